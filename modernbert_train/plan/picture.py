"""Learning rate, batch size, context length and masking rate over tokens: in the terminal, and as SVG.

Both are drawn from the functions that training itself calls, so what is drawn is what happens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files

from modernbert_train.clock import at, position_at
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.batch_warmup import batch_rows_at
from modernbert_train.optim.schedules import lr_at
from modernbert_train.report.chart import Chart, Line, Marks, standalone
from modernbert_train.text import percent, rate, tokens_text, whole

COLUMNS = 72
HEIGHTS = (3, 2, 2, 2)  # lines of text for each quantity
BLOCKS = " ▁▂▃▄▅▆▇█"
SAMPLES = 600  # points of a drawn curve, besides the joints


@dataclass(frozen=True)
class Quantity:
    """Something that changes over a run: its name, its value after so many tokens, and how people write it."""

    name: str
    at: Callable[[int], float]
    text: Callable[[float], str]


def quantities(config: RunConfig) -> tuple[Quantity, ...]:
    """What the picture shows."""

    def rows(tokens: int) -> int:
        position = position_at(config, tokens)
        return batch_rows_at(position.phase, position.tokens)

    return (
        Quantity("learning rate", lambda tokens: lr_at(config, tokens), rate),
        Quantity("batch size, rows", rows, whole),
        Quantity("context length, tokens", lambda tokens: position_at(config, tokens).phase.row_tokens, whole),
        Quantity("predicted tokens", lambda tokens: at(config, tokens).objective.predicted_share, percent(1)),
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


def charts(config: RunConfig) -> tuple[list[Chart], Marks]:
    """The same as charts of the report's kind, with both sides of every joint.

    Args:
        config: the run, checked.
    """
    last, start = config.total_tokens - 1, 0
    places = {round(i * last / SAMPLES) for i in range(SAMPLES + 1)}
    boundaries = []
    for name, phase in config.phases.items():
        joints = [0, phase.schedule.warmup_tokens, phase.tokens - phase.schedule.decay_tokens]
        joints += [phase.batch_warmup.tokens] if phase.batch_warmup is not None else []
        places |= {start + joint + side for joint in joints for side in (-1, 0)}
        boundaries.append((float(start), name))
        start += phase.tokens
    x = sorted(place for place in places if 0 <= place <= last)
    drawn = [
        Chart(
            quantity.name.capitalize(),
            [Line("plan", "main", x, [quantity.at(place) for place in x])],
            quantity.text,
            quantity.text,
            low=0.0,
        )
        for quantity in quantities(config)
    ]
    return drawn, Marks(end=float(config.total_tokens), boundaries=boundaries)


def picture_svg(config: RunConfig, *, styled: bool = True, width: int = 1000, height: int = 300) -> str:
    """All charts one below the other, as one SVG file.

    Args:
        config: the run, checked.
        styled: carry the style along; a page has it already.
        width, height: of one chart, in px.
    """
    drawn, marks = charts(config)
    style = files("modernbert_train.report").joinpath("chart.css").read_text("utf-8") if styled else ""
    subtitle = f"{config.name}, {tokens_text(config.total_tokens)} tokens"
    parts = [
        standalone(chart, marks, subtitle, style if index == 0 else "", width, height).replace(
            "<svg ", f'<svg y="{index * (height + 12)}" ', 1
        )
        for index, chart in enumerate(drawn)
    ]
    total = len(parts) * (height + 12)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" height="{total}">'
        f"{''.join(parts)}</svg>\n"
    )
