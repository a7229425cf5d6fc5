"""The source of the project: its syntax trees, and its texts, that is messages, help and names without docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.packages import PACKAGES
from tests.support.paths import ROOT


@cache
def parsed() -> dict[Path, ast.Module]:
    """Return every file of our packages by its path, relative to the root."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT): ast.parse(path.read_text("utf-8")) for path in files}


@cache
def messages() -> dict[Path, str]:
    """Return the texts of every file of our packages, without docstrings."""
    return {path: "\n\n".join(texts_of(tree)) for path, tree in parsed().items()}


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield every text in a program except docstrings; the values in an f-string are left out."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
