"""Describe what this machine offers a run, as a block to paste into a bug report.

Every finding is one line: "ok"; "warn", with a remedy; or "no", for something unusable here, with its requirements.
Kernels, compiler and backends are really tried (plan/trials/) before they count as ok. Each group of findings is
collected separately, since doctor must work on a broken installation: a failure becomes a warning. Values of
environment variables, paths and host names are not shown.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from modernbert_train.core.installed import commit, library_version
from modernbert_train.core.version import __version__
from modernbert_train.core.versions import TESTED, is_allowed, required, untested
from modernbert_train.distributed.visible_gpus import built_for, count_gpus, driver_version, why_torch_sees_none

GB = 1e9
MIN_DISK_GB = 20  # the base model's newest three checkpoints take 6 GB, its shards more
MIN_SHARED_GB = 1  # Docker gives 0.06 by default
MIN_OPEN_FILES = 1024
PACKAGES = (
    ("torch", True),
    ("mosaicml", True),
    ("mosaicml-streaming", True),
    ("transformers", True),
    ("tokenizers", True),
    ("datasets", True),
    ("numpy", True),
    ("omegaconf", True),
    ("safetensors", True),
    ("torchvision", False),
    ("wandb", False),
)
AMD = "read docs/speed.md#amd-gpus; make a short run before a long one"
REINSTALL = "install modernbert-train into a new environment"


@dataclass(frozen=True)
class Finding:
    """One line; `remedy` is None if all is well. A `known` limit of the machine is not worth a warning."""

    text: str
    remedy: str | None = None
    known: bool = False

    def __str__(self) -> str:
        if self.remedy is None:
            return f"ok    {self.text}"
        return f"{'no    ' if self.known else 'warn  '}{self.text}\n      -> {self.remedy}"


def lines() -> Iterator[str]:
    """Yield all lines, slow checks last; never raises."""
    yield "```"
    yield f"modernbert-train {__version__}{_commit()}"
    for look in GROUPS:
        yield from map(str, examine(look))
    yield "```"


def examine(look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Run one group; an error that ends it becomes its last finding."""
    try:
        yield from look()  # findings before the failure are kept
    except Exception as error:  # the environment may be broken in unknown ways; the other groups still run
        name = look.__name__.strip("_").replace("_", " ")
        remedy = REINSTALL if isinstance(error, ImportError) else "none needed if training works; else tell us"
        yield Finding(f"{name}: could not be looked up ({type(error).__name__})", remedy)


def _commit() -> str:
    """Return the checkout's commit, and whether files differ from it; empty outside a checkout."""
    installed = commit()
    return "" if installed is None else f", commit {installed[0][:7]}{' with changes' if installed[1] else ''}"


def _python() -> Iterator[Finding]:
    text = f"python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
    fits = (3, 11) <= sys.version_info[:2] < (3, 14)
    yield Finding(text, None if fits else "use Python 3.11, 3.12 or 3.13")


def _packages() -> Iterator[Finding]:
    for name, needed in PACKAGES:
        try:
            version = library_version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is not None:
            yield _package(name, version)
        else:
            yield Finding(f"{name} not installed", REINSTALL) if needed else Finding(f"{name} absent, not needed")


def _package(name: str, version: str) -> Finding:
    """Compare a version with pyproject.toml's requirement, and torch's also with the tested versions."""
    with suppress(importlib.metadata.PackageNotFoundError):  # run from a folder without being installed
        if not is_allowed(name, version):
            versions = required(name)
            return Finding(f"{name} {version}, and this program needs {versions}", f"pip install '{name}{versions}'")
    if name == "torch" and (newer := untested(version)) is not None:
        return Finding(newer, f"install torch {TESTED[-1]} if losses or speed surprise you, and tell us")
    return Finding(f"{name} {version}")


def _processor() -> Iterator[Finding]:
    import torch

    usable = min(len(os.sched_getaffinity(0)), _cpu_quota())
    threads = torch.get_num_threads()
    text = f"CPU: {usable:g} of {os.cpu_count()} cores usable, torch uses {threads} threads in each process"
    yield Finding(text, None if threads <= max(usable, 1) else f"set OMP_NUM_THREADS to at most {max(int(usable), 1)}")


def _memory() -> Iterator[Finding]:
    fields = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
    total, free = int(fields["MemTotal"]) * 1024, int(fields["MemAvailable"]) * 1024
    limit = _read("/sys/fs/cgroup/memory.max")
    capped = f", limit of this container {int(limit) / GB:.1f} GB" if limit.isdigit() else ""
    few = min(free, int(limit)) if limit.isdigit() else free
    remedy = None if few > 4 * GB else "end other programs, or lower data.num_workers and data.prefetch_batches"
    yield Finding(f"memory: {free / GB:.1f} of {total / GB:.1f} GB available{capped}", remedy)


def _gpus() -> Iterator[Finding]:
    import torch

    driver = driver_version()
    if not torch.cuda.is_available():
        why = why_torch_sees_none(driver, str(torch.__version__), built_for())
        fit = "install a driver and a torch that fit each other: see pytorch.org/get-started"
        yield Finding(f"GPU: torch sees none. {why}", fit if driver or count_gpus() else None)
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        text = f"GPU {index}: {gpu.name}, {gpu.total_memory / GB:.0f} GB, capability {gpu.major}.{gpu.minor}"
        old = "bf16 needs capability 8.0: set compute.precision=fp32" if gpu.major < 8 else None
        yield Finding(f"{text}, driver {driver or 'unknown'}, torch built for {built_for()}", old)
    if torch.version.hip is not None:
        yield Finding("ROCm: this program has never run on it", AMD)


def _shared_memory() -> Iterator[Finding]:
    folder = Path("/dev/shm")
    usage = shutil.disk_usage(folder)
    small = "give the container more: docker run --ipc=host, or --shm-size=8g"
    text = f"shared memory: {usage.free / GB:.1f} of {usage.total / GB:.1f} GB free"
    yield Finding(text, None if usage.free > MIN_SHARED_GB * GB else small)
    mapped = _mapped_segments()
    dead = sorted(p.name for p in folder.iterdir() if re.fullmatch(r"\d{6}_\w+", p.name) and p.name not in mapped)
    if dead:
        prefixes = " ".join(sorted({f"/dev/shm/{name[:6]}_*" for name in dead}))
        remedy = f"if no training of another user or container runs here: rm {prefixes}"
        yield Finding(f"shared memory: {len(dead)} segments that no visible process uses, left by a killed job", remedy)


def _disk() -> Iterator[Finding]:
    usage = shutil.disk_usage(Path.cwd())
    remedy = None if usage.free > MIN_DISK_GB * GB else "free space, or set runs_folder to a larger disk"
    yield Finding(f"disk here: {usage.free / GB:.0f} of {usage.total / GB:.0f} GB free", remedy)
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = None if files >= MIN_OPEN_FILES or files == resource.RLIM_INFINITY else f"ulimit -n {max(hard, files)}"
    yield Finding(f"open files: at most {files if files != resource.RLIM_INFINITY else 'any number'}", few)


def _wandb() -> Iterator[Finding]:
    switched_off = os.environ.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun")
    if switched_off:
        yield Finding("wandb switched offline by the environment")


def _trials() -> Iterator[Finding]:
    import torch

    from modernbert_train.plan.trials.trials_table import TRIALS

    at_once = 1 if torch.cuda.is_available() else 2  # a GPU may be set to allow a single process
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(_try, TRIALS)


def _try(name: str) -> Finding:
    from modernbert_train.plan.trials import attempt, command_of, without_paths
    from modernbert_train.plan.trials.trials_table import TRIALS

    trial = TRIALS[name]
    if (reason := trial.refusal()) is not None:
        return Finding(f"{trial.label}: not usable here: {without_paths(reason)}", f"needs {trial.remedy}", known=True)
    outcome = attempt(command_of(name), trial.seconds)
    if outcome.usable:
        return Finding(f"{trial.label}: usable here, tried: {outcome.text}")
    return Finding(f"{trial.label}: not usable here, tried: {outcome.text}", f"needs {trial.remedy}")


def _own_files() -> Iterator[Finding]:
    from modernbert_train.plan.trials import IMPORTS, attempt

    outcome = attempt([sys.executable, "-c", IMPORTS], seconds=100)
    remedy = None if outcome.usable else "python -m modernbert_train.import_stubs --environment"
    yield Finding(f"import composer, streaming in files of your own, tried: {outcome.text}", remedy)


GROUPS = (
    _python, _packages, _wandb, _processor, _memory, _gpus, _shared_memory, _disk, _own_files, _trials,
)  # fmt: skip


def _mapped_segments() -> set[str]:
    """Return names under /dev/shm that are mapped by a process visible to us."""
    names: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        names.update(re.findall(r"/dev/shm/(\S+)", _read(str(maps))))
    return names


def _cpu_quota() -> float:
    """Return the CPUs that the container may use; infinite without a limit."""
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.strip().isdigit() else float("inf")


def _read(path: str) -> str:
    """Return a file's text; empty if it cannot be read."""
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""
