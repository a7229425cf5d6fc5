"""Terminal output: colours only where they are wanted, and only characters that it has."""

from __future__ import annotations

import os
import sys


def wants_color(refused: bool) -> bool:
    """Whether to colour: the output is a terminal, and neither an option nor NO_COLOR says no (no-color.org)."""
    return not refused and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and sys.stdout.isatty()


def print_text(text: str) -> None:
    """Print; characters that the output cannot encode are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
