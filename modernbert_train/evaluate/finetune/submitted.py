"""Values that kinds write for a test server, `submit` of a suite; see `Kind.submitted`.

A text without a prediction has the first class, or the score 0, since a server counts the lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from modernbert_train.config.tools.suite import SubmitConfig

_BREAKS = re.compile(r"[\t\r\n]")  # characters that end a cell or row of a .tsv


def class_problems(part: SubmitConfig, classes: Sequence[str]) -> Iterator[str]:
    """Yield mistakes in a file of classes; `classes`: empty while they are unknown."""
    if part.between:
        yield f"between={part.between}: bounds a score, and the task has classes. Leave it out."
    if part.labels and classes and sorted(part.labels) != sorted(classes):
        yield f"labels={part.labels}: the classes are {', '.join(classes)}. Name each once, as the server counts."
    if not part.labels and (broken := [name for name in classes if _BREAKS.search(name)]):
        yield f"split={part.split}: the class {broken[0]!r} has a tab or line break. Name all in labels, for numbers."


def class_value(prediction: str | None, part: SubmitConfig, classes: Sequence[str]) -> str:
    """Return the class of a text, or its number among `labels`."""
    name = classes[0] if prediction is None else prediction
    return str(part.labels.index(name)) if part.labels else name


def score_problems(part: SubmitConfig) -> Iterator[str]:
    """Yield mistakes in a file of scores."""
    if part.labels:
        yield f"labels={part.labels}: number classes, and the task has a score. Leave it out."


def score_value(prediction: float | None, part: SubmitConfig) -> str:
    """Return the score of a text, clipped to `between`."""
    score: Any = prediction or 0.0
    return f"{min(max(score, part.between[0]), part.between[1]):.3f}" if part.between else f"{score:g}"
