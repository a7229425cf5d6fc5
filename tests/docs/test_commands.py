"""Every command of every page is run, and must do the same as on the page.

The commands of a page run in a copy of a reader's folder (home.py) after those of index.md, which train the run that
other pages use. Commands that need other programs are run by a separate test, named in ELSEWHERE; commands that need a
cluster, GPUs, the network or an account are marked so on the page.
"""

from __future__ import annotations

import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

import launch.run_stages
from modernbert_train.__main__ import parse
from modernbert_train.cli.verbs import BY_NAME, make_parser
from tests.docs.home import PREPARED, SMALLER, fork, furnish, type_in
from tests.support.pages import NEEDS, PAGES, Command, commands, typed
from tests.support.paths import ROOT

README = "tests/test_readme.py::test_"
LAUNCH = "tests/launch/test_launch.py::test_another_launcher_works_too"
MAKE = "tests/packaging/test_packaging.py::test_the_targets_that_pages_name_do_what_they_say"
# command -> the test that runs it, and words that this test must contain
ELSEWHERE = {
    "make quickstart": (
        f"{README}quickstart_goes_from_the_standard_library_to_a_model_that_transformers_loads",
        "modernbert_train pretrain --preset quickstart"),
    "modernbert-train pretrain --preset quickstart --tiny": (
        f"{README}the_first_minute_is_a_model_that_has_learnt_something", "--preset quickstart --tiny"),
    "modernbert-train doctor": (f"{README}every_command_of_the_readme_works_as_it_stands", "modernbert-train doctor"),
    "torchrun --standalone --nproc-per-node 2 -m modernbert_train train yamls/quickstart.yaml": (
        LAUNCH, "*TORCHRUN, RUN[1]"),
    "python -m modernbert_train.import_stubs composer.cli -n 2 -m modernbert_train train yamls/quickstart.yaml": (
        LAUNCH, "*COMPOSER", "modernbert_train", "train"),
    "modernbert-train finetune my/tone.yaml --model runs/quickstart frozen:runs/quickstart --seeds 1618 42 "
    "--out runs/judged --jobs 2": (
        "tests/evaluate/finetune/test_many.py::test_a_real_run", "frozen:", "--jobs", "--out"),
    "modernbert-train tokenizer fertility words.json en.jsonl de.jsonl --kind jsonl --parallel": (
        "tests/data_prep/test_fertility.py::test_counts_worked_by_hand", "fertility", "--kind", "--parallel"),
    **{f"make {target}": (MAKE, f'"{target}"') for target in ("venv", "test-quick", "test-cuda")},
    "python -m tests.curves.record": (
        "tests/curves/test_curves.py::test_the_command_shows_both_and_writes_only_on_request", "record.main"),
    "modernbert-train report --serve runs": (
        "tests/report/test_serve.py::test_ctrl_c_ends_it_with_a_code_and_without_a_traceback", "report", "--serve"),
    "python -m benchmarks.drill --out drill --scale quick": (
        "tests/benchmarks/test_drill.py::test_injuries_of_every_kind_are_survived", "--scale", "quick"),
}  # fmt: skip
# commands that train or load other libraries, beyond the first ten minutes; `make test-slow` types the pages with one.
# `launch` and `retrieval` train too: their pages are short, and `make test` types them in the place of the others
LONG = re.compile(r"modernbert-train (?:train|pretrain|finetune|sweep)\b|python examples/")
ALL = {page.name: commands(page) for page in PAGES}


def to_run(page: str) -> list[Command]:
    """The commands of a page that are run here."""
    return [each for each in ALL[page] if each.needs is None and each.text not in ELSEWHERE]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A reader's folder after the first ten minutes, and what was printed in them."""
    folder = tmp_path_factory.mktemp("reader")
    furnish(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, "\n".join(type_in(command.text) for command in to_run("index.md"))


@pytest.fixture
def home(first: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, in which the commands of another page run."""
    folder = Path(shutil.copytree(first[0], tmp_path / "reader", symlinks=True))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(launch.run_stages, "start", fork)
    return folder


def test_there_are_commands_and_each_mark_is_one_of_a_few() -> None:
    """A mark is a promise to the reader: an unknown one, or a misspelt one, would pass a command by in silence."""
    found = [command for page in ALL.values() for command in page]
    assert len(found) > 55
    assert {command.needs for command in found} <= {None, *NEEDS}
    written = [page for page in PAGES if page.name != "notebook.md"]  # where a program prints what to type next
    text = "".join(page.read_text(encoding="utf-8") for page in written)
    lines = re.findall(r"^[ $]*(?:modernbert-train|python (?:-m|data_prep/|launch/|examples/))", text, re.MULTILINE)
    every = [each.text for page in written for each in ALL[page.name]]
    verbs = [text for text in every if text.startswith(("python ", "modernbert-train "))]
    assert len(lines) == len(verbs), "one is in another block"
    assert not [part for part in SMALLER if not any(part in command.text for command in found)], "no command has it"


def test_every_verb_that_is_named_exists() -> None:
    """A reader types it: blocks, inline code, and the headers of YAML files, which `init` prints for copying."""
    pages = [*PAGES, ROOT / "README.md", ROOT / "SKILL.md", ROOT / "benchmarks/README.md"]
    written = [page for page in pages if page.name != "changelog.md"]  # which also names the verbs of earlier versions
    named = {
        (str(file.relative_to(ROOT)), verb)
        for file in (*written, *(ROOT / "yamls").rglob("*.yaml"))
        for verb in re.findall(
            r"(?:(?<![\w/.-])modernbert-train|-m modernbert_train) ([a-z][a-z-]*)\b(?!/)",
            file.read_text(encoding="utf-8"),
        )
    }
    assert len(named) > 100
    assert sorted(each for each in named if each[1] not in BY_NAME) == []


@pytest.mark.parametrize("page", [page for page in ALL if any(" " in each.text for each in ALL[page])])
def test_the_verbs_take_what_a_page_types(page: str) -> None:
    """Of the long pages too, which only `make test-slow` runs."""
    for text in (each.text for each in ALL[page] if each.text.startswith("modernbert-train ")):
        name, *words = shlex.split(text.split(" > ")[0])[1:]
        if name in BY_NAME:
            parser = make_parser(BY_NAME[name])
            assert parser.parse_intermixed_args(words) if name == "launch" else parse(parser, words)


@pytest.mark.runs
@pytest.mark.timeout(200)
def test_the_first_ten_minutes(first: tuple[Path, str]) -> None:
    folder, said = first
    assert "quickstart: good." in said and re.search("(better|worse) by", said) and re.search(r'" +\d+%', said)
    assert (folder / "runs/quickstart/report.html").is_file()


@pytest.mark.runs
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * any(LONG.match(each.text) for each in to_run(page)))
        for page in ALL
        if page != "index.md" and to_run(page)
    ],
)
def test_the_commands_of_a_page_work(home: Path, page: str) -> None:
    if page in PREPARED:
        PREPARED[page](home)
    for command in to_run(page):
        output = type_in(command.text)
        words = shlex.split(command.text)
        named = [after for word, after in pairwise(words) if word in ("--out", "--html", ">")]
        named = [] if "--dry-run" in words else named
        assert all((home / name).exists() for name in named), command.text
        assert output or named, f"{command.text}: prints nothing and writes nothing"
    if page == "watching.md":
        assert list((home / "runs/profiled/profile").glob("steps-11-13.*"))
    if page == "data.md":
        assert (home / "data/mine/prepare_report.json").is_file()


@pytest.mark.runs
@pytest.mark.usefixtures("home")
def test_the_commands_of_the_readme_are_right() -> None:
    """Training commands are only checked; the slow test_readme.py runs them all,
    word for word, and the other pages the same verbs."""
    lines = [line.split("  #")[0] for line in typed(ROOT / "README.md")]
    runs = [re.sub(r"^modernbert-train (train|launch) ", "modernbert-train check ", text) for text in lines]
    runs = [re.sub(r" --ranks \d", "", text) for text in runs if " check " in text]
    assert len(runs) == 2
    assert all(type_in(text) for text in runs)


@pytest.mark.parametrize("command", ELSEWHERE)
def test_what_is_run_elsewhere_is_run_there(command: str) -> None:
    test, *words = ELSEWHERE[command]
    file, name = test.split("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    (body,) = re.findall(rf"^(?:@.*\n(?:[ )].*\n)*)*def {name}\(.*\n(?:(?:[ )].*)?\n)*", text, re.MULTILINE)
    assert not [word for word in words if word not in body]
    assert any(each.text == command for page in ALL.values() for each in page), "no page has it any more"
