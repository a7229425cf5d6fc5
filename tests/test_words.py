"""The words that a user reads. If this breaks, a page or a message reads like a translation."""

from __future__ import annotations

import ast
import io
import math
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from modernbert_train.cli.verbs import VERBS, help_page, make_parser
from tests.support.pages import PAGES
from tests.support.paths import ROOT
from tests.support.program_texts import messages

WORDS = tomllib.loads((ROOT / "tests/words.toml").read_text(encoding="utf-8"))
FOUND = re.compile("|".join(rf"\b{phrase}" for phrase in WORDS["never"]), re.IGNORECASE)
TOPS = ("modernbert_train", "data_prep", "launch", "examples", "benchmarks", "requirements", "tests")
OTHERS = [ROOT / name for name in ("README.md", "benchmarks/README.md", "requirements/README.md")]


def strange(text: str) -> list[str]:
    text = re.sub(r"\s+", " ", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [text[max(0, found.start() - 40) : found.end() + 20] for found in FOUND.finditer(text)]


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: page.name)
def test_a_page_is_in_the_words_of_the_field(page: Path) -> None:
    assert strange(page.read_text(encoding="utf-8")) == []


def test_help_is_in_the_words_of_the_field() -> None:
    assert strange(help_page()) == []
    assert {verb.name: found for verb in VERBS if (found := strange(make_parser(verb).format_help()))} == {}


@pytest.mark.runs
def test_messages_are_in_the_words_of_the_field() -> None:
    assert {str(path): found for path, text in messages().items() if (found := strange(text))} == {}


COUNTED = [re.compile(phrase, re.IGNORECASE) for phrase in WORDS["counted"].values()]


def prose(path: Path) -> Iterator[str]:
    """Yield the docstrings, comments and messages of a Python file, the lines of a page, or a YAML file's comments."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        comment = "^" if path.suffix == ".md" else r"(?:^|\s)#"
        yield from (found[1] for line in source.splitlines() if (found := re.search(f"{comment}(.*)", line)))
        return
    for node in ast.walk(ast.parse(source)):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if " " in text and len(text) > 24:
            yield " ".join(text.split())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def files_of(place: str) -> list[Path]:
    """Return the files of a bound: pages, a folder of packages, or the files directly in it (`FOLDER/*.py`)."""
    if place.endswith(".md"):
        return [ROOT / place]
    if place == "README.md, AGENTS.md and docs":
        pages = [*(ROOT / name for name in ("AGENTS.md", "SKILL.md", "CONTRIBUTING.md")), *OTHERS, *PAGES]
        return [page for page in pages if page.name != "config.md"]
    kind = "*.yaml" if place == "yamls" else "*.py"
    return sorted(ROOT.glob(place) if "*" in place else (ROOT / place).rglob(kind))


def rate(files: list[Path]) -> float:
    """Return the hits of `counted` a thousand words, rounded up to a tenth."""
    texts = [text for path in files for text in prose(path)]
    hits = sum(len(phrase.findall(text)) for text in texts for phrase in COUNTED)
    return math.ceil(10_000 * hits / sum(len(text.split()) for text in texts)) / 10


def test_the_count_sees_a_riddle_and_passes_plain_words(tmp_path: Path) -> None:
    """A pattern that matches nothing would let every text pass."""
    file = tmp_path / "riddle.md"
    file.write_text(WORDS["riddle"], encoding="utf-8")
    assert rate([file]) > 100
    file.write_text("The sum of the losses. Raise ValueError for an unknown name.", encoding="utf-8")
    assert rate([file]) == 0


def test_every_folder_has_a_bound() -> None:
    """Code without a bound could be written in any words."""
    covered = {file for place in WORDS["bounds"] for file in files_of(place)}
    every = [file for top in TOPS for file in (ROOT / top).rglob("*.py")]
    assert [str(file.relative_to(ROOT)) for file in every if file not in covered] == []


@pytest.mark.parametrize("place", WORDS["bounds"])
def test_a_reader_need_not_decode_what_is_written(place: str) -> None:
    """Docstrings, comments, messages and pages: a sentence that must be decoded hides mistakes."""
    assert rate(files_of(place)) <= WORDS["bounds"][place], (
        f"rewrite the new sentences of {place}, see tests/words.toml"
    )


TARGETS = "|".join(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
SCRIPT = re.compile(rf"\b(?:launch|data_prep|examples|benchmarks)/[\w/]+\.py(?! of AnswerDotAI)|\bmake (?:{TARGETS})\b")


def scripts(text: str) -> list[str]:
    return [found[0] for found in SCRIPT.finditer(text)]


def test_nothing_that_is_installed_names_a_script_of_a_checkout() -> None:
    """A wheel lacks `launch/run.py` and the Makefile, so a remedy that names one is useless. Job files may, since they
    start the program by its path in an image; launch/render.py is left out."""
    assert scripts("error: run `make venv`") and scripts("python launch/run.py RUN.yaml") and not scripts("make it")
    said = {str(path): text for path, text in messages().items() if path != Path("launch/render.py")}
    texts = [*(ROOT / "yamls").rglob("*.yaml"), *(ROOT / "launch/templates").iterdir(), ROOT / "docs/config.md"]
    texts += (ROOT / "modernbert_train/config/tools/skeletons").rglob("*.*")
    said |= {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in texts}
    said |= {verb.name: make_parser(verb).format_help() for verb in VERBS}
    assert {place: found for place, text in said.items() if (found := scripts(text))} == {}


def test_a_docstring_describes_the_parameters_that_are_there() -> None:
    """A name that only the docstring has is looked for in vain."""
    stale = []
    for path in (file for top in TOPS for file in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and "Args:" in (text := ast.get_docstring(node) or ""):
                block = re.split(r"\n(?=\S)", text.partition("Args:\n")[2])[0]
                described = re.findall(r"^    ([\w*, ]+): ", block, re.MULTILINE)
                names = {name.strip(" *") for line in described for name in line.split(",")}
                there = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
                stale += [f"{path}:{node.lineno}: {name}" for name in names - there]
    assert stale == []
