"""Speed settings: the values of the open keys of a run, and `close_settings`, which decides.

A key that the user sets is not open and never changes. An open key gets its plain value of config/auto.py, or on GPUs
its value in FAST; `close_settings` has the order of all sources. No torch is imported at the top: a login node plans
and refuses runs without it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from modernbert_train.checkpoints.manifest import CONFIG_YAML, newest_step
from modernbert_train.config.auto import (
    assigned,
    filled,
    kept,
    microbatch_key,
    open_settings,
    value_of,
    with_settings,
)
from modernbert_train.config.load import load_run
from modernbert_train.config.packages import missing_on_gpu
from modernbert_train.config.schema import RunConfig
from modernbert_train.errors import ConfigError
from modernbert_train.plan.gpus import HasMemory, RunGpus
from modernbert_train.plan.memory import usable_bytes
from modernbert_train.plan.memory_fit import configured_memory, microbatches, predicts
from modernbert_train.plan.oom_backoff import read_backoff

if TYPE_CHECKING:
    from modernbert_train.distributed.compute import Compute

CPU, OLD_GPU, GPU = "a CPU", "a GPU that cannot compile", "a GPU of capability 8.0 or newer"
OLDEST = (8, 0)  # minimum capability of GPU: the first with bf16
# slowdown of a run that is neither compiled nor fused: ModernBERT-base on 8 H100 by `plan` (a test)
SLOWER = 1.8
# On GPU; elsewhere open keys have the plain values of config/auto.py. Compiled, base made 374,000 tokens/s on an H200,
# eager 223,000 (RESULTS, on a GPU); a fused update moves 40 bytes a weight, not 140 (RESULTS, by count).
FAST: dict[str, Any] = {"compute.compile": True, "optim.fused": True}


def gpus_of_run(compute: Compute) -> RunGpus | None:
    """Combine the GPUs of all ranks, None on CPUs; every rank calls it and gets the same answer."""
    import torch

    from modernbert_train.distributed.group import gather_from_all

    uuid = str(torch.cuda.get_device_properties(compute.device).uuid) if compute.device.type == "cuda" else ""
    gathered = gather_from_all((uuid, gpu_of_this_rank(compute)))
    ranks_of = Counter(map(itemgetter(0), gathered))  # more than one if ranks share a GPU
    gpus = [replace(gpu, memory_bytes=gpu.memory_bytes // ranks_of[uuid]) for uuid, gpu in gathered if gpu is not None]
    return RunGpus.of_ranks(gpus) if gpus else None


def gpu_of_this_rank(compute: Compute) -> RunGpus | None:
    """Describe the GPU of this rank; None on a CPU."""
    import torch

    from modernbert_train.distributed.group import ranks_per_node

    if compute.device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(compute.device)
    lacks = missing_on_gpu()
    if (gpu.major, gpu.minor) < OLDEST:
        lacks.insert(0, f"{gpu.name} has capability {gpu.major}.{gpu.minor}, and 8.0 is needed")
    return RunGpus(gpu.name, gpu.total_memory, ranks_per_node(), compute.bf16, tuple(lacks))


class Closed(NamedTuple):
    """A run without open keys, and lines for the banner on the settings that were chosen."""

    config: RunConfig
    lines: list[str]


def close_settings(config: RunConfig, *, gpus: RunGpus | None = None, ranks: int = 1, fresh: bool = False) -> Closed:
    """Fill each open key from the first of these sources that has a value:

    1. the run as it was trained last, except what this device cannot do: a resumed run repeats itself to the bit;
    2. FAST, on a GPU that can;
    3. for a microbatch on a GPU, memory: the largest that fits;
    4. the plain value of config/auto.py; for a microbatch, one row.

    A microbatch that once ran out of memory is then lowered to the half that was noted, see oom_backoff.py.

    Args:
        config: the run.
        gpus: GPUs of all ranks; None on CPUs.
        ranks: ranks of the run.
        fresh: True if the run's folder, with its checkpoints and notes, will be moved aside.
    """
    device = CPU if gpus is None else OLD_GPU if gpus.lacks else GPU
    open_keys = open_settings(config)
    last = None if fresh else last_trained(config)
    before = {} if last is None else kept(config, last)
    before = {key: value for key, value in before.items() if _can(device, key, value)}
    closed = on_device(config, device, gpus, ranks, before)
    chosen = {key: value_of(closed, key) for key in open_keys}
    noted = {} if fresh else read_backoff(Path(config.folder))
    halved = {key: tokens for key, tokens in noted.items() if key in chosen and tokens < chosen[key]}
    closed, chosen = with_settings(closed, halved), chosen | halved
    lines = [*_lines(chosen, closed, gpus, halved, resumed=last is not None)]
    return Closed(closed, lines if gpus is None else [*lines, *_gpu_lines(chosen, closed, gpus, ranks)])


def on_device(
    config: RunConfig, device: str, gpu: HasMemory | None, ranks: int, measured: dict[str, Any] | None = None
) -> RunConfig:
    """Fill open keys by steps 2 to 4 of `close_settings`.

    Args:
        config: the run.
        device: CPU, OLD_GPU or GPU.
        gpu: its memory counts; None on a CPU.
        ranks: ranks of the run.
        measured: values of open keys that take precedence.
    """
    open_keys = open_settings(config)
    fast = {key: value for key, value in FAST.items() if device == GPU and key in open_keys}
    closed = with_settings(config, fast | (measured or {}))
    return filled(closed, {} if gpu is None else microbatches(closed, gpu, ranks))


def on_gpu(config: RunConfig, gpu: HasMemory, ranks: int) -> RunConfig:
    """Fill open keys as for a new run on GPUs that support compiled layers."""
    return on_device(config, GPU, gpu, ranks)


def last_trained(config: RunConfig) -> RunConfig | None:
    """Read the configuration that a run was trained with last; None without a checkpoint to resume from."""
    newest = newest_step(Path(config.folder))
    for folder in () if newest is None else (Path(config.folder), newest):
        with suppress(ConfigError):  # damaged, or of another version; resuming reports it
            return load_run([folder / CONFIG_YAML])
    return None


def _can(device: str, key: str, value: Any) -> bool:
    """Return True if a device supports a setting that a run was trained with on another."""
    if key == "compute.threads":
        return "OMP_NUM_THREADS" not in os.environ  # otherwise set by the user or by a launcher of several ranks
    unable = {CPU: ("optim.fused",), OLD_GPU: (*FAST,), GPU: ()}[device]
    return not value or key not in unable


def _lines(
    chosen: Mapping[str, Any], closed: RunConfig, gpus: RunGpus | None, halved: Mapping[str, int], *, resumed: bool
) -> Iterator[str]:
    """List the settings that were chosen, with the reason."""
    shown = [assigned(key, value) for key, value in chosen.items() if value not in (None, "auto")]
    usual = f"as usual on {'a CPU' if gpus is None else gpus.label}"
    if shown:
        yield f"{', '.join(shown)}: {'as this run was trained so far' if resumed else usual}"
    for key, tokens in halved.items():
        yield f"{assigned(key, tokens)} after running out of memory"
    if chosen and not resumed and (unread := unread_settings(closed)) is not None:
        yield unread


def unread_settings(config: RunConfig) -> str | None:
    """Name the newest settings that the removed verb `tune` wrote for a model and row length of a run; None: none."""
    rows = {phase.row_tokens for phase in config.phases.values()}
    folder = Path(config.runs_folder) / "tuned"
    files = (file for tokens in rows for file in folder.glob(f"*-{config.model.name}-{tokens}-*/settings.json"))
    if (newest := max(files, key=lambda file: file.stat().st_mtime, default=None)) is None:
        return None
    return (
        f"{newest}: no longer read. Write its settings as keys of the run, microbatch_tokens as a key of the phase, or "
        "remove the file"
    )


def _gpu_lines(chosen: Mapping[str, Any], closed: RunConfig, gpus: RunGpus, ranks: int) -> Iterator[str]:
    """Name the fast settings that are off, with the reason, and the memory of the microbatches."""
    off = [key for key in FAST if not chosen.get(key, True)]
    if gpus.lacks and off:
        yield (
            f"{' and '.join(off)} {'are' if len(off) > 1 else 'is'} off: {'; '.join(gpus.lacks)}. Without both a run "
            f"takes about {SLOWER} times as long"
        )
    names = [name for name in closed.phases if microbatch_key(name) in chosen]
    if names and predicts(closed):
        peak, name = max((configured_memory(closed, name, gpus, ranks).peak, name) for name in names)
        yield (
            f"microbatches that were left open take {peak / 1e9:.1f} of {usable_bytes(gpus) / 1e9:.1f} usable GB, by "
            f"`plan`, in phase {name}"
        )
    elif names:
        yield f"memory of {closed.model.name} is not predicted: set {microbatch_key(names[0])} as large as fits"
