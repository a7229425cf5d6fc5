"""If the newest checkpoint of a run is damaged, each verb uses the newest whole one, and reports which and why.

If this breaks, a flipped bit is published, or a run that can be evaluated looks lost.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from modernbert_train.checkpoints.checkpoint import newest_valid
from modernbert_train.checkpoints.verified import step_folders
from tests.support.tiny_run import TinyRun

pytestmark = [pytest.mark.runs, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def trained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with some checkpoints, trained once for all tests here."""
    from tests.support.tiny_run import TINY_YAML

    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.yaml").write_text(TINY_YAML.format(runs=folder / "runs", data=tiny_data), encoding="utf-8")
    decay = "phases.short={tokens: 2500, batch_warmup: null, schedule: {warmup_tokens: 300, decay_tokens: 1500}}"
    words = ("phases.long=null", decay, "checkpoint.interval_steps=1", "checkpoint.keep=9")
    assert main(["train", str(folder / "tiny.yaml"), *words]) == 0
    return folder / "runs/tiny"


@pytest.fixture
def run(trained: Path, tmp_path: Path, tiny_run: TinyRun) -> Path:
    """Return a copy of it whose newest checkpoint has one flipped bit."""
    folder = tmp_path / "runs/tiny"
    shutil.copytree(trained, folder)
    weights = step_folders(folder / "checkpoints")[-1] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    text = (folder / "config.yaml").read_text().replace(str(trained.parent), str(tmp_path / "runs"))
    (folder / "config.yaml").write_text(text)
    return folder


def said_by(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words) == 0
    return "".join(capsys.readouterr())


VERBS: dict[str, Callable[[Path], list[str]]] = {
    "eval": lambda run: ["eval", str(run)],
    "export": lambda run: ["export", str(run)],
    "average": lambda run: ["average", str(run), str(step_folders(run / "checkpoints")[0]), "--out", f"{run}-mean"],
    "average --last": lambda run: ["average", str(run), "--last", "2", "--out", f"{run}-last"],
    "report": lambda run: ["report", str(run)],
}


@pytest.mark.parametrize("verb", VERBS)
def test_the_newest_that_is_whole_is_taken_and_reported(
    verb: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, good, bad = step_folders(run / "checkpoints")
    said = said_by(VERBS[verb](run), capsys)
    assert re.search(rf"warning: passed over a damaged checkpoint: {bad}/model\.safetensors: damaged; found ", said)
    assert good.name in said
    if verb != "average --last":  # it names each one
        assert f"taken instead: {good.name}, " in said and "the newest that is whole" in said


def test_the_report_shows_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = newest_valid(run / "checkpoints")
    assert found is not None
    said_by(["report", str(run)], capsys)
    page = (run / "report.html").read_text(encoding="utf-8")
    tile = f'["Newest valid checkpoint","step {found.step}","{found.state.tokens:,} tokens; 1 newer one damaged"]'
    assert tile in page
    for folder in step_folders(run / "checkpoints"):
        (folder / "state.json").write_text("{")
    assert "no checkpoint is whole" in said_by(["report", str(run)], capsys)
    assert '["Newest valid checkpoint","none","not one of those there is valid"]' in (run / "report.html").read_text()
    shutil.rmtree(run / "checkpoints")
    assert "warning" not in said_by(["report", str(run)], capsys)
