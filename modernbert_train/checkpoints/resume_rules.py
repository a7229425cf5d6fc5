"""Refuse changes to the trained phases of a run; phases after its checkpoint may change.

The clock is a sum of phases: another order, name or length of a trained phase would silently move the run to another
position of its plan, with other rates, row length and RoPE base. So the plan saved with the checkpoint is compared with
the run's, phase by phase, up to the phase of the last step. For keys outside of `phases` see run_folder.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from modernbert_train.checkpoints.run_folder import changed_keys, fixed
from modernbert_train.config.knob import facts_of
from modernbert_train.config.load import differences
from modernbert_train.config.schema import PhaseConfig, RunConfig
from modernbert_train.core.claim import START_OVER, Change, refuse
from modernbert_train.errors import ConfigError

if TYPE_CHECKING:
    from modernbert_train.checkpoints.checkpoint import Checkpoint


# keys of a run's present phase that decide when it ends and how its rate decays towards that end
_ITS_END = ("tokens", "schedule.decay_tokens", "schedule.decay", "schedule.final_lr_ratio")
# sections that a measurement takes from the given configuration; and what a run began with, which may have moved
_NOT_COMPARED = ("compute.", "data.", "weights.", "start.")


def check_same_past(checkpoint: Checkpoint, phases: Mapping[str, PhaseConfig]) -> None:
    """Compare the plan that a run was trained by with its present plan.

    Args:
        checkpoint: the newest of the run.
        phases: of the run now.

    Raises:
        ConfigError: a trained phase differs; names each difference.
    """
    refuse_changes(checkpoint.folder, checkpoint.config.phases, phases, checkpoint.state.phase, checkpoint.state.tokens)


def check_same_run(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Refuse other values for keys that `eval` and `export` take from the checkpoint, where they would have no effect.

    Raises:
        ConfigError: there are some; names each with both values.
    """
    changed = fixed(changed_keys(checkpoint.config, config))
    refuse(
        f"{checkpoint.folder} was trained with another configuration, which is used here",
        [each for each in changed if not each.key.startswith(_NOT_COMPARED)]
        + past_changes(checkpoint.config.phases, config.phases, checkpoint.state.phase, checkpoint.state.tokens),
        "Leave these keys out; or restore the run's config.yaml.",
    )


def refuse_average(run: Path) -> None:
    """Refuse to continue training from a run's folder that holds an average.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"{run}: an average of checkpoints, which has no moments and no position in the data to continue from. "
        f"Start another run with weights.init_from={run}."
    )


def refuse_changes(
    checkpoint: Path, then: Mapping[str, PhaseConfig], now: Mapping[str, PhaseConfig], phase: str, tokens: int
) -> None:
    """Compare two plans up to a checkpoint.

    Args:
        checkpoint: its folder.
        then, now, phase, tokens: see `past_changes`.

    Raises:
        ConfigError: as `check_same_past`.
    """
    refuse(
        f"{checkpoint}: trained to {tokens:,} tokens, into phase {phase}, and the plan up to there has changed",
        past_changes(then, now, phase, tokens),
        "Only what lies ahead can still be changed. Restore these, or follow the new plan in a run with another name= "
        f"and start.checkpoint={checkpoint}, or {START_OVER}.",
    )


def past_changes(
    then: Mapping[str, PhaseConfig], now: Mapping[str, PhaseConfig], last: str, tokens: int
) -> list[Change]:
    """Return the differences between two plans in their trained part.

    Args:
        then, now: phases of the runs; `then` has one of the name `last`.
        last: phase of the last step.
        tokens: global tokens seen; past the phase's end if the last batch crossed it.

    Returns:
        Each difference, old value and new. The length and decay of the last step's phase may still change,
        if the decay begins after that step in both plans.
    """
    old, new = list(then), list(now)
    trained = old[: old.index(last) + 1]
    renamed = [
        Change(f"phase {number}", name, new[number - 1] if number <= len(new) else "none")
        for number, name in enumerate(trained, 1)
        if new[number - 1 : number] != [name]
    ]
    if renamed:
        return renamed
    seen = tokens - sum(then[name].tokens for name in trained[:-1])
    end_is_open = all(_decay_lies_ahead(plan[last], seen) for plan in (then, now)) and (
        now[last].tokens >= min(seen, then[last].tokens)
    )
    free = [field.name for field in fields(PhaseConfig) if facts_of(field).restart]
    return [
        Change(f"phases.{name}.{key}", before, after)
        for name in trained
        for key, before, after in differences(then[name], now[name])
        if key not in free and not (end_is_open and name == last and key in _ITS_END)
    ]


def _decay_lies_ahead(phase: PhaseConfig, seen: int) -> bool:
    return phase.schedule.decay_tokens == 0 or seen <= phase.tokens - phase.schedule.decay_tokens
