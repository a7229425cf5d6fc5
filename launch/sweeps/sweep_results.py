"""Results of a sweep: a table, the importance of each key, the best run as YAML.

All of it is read from the sweep's folder and database, without a network; the page is one self-contained file.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.trial import TrialState

from launch.sweeps.space import Space, load_point, trial_name
from launch.sweeps.trial import OUTPUT, write_yaml
from launch.sweeps.trial_rows import TrialRow, best_row, make_rows, param_text, ranked
from launch.sweeps.trial_store import Store
from modernbert_train.core.text import plural, table
from modernbert_train.distributed.run_jobs import Failure, Failures, raise_failures
from modernbert_train.errors import ConfigError, RunError
from modernbert_train.report.page import write_comparison

BEST = "best.yaml"
PAGE = "results.html"
FEWEST = 8  # completed trials below which importance is noise
_TOP = 0.25  # share of best trials that importance is computed from


def show_results(space: Space) -> str:
    """Write best.yaml and results.html into the sweep's folder; return the table and their paths.

    Raises:
        ConfigError: the sweep has not been started.
        StorageError: its database cannot be reached.
    """
    sweep = space.sweep
    folder = Path(sweep.folder)
    if sweep.storage is None and not (folder / "sweep.db").exists():
        raise ConfigError(f"{folder}: no sweep has been run there. Run it first, without --results.")
    store = Store(space)
    with store.reachable():
        rows = make_rows(store, folder)
        weights = importance(store.study)
    best = best_row(rows, sweep.direction)
    lines = [trials_text(rows, space), "", importance_text(weights, rows)]
    if best is not None:
        lines += ["", write_best(space, best, folder / BEST)]
    trials = [folder / trial_name(row.slot) for row in ranked(rows, sweep.direction) if row.entries]
    if trials:
        lines.append(f"page: {write_comparison(trials, folder / PAGE)}")
    return "\n".join(lines)


def raise_failed(space: Space) -> None:
    """Raise an error if trials have failed, or if all are over and none has a figure.

    Raises:
        RunError: names them and their logs; its exit code is the first one's.
    """
    store, folder = Store(space), Path(space.sweep.folder)
    with store.reachable():
        rows, is_over = make_rows(store, folder), store.is_over()
    failed, remedy = [row for row in rows if row.state == "failed"], "Add --retry to repeat what failed"
    if not failed and is_over and all(row.value is None for row in rows):
        failed, remedy = rows, "No trial has a figure: change the space or the run"
    failures = Failures()
    for row in failed:
        log = folder / trial_name(row.slot) / OUTPUT
        failures[f"trial {row.slot}"] = Failure(row.code or RunError.exit_code, row.reason or "", log)
    raise_failures(failures, counted=f"{len(failed)} of {plural(space.trials, 'trial')}", remedy=remedy)


def importance(study: optuna.Study) -> dict[str, float]:
    """Return each key's share in deciding whether a trial is among the best quarter; the shares add up to 1.

    Source: PED-ANOVA, Watanabe et al. 2023, arXiv:2304.10255. Empty below FEWEST completed trials, or if all are equal.
    """
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < FEWEST or len({trial.value for trial in complete}) == 1:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        evaluator = PedAnovaImportanceEvaluator(target_quantile=_TOP)
        shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {key: share for key, share in shares.items() if math.isfinite(share)}


def trials_text(rows: Sequence[TrialRow], space: Space) -> str:
    """Format all trials as lines of text, the best first."""
    keys = list(space.distributions)
    head = ["trial", space.sweep.objective, "state", "tokens", *keys]
    cells = [head] + [
        [
            str(row.slot),
            "" if row.value is None else f"{row.value:.5g}",
            row.state,
            f"{row.tokens:,}",
            *(param_text(row.params.get(key, "")) for key in keys),
        ]
        for row in ranked(rows, space.sweep.direction)
    ]
    notes = [f"trial {row.slot}: {row.reason}" for row in rows if row.reason and row.state != "pruned"]
    return "\n".join([table(cells), *[""] * bool(notes), *notes])


def importance_text(weights: Mapping[str, float], rows: Sequence[TrialRow]) -> str:
    """Format the importance of each key as lines of text, or the reason why it is unknown."""
    if not weights:
        complete = sum(row.value is not None for row in rows)
        return f"importance: estimated from {FEWEST} different completed trials on; there are {complete}."
    width = max(map(len, weights))
    lines = [f"  {key.ljust(width)}  {share:4.0%}  {'█' * round(30 * share)}" for key, share in weights.items()]
    return "\n".join(["importance (PED-ANOVA, best quarter of the trials)", *lines])


def write_best(space: Space, best: TrialRow, file: Path) -> str:
    """Write the best trial's run under the sweep's name; return a line about it."""
    sweep = space.sweep
    point = " ".join(space.overrides(best.params))
    ours = [f"name={sweep.name}-best", f"runs_folder={sweep.runs_folder}"]
    config = load_point(sweep, [*space.overrides(best.params), *ours])
    figure = f"{sweep.objective} {best.value:.5g}"
    head = [f"Trial {best.slot} of {sweep.name}, {figure}: {point}", "", f"  python -m modernbert_train launch {file}"]
    write_yaml(file, config, head)
    return f"best: trial {best.slot}, {figure}, {point}\nits YAML: {file}"
