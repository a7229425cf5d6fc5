"""A handler of all exceptions gives its reason: else a bug of ours is reported as the user's damage, or not at all.

That is how a source of documents was lost with exit code 0: a misspelt column was raised within a `try` that took every
error for one damaged row.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.packages import PACKAGES
from tests.support.paths import ROOT

BROAD = ("Exception", "BaseException")


def broad_catches(source: str) -> list[int]:
    """Lines that catch everything, with no comment there and without raising it again with its cause."""
    lines, found = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            names = [node.type] if not isinstance(node.type, ast.Tuple) else node.type.elts
            last = node.body[-1]
            raised = isinstance(last, ast.Raise) and not (isinstance(last.cause, ast.Constant))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "suppress":
            names, raised = list(node.args), False
        else:
            continue
        broad = any(name is None or (isinstance(name, ast.Name) and name.id in BROAD) for name in names)
        if broad and not raised and "#" not in lines[node.lineno - 1]:
            found.append(node.lineno)
    return found


@pytest.mark.runs
def test_catching_everything_needs_a_reason() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 200
    texts = {path.relative_to(ROOT): path.read_text("utf-8") for path in files}
    suspect = {path: text for path, text in texts.items() if re.search(r"\b(Base)?Exception\b|except:", text)}
    silent = [f"{path}:{line}" for path, text in suspect.items() for line in broad_catches(text)]
    assert silent == [], "name the errors that are meant; or say in a comment on the line why all are"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("try:\n    x()\nexcept Exception:\n    pass", [3]),
        ("try:\n    x()\nexcept (ValueError, BaseException) as error:\n    print(error)", [3]),
        ("try:\n    x()\nexcept Exception as error:\n    raise ValueError('bad') from None", [3]),
        ("try:\n    x()\nexcept Exception:  # the library may raise any\n    pass", []),
        ("try:\n    x()\nexcept ValueError:\n    pass", []),
        ("with suppress(Exception):\n    x()\n", [1]),
    ],
)
def test_it_is_found(source: str, lines: list[int]) -> None:
    assert broad_catches(source) == lines
