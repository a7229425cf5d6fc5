"""Check, before anything is trained or written, that all ranks run the same code and the same run on the same data.

A machine with an old checkout, another torch or another copy of the shards would train without an error; only the loss
would show it eventually. Folders may differ between machines, their contents may not.
"""

from __future__ import annotations

import hashlib
import platform
import socket
from collections.abc import Mapping, Sequence

from modernbert_train.config.knob import may
from modernbert_train.config.plugins import versions
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.installed import PACKAGE, library_version
from modernbert_train.core.text import table
from modernbert_train.distributed.group import gather_from_all
from modernbert_train.errors import ConfigError

_PACKAGES = ("torch", "mosaicml", "mosaicml-streaming", "numpy", "tokenizers")
_ABSENT = "absent"


def require_agreement(keys: Mapping[str, object], plugins: list[str], fingerprint: Mapping[str, str]) -> None:
    """Compare this rank's run with the other ranks'.

    Args:
        keys: of the run with their values, as this rank has read them.
        plugins: named by the run.
        fingerprint: hash of each part of the data, as this rank has read them.

    Raises:
        ConfigError: on every rank, with a table of the differences.
    """
    here = identity(keys, plugins, fingerprint)
    # hashes first: a thousand ranks that agree need not exchange a thousand lists
    if len(set(gather_from_all(hashlib.sha256(repr(sorted(here.items())).encode()).hexdigest()))) > 1:
        gathered = gather_from_all((socket.gethostname(), here))
        table = disagreement([host for host, _ in gathered], [values for _, values in gathered])
        raise ConfigError(
            f"the ranks differ, and must all run the same:\n{table}\nBring the machines to the same state, and start "
            "the same command on each."
        )


def identity(keys: Mapping[str, object], plugins: list[str], fingerprint: Mapping[str, str]) -> dict[str, str]:
    """Return everything that must be equal on every rank, by name; see `require_agreement`."""
    shared = {key: str(value) for key, value in keys.items() if not may("local", RunConfig, key)}
    packages = {name: library_version(name) for name in _PACKAGES}
    packages |= {f"plugin {name}": version for name, version in versions(plugins).items()}
    data = {f"hash of {name}": text[:12] for name, text in fingerprint.items()}
    python = ".".join(platform.python_version_tuple()[:2])
    return {"code": code_hash()[:12], "python": python, **packages, **data, **shared}


def code_hash() -> str:
    """Return a hash of every module of this package; it changes when a checkout is edited."""
    sha256 = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        sha256.update(f"{path.relative_to(PACKAGE)}\n".encode() + path.read_bytes())
    return sha256.hexdigest()


def disagreement(hosts: Sequence[str], identities: Sequence[Mapping[str, str]]) -> str:
    """Return a table with a column for each group of equal ranks and a line for each difference; empty if none."""
    groups: list[list[int]] = []
    for rank, values in enumerate(identities):
        for group in groups:
            if identities[group[0]] == values:
                group.append(rank)
                break
        else:
            groups.append([rank])
    if len(groups) == 1:
        return ""
    names = dict.fromkeys(name for values in identities for name in values)
    columns = [[identities[group[0]].get(name, _ABSENT) for name in names] for group in groups]
    rows = [["", *(_title(group, hosts) for group in groups)]]
    rows += [[name, *cells] for name, *cells in zip(names, *columns, strict=True) if len(set(cells)) > 1]
    return table(rows, indent=2)


def _title(group: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the ranks of a group, shortened, and their machines."""
    runs: list[list[int]] = []
    for rank in group:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    ranks = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    host_names = list(dict.fromkeys(hosts[rank] for rank in group))
    return f"rank {ranks} on {', '.join(host_names[:2])}{' ...' if len(host_names) > 2 else ''}"
