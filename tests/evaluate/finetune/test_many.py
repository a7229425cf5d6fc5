"""Many fine-tuning runs by one command: results that are kept, resumed or refused, and their table."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from modernbert_train.distributed.run_jobs import environments
from modernbert_train.errors import ConfigError
from modernbert_train.evaluate.finetune.task import as_trained, label_of, labels_of, named_model, read_task, run_name
from modernbert_train.evaluate.suite.cells import LOGS
from tests.support import fake_runs
from tests.support.fake_runs import starts
from tests.support.finetuning import FAST
from tests.support.front_door import Cli
from tests.support.jobs import alive
from tests.support.labelled import WriteTask
from tests.support.paths import ROOT

SEEDS = (1618, 42)


@pytest.mark.parametrize(
    ("text", "source", "baseline", "label"),
    [
        ("runs/mine", "runs/mine", (), "mine"),
        ("frozen:runs/mine/hf", "runs/mine/hf", ("frozen",), "frozen-mine"),
        ("untrained:owner/model", "owner/model", ("untrained",), "untrained-model"),
        ("untrained:frozen:x", "x", ("frozen", "untrained"), "frozen-untrained-x"),
        ("runs/mine/checkpoints/step-00000010", "runs/mine/checkpoints/step-00000010", (), "mine"),
        ("other:x", "other:x", (), "other:x"),
        (".", ".", (), "here"),
        ("hf", "hf", (), "here"),
        ("checkpoints/step-00000010", "checkpoints/step-00000010", (), "here"),
    ],
)
def test_a_baseline_stands_before_the_model_and_a_run_is_called_by_its_folder(
    text: str, source: str, baseline: tuple[str, ...], label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from within it: without a name two models would be fine-tuned into one folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert named_model(text) == (source, baseline)
    assert label_of(text) == label


def test_two_models_of_one_name_have_rows_of_their_own() -> None:
    """Users compare two checkpoints of a run; one folder for both would be refused, or worse, shared."""
    models = [f"runs/a/checkpoints/step-0000000{n}" for n in (1, 2)] + ["runs/b"]
    assert labels_of(models)["runs/b"] == "b"
    assert len({*labels_of(models).values()}) == 3
    assert len({*labels_of(["a/b", "a-b", "x/../a:b"]).values()}) == 3
    names = {run_name("tone", f"runs/{'long' * 40}", f"01234567-{seed}") for seed in SEEDS}
    assert len(names) == 2 and {len(name) for name in names} == {100}  # otherwise all seeds would be one run


def test_a_frozen_encoder_has_rates_of_its_own() -> None:
    task, rest = read_task("mnli", ["frozen.lr=1e-2", "optim.name=adamw", "lr=1e-4"])
    assert rest == ["optim.name=adamw"]
    tuned, frozen = (as_trained(task, named_model(name), 768) for name in ("x", "frozen:x"))
    assert (tuned.lr, tuned.freeze) == (1e-4, False)
    assert (frozen.lr, frozen.epochs, frozen.weight_decay, frozen.freeze) == (1e-2, 10, 0, True)
    assert as_trained(task, named_model("x"), 1024).lr == task.large.lr
    with pytest.raises(ConfigError, match=r"frozen\.lr=0\.0: must be above 0"):
        read_task("mnli", ["frozen.lr=0"])


def test_gpus_and_cores_are_shared_out() -> None:
    """Two processes on one GPU while another is idle, or each with all cores, would be slow without an error."""
    own = environments(3, {"CUDA_VISIBLE_DEVICES": "4,6"}, 2, 8)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in own] == ["4", "6", "4"]
    assert {each["OMP_NUM_THREADS"] for each in own} == {"2"}
    assert environments(1, {"OMP_NUM_THREADS": "5"}, 0, 8) == [{"OMP_NUM_THREADS": "5"}]


# --- with stand-ins for runs ------------------------------------------------------------------------------------------


def make_model(run: Path) -> None:
    """Write the part of a run with a checkpoint that is read without torch."""
    (run / "checkpoints" / "step-00000004").mkdir(parents=True)
    (run / "config.yaml").write_text("name: x")


@pytest.fixture
def grid(write_task: WriteTask, tmp_path: Path) -> list[str]:
    """Return the words of a command: two tasks with two models and two seeds."""
    first = write_task()
    second = first.with_name("second.yaml")
    second.write_text(first.read_text())
    for name in ("a", "b"):
        make_model(tmp_path / name)
    models = [str(tmp_path / "a"), f"frozen:{tmp_path / 'b'}"]
    named = ["--model", *models, "--out", str(tmp_path / "out"), "--seeds", "1618", "42"]
    return ["finetune", str(first), str(second), *named]


def run_of(out: Path, task: str, model: str, seed: int) -> Path:
    """Return the folder of a run: its name depends on its settings."""
    (found,) = out.glob(f"{task}-{model}-????????-{seed}")
    return found


@pytest.mark.runs
def test_other_settings_are_other_runs_and_another_model_is_one_more_row(
    grid: list[str], stand_ins: None, tmp_path: Path, cli: Cli
) -> None:
    """Keys of speed are no settings."""
    out = tmp_path / "out"
    cli(*grid, "--jobs", "2")
    table = json.loads((out / "table.json").read_text())
    assert [row["model"] for row in table["rows"]] == ["a", "frozen-b"]
    assert "each of several runs has its own" in cli(*grid[:3], "name=x", *grid[3:], code=78).err
    cli(*grid[:3], "lr=1e-3", *grid[3:-1])
    make_model(tmp_path / "c")
    cli(*grid[:3], "logging.progress_bar=false", *grid[3:6], tmp_path / "c", *grid[6:-1])
    assert sum(starts(out).values()) == 8 + 4 + 2


def spawn(words: list[str]) -> subprocess.Popen[bytes]:
    path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "tests.support.fake_runs", *words], env=os.environ | path)


def wait_until(holds: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def pids(out: Path) -> list[int]:
    return [int(line.split()[0]) for file in out.glob("*/starts") for line in file.read_text().splitlines()]


@pytest.mark.runs
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_killed_command_leaves_nobody_behind_and_resumes(
    number: signal.Signals, grid: list[str], stand_ins: None, tmp_path: Path, cli: Cli
) -> None:
    """After SIGTERM all save and it ends with 75; after a kill the kernel ends them; then only missing runs start."""
    out = tmp_path / "out"
    grid.remove(next(word for word in grid if word.endswith("second.yaml")))
    cli(*grid[:-1], "--jobs", "2")
    names = [run_of(out, "tone", model, 1618).name[:-4] + "42" for model in ("a", "frozen-b")]
    (out / fake_runs.BEHAVE).write_text(json.dumps({"wait": names}))
    process = spawn([*grid, "--jobs", "2"])
    waiting = [out / name / "starts" for name in names]
    try:
        wait_until(lambda: all(file.exists() and file.read_text() for file in waiting))
        assert "out: in use by process" in cli(*grid, "--jobs", "2", code=78).err  # a second command
        process.send_signal(number)
        code = process.wait(120)
    finally:
        process.kill()
    wait_until(lambda: not any(map(alive, pids(out))))
    assert code == (75 if number != signal.SIGKILL else -signal.SIGKILL)
    assert [(out / name / "saved").exists() for name in names] == ([number != signal.SIGKILL] * 2)
    assert len(list(out.glob("*/result.json"))) == 2
    (out / fake_runs.BEHAVE).unlink()
    cli(*grid, "--jobs", "2")
    assert len(list(out.glob("*/result.json"))) == 4
    assert sorted(starts(out).values()) == [1] * 2 + [2] * 2


def test_several_runs_need_a_folder_and_no_launcher(grid: list[str], monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    at = grid.index("--out")
    assert "Add --out" in cli(*grid[:at], *grid[at + 2 :], code=78).err
    suite, mine = ["eval", "m", "--suite", "quick", "--out", "o"], ["retrieval", "mine", "p.tsv", "--model", "m"]
    for words in (grid, suite, mine):
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert re.search("is one process.* start it without torchrun", cli(*words, code=78).err)
        monkeypatch.setenv("WORLD_SIZE", "")  # another program's, of one who has started no ranks
        assert re.search("WORLD_SIZE='' in the environment.*`unset RANK", cli(*words, code=78).err)
    monkeypatch.delenv("WORLD_SIZE")
    assert "nobody: no such folder" in cli(*grid, "--model", "nobody", code=65).err  # before any run is started
    assert "finetune lr=1 x: names no task. Name one of cola" in cli("finetune", "lr=1", "--model", "x", code=78).err
    same = ["finetune", "rte", "own/rte.yaml", "--model", "a", "--out", "o"]
    assert "two of them have the same name" in cli(*same, code=78).err


def test_an_option_that_was_removed_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="64"):
        main(["finetune", "rte", "--model", "x", "--watch", "y"])
    assert "--watch was removed: evals of the run" in capsys.readouterr().err


@pytest.mark.parametrize("prefix", ["", "frozen:", "frozen:untrained:"])
def test_a_path_with_an_equals_sign_is_no_override(prefix: str, tmp_path: Path, cli: Cli) -> None:
    """A suite in such a folder lost the frozen runs that begin with another run's weights."""
    (model := tmp_path / "mb=1").mkdir()
    suite = ["--suite", "quick", "--out", tmp_path / "out"]
    for words in (
        ["finetune", "sst2", "--model", f"{prefix}{model}", "lr=1e-3"],
        ["eval", f"{prefix}{model}", "lr=1e-3", *suite],
        ["eval", model, "name=a"],
    ):
        assert f"error: {model}" in cli(*words, code=65).err


@pytest.mark.runs
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("lr=-1",), 78, "lr=-1.0: must be above 0"),
        (("train=gone.tsv",), 65, "train=gone.tsv: no such file"),
        (("kind=relations",), 78, "multiple-choice, tokens, relation. Did you mean relation?"),
        (("optim.lrr=1",), 78, "Did you mean optim.lr?"),
        (("optim.lr=-1",), 78, "optim.lr=-1.0: must be"),
        (("name=../../escaped",), 78, "name='../../escaped': a run's name becomes its folder"),
        (("label_column=class",), 65, "line 1: no column 'class' among 'text', 'label'"),
        ((), 65, "no such folder"),  # the model
    ],
)
def test_mistakes_in_a_task_and_its_model_are_found_before_torch_is_loaded(
    words: tuple[str, ...], code: int, message: str, write_task: WriteTask, tmp_path: Path
) -> None:
    """They are the usual mistakes, and torch takes ten seconds to import."""
    call = f"main(['finetune', {str(write_task())!r}, '--model', {str(tmp_path / 'gone')!r}, *{words!r}])"
    script = f"import sys; from modernbert_train.__main__ import main; print({call}, 'torch' in sys.modules)"
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=own, capture_output=True, text=True)
    assert message in done.stderr and done.stdout.split()[-2:] == [str(code), "False"]
    assert {path.suffix for path in tmp_path.iterdir()} == {".tsv", ".yaml"} and not (tmp_path / "../escaped").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_run(write_task: WriteTask, models: dict[str, Path], tmp_path: Path, cli: Cli) -> None:
    """Not covered by stand-ins: real processes find the package and the model, and end."""
    task, out = write_task(epochs=1, frozen={"epochs": 1}), tmp_path / "out"
    words = ["finetune", task, *FAST, "--model", f"frozen:{models['bert']}", "--out", out, "--jobs", "2"]
    cli(*words)
    assert [row["model"] for row in json.loads((out / "table.json").read_text())["rows"]] == ["frozen-bert"]
    run = run_of(out, "tone", "frozen-bert", 1618)
    assert f"{run.name}: dev accuracy" in (out / LOGS / f"{run.name}.log").read_text()
    finished = (run / "result.json").stat().st_mtime_ns
    cli(*words)
    assert (run / "result.json").stat().st_mtime_ns == finished
