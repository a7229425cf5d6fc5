"""The words that a user reads. If this breaks, a page or a message reads like a translation."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from modernbert_train.cli.verbs import VERBS, help_page, make_parser
from tests.docs.pages import PAGES, ROOT
from tests.test_docs import _texts

# phrase -> what this project says instead
INSTEAD = {
    r"(go|goes|going|went) on\b": "resume, continue, or advance",
    r"at hand\b": "available, or local",
    r"(is|are|be|was|were|been|being) told\b": "reported, printed, predicted, or labelled",
    r"stand(s|ing)? (in|on|at|for|there|first|before|beside|behind|above|under|still)\b": "is, or is used",
    r"(peak|the|a|its|whose|their) rate (of [0-9]|is|was|and (the )?(weight )?decay)\b": "learning rate, if it is one",
}
FOUND = re.compile("|".join(rf"\b{phrase}" for phrase in INSTEAD), re.IGNORECASE)
REWRITTEN: tuple[str, ...] = ()
OTHERS = [ROOT / name for name in ("README.md", "benchmarks/README.md", "requirements/README.md")]


def strange(text: str) -> list[str]:
    text = re.sub(r"\s+", " ", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [text[max(0, found.start() - 40) : found.end() + 20] for found in FOUND.finditer(text)]


@pytest.mark.parametrize(
    "page", [page for page in (*PAGES, *OTHERS) if page.name not in REWRITTEN], ids=lambda page: page.name
)
def test_a_page_is_in_the_words_of_the_field(page: Path) -> None:
    assert strange(page.read_text(encoding="utf-8")) == []


def test_help_is_in_the_words_of_the_field() -> None:
    assert strange(help_page()) == []
    assert {verb.name: found for verb in VERBS if (found := strange(make_parser(verb).format_help()))} == {}


@pytest.mark.runs
def test_messages_are_in_the_words_of_the_field() -> None:
    files = [path for top in ("modernbert_train", "launch", "data_prep") for path in sorted((ROOT / top).rglob("*.py"))]
    files = [path for path in files if path.name not in REWRITTEN]
    said = {path: "\n\n".join(_texts(ast.parse(path.read_text(encoding="utf-8")))) for path in files}
    assert {str(path.relative_to(ROOT)): found for path in files if (found := strange(said[path]))} == {}


TARGETS = "|".join(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
SCRIPT = re.compile(rf"\b(?:launch|data_prep|examples|benchmarks)/[\w/]+\.py(?! of AnswerDotAI)|\bmake (?:{TARGETS})\b")


def scripts(text: str) -> list[str]:
    return [found[0] for found in SCRIPT.finditer(text)]


def test_nothing_that_is_installed_names_a_script_of_a_checkout() -> None:
    """Who has the wheel has no `launch/run.py` and no Makefile: a remedy that names one is none. Job files do, which
    start the program by its path in an image, so launch/render.py is left out."""
    assert scripts("error: run `make venv`") and scripts("python launch/run.py RUN.yaml") and not scripts("make it")
    files = [path for top in ("modernbert_train", "launch", "data_prep") for path in sorted((ROOT / top).rglob("*.py"))]
    messages = {
        str(path.relative_to(ROOT)): "\n".join(_texts(ast.parse(path.read_text(encoding="utf-8"))))
        for path in files
        if path != ROOT / "launch/render.py"
    }
    texts = [*(ROOT / "yamls").rglob("*.yaml"), *(ROOT / "launch/templates").iterdir(), ROOT / "docs/config.md"]
    texts += (ROOT / "modernbert_train/config/tools/skeletons").rglob("*.*")
    messages |= {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in texts}
    messages |= {verb.name: make_parser(verb).format_help() for verb in VERBS}
    assert {place: found for place, text in messages.items() if (found := scripts(text))} == {}
