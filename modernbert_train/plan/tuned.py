"""Load the settings that `tune` measured for this device.

RUNS_FOLDER/tuned/CASE/settings.json is one finding: the settings, and what they were found for. They are taken only
where all of that is the same: device, precision, torch, shape of the model, objective, optimizer, length of a row. Rank
0 reads the file, and what it says is what all ranks compute with. What is left open then is as the GPUs of the run are
fast with, see plan/room.py. A run that has checkpoints keeps the settings that it was trained with, whatever was found
since; see config/auto.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from modernbert_train.checkpoints.manifest import CONFIG_YAML, newest_step
from modernbert_train.config.auto import (
    MICROBATCH,
    OPEN,
    assigned,
    filled,
    kept,
    microbatch_key,
    open_settings,
    value_of,
    with_settings,
)
from modernbert_train.config.check import check
from modernbert_train.config.knob import architecture_keys
from modernbert_train.config.load import load_run
from modernbert_train.config.packages import missing_packages
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.read_json import as_type, read_json
from modernbert_train.core.read_once import read_once
from modernbert_train.core.text import first_line
from modernbert_train.distributed.compute import Compute
from modernbert_train.errors import ConfigError
from modernbert_train.models.attention import KERNELS
from modernbert_train.plan.halved import halved
from modernbert_train.plan.room import Card, on_gpu

FOLDER, SETTINGS = "tuned", "settings.json"
FORMAT = 1
_LETTERS = 40  # of a device in the name of a folder


@dataclass(frozen=True)
class Fit:
    """What settings are found for; with anything else they may be wrong or slow."""

    device: str
    precision: str
    torch: str
    model: dict[str, str]
    objective: str
    optimizer: str
    row_tokens: int

    @property
    def case(self) -> str:
        """A name for it, of a folder."""
        device = re.sub(r"[^a-z0-9]+", "-", self.device.lower())[:_LETTERS].strip("-")
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        return f"{device}-{self.model['name']}-{self.row_tokens}-{digest}"

    def differences(self, here: Fit) -> list[str]:
        """What is another than here, in words."""
        found = []
        for field in fields(self):
            theirs, ours = getattr(self, field.name), getattr(here, field.name)
            if theirs != ours:
                short = field.name == "model"
                found.append(
                    "a model of another shape" if short else f"{field.name.replace('_', ' ')} {theirs}, here {ours}"
                )
        return found


@dataclass(frozen=True)
class Tuned:
    """A finding.

    Attributes:
        fit: what it was found for.
        settings: of the keys of config/auto.py; a phase's microbatch by its bare name.
        tokens_per_second: of a training step with the settings that a run has without tuning, and with these, in turns.
        date: of the day.
        format: of the file.
    """

    fit: Fit
    settings: Mapping[str, Any]
    tokens_per_second: tuple[float, float]
    date: str
    format: int = FORMAT

    def write(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"


class Taken(NamedTuple):
    """A run in which nothing is open, and where its settings are from, for the banner; empty where nothing is."""

    config: RunConfig
    text: str


def folder_of(config: RunConfig) -> Path | None:
    """Where findings are; None where the run wants none."""
    if config.compute.tuned == "none":
        return None
    return Path(config.runs_folder) / FOLDER if config.compute.tuned == "auto" else Path(config.compute.tuned)


def main_phase(config: RunConfig) -> str:
    """The phase with the most tokens: it decides what the whole run computes with."""
    return max(config.phases, key=lambda name: config.phases[name].tokens)


def fit_of(config: RunConfig, phase: str, compute: Compute) -> Fit:
    """What settings of a phase of a run must have been found for, on this device."""
    now = config.in_phase[phase]
    shape = {"name": now.model.name, **{key: str(getattr(now.model, key)) for key in architecture_keys(now.model)}}
    return Fit(
        device=device_name(compute.device),
        precision=compute.precision,
        torch=torch.__version__,
        model=shape,
        objective=now.objective.name,
        optimizer=now.optim.name,
        row_tokens=config.phases[phase].row_tokens,
    )


def device_name(device: torch.device) -> str:
    """What kind of device it is; of a CPU also how many cores this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    found = None
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return f"{found[1] if found else 'CPU'}, {len(os.sched_getaffinity(0))} cores"


def begun_with(config: RunConfig) -> RunConfig | None:
    """What a run was trained with last; None where it has no checkpoint to resume from."""
    newest = newest_step(Path(config.folder))
    for folder in () if newest is None else (Path(config.folder), newest):
        with suppress(ConfigError):  # of another version, or damaged; whoever resumes will say so
            return load_run([folder / CONFIG_YAML])
    return None


def take(
    config: RunConfig, compute: Compute, *, card: Card | None = None, ranks: int = 1, fresh: bool = False
) -> Taken:
    """Close what a run leaves open: as it was trained last, else as was found for this device, else as is fast on it.

    Args:
        config: the run.
        compute: of rank 0.
        card: the GPUs of all ranks; None on CPUs.
        ranks: of the run.
        fresh: what the run's folder holds will be put aside.

    Raises:
        ConfigError: compute.tuned names a folder that is not there.
    """

    def close(found: Mapping[str, Any]) -> RunConfig:
        if card is None:
            return filled(config, found)
        return on_gpu(config, card, ranks, found, fast=not card.lacks)

    slow = [key for key, setting in OPEN.items() if setting.fast is True and card is not None and card.lacks]
    unable = [*slow, *(["optim.fused"] if card is None else [])]
    taken, text = _take(config, compute, close, unable, fresh=fresh)
    if not fresh:
        noted = {key: tokens for key, tokens in halved(Path(config.folder)).items() if key in open_settings(config)}
        taken = with_settings(taken, {key: min(tokens, value_of(taken, key)) for key, tokens in noted.items()})
    return Taken(taken, text)


def _take(
    config: RunConfig,
    compute: Compute,
    close: Callable[[Mapping[str, Any]], RunConfig],
    unable: Sequence[str],
    *,
    fresh: bool,
) -> Taken:
    """The same without what was halved.

    Args:
        config, compute, fresh: see `take`.
        close: fills in what is neither given nor found.
        unable: keys of what this device cannot do, though the run may have been trained with it on another.
    """
    plain = close({})
    left = {key: value_of(plain, key) for key in open_settings(config)}
    then = None if fresh else begun_with(config)
    spoken_for = "OMP_NUM_THREADS" in os.environ  # somebody has said it, or several ranks share the machine
    if then is not None:
        resumed = close({key: value for key, value in kept(config, then).items() if key not in unable})
        if spoken_for and "compute.threads" in left:
            resumed = with_settings(resumed, {"compute.threads": None})
        settings = _shown(resumed, left)
        return Taken(resumed, f"as this run was trained so far: {', '.join(settings)}" if settings else "")
    folder = folder_of(config)
    if folder is None or not left:
        return Taken(plain, "")
    if config.compute.tuned != "auto" and not folder.is_dir():
        raise ConfigError(f"compute.tuned={config.compute.tuned}: no such folder. Name one that `tune` wrote, or none.")
    findings, damaged = read_findings(folder)
    fits = {name: fit_of(config, name, compute) for name in config.phases}
    own = {name: tuned for name, fit in fits.items() for tuned in findings.values() if tuned.fit == fit}
    main = own.get(main_phase(config))
    if not own:
        return Taken(plain, _why_not(list(findings.values()), damaged, fits[main_phase(config)], left))
    found = {} if main is None else {key: value for key, value in main.settings.items() if key in OPEN}
    if spoken_for:
        found.pop("compute.threads", None)
    found |= {microbatch_key(name): each.settings[MICROBATCH] for name, each in own.items()
              if MICROBATCH in each.settings}  # fmt: skip
    tuned = close(found)
    where = folder / (main or next(iter(own.values()))).fit.case / SETTINGS
    if (reason := _refusal(tuned, compute)) is not None:
        return Taken(plain, f"{where} is ignored: {reason}")
    gain = "" if main is None else f"; {_gain(main)} when it was found, {main.date}"
    taken = _shown(tuned, left)
    return Taken(tuned, f"by {where}: {', '.join(taken) or 'nothing but what is plain'}{gain}")


def read_findings(folder: Path) -> tuple[dict[Path, Tuned], list[str]]:
    """The findings in a folder, and a line for each file that is none."""
    found, damaged = {}, []
    for file in sorted(folder.glob(f"*/{SETTINGS}")):
        try:
            found[file] = read_once(file, read_tuned)
        except (OSError, ValueError, KeyError, TypeError) as error:
            damaged.append(f"{file} is damaged ({first_line(error)[:120]}); tune again")
    return found, damaged


def read_tuned(file: Path) -> Tuned:
    """Read a finding.

    Raises:
        OSError, ValueError, KeyError, TypeError: it is none, or of another version.
    """
    raw = read_json(file)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ValueError("not a file of this version of tune")
    before, after = raw["tokens_per_second"]
    return Tuned(as_type(Fit, raw["fit"], "fit"), dict(raw["settings"]), (before, after), raw["date"])


def _why_not(findings: list[Tuned], damaged: list[str], here: Fit, left: Mapping[str, Any]) -> str:
    """Why nothing is taken, and what might be won."""
    near = min((each.fit.differences(here) for each in findings), key=len, default=[])
    reasons = [*damaged[:1], *([f"what was found is for {'; '.join(near)}"] if near else ["not tuned"])]
    words = {"compute.compile": "a compiler", "compute.attention": "kernels", "optim.fused": "the fused optimizer",
             "compute.threads": "threads", "data.num_workers": "workers"}  # fmt: skip
    on_gpu = "cores" not in here.device
    gpu_only, cpu_only = ("compute.attention", "optim.fused"), ("compute.threads",)
    may = [text for key, text in words.items() if key in left and key not in (cpu_only if on_gpu else gpu_only)]
    may += ["microbatches"] * any(key.endswith(MICROBATCH) for key in left)
    return f"{'. '.join(reasons)}. `tune` measures here what {', '.join(may)} may win" if may else ". ".join(reasons)


def _refusal(config: RunConfig, compute: Compute) -> str | None:
    """Why a run cannot have these settings here, which were found when it could."""
    try:
        check(config)
    except ConfigError as error:
        return first_line(error)
    on_gpu, sections = compute.device.type == "cuda", (config.callbacks, config.loggers)
    if missing := list(missing_packages(config.compute, config.optim, *sections, on_gpu=on_gpu)):
        return missing[0]
    dtype = torch.bfloat16 if compute.bf16 else torch.float32
    for name in sorted({config.compute.attention, config.compute.global_attention or "auto"} & set(KERNELS)):
        for now in config.in_phase.values():
            reason = KERNELS[name].support(compute.device, dtype, now.objective.order, now.model.score_bias)
            if reason is not None:
                return f"{name}: {reason}"
    return None


def _shown(config: RunConfig, left: Mapping[str, Any]) -> list[str]:
    """The settings that were left open and are not plain, each as it would be written."""
    values = {key: value_of(config, key) for key, plain in left.items() if value_of(config, key) != plain}
    return [assigned(key, value) for key, value in values.items()]


def _gain(tuned: Tuned) -> str:
    before, after = tuned.tokens_per_second
    return f"{after / before:.2f} x the tokens/s of the plain settings"
