"""One clock: global tokens seen, padding not counted. Everything that changes during a run is a function of it.

Phases lie end to end on the clock. A batch that crosses a boundary belongs to the phase in which it starts, so a phase
begins up to one batch late and its own count starts with that overshoot; nothing is reset and nothing drifts.
"""

from __future__ import annotations

from dataclasses import dataclass

from modernbert_train.config.schema import EvalConfig, PhaseConfig, RunConfig

VALIDATIONS = 15  # in a phase, if they cost no more than one part in so many of it:
_COST_PARTS = 20
_FORWARD_PARTS = 3  # a forward pass is a third of a training step


@dataclass(frozen=True)
class Position:
    """Where a batch stands.

    Attributes:
        index: number of the phase, from 0.
        name: the phase's key in the YAML.
        phase: its configuration.
        tokens: tokens seen since the phase's nominal start, at least 0.
    """

    index: int
    name: str
    phase: PhaseConfig
    tokens: int


def position_at(config: RunConfig, tokens: int) -> Position:
    """Find the phase that holds a token count.

    Args:
        config: the run; its phases lie end to end.
        tokens: global tokens seen before the batch in question.

    Returns:
        The position; at or past the end of the run, the end of the last phase.
    """
    start = 0
    items = list(config.phases.items())
    for index, (name, phase) in enumerate(items):
        if tokens < start + phase.tokens or index == len(items) - 1:
            return Position(index, name, phase, min(tokens - start, phase.tokens))
        start += phase.tokens
    raise ValueError("a run needs at least one phase")


def at(config: RunConfig, tokens: int) -> RunConfig:
    """The run as it is now: with what the phase that holds a token count overrides, in the run's own keys."""
    return config.in_phase[position_at(config, tokens).name]


def ends_phase(config: RunConfig, before: int, after: int) -> bool:
    """Whether a step from one token count to another ended a phase or the run."""
    return after >= config.total_tokens or position_at(config, before).index != position_at(config, after).index


def crosses(interval: int | None, before: int, after: int) -> bool:
    """Whether a step from one token count to another passed a multiple of an interval; None never."""
    return interval is not None and before // interval != after // interval


def is_pythia(step: int) -> bool:
    """Whether the Pythia suite has a checkpoint of a step: 0, 1, 2, 4, ..., 512, and every 1000 (arXiv 2304.01373)."""
    return step % 1000 == 0 or (step <= 512 and step & (step - 1) == 0)


def is_due(config: RunConfig, interval: int | None, before: int, after: int) -> bool:
    """Whether what is done every so many tokens, and at the end of each phase, is due after a step."""
    return crosses(interval, before, after) or ends_phase(config, before, after)


def validations_in(phase: PhaseConfig, settings: EvalConfig, held_out_tokens: int | None) -> int:
    """How many times a phase is validated where no interval is given, the last of them at its end; at least once.

    Args:
        phase: of the run.
        settings: the run's eval section.
        held_out_tokens: that one validation reads; None if they are not known, and then nothing bounds the number.
    """
    if settings.times_per_phase is not None:
        return settings.times_per_phase
    if not held_out_tokens:
        return VALIDATIONS
    return max(1, min(VALIDATIONS, _FORWARD_PARTS * phase.tokens // (_COST_PARTS * held_out_tokens)))


def validates(config: RunConfig, held_out_tokens: int | None, before: int, after: int) -> bool:
    """Whether the held-out text is measured after a step from one token count to another.

    A function of the clock alone: the same for any number of ranks, and wherever the run was stopped and went on.
    """
    if config.eval.interval_tokens is not None:
        return is_due(config, config.eval.interval_tokens, before, after)
    position = position_at(config, before)
    parts, tokens = validations_in(position.phase, config.eval, held_out_tokens), position.phase.tokens
    return parts * position.tokens // tokens != parts * (position.tokens + after - before) // tokens
