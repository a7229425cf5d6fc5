"""A run's folder on the command line, after it was moved or copied.

If this breaks, a verb given a copied run trains, evaluates or publishes the original instead.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from modernbert_train.__main__ import read_run
from modernbert_train.checkpoints.manifest import MANIFEST

YAML = """\
name: first
runs_folder: {runs}
data: {{train: x, tokenizer: y}}
phases: {{only: {{tokens: 1000, row_tokens: 64, batch_rows: 8, microbatch_tokens: 128}}}}
optim: {{lr: 1}}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/first"
    checkpoint = folder / "checkpoints/step-00000005"
    checkpoint.mkdir(parents=True)
    (folder / "config.yaml").write_text(YAML.format(runs="runs"))
    shutil.copy(folder / "config.yaml", checkpoint)
    (checkpoint / MANIFEST).write_text("{}")
    return folder


def place(*words: str) -> Path:
    return Path(read_run(list(words)).folder).resolve()


def test_a_run_that_lies_where_it_was_trained_keeps_its_configuration(run: Path) -> None:
    assert read_run([str(run)]) == read_run(["runs/first"]) == read_run(["runs/first/config.yaml"])
    assert read_run([str(run)]).folder == "runs/first"


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_copy_is_a_run_of_its_own(run: Path, tmp_path: Path, name: str) -> None:
    there = tmp_path / "elsewhere, [with] {signs}" / name
    shutil.copytree(run, there)
    assert place(str(there)) == there and read_run([str(there)]).name == name
    assert place(str(there / "checkpoints/step-00000005")) == there
    assert place(f"elsewhere, [with] {{signs}}/{name}") == there


def test_a_run_named_from_another_folder_is_found(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path.parent)
    assert place(str(run)) == run
    monkeypatch.chdir(run)
    assert place(".") == run
    assert place("checkpoints/step-00000005") == run


def test_a_name_that_is_given_counts(run: Path, tmp_path: Path) -> None:
    there = tmp_path / "moved/first"
    shutil.move(run, there)
    assert place(str(there), "name=next") == there.with_name("next")


def test_a_folder_with_a_yaml_and_no_run_is_what_the_yaml_says(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(YAML.format(runs=tmp_path / "runs"))
    assert place(str(tmp_path)) == tmp_path / "runs/first"
