"""The page shows the toys exactly: untested code on a page is wrong within a month."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/extending.md"


@pytest.mark.parametrize("toy", ["encoder", "objective", "format"])  # of the others `init extension` writes better ones
def test_the_page_shows_the_toy(toy: str) -> None:
    file = HERE / f"toy_{toy}.py"
    code = file.read_text()
    start = code.index("@dataclass") if "@dataclass\n" in code or "@dataclass(" in code else code.index("\ndef ") + 1
    assert code[start:].rstrip() in PAGE.read_text(), f"copy {file.name} to docs/extending.md"
