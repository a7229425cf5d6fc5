"""Every command of every page is run, and must do the same as on the page.

They run in one folder (home.py), index.md's first, which train the run that other pages use. Commands that need other
programs are run by a separate test, named in ELSEWHERE; commands that need a cluster, GPUs, the network or an account
are marked so on the page.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest

from modernbert_train.__main__ import parse
from modernbert_train.cli.verbs import BY_NAME, make_parser
from tests.docs.home import PREPARED, SMALLER, furnish, type_in
from tests.support.pages import NEEDS, PAGES, Command, blocks, commands
from tests.support.paths import ROOT

# command -> the test that runs it, and words that this test must contain
ELSEWHERE = {
    "make quickstart": ("tests/test_readme.py::test_quickstart_goes_from_the_standard_library_to_a_model_that_"
                        "transformers_loads", ("modernbert_train pretrain --preset quickstart",)),
    "modernbert-train pretrain --preset quickstart --tiny": (
        "tests/test_readme.py::test_the_first_minute_is_a_model_that_has_learnt_something",
        ("--preset quickstart --tiny",),
    ),
    "torchrun --standalone --nproc-per-node 2 -m modernbert_train train yamls/quickstart.yaml": (
        "tests/launch/test_launch.py::test_another_launcher_works_too",
        ("*TORCHRUN, RUN[1]",),
    ),
    "python -m modernbert_train.import_stubs composer.cli -n 2 -m modernbert_train train yamls/quickstart.yaml": (
        "tests/launch/test_launch.py::test_another_launcher_works_too",
        ("*COMPOSER", "modernbert_train", "train"),
    ),
    "modernbert-train doctor": (
        "tests/test_readme.py::test_every_command_of_the_readme_works_as_it_stands", ("modernbert-train doctor",)
    ),
    "modernbert-train finetune my/tone.yaml --model runs/quickstart frozen:runs/quickstart --seeds 1618 42 "
    "--out runs/judged --jobs 2": (
        "tests/evaluate/finetune/test_many.py::test_a_real_run",
        ("frozen:", "--jobs", "--out"),
    ),
    "modernbert-train tokenizer fertility words.json en.jsonl de.jsonl --kind jsonl --parallel": (
        "tests/data_prep/test_fertility.py::test_counts_worked_by_hand", ("fertility", "--kind", "--parallel")
    ),
    "make venv": ("tests/packaging/test_packaging.py::test_the_targets_that_pages_name_do_what_they_say", ("venv",)),
    "make test-quick": (
        "tests/packaging/test_packaging.py::test_the_targets_that_pages_name_do_what_they_say", ("test-quick",)
    ),
    "make test-cuda": (
        "tests/packaging/test_packaging.py::test_the_targets_that_pages_name_do_what_they_say", ("test-cuda",)
    ),
    "python -m tests.curves.record": (
        "tests/curves/test_curves.py::test_the_command_shows_both_and_writes_only_on_request", ("record.main",)
    ),
    "modernbert-train report --serve runs": (
        "tests/report/test_serve.py::test_ctrl_c_ends_it_with_a_code_and_without_a_traceback", ("report", "--serve")
    ),
    "python -m benchmarks.drill --out drill --scale quick": (
        "tests/benchmarks/test_drill.py::test_injuries_of_every_kind_are_survived", ("--scale", "quick")
    ),
}  # fmt: skip
# pages that train or start processes beyond the first ten minutes; `make test-slow` types them
LONG = ("weights.md", "use.md", "watching.md", "data.md", "finetuning.md", "continue.md", "plan.md", "entities.md")
LONG += (
    "composer.md",
    "sweeps.md",
    "speed.md",
    "code.md",
    "language.md",
    "laptop.md",
    "encoders.md",
    "proteins.md",
    "sparse.md",
    "superbpe.md",
)
ALL = {page.name: commands(page) for page in PAGES}


def to_run(page: str) -> list[Command]:
    """The commands of a page that are run here; the README's are run by its own test, word for word."""
    return [each for each in ALL[page] if each.needs is None and each.text not in ELSEWHERE and not _in_readme(each)]


def _in_readme(command: Command) -> bool:
    return "loggers.wandb" in command.text and command in commands(ROOT / "README.md")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A reader's folder after the first ten minutes, and the folder in which the commands of the other pages run."""
    folder = tmp_path_factory.mktemp("reader")
    furnish(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        said = {command.text: type_in(command.text) for command in to_run("index.md")}
        (folder / "said.txt").write_text("\n".join(said.values()), encoding="utf-8")
        yield folder


def test_there_are_commands_and_each_mark_is_one_of_a_few() -> None:
    """A mark is a promise to the reader: an unknown one, or a misspelt one, would pass a command by in silence."""
    found = [command for page in ALL.values() for command in page]
    assert len(found) > 55
    assert {command.needs for command in found} <= {None, *NEEDS}
    written = [page for page in PAGES if page.name != "notebook.md"]  # where a program prints what to type next
    text = "".join(page.read_text(encoding="utf-8") for page in written)
    lines = re.findall(r"^[ $]*(?:modernbert-train|python (?:-m|data_prep/|launch/|examples/))", text, re.MULTILINE)
    typed = [
        text for page in written for text, _ in ALL[page.name] if text.startswith(("python ", "modernbert-train "))
    ]
    assert len(lines) == len(typed), "one is in another block"
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
def test_the_first_ten_minutes(home: Path) -> None:
    said = (home / "said.txt").read_text(encoding="utf-8")
    assert "quickstart: good." in said and re.search("(better|worse) by", said) and re.search(r'" +\d+%', said)
    assert (home / "runs/quickstart/report.html").is_file()


@pytest.mark.runs
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page in LONG))
        for page in ALL
        if page != "index.md" and to_run(page)
    ],
)
def test_the_commands_of_a_page_work(home: Path, page: str) -> None:
    with PREPARED[page](home) if page in PREPARED else nullcontext():
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
def test_the_commands_of_the_readme_are_right(home: Path) -> None:
    """Training commands are only checked; the slow test_readme.py runs them all,
    word for word, and the other pages the same verbs."""
    lines = [line for block in blocks(ROOT / "README.md", "bash") for line in block.splitlines()]
    typed = [line.split("  #")[0].strip() for line in lines]
    runs = [re.sub(r"^modernbert-train (train|launch) ", "modernbert-train check ", text) for text in typed]
    runs = [re.sub(r" --ranks \d", "", text) for text in runs if " check " in text]
    assert len(runs) == 2
    for text in runs:
        assert type_in(re.sub(r" name=(\S+)", r" name=readme-\1", text))  # pages may have trained one of that name


@pytest.mark.parametrize("command", ELSEWHERE)
def test_what_is_run_elsewhere_is_run_there(command: str) -> None:
    test, words = ELSEWHERE[command]
    file, name = test.split("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    function = functions[name]
    first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
    body = "\n".join(text.splitlines()[first - 1 : function.end_lineno])
    assert not [word for word in words if word not in body]
    assert any(each.text == command for page in ALL.values() for each in page), "no page has it any more"
