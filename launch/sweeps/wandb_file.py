"""The same sweep as a file of W&B, for teams whose agents are W&B's: `wandb sweep FILE`, then `wandb agent ID`.

W&B then searches, not Optuna, and each run is one command: an agent's run that is lost is not gone on with.
"""

from __future__ import annotations

from typing import Any

import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from launch.sweeps.space import Space, override

_METHODS = {"tpe": "bayes", "random": "random", "grid": "grid"}


def wandb_sweep(space: Space) -> str:
    """The sweep file's text.

    Args:
        space: the sweep.
    """
    sweep = space.sweep
    kind, _, figure = sweep.objective.partition(".")
    found: dict[str, Any] = {
        "name": sweep.name,
        "program": "launch/run.py",
        "method": _METHODS[sweep.sampler],
        "metric": {"name": f"{'train' if kind == 'step' else kind}/{figure}", "goal": sweep.direction},
        "run_cap": space.trials,
        "parameters": {key: _parameter(key, distribution, space) for key, distribution in space.distributions.items()},
        "command": _command(space),
    }
    prune = sweep.prune
    note = ""
    if prune.name == "hyperband":
        assert prune.interval_tokens is not None
        found["early_terminate"] = {  # counted in validations, which is how often the metric is logged
            "type": "hyperband",
            "min_iter": max(1, prune.min_tokens // prune.interval_tokens),
            "eta": 3,
        }
    elif prune.name == "median":
        note = "# prune.name=median has no equal in W&B; no run is ended early.\n"
    head = f"# {sweep.name} for W&B: wandb sweep THIS_FILE, then on each machine: wandb agent ID\n{note}"
    return head + yaml.safe_dump(found, sort_keys=False, width=120)


def _parameter(key: str, distribution: BaseDistribution, space: Space) -> dict[str, Any]:
    if space.points:
        return {"values": [_plain(value) for value in dict.fromkeys(point[key] for point in space.points)]}
    if isinstance(distribution, CategoricalDistribution):
        return {"values": [_plain(value) for value in distribution.choices]}
    assert isinstance(distribution, (FloatDistribution, IntDistribution))
    bounds = {"min": distribution.low, "max": distribution.high}
    if isinstance(distribution, IntDistribution):
        if distribution.log or distribution.step > 1:
            return {"distribution": "q_log_uniform_values" if distribution.log else "q_uniform", **bounds} | {
                "q": distribution.step
            }
        return {"distribution": "int_uniform", **bounds}
    if distribution.step is not None:
        return {"distribution": "q_uniform", **bounds, "q": distribution.step}
    return {"distribution": "log_uniform_values" if distribution.log else "uniform", **bounds}


def _plain(value: Any) -> Any:
    """As an agent must print it behind `key=`; it would print null as None, which is a word."""
    return "null" if value is None else value


def _command(space: Space) -> list[str]:
    """What an agent runs: launch/run.py with the values as overrides, in a folder named like W&B's run."""
    sweep = space.sweep
    fixed = [*sweep.run, *sweep.overrides, override("runs_folder", sweep.folder)]
    if sweep.prune.interval_tokens is not None:
        fixed.append(override("eval.interval_tokens", sweep.prune.interval_tokens))
    ranks = [] if sweep.ranks is None else ["--ranks", str(sweep.ranks)]
    # a shell, because only the run's own environment knows its id; $0 and $@ are what follows
    shell = (
        'exec "$0" "$@" "name=wandb-$WANDB_RUN_ID" "loggers.wandb.init_kwargs={mode: online, id: \'$WANDB_RUN_ID\'}"'
    )
    return ["${env}", "sh", "-c", shell, "${interpreter}", "${program}", *fixed, *ranks, "${args_no_hyphens}"]
