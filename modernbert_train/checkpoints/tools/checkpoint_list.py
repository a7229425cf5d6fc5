"""List every checkpoint of a run in a line: its state, and why it is kept; without torch.

By default only the manifest, the sizes and the two small files of each are read, which quickly finds truncated, missing
and half-written files; a flipped bit in the tensors is found by verifying them. A damaged checkpoint is a line and not
an error, so it does not hide the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from modernbert_train.checkpoints.copier import manifest_of
from modernbert_train.checkpoints.manifest import CONFIG_YAML, MANIFEST, STATE, Manifest
from modernbert_train.checkpoints.store import Store
from modernbert_train.checkpoints.tools.selection import Selection
from modernbert_train.checkpoints.verified import (
    NAME,
    SUPERSEDED,
    check_hashes,
    partial_folders,
    read_texts,
    require_files,
    step_folders,
    step_of,
)
from modernbert_train.clock import is_pythia
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.files import os_errors_as
from modernbert_train.core.text import date, plural, table
from modernbert_train.errors import RunError, StorageError

VALID, WHOLE, DAMAGED, INCOMPLETE = "valid", "whole", "damaged", "incomplete"
SET_ASIDE, ELSEWHERE = "set aside", "replica only"
_LETTERS = 400  # length limit of a problem's text


@dataclass(frozen=True)
class Listed:
    """One checkpoint; None for unknown values.

    Attributes:
        name: of its folder, below the folder of checkpoints.
        step: optimizer steps done.
        state: valid, if every byte was read and is right; whole, if only manifest, sizes and the small files were
            read; damaged; incomplete, if a write is in progress or was interrupted; set aside, if the run went back to
            an older one; replica only.
        problem: the error, with its file.
        kept: reasons to keep it when others are removed.
        tokens, phase: of the clock.
        bytes: of its local files.
        time: unix time at which it was written here.
        ranks: number of ranks that wrote it.
        schema: version of its file format.
        in_replica: True if the replica has an identical copy; None without a replica, or if it was not read.
    """

    name: str
    step: int
    state: str
    problem: str | None = None
    kept: tuple[str, ...] = ()
    tokens: int | None = None
    phase: str | None = None
    bytes: int | None = None
    time: float | None = None
    ranks: int | None = None
    schema: int | None = None
    in_replica: bool | None = None


def look(folder: Path) -> Manifest:
    """Check a checkpoint without reading its tensors.

    Raises:
        StorageError: names the file and the problem.
    """
    manifest = require_files(folder)
    for name, expected in manifest.files.items():
        with os_errors_as(StorageError, f"{folder / name}: cannot be read"):
            size = (folder / name).stat().st_size
        if size != expected.bytes:
            raise StorageError(f"{folder / name}: damaged; {size:,} bytes, the manifest says {expected.bytes:,}")
    check_hashes(folder, manifest, (STATE, CONFIG_YAML))
    return manifest


def kept_for(manifests: Mapping[int, Manifest], config: RunConfig | None) -> dict[int, tuple[str, ...]]:
    """Return the reasons to keep each checkpoint.

    Args:
        manifests: of the checkpoints of a run, by step.
        config: of the run; None if it cannot be read, so only the reasons in the manifests are known.
    """
    keep = 0 if config is None else config.checkpoint.keep
    newest = sorted(manifests, reverse=True)[:keep]
    pythia = config is not None and config.checkpoint.milestones == "pythia"
    return {
        step: (
            *([f"newest {keep}"] * (step in newest)),
            *(["phase end"] * manifest.phase_end),
            *(["pythia" if pythia and is_pythia(step) else "milestone"] * manifest.milestone),
        )
        for step, manifest in manifests.items()
    }


def list_checkpoints(
    selection: Selection,
    config: RunConfig | None,
    store: Store | None = None,
    copies: Mapping[int, str] | None = None,
    verify: Callable[[Path], object] | None = None,
    only: int | None = None,
) -> list[Listed]:
    """List the checkpoints of a run in order of steps.

    Args:
        selection: the run.
        config: of the run; None if it cannot be read.
        store: its replica; None if it is not used.
        copies: names of the checkpoints in the replica, by step.
        verify: reads a whole checkpoint, or raises StorageError; None checks small files only.
        only: list this step only.
    """
    here = [folder for folder in step_folders(selection.checkpoints) if only is None or step_of(folder) == only]
    manifests = {step_of(each): manifest for each in here if (manifest := _manifest(each)) is not None}
    kept = kept_for(manifests if only is None else _all_manifests(selection), config)
    copies = {step: name for step, name in (copies or {}).items() if only in (None, step)}
    checkpoints = [
        _listed(folder, kept.get(step_of(folder), ()), _copied(store, copies, folder, manifests), verify)
        for folder in here
    ]
    checkpoints = [
        each for each in checkpoints if each.state != DAMAGED or (selection.checkpoints / each.name).is_dir()
    ]  # just removed
    steps = {each.step for each in checkpoints}
    for step, name in copies.items():
        if step not in steps and store is not None:
            checkpoints.append(_listed_there(store, step, name))
    if only is None:
        for path in partial_folders(selection.checkpoints):
            match = NAME.match(path.name)
            assert match is not None
            problem, size = _of_partial(path.name), bytes_in(path)
            checkpoints.append(Listed(path.name, int(match[1]), INCOMPLETE, problem, bytes=size, time=_time(path)))
        for folder in sorted((selection.checkpoints / SUPERSEDED).glob("*")):
            for path in step_folders(folder):
                listed = _listed(path, (), None, None)
                state = listed.state if listed.state == DAMAGED else SET_ASIDE
                name = str(path.relative_to(selection.checkpoints))
                checkpoints.append(replace(listed, name=name, state=state, kept=()))
    return sorted(checkpoints, key=lambda each: (each.state == SET_ASIDE or "/" in each.name, each.step, each.name))


def _all_manifests(selection: Selection) -> dict[int, Manifest]:
    return {
        step_of(each): manifest
        for each in step_folders(selection.checkpoints)
        if (manifest := _manifest(each)) is not None
    }


def _manifest(folder: Path) -> Manifest | None:
    with suppress(StorageError):
        return require_files(folder)
    return None


def _copied(
    store: Store | None, copies: Mapping[int, str], folder: Path, manifests: Mapping[int, Manifest]
) -> bool | None:
    """Return True if the replica has an identical copy of this checkpoint; None without a replica."""
    if store is None:
        return None
    step = step_of(folder)
    if step not in copies or step not in manifests:
        return False
    with suppress(RunError):
        return manifest_of(store, copies[step]) == manifests[step]
    return False


def _listed(
    folder: Path, kept: tuple[str, ...], copied: bool | None, verify: Callable[[Path], object] | None
) -> Listed:
    about: dict[str, Any] = {"name": folder.name, "step": step_of(folder), "kept": kept, "in_replica": copied}
    about |= {"bytes": bytes_in(folder), "time": _time(folder / MANIFEST)}
    try:
        manifest = look(folder)
        about |= {"ranks": len(manifest.weights), "schema": manifest.schema}
        texts = read_texts(folder, manifest)
        about |= {"tokens": texts.state.tokens, "phase": texts.state.phase}
        if verify is not None:
            verify(folder)
    except StorageError as error:
        return Listed(**about, state=DAMAGED, problem=one_line(str(error).removeprefix(f"{folder}/")))
    return Listed(**about, state=WHOLE if verify is None else VALID)


def _listed_there(store: Store, step: int, name: str) -> Listed:
    try:
        manifest = manifest_of(store, name)
    except RunError as error:
        return Listed(name, step, DAMAGED, one_line(f"in the replica: {error}"), in_replica=True)
    kept = kept_for({step: manifest}, None)[step]
    size = sum(file.bytes for file in manifest.files.values())
    about: dict[str, Any] = {"bytes": size, "ranks": len(manifest.weights), "schema": manifest.schema}
    return Listed(name, step, ELSEWHERE, kept=kept, in_replica=True, **about)


def _of_partial(name: str) -> str:
    if name.endswith("-removed"):
        return "was being removed"
    return "is being written, or a write broke off; the next checkpoint removes it"


def bytes_in(folder: Path) -> int:
    """Sum the sizes of the files in a folder; a link counts 0, and so do files that vanish meanwhile."""
    total = 0
    if folder.is_symlink():
        return 0
    with suppress(OSError):
        for path in folder.iterdir():
            total += path.lstat().st_size
    return total


def _time(path: Path) -> float | None:
    with suppress(OSError):
        return path.stat().st_mtime
    return None


def one_line(text: str) -> str:
    """Return an error's text, which may quote a hostile file, as part of a line."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= _LETTERS else f"{line[:_LETTERS]}..."


def as_text(listed: Sequence[Listed], selection: Selection) -> str:
    """Format a table, followed by the problems."""
    if not listed:
        return f"no checkpoint yet in {selection.checkpoints}"
    copies = any(each.in_replica is not None for each in listed)
    replica_column = ["replica"] if copies else []
    rows: list[tuple[str, ...]] = [("step", "tokens", "phase", "written", "MB", "state", *replica_column, "kept as")]
    for each in listed:
        cells = [
            f"{each.step:,}",
            "-" if each.tokens is None else f"{each.tokens:,}",
            "-" if each.phase is None else one_line(each.phase),
            "-" if each.time is None else date(each.time),
            "-" if each.bytes is None else f"{each.bytes / 1e6:,.1f}",
            each.state,
        ]
        if copies:
            cells.append({None: "-", True: "yes", False: "no"}[each.in_replica])
        nothing = "-" if each.state in (SET_ASIDE, ELSEWHERE, INCOMPLETE) or each.schema is None else "nothing"
        rows.append((*cells, ", ".join(each.kept) or nothing))
    lines = [table(rows)]
    lines += [f"{each.name}: {each.state}: {each.problem}" for each in listed if each.problem is not None]
    lines += [f"set aside by `checkpoints restore`: {each.name}" for each in listed if each.state == SET_ASIDE]
    total = sum(each.bytes or 0 for each in listed if each.state != ELSEWHERE)
    lines.append(f"{plural(sum(each.state in (VALID, WHOLE) for each in listed), f'{_word(listed)} checkpoint')}, "
                 f"{total / 1e6:,.1f} MB here")  # fmt: skip
    if any(each.state == WHOLE for each in listed):
        lines.append("whole: manifest, sizes and small files are right; `checkpoints verify` reads every byte")
    return "\n".join(lines)


def _word(listed: Sequence[Listed]) -> str:
    return VALID if any(each.state == VALID for each in listed) else WHOLE


def as_json(listed: Sequence[Listed]) -> str:
    """Format the list as JSON, with exact numbers."""
    return json.dumps([asdict(each) for each in listed], indent=2)
