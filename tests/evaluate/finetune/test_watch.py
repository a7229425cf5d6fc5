"""Fine-tunings of a run that still trains: each checkpoint once, also those that it removes, and a curve of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from modernbert_train.__main__ import main
from modernbert_train.checkpoints.manifest import FILES, MANIFEST
from modernbert_train.evaluate.finetune import watch as module
from modernbert_train.evaluate.finetune.watch import Watched, watch
from tests import warm
from tests.conftest import TinyRun
from tests.evaluate.finetune import fake_runs
from tests.evaluate.finetune.conftest import WriteTask
from tests.evaluate.finetune.test_many import behave, is_alive, pids, spawn, starts, wait_until

END = 400


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of 400 tokens that has begun."""
    folder = tmp_path / "mine"
    (folder / "checkpoints").mkdir(parents=True)
    phase = {"tokens": END, "row_tokens": 64, "batch_rows": 2, "microbatch_tokens": 64}
    tree = {"name": "mine", "data": {"train": "x", "tokenizer": "y"}, "optim": {"lr": 1e-3}, "phases": {"only": phase}}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    (folder / "metrics.jsonl").write_text(
        json.dumps({"kind": "step", "step": 1, "tokens": 100, "phase": "only", "loss": 2.0, "time": 1.0}) + "\n"
    )
    return folder


def checkpoint(run: Path, step: int) -> Path:
    """A checkpoint as far as watching looks into it."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir()
    for name in (*FILES, MANIFEST):
        (folder / name).write_text("{}")
    (folder / "state.json").write_text(json.dumps({"step": step, "tokens": 100 * step, "phase": "only"}))
    return folder


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modernbert_train.evaluate.finetune.many._command", fake_runs._command)


def points(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "watch.jsonl").read_text().splitlines()]


@pytest.mark.runs
def test_each_checkpoint_is_measured_once_and_drawn(
    run: Path, write_task: WriteTask, fakes: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that comes while another is measured, and is removed by the run before its turn."""
    task = str(write_task())
    checkpoint(run, 1)
    linked = Watched.link

    def goes_on(self: Watched) -> None:
        """The run trains while the first checkpoint is measured: another comes, is seen, and is removed."""
        if starts(run / "watch") and not (run / "checkpoints/step-00000004").exists():
            second = checkpoint(run, 2)
            linked(self)
            shutil.rmtree(second)
            checkpoint(run, 4)
        linked(self)

    monkeypatch.setattr(Watched, "link", goes_on)
    assert main(["finetune", task, "--watch", str(run), "--seeds", "1", "2", "--jobs", "2", "--patience", "60"]) == 0
    assert [(each["step"], each["tokens"], each["phase"]) for each in points(run)] == [
        (1, 100, "only"), (2, 200, "only"), (4, 400, "only"),
    ]  # fmt: skip
    values = [fake_runs.figure_of(f"tone-step-00000002-{seed}") for seed in (1, 2)]
    assert points(run)[1]["figures"] == {"accuracy": pytest.approx(sum(values) / 2), "num_seeds": 2}
    assert points(run)[1]["seeds"]["accuracy"] == dict(zip("12", map(pytest.approx, values), strict=True))
    assert starts(run / "watch") == dict.fromkeys(starts(run / "watch"), 1) and len(starts(run / "watch")) == 6
    assert not list((run / "watch").glob("*step-????????/MANIFEST.json"))  # no checkpoint is left there
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-00000001", "step-00000004"}
    assert "trained to its end, and every checkpoint is measured" in capsys.readouterr().out

    page = (run / "report.html").read_text()
    (data,) = [line for line in page.splitlines() if line.startswith('<script type="application/json"')]
    (drawn,) = json.loads(data.partition(">")[2].removesuffix("</script>"))["runs"]
    value = points(run)[1]["figures"]["accuracy"]
    (curve,) = [curve for curve in drawn["curves"] if curve["title"].endswith("accuracy") and curve["value"][1:2]
                == [pytest.approx(value, rel=1e-5)]]  # fmt: skip
    assert curve["title"].startswith("finetune tone") and len(curve["tokens"]) == 3

    # again: nothing is left to do. A further checkpoint of a run that was made longer is one more point
    assert main(["finetune", task, "--watch", str(run), "--seeds", "1", "2", "--patience", "60"]) == 0
    assert len(starts(run / "watch")) == 6
    # other settings would be another curve
    assert main(["finetune", task, "lr=1e-5", "--watch", str(run), "--seeds", "1", "2", "--patience", "60"]) == 78
    assert "made by other settings or seeds" in capsys.readouterr().err
    assert main(["finetune", task, "--watch", str(run), "--patience", "60"]) == 78


@pytest.mark.runs
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_killed_watch_goes_on_and_skips_what_is_done(
    number: signal.Signals, run: Path, write_task: WriteTask
) -> None:
    task, out = str(write_task()), run / "watch"
    out.mkdir()
    behave(out, wait=["tone-step-00000004-1618"])
    checkpoint(run, 1)
    checkpoint(run, 4)
    process = spawn(["finetune", task, "--watch", str(run)])
    try:
        wait_until((out / "tone-step-00000004-1618" / "starts").exists)
        shutil.rmtree(run / "checkpoints" / "step-00000004")  # what is being measured does not need it
        process.send_signal(number)
        assert process.wait(120) == (75 if number == signal.SIGTERM else -signal.SIGKILL)
    finally:
        process.kill()
    wait_until(lambda: not any(map(is_alive, pids(out))))
    assert [each["step"] for each in points(run)] == [1]
    assert (out / "step-00000004" / MANIFEST).is_file()
    behave(out)
    assert spawn(["finetune", task, "--watch", str(run), "--patience", "1"]).wait(120) == 0
    assert [each["step"] for each in points(run)] == [1, 4]
    assert starts(out) == {"tone-step-00000001-1618": 1, "tone-step-00000004-1618": 2}


@pytest.mark.runs
def test_a_checkpoint_that_fails_does_not_stop_the_others(
    run: Path, write_task: WriteTask, fakes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    task, out = str(write_task()), run / "watch"
    out.mkdir()
    behave(out, fail=["tone-step-00000001-1618"])
    checkpoint(run, 1)
    (checkpoint(run, 2) / "state.json").write_text("{")
    checkpoint(run, 4)
    assert main(["finetune", task, "--watch", str(run), "--patience", "1"]) == 65
    assert "state.json: damaged" in capsys.readouterr().err
    assert [each["step"] for each in points(run)] == [4]
    behave(out)
    shutil.rmtree(out / "step-00000002")
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    assert main(["finetune", task, "--watch", str(run), "--patience", "1"]) == 0
    assert sorted(each["step"] for each in points(run)) == [1, 4]


def test_a_checkpoint_that_vanishes_while_it_is_linked_is_let_go(
    run: Path, write_task: WriteTask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run removes old ones whenever it likes; half a checkpoint must not be measured, nor end the watching."""
    watched = Watched(run, [str(write_task())], [1], [])
    watched.folder.mkdir()
    gone, stays = checkpoint(run, 1), checkpoint(run, 2)
    link = module._link

    def vanishes(source: Path, target: Path) -> None:
        if source.parent == gone and source.name == FILES[1]:
            shutil.rmtree(gone)
        link(source, target)

    monkeypatch.setattr(module, "_link", vanishes)
    watched.link()
    assert [path.name for path in watched.folder.iterdir()] == [stays.name]
    assert "step-00000001: removed by the run before it could be measured" in capsys.readouterr().out
    assert watched.next() == watched.folder / stays.name
    shutil.rmtree(stays)
    assert (watched.folder / stays.name / FILES[0]).read_text() == "{}"


def test_where_nobody_trains_watching_ends(
    tmp_path: Path, write_task: WriteTask, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a run that never began."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)
    watch(tmp_path / "none", [str(write_task())], None, None, 0.05, [])
    assert "no sign of training for 0 s" in capsys.readouterr().out


@pytest.mark.runs
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_run_is_watched_while_it_trains(tiny_run: TinyRun, write_task: WriteTask, tmp_path: Path) -> None:
    """It keeps one checkpoint and knows nothing of being watched; its weights and record are those of a run alone."""
    run = tiny_run("checkpoint.interval_steps=4", "checkpoint.keep=1")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    training = warm.Popen([sys.executable, "-m", "modernbert_train", "train", *run], env=environment)
    folder = tmp_path / "runs" / "tiny"
    task = str(write_task(freeze=True, frozen={"epochs": 1, "lr": 1e-2}))
    words = ["finetune", task, "compute.device=cpu", "data.num_workers=0", "--watch", str(folder), "--seeds", "1"]
    assert main(words) == 0
    assert training.wait() == 0
    assert [each["name"] for each in points(folder)] == ["finetune tone frozen"] * len(points(folder))
    assert len(points(folder)) > 1
    alone = tiny_run("checkpoint.interval_steps=4", "checkpoint.keep=1", "name=alone")
    assert main(["train", *alone]) == 0
    steps = []
    for name in ("tiny", "alone"):
        lines = map(json.loads, (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines())
        steps.append([(entry["step"], entry["loss"]) for entry in lines if entry["kind"] == "step"])
    assert steps[0] == steps[1]
