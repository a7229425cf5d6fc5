"""One tune, from the run to the file of settings: look at the device, fit, ask, and compare with today's in turns."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from modernbert_train.checkpoints.run_folder import take_lock
from modernbert_train.config.auto import MICROBATCH, OPEN
from modernbert_train.config.check import check
from modernbert_train.config.load import to_yaml
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.files import os_errors_as, values_as
from modernbert_train.core.read_json import as_type
from modernbert_train.core.text import plural
from modernbert_train.data.check import check_data
from modernbert_train.errors import ConfigError, StorageError
from modernbert_train.plan.tuned import Fit, Tuned, folder_of, main_phase
from modernbert_train.train.tune.candidates import MICROBATCHES, Case, Settings, label, questions
from modernbert_train.train.tune.findings import MARKDOWN, Report, as_markdown, write_findings
from modernbert_train.train.tune.journal import Journal
from modernbert_train.train.tune.pool import Commands, Pool, launch
from modernbert_train.train.tune.process import Failure, command_of
from modernbert_train.train.tune.search import gain
from modernbert_train.train.tune.tuning import TODAY, Tuning

LOOK_SECONDS = 300.0
COMPILED_SECONDS = 5.0  # that the first step takes longer, which is worth a line
SPARE = 0.9  # of a GPU's memory may be taken: several ranks need more than one does, to exchange gradients
_KERNELS = dict.fromkeys(("varlen", "flash", "flex"), "not asked") | {"sdpa": None}


def tune(
    config: RunConfig,
    *,
    phase: str | None = None,
    minutes: float = 30.0,
    fresh: bool = False,
    command: Commands = command_of,
) -> Path:
    """Find the fastest settings of what a run leaves open, on this device, and write them where runs look for them.

    Args:
        config: the run.
        phase: whose rows are tuned; None: the one with the most tokens.
        minutes: after which no further question is begun.
        fresh: measure again what was measured before.
        command: what starts the worker of a candidate.

    Returns:
        The folder of what was found.

    Raises:
        ConfigError: the run or the phase is wrong, or another tune has the folder.
        DataError, StorageError: the data or the disk.
        RunError: the run cannot train at all.
    """
    began = time.monotonic()
    check(config)
    check_data(config)
    name = _phase(config, phase)
    parent = folder_of(config)
    if parent is None:
        raise ConfigError("compute.tuned=none: then nothing that is found would be used. Set it to auto or a folder.")
    omp = os.environ.get("OMP_NUM_THREADS")
    facts = _look(config, name, command)
    case = Case(config, name, facts, omp)
    fit: Fit = as_type(Fit, facts["fit"], "fit")
    folder = parent / fit.case
    print(f"tuning phase {name} of {config.name} on {fit.device}, into {folder}", flush=True)
    with os_errors_as(
        StorageError, f"{folder}: cannot be written", "Fix the permissions, or set compute.tuned to a folder."
    ):
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder, "Two tunes would disturb each other: wait for it, or stop it.")
    with closing(lock):
        if fresh:
            Journal.put_aside(folder)
        journal = Journal(folder, _about(case))
        if journal.remembered:
            print(f"{plural(journal.remembered, 'measurement')} of an earlier start remembered; --fresh measures again")
        if (load := os.getloadavg()[0]) > 0.5 * facts["cores"] and not facts["on_gpu"]:
            print(f"warning: this machine is busy (load {load:.1f} on {plural(facts['cores'], 'core')}), and what is "
                  "fastest beside others may not be fastest alone")  # fmt: skip
        limit = SPARE * facts["memory_bytes"] if facts["on_gpu"] else None
        pool = Pool(lambda settings: launch(case, folder, command, settings), limit_bytes=limit)
        with closing(pool):
            report, settings = _run(Tuning(case, journal, folder, command, pool, _say), began + 60 * minutes, fit)
        tuned = Tuned(fit, settings, report.tokens_per_second, time.strftime("%Y-%m-%d"))
        write_findings(folder, report, tuned)
    print(f"\n{as_markdown(report)}\n\ntable: {folder / MARKDOWN}")
    return folder


def _run(tuning: Tuning, until: float, fit: Fit) -> tuple[Report, Settings]:
    """Ask all there is time for; the report, and the settings that runs shall take."""
    case = tuning.case
    today, steps = tuning.fitting(case.plain)
    if not (right := tuning.is_right(TODAY, today, today)):
        tuning.advice.append(f"WRONG: today's settings, {label(today)}, do not compute what the plain form does.")
    found, microbatch = today, today[MICROBATCH]
    for question in questions(case):
        if time.monotonic() > until:
            tuning.advice.append(f"Out of time before: {question.title}. The same command with more --minutes resumes.")
            break
        best = tuning.ask(question, found, steps)
        if question.reported:
            microbatch = best[MICROBATCH]
        else:
            found = best
    tuning.advice += _microbatch_advice(case, today[MICROBATCH], microbatch)
    pair: tuple[list[float], list[float]] = ([], [])
    if found != today:
        try:
            pair = tuning.compare(today, found, steps)
        except Failure as failure:
            tuning.advice.append(f"The last comparison failed, so today's settings stay: {failure.text}.")
            found = today if right else found
    won = gain(pair) if pair[0] and found != today else 1.0
    if won < 1.0 and right:
        tuning.advice.append(f"In turns {label(found, today)} was no faster, so today's settings stay.")
        found = today
    tuning.advice += _start_advice(tuning.first_seconds, today, found, won)
    title = (
        f"{case.config.name}, phase {case.phase}: {fit.model['name']} in rows of {fit.row_tokens:,} on {fit.device}, "
        f"{fit.precision}, torch {fit.torch}"
    )
    if not case.gives_microbatch:
        microbatch = found[MICROBATCH]
    settings = {key: found[key] for key in OPEN if key in case.open} | {MICROBATCH: microbatch}
    return Report(title, tuning.rows, pair, won, tuning.advice), settings


def _microbatch_advice(case: Case, given: int, best: int) -> list[str]:
    if not case.gives_microbatch or given == best:
        return []
    key = f"phases.{case.phase}.{MICROBATCH}"
    return [f"{key}={best:,} was faster than {given:,}, which the run gives. Set it, or leave the key out."]


def _start_advice(first_seconds: Mapping[str, float], today: Settings, found: Settings, won: float) -> list[str]:
    """What is lost at each start, where it is more than a few seconds, and how long a run must be to win it back."""
    before, after = (first_seconds.get(label(settings), 0.0) for settings in (today, found))
    if won <= 1.0 or after - before < COMPILED_SECONDS:
        return []
    minutes = (after - before) / (1 - 1 / won) / 60
    return [
        f"The first step takes {after - before:.0f} s more than with today's settings, at each start: a run of less "
        f"than {minutes:.0f} minutes wins nothing."
    ]


def _phase(config: RunConfig, phase: str | None) -> str:
    if phase is not None and phase not in config.phases:
        raise ConfigError(f"--phase {phase}: the run has {', '.join(config.phases)}.")
    return phase or main_phase(config)


def _look(config: RunConfig, phase: str, command: Commands) -> Mapping[str, Any]:
    """What the device is and can do, found by a process of its own: this one must not take a part of a GPU's memory.

    Raises:
        ConfigError: it cannot be used.
    """
    nothing: dict[str, Any] = {"on_gpu": False, "kernels": _KERNELS}
    case = Case(config, phase, nothing)
    with tempfile.TemporaryDirectory() as folder:
        process = launch(case, Path(folder), command, case.plain)
        try:
            with values_as(ConfigError, "tune: this device cannot be used", Failure):
                facts = process.ask(LOOK_SECONDS, do="look")
        finally:
            process.close()
    return facts


def _about(case: Case) -> dict[str, Any]:
    """What measurements are of: any other run, or device, has others."""
    phase = replace(case.config.phases[case.phase], tokens=1)
    run = replace(case.config, phases={case.phase: phase}, name="", runs_folder="")
    facts = {key: value for key, value in case.facts.items() if key != "memory_bytes"}
    return {"run": to_yaml(run), "facts": facts, "omp": case.omp, "microbatches": MICROBATCHES}


def _say(line: str) -> None:
    print(line, flush=True)
