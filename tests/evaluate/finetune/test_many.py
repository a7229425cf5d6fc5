"""Many fine-tunings by one command: what is kept, what goes on, what is refused, and what their table says."""

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
from typing import Any

import pytest

from modernbert_train.__main__ import main
from modernbert_train.distributed.many import environments
from modernbert_train.errors import ConfigError
from modernbert_train.evaluate.finetune.many import LOGS, finetune_many, plan_cells
from modernbert_train.evaluate.finetune.table import as_markdown, make_table, write_table
from modernbert_train.evaluate.finetune.task import as_trained, label_of, labels_of, named_model, read_task
from modernbert_train.report.many import write_table_page
from tests.evaluate.finetune import fake_runs
from tests.evaluate.finetune.conftest import WriteTask

ROOT = Path(__file__).parents[3]
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


def test_a_folder_that_is_called_like_a_baseline_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "frozen:x").mkdir()
    assert named_model("frozen:x") == ("frozen:x", ())
    assert named_model("untrained:frozen:x") == ("frozen:x", ("untrained",))


def test_two_models_of_one_name_have_rows_of_their_own(write_task: WriteTask) -> None:
    """Two checkpoints of a run are what a user compares; one folder for both would be refused, or worse, shared."""
    models = [f"runs/a/checkpoints/step-0000000{n}" for n in (1, 2)] + ["runs/b"]
    assert labels_of(models)["runs/b"] == "b"
    cells = plan_cells(["rte", "cola"], models, SEEDS)
    assert len({cell.name for cell in cells}) == 12
    assert "rte-b-1618" in {cell.name for cell in cells}
    assert "rte-runs-a-checkpoints-step-00000002-42" in {cell.name for cell in cells}
    for tasks, named, seeds in ((["rte", "rte"], ["a"], [1]), (["rte"], ["a", "a"], [1]), (["rte"], ["a"], [1, 1])):
        with pytest.raises(ConfigError, match="named twice"):
            plan_cells(tasks, named, seeds)
    with pytest.raises(ConfigError, match=r"both would be called rte-a-1\. Rename"):
        plan_cells(["rte", "own/rte.yaml"], ["a"], [1])


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
    """Two processes on one GPU while another is idle, or each with all cores, would only be slow: nobody would see."""
    own = environments(3, {"CUDA_VISIBLE_DEVICES": "4,6"}, 2, 8)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in own] == ["4", "6", "4"]
    assert {each["OMP_NUM_THREADS"] for each in own} == {"2"}
    assert environments(1, {"OMP_NUM_THREADS": "5"}, 0, 8) == [{"OMP_NUM_THREADS": "5"}]


def result(folder: Path, task: str, source: str, seed: int, figures: dict[str, Any], **settings: Any) -> None:
    own = folder / f"{task}-{source}-{seed}"
    own.mkdir(parents=True)
    validation = dict.fromkeys(figures, "x")
    content = {"task": task, "source": source, "seed": seed, "figures": figures, "asked": {"task": settings}}
    settings = {"kind": "single-label", "validation": validation, "metrics": ["accuracy", "f1"]}
    (own / "result.json").write_text(json.dumps(content | {"settings": settings}))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two models on two tasks, one of them of two splits; of the second model a figure and a run are missing."""
    folder = tmp_path / "judged"
    for seed, value in ((1, 0.5), (2, 0.7)):
        result(folder, "one", "good", seed, {"dev": {"accuracy": value, "f1": 0.1}})
        splits = {"a": {"accuracy": 0.2, "f1": 0.1}, "b": {"accuracy": 0.4 + value, "f1": 0.1}}
        result(folder, "two", "good", seed, splits)
        result(folder, "one", "bad", seed, {"dev": {"accuracy": None if seed == 1 else 0.25, "f1": 0.1}})
    return folder


def test_the_table_has_mean_spread_and_number_by_hand(results: Path) -> None:
    table = make_table(results, ["good"])
    write_table(results, table)
    text = (results / "table.md").read_text()
    assert text.splitlines()[0] == "| model | one accuracy | two accuracy, a | two accuracy, b | average |"
    # of 0.5 and 0.7: 0.6 ± 0.1414; averages of seeds (0.5 + (0.2 + 0.9) / 2) / 2 and (0.7 + (0.2 + 1.1) / 2) / 2
    assert text.splitlines()[2] == (
        "| good | 0.6000 ± 0.1414 (2) | 0.2000 ± 0.0000 (2) | 1.0000 ± 0.1414 (2) | 0.6000 ± 0.1061 (2) |"
    )
    assert text.splitlines()[3] == "| bad | 0.2500 (1) | - | - | - |"
    assert json.loads((results / "table.json").read_text()) == table
    assert {column["metric"] for column in table["columns"]} == {"accuracy", "f1"}
    assert table["rows"][0]["cells"][0]["seeds"] == {"1": 0.5, "2": 0.7}
    assert statistics.stdev((0.525, 0.675)) == pytest.approx(table["rows"][0]["average"]["standard_deviation"])


def test_the_table_says_where_runs_were_made_differently(results: Path) -> None:
    result(results, "one", "third", 1, {"dev": {"accuracy": 0.5, "f1": 0.5}}, lr=1e-3)
    assert "Note: one: the runs differ in lr; their result.json say how." in as_markdown(make_table(results))


def test_what_is_no_result_is_left_out(results: Path) -> None:
    before = make_table(results)
    for name, content in (("torn", '{"task": "one"'), ("other", "[]"), ("half", '{"task": "one", "source": "good"}')):
        (results / name).mkdir()
        (results / name / "result.json").write_text(content)
    assert make_table(results) == before


def test_the_page_has_the_table(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(results, make_table(results))
    assert main(["report", str(results)]) == 0
    page = (results / "report.html").read_text()
    assert str(results / "report.html") in capsys.readouterr().out
    for text in ("<th>Average</th>", "one: accuracy", "two: f1, b", "1 bad", "2 good", "<b>0.6000 ± 0.1414 (2)</b>"):
        assert text in page, text
    same = write_table_page(results).read_text()
    assert same == page
    (results / "table.json").write_text("{}")
    assert main(["report", str(results)]) == 65


# --- with processes in place of runs ----------------------------------------------------------------------------------


def make_model(run: Path) -> None:
    """A run with a checkpoint, as far as it is looked at without torch."""
    (run / "checkpoints" / "step-00000004").mkdir(parents=True)
    (run / "config.yaml").write_text("name: x")


@pytest.fixture
def grid(write_task: WriteTask, tmp_path: Path) -> list[str]:
    """The words of a command: two tasks with two models and two seeds."""
    first = write_task()
    second = first.with_name("second.yaml")
    second.write_text(first.read_text())
    for name in ("a", "b"):
        make_model(tmp_path / name)
    models = [str(tmp_path / "a"), f"frozen:{tmp_path / 'b'}"]
    named = ["--model", *models, "--out", str(tmp_path / "out"), "--seeds", "1618", "42"]
    return ["finetune", str(first), str(second), *named]


def starts(out: Path) -> dict[str, int]:
    """How often each run was started."""
    return {file.parent.name: len(file.read_text().splitlines()) for file in out.glob("*/starts")}


def behave(out: Path, **names: list[str]) -> None:
    out.mkdir(exist_ok=True)
    (out / fake_runs.BEHAVE).write_text(json.dumps(names))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modernbert_train.evaluate.finetune.many._command", fake_runs._command)


@pytest.mark.runs
def test_a_failed_run_stops_no_other_and_is_tried_again(
    grid: list[str], fakes: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log is named, the exit code is its own, and the next command starts it alone."""
    out = tmp_path / "out"
    behave(out, fail=["tone-a-42"])
    assert main([*grid, "--jobs", "2"]) == 65
    said = capsys.readouterr()
    assert f"tone-a-42: exit code 65; {out / LOGS / 'tone-a-42.log'}" in said.err
    assert "error: the texts are of nobody" in said.err
    assert len(starts(out)) == 8 and not (out / "tone-a-42" / "result.json").exists()
    table = json.loads((out / "table.json").read_text())
    assert [cell["n"] for cell in table["rows"][0]["cells"]] == [1, 2]
    assert table["rows"][0]["average"] is None and table["rows"][1]["average"]["n"] == 2

    behave(out)
    assert main([*grid, "--jobs", "2"]) == 0
    said = capsys.readouterr()
    assert "7 runs of 8 done before" in said.out
    assert starts(out) == dict.fromkeys(starts(out), 1) | {"tone-a-42": 2}
    own = [fake_runs.figure_of(f"tone-a-{seed}") for seed in SEEDS]
    table = json.loads((out / "table.json").read_text())
    assert table["rows"][0]["cells"][0]["mean"] == pytest.approx(statistics.fmean(own))
    assert [row["model"] for row in table["rows"]] == ["a", "frozen-b"]
    assert f"| a | {statistics.fmean(own):.4f} ± {statistics.stdev(own):.4f} (2) |" in said.out
    assert (out / "report.html").is_file()

    # other settings are refused, with both values; nothing is started
    words = [*grid[:3], "lr=1e-3", *grid[3:]]
    assert main(words) == 78
    assert f"{out / 'tone-a-1618'}: lr: 0.003 there, 0.001 now" in capsys.readouterr().err
    assert main([*grid[:3], "name=x", *grid[3:]]) == 78
    assert "each of several runs has its own name" in capsys.readouterr().err
    # what changes only how fast it goes, or who looks on, is no other setting; another model is one more row
    make_model(tmp_path / "c")
    more = [*grid[:3], "logging.progress_bar=false", *grid[3:6], str(tmp_path / "c"), *grid[6:]]
    assert main(more) == 0
    assert sum(starts(out).values()) == 9 + 4


def spawn(words: list[str]) -> subprocess.Popen[bytes]:
    path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "tests.evaluate.finetune.fake_runs", *words], env=os.environ | path)


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
def test_a_killed_command_leaves_nobody_behind_and_goes_on(
    number: signal.Signals, grid: list[str], tmp_path: Path
) -> None:
    """Asked to stop, all save and it ends with 75; killed, the kernel ends them; then only what is missing is run."""
    out = tmp_path / "out"
    behave(out, wait=["second-a-42", "second-frozen-b-42"])
    process = spawn([*grid, "--jobs", "2"])
    waiting = [out / name / "starts" for name in ("second-a-42", "second-frozen-b-42")]
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
    assert [(out / name / "saved").exists() for name in ("second-a-42", "second-frozen-b-42")] == (
        [number != signal.SIGKILL] * 2
    )
    assert len(list(out.glob("*/result.json"))) == 6
    behave(out)
    assert spawn([*grid, "--jobs", "2"]).wait(120) == 0
    assert len(list(out.glob("*/result.json"))) == 8
    assert sorted(starts(out).values()) == [1] * 6 + [2] * 2


@pytest.mark.runs
def test_a_result_of_weights_or_texts_that_have_changed_is_refused(
    write_task: WriteTask, fakes: None, tmp_path: Path
) -> None:
    """A run that has trained on since is another model: its old figure beside a new one would be a mixture."""
    run = tmp_path / "mine"
    make_model(run)
    task, out = str(write_task()), tmp_path / "out"
    finetune_many([task], [str(run)], [1], out, 1, [])
    file = out / "tone-mine-1" / "result.json"
    weights = f"weights.init_from={run}/checkpoints/step-00000004; no classifier"
    made = json.loads(file.read_text()) | {"weights": weights}
    file.write_text(json.dumps(made))
    finetune_many([task], [str(run)], [1], out, 1, [])
    (run / "checkpoints" / "step-00000012").mkdir()
    with pytest.raises(ConfigError, match=r"step-00000004, and \S+step-00000012 is there now"):
        finetune_many([task], [str(run)], [1], out, 1, [])
    (run / "checkpoints" / "step-00000012").rmdir()
    about = {"asked": {"files": {"train": {"file": str(tmp_path / "train.tsv"), "sha256": "0"}}}}
    (out / "tone-mine-1" / "task").mkdir()
    (out / "tone-mine-1" / "task" / "task.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match=r"train: \S+train.tsv has changed since"):
        finetune_many([task], [str(run)], [1], out, 1, [])


def test_several_runs_need_a_folder_and_no_launcher(
    grid: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at = grid.index("--out")
    assert main([*grid[:at], *grid[at + 2 :]]) == 78
    assert "Add --out" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(grid) == 78
    assert "without torchrun" in capsys.readouterr().err
    monkeypatch.delenv("WORLD_SIZE")
    assert main([*grid, "--model", "nobody"]) == 65  # before any run is started
    assert "nobody: no such folder" in capsys.readouterr().err
    assert main(["finetune", "lr=1", "--model", "x"]) == 78
    assert "finetune lr=1 x: names no task. Name one of cola" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["finetune", "rte", "--model", "x", "--watch", "y"])
    assert ended.value.code == 64


@pytest.mark.runs
@pytest.mark.timeout(600)
def test_a_real_run_and_its_frozen_twin_and_a_watch_of_it(
    write_task: WriteTask, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the fakes leave open: that real processes find the package, the model, the linked checkpoint, and end."""
    from tests.evaluate.finetune.test_finetune import FAST

    task, out = str(write_task(epochs=1, frozen={"epochs": 1})), tmp_path / "out"
    named = [str(models["bert"]), f"frozen:{models['bert']}"]
    assert main(["finetune", task, *FAST, "--model", *named, "--out", str(out), "--jobs", "2"]) == 0, (
        capsys.readouterr()
    )
    assert [row["model"] for row in json.loads((out / "table.json").read_text())["rows"]] == ["bert", "frozen-bert"]
    run = out / "tone-bert-1618"
    assert "tone-bert-1618: dev accuracy" in (out / LOGS / f"{run.name}.log").read_text()
    assert main(["finetune", task, *FAST, "freeze=true", "--watch", str(run), "--patience", "30"]) == 0
    (point,) = [json.loads(line) for line in (run / "watch.jsonl").read_text().splitlines()]
    assert point["name"] == "finetune tone frozen" and 0 <= point["figures"]["accuracy"] <= 1
    assert "finetune tone frozen" in (run / "report.html").read_text()
    assert main(["finetune", task, *FAST, "--model", *named, "--out", str(out), "--jobs", "2"]) == 0
    assert "2 runs of 2 done before" in capsys.readouterr().out


@pytest.mark.runs
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_models_two_tasks_two_seeds(write_task: WriteTask, models: dict[str, Path], tmp_path: Path) -> None:
    """Each cell is today's command: the same folder, the same figures, the same bits."""
    from tests.evaluate.finetune.test_finetune import FAST, weights

    first = write_task(epochs=1)
    second = first.with_name("second.yaml")
    second.write_text(json.dumps(json.loads(first.read_text()) | {"metrics": ["macro_f1"]}))
    named = [str(models["bert"]), f"frozen:{models['modernbert']}"]
    out = tmp_path / "out"
    words = [str(first), str(second), *FAST, "--model", *named, "--seeds", "1618", "42", "--jobs", "2"]
    assert main(["finetune", *words, "--out", str(out)]) == 0
    table = json.loads((out / "table.json").read_text())
    assert [cell["n"] for row in table["rows"] for cell in row["cells"]] == [2] * 4
    alone = ["finetune", str(second), "--model", str(models["bert"]), *FAST, "seed=42", f"runs_folder={tmp_path}/alone"]
    assert main(alone) == 0
    ours, theirs = (weights(folder / "second-bert-42") for folder in (out, tmp_path / "alone"))
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    results = [json.loads((folder / "second-bert-42/result.json").read_text()) for folder in (out, tmp_path / "alone")]
    assert results[0] == results[1]
    assert table["rows"][0]["cells"][1]["seeds"]["42"] == results[0]["figures"]["dev"]["macro_f1"]
