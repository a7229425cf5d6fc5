"""`init extension`: each package that it writes passes its own test and trains, named in a YAML, without an edit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from modernbert_train.__main__ import main
from modernbert_train.config.tools.skeleton import KINDS
from tests.support import forked
from tests.support.paths import ROOT
from tests.support.plugins import folder as folder
from tests.support.runs import records
from tests.support.tiny_run import TinyRun

SIZES = {"vocab_size": 512, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 48}
SECTIONS = {
    "encoder": {"model": {"name": "mine", **SIZES, "residual": 0.5}},
    "objective": {"objective": {"name": "mine", "share": 0.3}},
    "optimizer": {"optim": {"name": "mine", "lr": 1e-3, "momentum": 0.5}},
    "evaluation": {"evals": {"size": {"name": "mine", "every_tokens": 500}}},
}


@pytest.mark.runs
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "encoder")) for kind in KINDS])
def test_a_skeleton_passes_its_test_and_trains(tiny_run: TinyRun, tmp_path: Path, folder: Path, kind: str) -> None:
    out = folder / "new"
    assert main(["init", "extension", kind, "mine", "--out", str(out)]) == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", str(out)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = forked.run(
        command, cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "mine").symlink_to(out / "mine")
    (file,) = tiny_run()
    run = yaml.safe_load(Path(file).read_text())
    del run["phases"]["long"]
    run["phases"]["short"]["tokens"] = 800
    run["data"]["num_workers"] = 1
    Path(file).write_text(yaml.safe_dump({"plugins": ["mine"]} | run | SECTIONS[kind]))
    assert main(["check", file]) == 0
    assert main(["train", file]) == 0
    steps = records(tmp_path / "runs/tiny")
    assert len(steps) >= 2
    if kind == "evaluation":
        (measured, *_) = records(tmp_path / "runs/tiny", "evaluation")
        assert measured["name"] == "size" and measured["figures"]["longest_over_mean"] > 1
    assert steps[-1]["predicted"] > 0 and steps[-1]["grad_norm"] > 0


def test_the_kinds_are_listed_and_mistakes_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "extension"]) == 0 and capsys.readouterr().out.split() == sorted(KINDS)
    (tmp_path / "there").mkdir()
    for words, said in {
        "decoder": "Known: encoder, objective, optimizer, evaluation",
        "encoder": "add the name of your package, such as my_encoder",
        "encoder Mine": "cannot be a module's name",
        "encoder lambda": "cannot be a module's name",
        "optimizer json": "a module, or a optim.name, already has that name",
        "objective sop": "already has that name. Choose another",
        "evaluation there": "--out=there: exists already",
    }.items():
        assert main(["init", "extension", *words.split()]) == 78
        assert said in capsys.readouterr().err
    assert main(["init", "recipe", "modernbert-base", "mine"]) == 78
    assert sorted(tmp_path.iterdir()) == [tmp_path / "there"]
