"""Many fine-tuning runs by one command: results that are kept, resumed or refused, and their table."""

from __future__ import annotations

import json
import os
import signal
import statistics
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
from modernbert_train.evaluate.suite.run import finetune_many
from tests.support import fake_runs
from tests.support.fake_runs import starts
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
    ],
)
def test_a_baseline_stands_before_the_model(text: str, source: str, baseline: tuple[str, ...], label: str) -> None:
    assert named_model(text) == (source, baseline)
    assert label_of(text) == label


@pytest.mark.parametrize("model", [".", "hf", "checkpoints/step-00000010"])
def test_a_model_that_is_named_from_within_its_run_is_called_like_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a name two models would be fine-tuned into one folder."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert label_of(model) == "mine"


def test_two_models_of_one_name_have_rows_of_their_own(tmp_path: Path) -> None:
    """Users compare two checkpoints of a run; one folder for both would be refused, or worse, shared."""
    models = [f"runs/a/checkpoints/step-0000000{n}" for n in (1, 2)] + ["runs/b"]
    assert labels_of(models)["runs/b"] == "b"
    assert len({*labels_of(models).values()}) == 3
    assert len({*labels_of(["a/b", "a-b", "x/../a:b"]).values()}) == 3
    names = {run_name("tone", f"runs/{'long' * 40}", f"01234567-{seed}") for seed in SEEDS}
    assert len(names) == 2 and {len(name) for name in names} == {100}  # otherwise all seeds would be one run
    with pytest.raises(ConfigError, match="two of them have the same name"):
        finetune_many(["rte", "own/rte.yaml"], ["a"], [1], tmp_path, 1, [])


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


def behave(out: Path, **names: list[str]) -> None:
    out.mkdir(exist_ok=True)
    (out / fake_runs.BEHAVE).write_text(json.dumps(names))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modernbert_train.evaluate.suite.cells._command", fake_runs._command)


def run_of(out: Path, task: str, model: str, seed: int) -> Path:
    """Return the folder of a run: its name depends on its settings."""
    (found,) = out.glob(f"{task}-{model}-????????-{seed}")
    return found


@pytest.mark.runs
def test_a_failed_run_stops_no_other_and_is_repeated_on_request(
    grid: list[str], fakes: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log is named, the exit code is the run's, and --retry starts only it."""
    out = tmp_path / "out"
    assert main([*grid, "--jobs", "2"]) == 0
    lost = run_of(out, "tone", "a", 42)
    (lost / "result.json").unlink()
    behave(out, fail=[lost.name])
    assert main([*grid, "--jobs", "2"]) == 65
    said = capsys.readouterr()
    assert f"{lost.name}: exit code 65; {out / LOGS / lost.name}.log" in said.err
    assert "error: the texts are missing" in said.err
    table = json.loads((out / "table.json").read_text())
    assert [cell["n"] for cell in table["rows"][0]["cells"]] == [1, 2]

    behave(out)
    assert main([*grid, "--jobs", "2", "--retry"]) == 0
    said = capsys.readouterr()
    assert starts(out) == dict.fromkeys(starts(out), 1) | {lost.name: 3}
    own = [fake_runs.figure_of(run_of(out, "tone", "a", seed).name) for seed in SEEDS]
    table = json.loads((out / "table.json").read_text())
    assert table["rows"][0]["cells"][0]["mean"] == pytest.approx(statistics.fmean(own))
    assert [row["model"] for row in table["rows"]] == ["a", "frozen-b"]
    assert f"| a | {100 * statistics.fmean(own):.2f} ± {100 * statistics.stdev(own):.2f} (2) |" in said.out

    # other settings are other runs; keys of speed are not settings, and another model is one more row
    assert main([*grid[:3], "name=x", *grid[3:]]) == 78
    assert "each of several runs has its own" in capsys.readouterr().err
    assert main([*grid[:3], "lr=1e-3", *grid[3:-1]]) == 0
    make_model(tmp_path / "c")
    more = [*grid[:3], "logging.progress_bar=false", *grid[3:6], str(tmp_path / "c"), *grid[6:-1]]
    assert main(more) == 0
    assert sum(starts(out).values()) == 10 + 4 + 2


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


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.runs
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_killed_command_leaves_nobody_behind_and_resumes(
    number: signal.Signals, grid: list[str], fakes: None, tmp_path: Path
) -> None:
    """After SIGTERM all save and it ends with 75; after a kill the kernel ends them; then only missing runs start."""
    out = tmp_path / "out"
    grid.remove(next(word for word in grid if word.endswith("second.yaml")))
    assert main([*grid[:-1], "--jobs", "2"]) == 0
    names = [run_of(out, "tone", model, 1618).name[:-4] + "42" for model in ("a", "frozen-b")]
    behave(out, wait=names)
    process = spawn([*grid, "--jobs", "2"])
    waiting = [out / name / "starts" for name in names]
    try:
        wait_until(lambda: all(file.exists() and file.read_text() for file in waiting))
        again = main([*grid, "--jobs", "2"])  # a second command in the same folder
        assert again == 78
        process.send_signal(number)
        code = process.wait(120)
    finally:
        process.kill()
    wait_until(lambda: not any(map(is_alive, pids(out))))
    assert code == (75 if number != signal.SIGKILL else -signal.SIGKILL)
    assert [(out / name / "saved").exists() for name in names] == ([number != signal.SIGKILL] * 2)
    assert len(list(out.glob("*/result.json"))) == 2
    behave(out)
    assert main([*grid, "--jobs", "2"]) == 0
    assert len(list(out.glob("*/result.json"))) == 4
    assert sorted(starts(out).values()) == [1] * 2 + [2] * 2


@pytest.mark.runs
def test_a_result_of_weights_or_texts_that_have_changed_is_refused(
    write_task: WriteTask, fakes: None, tmp_path: Path
) -> None:
    """A run that has trained further is another model: its old figure next to a new one would be inconsistent."""
    run = tmp_path / "mine"
    make_model(run)
    task, out = str(write_task()), tmp_path / "out"
    finetune_many([task], [str(run)], [1], out, 1, [])
    run_folder = run_of(out, "tone", "mine", 1)
    file = run_folder / "result.json"
    weights = f"weights.init_from={run}/checkpoints/step-00000004; no classifier"
    made = json.loads(file.read_text()) | {"weights": weights}
    file.write_text(json.dumps(made))
    finetune_many([task], [str(run)], [1], out, 1, [])
    (run / "checkpoints" / "step-00000012").mkdir()
    with pytest.raises(ConfigError, match=r"step-00000004, and \S+step-00000012 is there now"):
        finetune_many([task], [str(run)], [1], out, 1, [])
    (run / "checkpoints" / "step-00000012").rmdir()
    about = {"asked": {"files": {"train": {"file": str(tmp_path / "train.tsv"), "sha256": "0"}}}}
    (run_folder / "task").mkdir()
    (run_folder / "task" / "task.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match=r"train: \S+train.tsv has changed since"):
        finetune_many([task], [str(run)], [1], out, 1, [])


def test_several_runs_need_a_folder_and_no_launcher(
    grid: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at = grid.index("--out")
    assert main([*grid[:at], *grid[at + 2 :]]) == 78
    assert "Add --out" in capsys.readouterr().err
    for words in (
        grid,
        ["eval", "m", "--suite", "quick", "--out", "o"],
        ["retrieval", "mine", "p.tsv", "--model", "m"],
    ):
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert main(words) == 78
        assert "is one process" in (said := capsys.readouterr().err) and "start it without torchrun" in said
        monkeypatch.setenv("WORLD_SIZE", "")  # another program's, of one who has started no ranks
        assert main(words) == 78
        assert "WORLD_SIZE='' in the environment" in (said := capsys.readouterr().err) and "`unset RANK" in said
    monkeypatch.delenv("WORLD_SIZE")
    assert main([*grid, "--model", "nobody"]) == 65  # before any run is started
    assert "nobody: no such folder" in capsys.readouterr().err
    assert main(["finetune", "lr=1", "--model", "x"]) == 78
    assert "finetune lr=1 x: names no task. Name one of cola" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["finetune", "rte", "--model", "x", "--watch", "y"])
    assert ended.value.code == 64
    assert "--watch was removed: evals of the run" in capsys.readouterr().err


@pytest.mark.parametrize("prefix", ["", "frozen:", "frozen:untrained:"])
def test_a_path_with_an_equals_sign_is_no_override(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A suite in such a folder lost the frozen runs that begin with another run's weights."""
    (model := tmp_path / "mb=1").mkdir()
    for words in (
        ["finetune", "sst2", "--model", f"{prefix}{model}", "lr=1e-3"],
        ["eval", f"{prefix}{model}", "lr=1e-3", "--suite", "quick", "--out", str(tmp_path / "out")],
    ):
        assert main(words) == 65
        assert f"error: {model}" in capsys.readouterr().err
    assert main(["eval", str(model), "name=a"]) == 65
    assert f"error: {model}" in capsys.readouterr().err


@pytest.mark.runs
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("lr=-1",), 78, "lr=-1.0: must be above 0"),
        (("train=gone.tsv",), 65, "train=gone.tsv: no such file"),
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
def test_a_real_run(
    write_task: WriteTask, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not covered by stand-ins: real processes find the package and the model, and end."""
    from tests.support.finetuning import FAST

    task, out = str(write_task(epochs=1, frozen={"epochs": 1})), tmp_path / "out"
    named = f"frozen:{models['bert']}"
    words = ["finetune", task, *FAST, "--model", named, "--out", str(out), "--jobs", "2"]
    assert main(words) == 0, capsys.readouterr()
    assert [row["model"] for row in json.loads((out / "table.json").read_text())["rows"]] == ["frozen-bert"]
    run = run_of(out, "tone", "frozen-bert", 1618)
    assert f"{run.name}: dev accuracy" in (out / LOGS / f"{run.name}.log").read_text()
    finished = (run / "result.json").stat().st_mtime_ns
    assert main(words) == 0
    assert (run / "result.json").stat().st_mtime_ns == finished
