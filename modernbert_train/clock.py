"""One clock: global tokens seen, padding not counted. Everything that changes during a run is a function of it.

Phases lie end to end on the clock. A batch that crosses a border belongs to the phase in which it starts, so a phase
begins up to one batch late and its own count starts with that overshoot; nothing is reset and nothing drifts.
"""

from __future__ import annotations

from dataclasses import dataclass

from modernbert_train.config.schema import PhaseConfig, RunConfig


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
