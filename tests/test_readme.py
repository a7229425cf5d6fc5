"""A newcomer's session: every command of the README, verbatim, in a copy of the repository, only with fewer tokens."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from modernbert_train.__main__ import main
from modernbert_train.cli.verbs import BY_NAME
from tests.support.pages import commands, typed
from tests.support.paths import ROOT
from tests.support.runs import metrics

README = (ROOT / "README.md").read_text(encoding="utf-8")
HOURS = re.compile(r"--hours \d+")  # the test takes seconds instead
# `make` itself is not run from a test: `make test` is running, and the test runs the commands of `make quickstart`.
MAKE = ("make quickstart", "make test")


def shorter(tokens: re.Match[str]) -> str:
    """Divide a phase's tokens by 100, or by 250 from a million up, so that each phase keeps some steps."""
    number = int(tokens[2].replace("_", ""))
    return f"{tokens[1]}{number // (100 if number < 1_000_000 else 250)}"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree whose quickstart run is a hundred times shorter and more; all else is unchanged."""
    folder = tmp_path_factory.mktemp("stranger") / "modernbert-train"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so there is no list of its files")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    for run in (folder / "yamls/quickstart.yaml", *sorted((folder / "yamls/recipes/tiny").glob("[0-9]*.yaml"))):
        text, changed = re.subn(r"((?<!max_)tokens: )([0-9_]{6,})", shorter, run.read_text())
        assert changed >= 1
        run.write_text(text)
    (folder / "my/texts").mkdir(parents=True)
    for source in sorted(Path(json.__file__).parents[1].glob("*.py")):  # a newcomer's own text: some 6 MB
        shutil.copyfile(source, folder / f"my/texts/{source.stem}.txt")
    return folder


def run(command: str, folder: Path) -> str:
    words = shlex.split(re.sub("^modernbert-train ", "python -m modernbert_train ", command))
    assert words[0] == "python", command
    environment = {"OMP_NUM_THREADS": "2"} | os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def quickstart(copy: Path) -> str:
    """Return the output of the quickstart; its run is in the copy."""
    return run("python -m modernbert_train pretrain --preset quickstart", copy)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quickstart_goes_from_the_standard_library_to_a_model_that_transformers_loads(
    copy: Path, quickstart: str
) -> None:
    """The first ten minutes of a newcomer, and everything that is promised to be there afterwards."""
    assert "$(PYTHON_IN_VENV) -m modernbert_train pretrain --preset quickstart" in (ROOT / "Makefile").read_text()
    assert re.search("(better|worse) by", quickstart)
    assert quickstart.count("%   ") >= 12  # five fills for each of three texts

    folder = copy / "runs/quickstart"
    steps = metrics(folder, "step")
    promised = ["step", "phase", "tokens", "rows", "loss", "lr", "grad_norm", "tokens_per_second", "packing_efficiency"]
    assert all(key in step for step in steps for key in promised)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    for entries in (steps, metrics(folder, "validation")):
        assert list(dict.fromkeys(entry["phase"] for entry in entries)) == ["stable", "context", "decay"]
    assert len({step["rows"] for step in steps if step["phase"] == "stable"}) > 1  # the batch grew
    assert steps[-1]["row_tokens"] > steps[0]["row_tokens"] and steps[-1]["lr"] < steps[len(steps) // 2]["lr"]

    report = (folder / "report.html").read_text()
    assert "What trained it" in report and "http://" not in report.replace("http://www.w3.org", "")

    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model = AutoModelForMaskedLM.from_pretrained(folder / "hf")
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    assert model.config.rope_parameters["full_attention"]["rope_theta"] == 160_000
    assert len(tokenizer) == model.config.vocab_size == 8192

    again = run("python -m modernbert_train pretrain --preset quickstart", copy)
    assert again.count("done before") == 3 and "already complete" in again  # training, measuring, exporting


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_minute_is_a_model_that_has_learnt_something(copy: Path) -> None:
    """Unshortened: a newcomer who tries `--tiny` first sees a loss below the unigram loss, or leaves."""
    output = run("python -m modernbert_train pretrain --preset quickstart --tiny", copy)
    assert "better by" in output and "training: half a minute" in output
    validations = metrics(copy / "runs/quickstart-tiny", "validation")
    assert validations[-1]["loss"] < validations[-1]["unigram_loss"] - 0.2

    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(copy / "runs/quickstart-tiny/hf")
    assert model.config.vocab_size == 2048 and model.config.num_hidden_layers == 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("quickstart")
def test_every_command_of_the_readme_works_as_it_stands(copy: Path) -> None:
    """A command that only works on its author's machine is the first thing a newcomer meets."""
    every = [line.split("  #")[0].strip() for line in typed(ROOT / "README.md")]
    assert [command for command in every if command in MAKE] == list(MAKE)
    others = [command for command in every if command not in MAKE]
    assert len(others) > 6 and "modernbert-train doctor" in others and any(HOURS.search(command) for command in others)
    for command in others:
        run(HOURS.sub("--size tiny --tokens 60k --yes", command), copy)
    assert (copy / "runs/two-ranks/metrics.jsonl").exists() and (copy / "runs/comparison.html").exists()
    for model in ("pretrained/texts/runs/texts", "runs/quickstart"):
        assert (copy / model / "hf/model.safetensors").exists()
    (lines,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (copy / "lines.py").write_text(lines)
    assert run("python lines.py", copy).split() == re.findall(r"# (torch\.Size.*)", lines)[0].split()


@pytest.mark.runs  # nvidia-smi, to list the GPUs
def test_the_answers_that_are_shown_are_those_that_are_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page with output that users do not get is not believed again."""
    monkeypatch.chdir(ROOT)
    shown = re.findall(r"^\$ modernbert-train ((?:check|plan) .*)\n((?:(?!\$|```).+\n)+)", README, re.MULTILINE)
    assert len(shown) == 2
    for words, text in shown:
        main(shlex.split(words))
        given = "".join(capsys.readouterr())
        assert text.strip() in given


def test_the_command_of_a_task_is_on_its_page_where_it_is_run() -> None:
    """tests/docs/ runs the commands of the pages, and checks those that need GPUs."""
    rows = re.findall(r"^\| \[[^]]+\]\(([^)]+\.md)\) \| `([^`]+)` \|$", README, re.MULTILINE)
    assert len(rows) >= 7
    assert [text for page, text in rows if text not in [each.text for each in commands(ROOT / page)]] == []


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_skill_has_its_form_and_every_command_of_it_is_a_verb() -> None:
    """An assistant finds it by its head (agentskills.io), and types its commands without looking further."""
    text = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    head = yaml.safe_load(text.split("---\n")[1])
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", head["name"]) and 0 < len(head["description"]) <= 1024
    verbs = re.findall(r"\$P ([a-z]+)", text)
    assert len(verbs) > 12 and {*verbs} <= BY_NAME.keys()
