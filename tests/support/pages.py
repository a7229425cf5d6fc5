"""The commands that the documentation shows, read from its Markdown.

A command is a line of a `bash` block, or one after `$` in a block that shows output. One that ends in `# needs ...`
cannot run in the tests, and tells the reader why; all others are run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
NEEDS = ("a cluster", "a GPU", "GPUs", "the network", "an account", "a database server", "torchvision")


class Command(NamedTuple):
    """A command line; `needs` is its requirement besides a machine with this repository, None without one."""

    text: str
    needs: str | None


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def typed(page: Path) -> list[str]:
    """The lines of the `bash` blocks, with their comments."""
    lines = [line for block in blocks(page, "bash") for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines()]
    return [line.strip() for line in lines if line.strip()]


def commands(page: Path) -> list[Command]:
    shown = [line for block in blocks(page, "text") for line in block.splitlines()]
    found = []
    for line in [*typed(page), *(line.removeprefix("$ ") for line in shown if line.startswith("$ "))]:
        text, *comments = re.split(r"\s+# ", line.strip())
        comment = "".join(comments)
        needs = comment.removeprefix("needs ") if comment.startswith("needs ") else None
        found.append(Command(text, needs))
    return found
