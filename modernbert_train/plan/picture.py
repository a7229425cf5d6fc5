"""Learning rate, batch size, context length and masking rate over tokens, as blocks in the terminal.

They are drawn from the functions that training itself calls, so what is drawn is what happens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from modernbert_train.clock import Clock
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.text import percent, rate, tokens_text, whole
from modernbert_train.data.batch_warmup import batch_rows_at
from modernbert_train.optim.schedules import lr_at

COLUMNS = 72
HEIGHTS = (3, 2, 2, 2)  # lines of text for each quantity
BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Quantity:
    """Something that changes over a run: its name, its value after so many tokens, and how people write it."""

    name: str
    at: Callable[[int], float]
    text: Callable[[float], str]


def quantities(config: RunConfig) -> tuple[Quantity, ...]:
    """What the picture shows."""
    clock = Clock.of(config)

    def rows(tokens: int) -> int:
        position = clock.at(tokens)
        return batch_rows_at(position.phase, position.tokens)

    return (
        Quantity("learning rate", lambda tokens: lr_at(clock, tokens), rate),
        Quantity("batch size, rows", rows, whole),
        Quantity("context length, tokens", lambda tokens: clock.at(tokens).phase.row_tokens, whole),
        Quantity("predicted tokens", lambda tokens: clock.at(tokens).objective.predicted_share, percent(1)),
    )


def picture_text(config: RunConfig) -> str:
    """Draw with blocks: every quantity from 0 to its highest value, every column the value where it begins.

    Args:
        config: the run, checked.
    """
    last = config.total_tokens - 1
    places = [round(column * last / (COLUMNS - 1)) for column in range(COLUMNS)]
    out = []
    for quantity, height in zip(quantities(config), HEIGHTS, strict=True):
        values = [quantity.at(place) for place in places]
        low, top = min(values), max(values)
        height = 1 if low == top else height
        span = "" if low == top else "up to " if low < 1e-6 * top else f"{quantity.text(low)} to "
        out.append(f"{quantity.name}: {span}{quantity.text(top)}")
        levels = [max(1, round(8 * height * value / (top or 1))) for value in values]
        for line in reversed(range(height)):
            out.append("  " + "".join(BLOCKS[min(8, max(0, level - 8 * line))] for level in levels).rstrip())
    return "\n".join([*out, *_axis(config)])


def _axis(config: RunConfig) -> list[str]:
    """A ruler with a mark where each phase begins, and the phases' names below it."""
    ruler, names = ["─"] * COLUMNS, ""
    starts = [0, *itertools.accumulate(phase.tokens for phase in config.phases.values())]
    for start, name in zip(starts, config.phases, strict=False):
        column = min(COLUMNS - 1, round(start * COLUMNS / config.total_tokens))
        ruler[column] = "┬"
        names = names.ljust(column) if len(names) < column else names + " "
        names += name
    return [f"  {''.join(ruler)}", f"  {names}", f"  0 to {tokens_text(config.total_tokens)} tokens"]
