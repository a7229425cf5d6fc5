"""Pairs for retrieval out of documents: a heading and its section, a docstring and its function."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples/text_pairs.py"
SECTION = " ".join(f"word{number}" for number in range(60))


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *files: Path) -> list[dict[str, str]]:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(out), *map(str, files)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return [json.loads(line) for line in out.read_text().splitlines()]


def documents(path: Path, *texts: tuple[str, str]) -> Path:
    path.write_text("".join(json.dumps({"path": name, "text": text}) + "\n" for name, text in texts))
    return path


@pytest.mark.parametrize(
    ("head", "title"),
    [
        ("# Guide to `tea`", "Guide to tea"),
        ("---\ntitle: 'Tea'\ndate: 2026-01-02\n---\n\n# A guide", "Tea"),
        ("---\ndate: 2026-01-02\n---\n\n# A guide", "A guide"),
    ],
    ids=["markup", "front matter with a title", "front matter without"],
)
def test_a_heading_with_its_page_is_the_query_of_its_section(
    head: str, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = f"{head}\n\nShort.\n\n## How to brew\n\n{SECTION}\n\n## Notes\n\ntoo short\n"
    found = run(monkeypatch, tmp_path / "out.jsonl", documents(tmp_path / "a.jsonl", ("a/guide.md", page)))
    assert found == [{"query": f"How to brew - {title}", "positive": SECTION}]


def test_a_docstring_is_the_query_of_its_function_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A query with two answers teaches nothing, and a query inside its answer teaches to copy."""
    code = (
        'def brew(leaves):\n    """Pour hot water on leaves. Then wait."""\n    pot = leaves\n    return pot\n\n\n'
        'def twice(a):\n    """Add a number to itself."""\n    b = a\n    return a + b\n'
    )
    again = code[code.index("def twice") :]
    file = documents(tmp_path / "a.jsonl", ("tea.py", code), ("more.py", again), ("broken.py", "def (:"))
    found = run(monkeypatch, tmp_path / "out.jsonl", file)
    assert found == [
        {"query": "Pour hot water on leaves.", "positive": "def brew(leaves):\n    pot = leaves\n    return pot"}
    ]
    assert "1 pairs; 2 left out whose query occurs twice" in capsys.readouterr().out
