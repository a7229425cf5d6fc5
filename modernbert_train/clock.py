"""One clock: global tokens seen, without padding. Everything that changes during a run is a function of it.

Phases follow each other on the clock. A batch that crosses a boundary belongs to the phase in which it starts, so a
phase begins up to one batch late and its own count starts with that overshoot; nothing is reset and nothing drifts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from modernbert_train.config.schema import (
    EvalConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    PhaseConfig,
    RunConfig,
)

VALIDATIONS = 15  # default number in a phase, if together they cost at most 1 / VALIDATIONS of it
_COST_PARTS = 20
_FORWARD_PARTS = 3  # a forward pass is a third of a training step


@dataclass(frozen=True)
class Position:
    """The phase and settings at a point of the clock.

    Attributes:
        index: number of the phase, from 0.
        name: the phase's key in the YAML.
        tokens: tokens seen since the phase's nominal start, at least 0.
        phase: its configuration.
        model, objective, optim: the run's sections with the phase's overrides.
    """

    index: int
    name: str
    tokens: int
    phase: PhaseConfig
    model: ModelConfig
    objective: ObjectiveConfig
    optim: OptimConfig


@dataclass(frozen=True)
class Clock:
    """The phases of a run in sequence.

    Attributes:
        phases: positions at the start of each, in order; at least one.
    """

    phases: tuple[Position, ...]

    @classmethod
    def of(cls, config: RunConfig) -> Clock:
        return cls(
            tuple(
                Position(index, name, 0, config.phases[name], now.model, now.objective, now.optim)
                for index, (name, now) in enumerate(config.in_phase.items())
            )
        )

    @property
    def total_tokens(self) -> int:
        return sum(each.phase.tokens for each in self.phases)

    def at(self, tokens: int) -> Position:
        """Return the position of a batch that starts after `tokens` global tokens; past the end, the last position."""
        start, last = 0, self.phases[-1]
        for each in self.phases:
            if tokens < start + each.phase.tokens or each is last:
                return replace(each, tokens=min(tokens - start, each.phase.tokens))
            start += each.phase.tokens
        raise ValueError("a run needs at least one phase")

    def phase(self, name: str) -> Position:
        """Return the start of a phase."""
        return next(each for each in self.phases if each.name == name)

    def ends_phase(self, before: int, after: int) -> bool:
        """Return True if a step from one token count to another ended a phase or the run."""
        return after >= self.total_tokens or self.at(before).index != self.at(after).index

    def is_due(self, interval: int | None, before: int, after: int) -> bool:
        """Return True if something scheduled every `interval` tokens, and at each phase's end, is due after a step."""
        return crosses(interval, before, after) or self.ends_phase(before, after)

    def validates(self, settings: EvalConfig, held_out_tokens: int | None, before: int, after: int) -> bool:
        """Return True if the held-out text is evaluated after a step from one token count to another.

        A function of the clock alone: the same for any number of ranks, and across restarts.
        """
        if settings.interval_tokens is not None:
            return self.is_due(settings.interval_tokens, before, after)
        now = self.at(before)
        num_validations, tokens = validations_in(now.phase, settings, held_out_tokens), now.phase.tokens
        return num_validations * now.tokens // tokens != num_validations * (now.tokens + after - before) // tokens


def crosses(interval: int | None, before: int, after: int) -> bool:
    """Return True if a step from one token count to another passed a multiple of an interval; with None never."""
    return interval is not None and before // interval != after // interval


def is_pythia(step: int) -> bool:
    """Return True for steps with a checkpoint in Pythia: 0, 1, 2, 4, ..., 512, and every 1000 (arXiv 2304.01373)."""
    return step % 1000 == 0 or (step <= 512 and step & (step - 1) == 0)


def validations_in(phase: PhaseConfig, settings: EvalConfig, held_out_tokens: int | None) -> int:
    """Return the number of validations of a phase without a given interval, the last at its end; at least one.

    Args:
        phase: of the run.
        settings: the run's eval section.
        held_out_tokens: number that one validation reads; None if it is unknown, which leaves the number unbounded.
    """
    if settings.times_per_phase is not None:
        return settings.times_per_phase
    if not held_out_tokens:
        return VALIDATIONS
    return max(1, min(VALIDATIONS, _FORWARD_PARTS * phase.tokens // (_COST_PARTS * held_out_tokens)))
