"""Texts in programs: messages, help and names, without docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield every text in a program except docstrings; the values in an f-string are left out."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
