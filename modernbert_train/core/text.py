"""Format numbers and tables for readers: units named, no meaningless digits, columns aligned."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime

# control characters of ASCII and Latin-1 except tab and newline, and characters that change the text's direction
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Escape control characters of untrusted text as in Python, so that a terminal does not interpret them."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def did_you_mean(word: str, names: Iterable[str], prefix: str = "", *, likeness: float = 0.5) -> str:
    """Return " Did you mean NAME?" for the most similar name; empty if none is similar enough."""
    near = difflib.get_close_matches(word, [*names], n=1, cutoff=likeness)
    return f" Did you mean {prefix}{near[0]}?" if near else ""


def is_plain_name(text: str) -> bool:
    """Return True for letters, digits, `_` and `-`: a name that metrics, keys and files can have."""
    return text.replace("_", "").replace("-", "").isalnum()


def is_folder_name(text: str) -> bool:
    """Return True for letters, digits, `.`, `_` and `-`: a name that a folder can have on every system."""
    return re.fullmatch(r"[A-Za-z0-9._-]{1,128}", text) is not None and text not in (".", "..")


def file_name(text: str, end: str = "", longest: int = 100) -> str:
    """Return a name for a file or folder: characters except letters, digits, `.`, `_` and `-` become `-`.

    It is never hidden or a path, and at most `longest` characters long; `end` stays whole.
    """
    plain, end = (re.sub(r"[^A-Za-z0-9._-]+", "-", each) for each in (text, end))
    return (plain.lstrip(".") or "-")[: longest - len(end)] + end


def tokens_text(tokens: float, digits: int = 3) -> str:
    """Format a count with k, M, G, T or P: 12_300_000 -> '12.3 M'."""
    units = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    size, letter = next((unit for unit in units if abs(tokens) >= unit[0]), (1, ""))
    count = tokens / size
    shown = f"{count:.{digits}g}" if abs(count) < 10**digits - 0.5 else f"{count:.0f}"
    return f"{shown} {letter}".rstrip()


def fixed(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}" if math.isfinite(value) else "not a number"


def percent(digits: int) -> Callable[[float], str]:
    """Return a formatter of shares as percentages, without trailing zeros: 0.993 -> '99.3 %'."""

    def text(value: float) -> str:
        if not math.isfinite(value):
            return "not a number"
        shown = f"{100 * value:.{digits}f}"
        return f"{shown.rstrip('0').rstrip('.') if digits else shown} %"

    return text


def whole(value: float) -> str:
    return f"{value:,.0f}"


def short(value: float) -> str:
    """Format with three significant digits, for norms, which span decades, and for axis ticks."""
    return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e3 else rate(value)


def rate(value: float) -> str:
    """Format a learning rate: 0.0008 -> '8e-4'."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def duration(seconds: float) -> str:
    """Format a duration with at most two units: 93784 -> '1 d 2 h'."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min".removesuffix(" 0 min")
    return f"{minutes // 1440} d {minutes % 1440 // 60} h".removesuffix(" 0 h")


def date(unix_seconds: float) -> str:
    """Format a time in UTC; empty if it is unknown."""
    with suppress(ValueError, OverflowError, OSError):  # NaN, or a year outside the calendar
        return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return ""


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def shorten(text: str, letters: int) -> str:
    """Shorten a text to at most so many letters, keeping both ends: long names often differ at the end."""
    if len(text) <= letters:
        return text
    tail = (letters - 1) // 3
    return f"{text[: letters - 1 - tail]}…{text[len(text) - tail :]}"


def shown_value(value: object) -> str:
    """Format a value for a message."""
    return shorten(repr(value), 40) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def some(names: Sequence[str], max_names: int = 10) -> str:
    """Format the first of many names for a message."""
    more = f" and {len(names) - max_names:,} more" if len(names) > max_names else ""
    return ", ".join(shorten(str(name), 40) for name in names[:max_names]) + more


def table(rows: Iterable[Sequence[str]], *, indent: int = 0, numbers: bool = False) -> str:
    """Format rows of cells as lines, each column as wide as its widest cell.

    Args:
        rows: of equally many cells.
        indent: spaces before each line.
        numbers: align columns to the right, except the first and those without a heading.
    """
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [">" if numbers and column and heading else "<" for column, heading in enumerate(lines[0])]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return "\n".join((" " * indent + form.format(*row)).rstrip() for row in lines)


def on_one_line(text: str) -> str:
    """Return untrusted text on one line, without control characters."""
    return " ".join(printable(text).split())


def markdown_text(text: str) -> str:
    """Escape untrusted text for Markdown: on one line, without markup and HTML."""
    plain = re.sub(r"([\\`*\[\]|])", r"\\\1", on_one_line(text))
    return plain.replace("&", "&amp;").replace("<", "&lt;")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format rows as a Markdown table; the cells are Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def number_in(value: object) -> float:
    """Parse a number from text or a JSON value; NaN if it is not a number."""
    with suppress(TypeError, ValueError, OverflowError):
        return math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    return math.nan
