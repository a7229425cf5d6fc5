"""The documentation: its quotes and names exist, every link leads somewhere, and the site builds.

Its commands are run by tests/docs/. Here the runs that need GPUs are checked, its YAML is loaded, its keys are compared
with the schema, and its quoted errors are searched for in the source.
"""

from __future__ import annotations

import html
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.run import make_parser as launch_parser
from modernbert_train import __version__
from modernbert_train.__main__ import read_run
from modernbert_train.config.check import check
from modernbert_train.config.load import load_typed
from modernbert_train.config.schema import RunConfig
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.config.tools.pairs import PairsConfig
from modernbert_train.config.tools.prepare import PrepareConfig
from modernbert_train.config.tools.retrieval import RetrievalConfig
from modernbert_train.config.tools.sweep import SweepConfig
from modernbert_train.errors import ConfigError
from tests.docs.figures import FIGURES, RACE, Figure, pattern_of, race_picture
from tests.support.pages import PAGES, blocks, commands
from tests.support.paths import ROOT
from tests.support.program_texts import messages

NEEDY = [command for page in PAGES for command in commands(page) if command.needs == "GPUs"]


@pytest.mark.parametrize("command", NEEDY, ids=[command.text[:90] for command in NEEDY])
def test_a_run_that_needs_gpus_is_good_until_then(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that cannot be tried on a laptop must not be refused in the queue."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(command.text)
    assert words[:2] == ["modernbert-train", "launch"]
    check(read_run(launch_parser().parse_intermixed_args(words[2:]).run), num_ranks=8)


YAML = [(page.name, block) for page in PAGES for block in blocks(page, "yaml")]


@pytest.mark.runs
@pytest.mark.parametrize(("page", "block"), YAML, ids=[f"{page}:{block[:30]!r}" for page, block in YAML])
def test_yaml_that_is_shown_has_keys_and_values_that_are_taken(page: str, block: str, tmp_path: Path) -> None:
    """It is copied into a reader's file; missing keys are allowed, and all others must be right."""
    file = tmp_path / "shown.yaml"
    file.write_text(block, encoding="utf-8")
    tree = yaml.safe_load(block)
    kinds = {"pairs": PairsConfig, "space": SweepConfig}
    kinds |= dict.fromkeys(("executor", "decontaminate", "sources", "streams"), PrepareConfig)
    kinds |= {"kind": TaskConfig, "positive_column": RetrievalConfig}
    schema = next((each for key, each in kinds.items() if key in tree), RunConfig)
    mistakes = ""
    try:
        load_typed(schema, [file])
    except ConfigError as error:
        mistakes = str(error)
    assert [line for line in mistakes.splitlines() if ": missing. It has no default" not in line] == []


KEYS = re.findall(r"^#### `([\w.<>]+)`", (ROOT / "docs/config.md").read_text(encoding="utf-8"), re.MULTILINE)
NO_KEYS = ("model.safetensors", "compute.py", "checkpoint.json", "data.json", "data.yaml")  # files


def test_every_key_that_a_page_names_is_a_key() -> None:
    """`phases.decay.tokens` and `phases.NAME.tokens` are both phases.<name>.tokens."""
    known = {re.sub(r"<\w+>", "*", key) for key in KEYS}
    sections = {key.split(".")[0] for key in known if "." in key} | {"phases"}
    unknown = []
    for page in PAGES:
        if page.name in ("config.md", "moving.md"):  # one is generated from the keys, the other has another program's
            continue
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for code in re.findall(r"`([^`\n]+)`", text):
            for key in re.findall(r"(?<![\w/.-])([a-z]\w*(?:\.\w+)+)(?![\w/(]|\.\w)", code):
                if key.split(".")[0] in sections and key not in NO_KEYS and not _is_key(key, known):
                    unknown.append(f"{page.name}: {key}")
    assert not unknown


def _is_key(key: str, known: set[str]) -> bool:
    parts = key.split(".")
    if parts[:2] == ["launch", "env"]:  # any variable
        return True
    forms = {key, ".".join([parts[0], "*", *parts[2:]]), ".".join([*parts[:2], "*", *parts[3:]])}
    return any(form == each or each.startswith(f"{form}.") for form in forms for each in known)


def quoted_errors() -> list[str]:
    """The first column of the table by error of docs/faults.md."""
    text = (ROOT / "docs/faults.md").read_text(encoding="utf-8").partition("## By what you see")[2]
    return [
        quote for cell in re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE) for quote in re.findall("`([^`]+)`", cell)
    ]


@pytest.mark.runs
def test_every_error_that_is_quoted_is_reported_by_the_program() -> None:
    """Users search the page for the words on the screen. `...` is any text; the rest must be in one file."""
    assert len(quoted_errors()) > 45
    for quote in quoted_errors():
        parts = [part.strip() for part in quote.split("...") if len(part.strip()) > 2]
        assert parts and any(all(part in text for part in parts) for text in messages().values()), quote


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'src="([^"]+)"', text)
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "README.md", ROOT / "benchmarks/README.md", ROOT / "benchmarks/RESULTS.md"],
    ids=lambda p: p.name,
)
def test_modules_that_are_named_exist(page: Path) -> None:
    """`train/step.py`, `modernbert_train/train/step.py`: a reader goes there, and a move must take the page along."""
    named = re.findall(r"(?<![\w/.-])((?:[a-z_]+/)+[a-z_0-9]+\.py)\b", page.read_text(encoding="utf-8"))
    missing = [name for name in named if not any((top / name).exists() for top in (ROOT, ROOT / "modernbert_train"))]
    assert missing == []


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_figure_is_the_same_on_every_page_and_in_its_source(figure: Figure) -> None:
    """Two pages that contradict each other are both doubted. `make figures` updates them."""
    for page, place in figure.places:
        quoted = pattern_of(place).findall((ROOT / page).read_text(encoding="utf-8"))
        assert quoted == [figure.source()], f"{page}: run `make figures`"


def test_the_picture_of_the_race_is_of_its_results() -> None:
    assert RACE.read_text(encoding="utf-8") == race_picture(), "run `make figures`"


def test_the_pages_are_few_enough_to_be_read() -> None:
    """A remedy that is lost among stories is not found at night; a new paragraph takes the place of an old one."""
    others = ("config.md", "notebook.md")  # the one is looked up, the other is mostly a program's output
    read = [ROOT / "README.md", *(page for page in PAGES if page.name not in others)]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in read) <= 30_000


def test_the_reading_list_is_read_in_an_afternoon() -> None:
    """Its reader knows how the program works; a list that grows is not read."""
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    entries = re.findall(r"^\d+\. `([^`]+)`: (.+)\.$", text, flags=re.MULTILINE)
    assert 10 <= len(entries) <= 14
    assert not [what for _, what in entries if re.search(r"\.(py|yaml)\b", what)], "an entry sends to another file"
    assert sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file, _ in entries) <= 2_100


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r"([\w/-]+\.md)$", (ROOT / ".mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(navigation) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES)


@pytest.mark.slow
def test_the_site_builds_and_its_search_leads_to_every_key(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed; `make venv` installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ".mkdocs.yml", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site/recipe/index.html").read_text(encoding="utf-8")
    assert f"modernbert-train {__version__}" in page and 'data-md-color-scheme="slate"' in page
    index = json.loads((tmp_path / "site/search/search_index.json").read_text(encoding="utf-8"))
    found = {html.unescape(re.sub(r"<.*?>", "", entry["title"])): entry["location"] for entry in index["docs"]}
    lost = [key for key in KEYS if not any(title.split()[0] == key for title in found)]
    assert len(KEYS) > 150 and not lost, "searching the site for these keys does not lead to them"
    assert "optim.lr" in KEYS
    assert found["data.shuffle_block_shards"] == "config/#datashuffle_block_shards"
    shown = (tmp_path / "site/config/index.html").read_text(encoding="utf-8")
    assert 'id="datashuffle_block_shards"' in shown and "phases.&lt;name&gt;.lr_ratio" in shown
    assert re.split(index["config"]["separator"], "optim.lr") == ["optim", "lr"]  # either is found, and both together
