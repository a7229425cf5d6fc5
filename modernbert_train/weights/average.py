"""`python -m modernbert_train average`: average checkpoints into the folder of a run that cannot be resumed.

The published base is the average of four checkpoints of its decay (arXiv 2412.13663, A.4). The result looks like a run
with one checkpoint, so `eval`, `export` and `weights.init_from` accept it as any run; it lacks optimizer moments and
a data cursor, so `train` refuses it.

Methods besides the mean, each applied tensor by tensor:

slerp  spherical interpolation of two checkpoints (Shoemake 1985), which keeps the length of the vector.
ties   differences to a common base (arXiv 2306.01708): of each difference only the largest `keep` share of the numbers
       is kept; the sign of each number is the sign of their sum; the mean is over the differences with that sign.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from modernbert_train.checkpoints.checkpoint import Checkpoint, commit, verify
from modernbert_train.checkpoints.evaluations import run_of
from modernbert_train.checkpoints.manifest import CONFIG_YAML
from modernbert_train.checkpoints.run_folder import RESOLVED, TOKENIZER_COPY
from modernbert_train.checkpoints.saved_state import Averaged
from modernbert_train.config.knob import phased_keys
from modernbert_train.config.load import load_run, to_yaml
from modernbert_train.core.files import errors_to, os_errors_as, warn, whole_folder
from modernbert_train.core.text import is_folder_name
from modernbert_train.errors import ConfigError, DataError, StorageError
from modernbert_train.vocabulary import copy_tokenizer
from modernbert_train.weights.names import other_architecture
from modernbert_train.weights.source import Source, open_model


@dataclass(frozen=True)
class Part:
    """One checkpoint of an average.

    Attributes:
        source: its folder and its architecture.
        checkpoint: source.checkpoint, which is None for a Hugging Face model and never None here.
        weight: its share of the average; all sum to 1.
    """

    source: Source
    checkpoint: Checkpoint
    weight: float

    @property
    def tokens(self) -> int:
        """Tokens it was trained on."""
        return self.checkpoint.state.tokens


How = Literal["mean", "slerp", "ties"]


def average_checkpoints(
    names: Sequence[str],
    out: Path,
    *,
    last: int | None = None,
    weights: Sequence[float] | None = None,
    how: How = "mean",
    base: str | None = None,
    keep: float = 0.2,
) -> Path:
    """Average checkpoints in fp64, one tensor at a time, and write the result in fp32.

    Args:
        names: checkpoints, or runs, of which the newest whole checkpoint is used.
        out: the folder; must be missing or empty.
        last: average this many newest checkpoints from the decay of the one named run.
        weights: of the checkpoints, in their order (with `last`: the newest last); None: all equal.
        how: see the head of this file.
        base: for `ties`: a checkpoint or run that all of them started from, such as the one before the decay.
        keep: for `ties`: the share of a difference's numbers that are kept.

    Returns:
        The folder.

    Raises:
        ConfigError: architectures, RoPE bases or tokenizers differ (names both values), or the arguments contradict.
        DataError, StorageError: see `open_model`; a run has fewer checkpoints than `last`.
    """
    _check_free(out)
    sources = [open_model(name) for name in (names if last is None else _last_of_decay(names, last))]
    parts = _parts(sources, weights)
    start = _base(parts, how, base, keep)
    for other in [*(part.source for part in parts[1:]), *([] if start is None else [start.source])]:
        _check_same(parts[0].source, other)
    newest = max(parts, key=lambda part: part.tokens)
    config_yaml = to_yaml(replace(newest.checkpoint.config, name=out.name, runs_folder=str(out.parent.absolute())))
    averaged = [Averaged(str(part.checkpoint.folder), part.checkpoint.step, part.tokens, part.weight) for part in parts]
    by = how if start is None else f"ties, {keep:g} kept of what changed since {start.checkpoint.folder}"
    unwritten = os_errors_as(StorageError, f"--out={out}: cannot be written", "Free the disk, or name another folder.")
    with unwritten, whole_folder(out) as staging:
        commit(
            staging / "checkpoints",
            weights=dict(average_each(parts, how, start, keep)),
            optimizer={},
            state=replace(newest.checkpoint.state, training=None, average=averaged, averaged_by=by),
            config_yaml=config_yaml,
            phase_end=True,
        )
        (staging / CONFIG_YAML).write_text(config_yaml, encoding="utf-8")
        run = run_of(newest.checkpoint.folder)
        if run is not None and (run / RESOLVED).is_file():  # relative paths of data begin where that run was started
            shutil.copyfile(run / RESOLVED, staging / RESOLVED)
        with (
            errors_to(warn, DataError, before="no tokenizer in the average: "),
            newest.source.tokenizer_folder() as own,
        ):
            copy_tokenizer(own, staging / TOKENIZER_COPY)
    for part in parts:
        print(f"{part.weight:6.4f} of {part.checkpoint.folder} ({part.tokens:,} tokens)")
    print(out)
    return out


@torch.no_grad()
def average_each(
    parts: Sequence[Part], how: How = "mean", base: Part | None = None, keep: float = 0.2
) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter's name and fp32 average; one tensor of each checkpoint is in memory at a time.

    Raises:
        ConfigError: a parameter is missing from one of them.
    """
    every = [*parts, *([] if base is None else [base])]
    stored = [part.checkpoint.stored_weights() for part in every]
    names = [set(tensors) for tensors in stored]
    for part, tensor_names in zip(every, names, strict=True):
        if odd := sorted(tensor_names ^ names[0]):
            raise ConfigError(
                f"{part.checkpoint.folder} and {parts[0].checkpoint.folder}: only one of them has {odd[0]}. "
                "Average checkpoints of one model."
            )
    for name in sorted(names[0]):
        if how == "mean":
            total: Tensor | None = None
            for part, tensors in zip(parts, stored, strict=True):
                tensor = tensors[name].double().mul_(part.weight)
                total = tensor if total is None else total.add_(tensor)
            assert total is not None
        else:
            found_here = [tensors[name].double() for tensors in stored]
            shares = [part.weight for part in parts]
            total = _slerp(found_here, shares[1]) if how == "slerp" else _ties(found_here, shares, keep)
        yield name, total.float()


def _slerp(ends: Sequence[Tensor], way: float) -> Tensor:
    """Interpolate spherically between two tensors; linearly if they are nearly parallel."""
    one, two = (end.flatten() / end.norm().clamp(min=1e-300) for end in ends)
    cosine = float((one * two).sum().clamp(-1, 1))
    if abs(cosine) > 1 - 1e-9:
        return ends[0] * (1 - way) + ends[1] * way
    angle = math.acos(cosine)
    return (ends[0] * math.sin((1 - way) * angle) + ends[1] * math.sin(way * angle)) / math.sin(angle)


def _ties(tensors: Sequence[Tensor], shares: Sequence[float], keep: float) -> Tensor:
    """Average the tensors by TIES, as differences to the last one."""
    *others, base = tensors
    total, weight = torch.zeros_like(base), torch.zeros_like(base)
    kept = []
    for tensor, share in zip(others, shares, strict=True):
        moved = tensor - base
        size = moved.abs().flatten()
        threshold = size.kthvalue(max(1, size.numel() - math.ceil(keep * size.numel()) + 1)).values
        kept.append((torch.where(moved.abs() >= threshold, moved, 0.0), share))
        total += share * kept[-1][0]
    sign = total.sign()
    total.zero_()
    for moved, share in kept:
        agrees = (moved.sign() == sign) & (moved != 0)
        total += torch.where(agrees, share * moved, 0.0)
        weight += share * agrees
    return base + total / weight.clamp(min=1e-300)


def _check_free(out: Path) -> None:
    if not is_folder_name(out.name):
        raise ConfigError(f"--out={out}: its last part becomes a run's name. Use letters, digits, '.', '_' and '-'.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out={out}: already exists. Choose a new folder, or move that one away.")


def _last_of_decay(names: Sequence[str], last: int) -> list[Path]:
    """Return the newest whole checkpoints of a run's last decay, oldest first."""
    run = Path(names[0])
    if len(names) != 1 or not (run / CONFIG_YAML).is_file() or not (run / "checkpoints").is_dir():
        raise ConfigError(f"--last={last} with {' '.join(names)}: needs the folder of one run. Or name checkpoints.")
    config = load_run([run / CONFIG_YAML])
    phase = list(config.phases.values())[-1]
    start = config.total_tokens - (phase.schedule.decay_tokens or phase.tokens)
    folders: list[Path] = []
    for folder in sorted((run / "checkpoints").glob("step-" + "[0-9]" * 8 + "*"), reverse=True):
        if "." in folder.name or len(folders) == last:
            continue
        with errors_to(warn, StorageError, before="passed over a damaged checkpoint: "):
            if verify(folder).state.tokens > start:
                folders.insert(0, folder)
    if len(folders) < last:
        raise StorageError(
            f"{run}: only {len(folders)} whole checkpoints of its decay, which begins at {start:,} tokens, and "
            f"--last={last}. Lower it, or train with checkpoint.interval_tokens, which keeps more checkpoints."
        )
    return folders


def _parts(sources: Sequence[Source], weights: Sequence[float] | None) -> list[Part]:
    shares = [1.0] * len(sources) if weights is None else list(weights)
    if len(sources) < 2:
        raise ConfigError(f"{sources[0].folder}: one checkpoint is its own average. Name others, or a run with --last.")
    if len(shares) != len(sources) or not all(math.isfinite(weight) and weight > 0 for weight in shares):
        raise ConfigError(f"--weights={shares}: give {len(sources)} numbers above 0, one for each checkpoint in order.")
    parts = []
    for source, weight in zip(sources, shares, strict=True):
        if source.checkpoint is None:
            raise ConfigError(f"{source.folder}: not a checkpoint of this program. Name a run or a checkpoint.")
        parts.append(Part(source, source.checkpoint, weight / math.fsum(shares)))
    return parts


def _base(parts: Sequence[Part], how: How, base: str | None, keep: float) -> Part | None:
    if how == "slerp" and len(parts) != 2:
        raise ConfigError(
            f"--how=slerp with {len(parts)} checkpoints: interpolates between exactly two. Name two, or set --how=ties."
        )
    if (base is not None) is not (how == "ties"):
        raise ConfigError(
            f"--how={how} with --base={base}: ties needs a base, and only ties uses one. Set --how=ties and --base "
            "to a checkpoint that all of them started from."
        )
    if base is None:
        return None
    if not 0 < keep <= 1:
        raise ConfigError(f"--keep={keep:g}: not a share of the numbers. Set it above 0 and up to 1.")
    source = open_model(base)
    if source.checkpoint is None:
        raise ConfigError(f"--base={base}: not a checkpoint of this program. Name a run or a checkpoint.")
    return Part(source, source.checkpoint, 0.0)


def _check_same(one: Source, other: Source) -> None:
    """Raise ConfigError if two models differ in architecture, phased keys, order or tokenizer."""
    different = other_architecture(one.model, other.model)
    if one.model.name == other.model.name:
        different += [(f"model.{k}", getattr(one.model, k), getattr(other.model, k)) for k in phased_keys(one.model)]
    different.append(("order", one.order, other.order))
    different.append(("sha256 of the tokenizer", one.tokenizer_sha256, other.tokenizer_sha256))
    wrong = [f"{key}: {first} and {second}" for key, first, second in different if first != second]
    if wrong:
        raise ConfigError(
            f"{one.folder} and {other.folder} cannot be averaged:\n  "
            + "\n  ".join(wrong)
            + "\nAverage checkpoints of one model, from one phase."
        )
