"""Lists of runs. If this breaks, a failed run looks as if it trained, or one bad folder hides all others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from modernbert_train.__main__ import main, read_run
from modernbert_train.checkpoints.provenance import STARTS
from modernbert_train.config.load import to_yaml
from modernbert_train.core.files import lock_now
from modernbert_train.report.run_list import last_entries, list_runs
from tests.report.records import step, validation
from tests.support.tiny_run import TinyRun


@pytest.fixture
def runs(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """Write runs of 6,000 tokens with steps of 100."""
    text = to_yaml(read_run(tiny_run()))
    for name, steps, outcome in (
        ("done", 60, "finished"),
        ("halted", 5, "stopped"),
        ("bad", 7, "failed"),
        ("cut", 3, ""),
    ):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(text.replace("name: tiny", f"name: {name}", 1))
        lines = [*map(step, range(1, steps + 1)), validation(steps, loss=2.25) | {"bits_per_byte": 0.875}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        ended = {"kind": "end", "time": 2000.0, "outcome": outcome, "error": "UnstableRun: loss is nan"}
        entries = [{"kind": "start", "time": 1000.0, "version": "0.1.0"}, *([ended] if outcome else [])]
        (folder / STARTS).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return tmp_path / "runs"


@pytest.mark.runs
def test_each_run_is_reported_with_its_state(runs: Path) -> None:
    (runs / "new").mkdir()
    (runs / "new/config.yaml").write_text((runs / "cut/config.yaml").read_text().replace("name: cut", "name: new", 1))
    (runs / "notes").mkdir()
    with (runs / "halted/.lock").open("w") as lock:
        assert lock_now(lock)
        found = {run.name: run for run in list_runs([runs], now=2000.0)[0]}
    states = {name: run.state for name, run in found.items()}
    assert states == {
        "done": "finished", "halted": "training", "bad": "failed", "cut": "interrupted", "new": "not begun",
    }  # fmt: skip
    done = found["done"]
    assert (done.tokens, done.total_tokens, done.loss, done.held_out_loss) == (6000, 6000, 3.0, 2.25)
    assert done.tokens_per_second == 50.0 and done.age_seconds == 2000 - 1121
    assert found["bad"].reason == "UnstableRun: loss is nan" and found["new"].age_seconds is None
    assert {run.name: run.state for run in list_runs([runs / "halted"])[0]} == {"halted": "stopped"}


def test_a_damaged_folder_is_named_and_the_others_are_listed(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs / "bad/config.yaml").write_text("model: [")
    (runs / "cut/metrics.jsonl").write_bytes(b"\xff\n[1]\n" + (runs / "cut/metrics.jsonl").read_bytes()[:-30])
    monkeypatch.chdir(runs.parent)
    assert main(["report"]) == 0
    told = capsys.readouterr()
    assert "warning: runs/bad: left out" in told.err
    assert [line.split()[:2] for line in told.out.splitlines()[1:]] == [
        ["done", "finished"], ["halted", "stopped"], ["cut", "interrupted"],
    ]  # fmt: skip
    assert main(["report", "runs/done", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert only["name"] == "done" and (only["held_out_loss"], only["bits_per_byte"]) == (2.25, 0.875)
    assert main(["report", "--list", "absent"]) == 78 and "absent: no such folder" in capsys.readouterr().err


def test_of_a_long_record_only_the_end_is_read(tmp_path: Path) -> None:
    """A long run's record has gigabytes, and a folder a hundred runs."""
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps(validation(1))] + [json.dumps(step(number)) for number in range(1, 3000)]
    file.write_text("\n".join(lines) + "\n")
    short = last_entries(file, held_out=False)
    assert 20 <= len(short) < 1000 and short[-1]["step"] == 2999
    assert last_entries(file, held_out=True)[0]["kind"] == "validation"
    assert last_entries(tmp_path / "absent", held_out=True) == []


@pytest.mark.runs
def test_what_a_stranger_wrote_neither_moves_the_cursor_nor_fills_the_screen(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name of a folder from an archive may be chosen to hide a line of the table, or an error."""
    folder = runs / "evil\x1b[2J"
    folder.mkdir()
    text = next(runs.glob("*/config.yaml")).read_text(encoding="utf-8")
    name = next(line for line in text.splitlines() if line.startswith("name: "))
    (folder / "config.yaml").write_text(text.replace(name, 'name: "evil\\e[2J"'), encoding="utf-8")
    line = {"kind": "step", "step": 1, "tokens": 1e308, "loss": 1e308, "tokens_per_second": 1e308, "time": 0}
    lines = [json.dumps(line | {"step": step}) for step in (1, 2, 3)]  # their sum overflows a float
    (folder / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    capsys.readouterr()
    assert main(["report", str(runs)]) == 0
    said = capsys.readouterr().out
    assert "evil\\x1b[2J" in said and "\x1b" not in said and "1.00e+308" in said
    assert max(map(len, said.splitlines())) < 160
    assert main(["report", str(folder)]) == 0
    assert "evil\\x1b[2J/report.html" in capsys.readouterr().out
    assert main(["report", "--list", str(folder / "no\x1b[2J")]) == 78
    assert "\x1b" not in capsys.readouterr().err


def repeated(runs: Path, name: str, seed: int, loss: float, lr: float) -> None:
    """Write a finished run of another seed, held-out loss and learning rate."""
    text = (runs / "done/config.yaml").read_text().replace("name: done", f"name: {name}", 1)
    text = text.replace("seed: 5", f"seed: {seed}", 1).replace("  lr: 0.005", f"  lr: {lr}", 1)
    shutil.copytree(runs / "done", runs / name)
    (runs / name / "config.yaml").write_text(text)
    file = runs / name / "metrics.jsonl"
    file.write_text(file.read_text().replace('"loss": 2.25', f'"loss": {loss}'))


def test_a_gain_is_shown_beside_the_spread_of_seeds(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rates on two seeds each; one pair is 0.0141 apart, the other equal: a pooled deviation of 0.0071."""
    config = read_run([str(runs / "done")])
    assert (config.seed, config.optim.lr) == (5, 5e-3)
    for name, seed, loss, lr in (("a", 1, 2.2, 1e-3), ("b", 2, 2.2 + 0.01 * 2**0.5, 1e-3), ("e", 18, 2.25, 5e-3)):
        repeated(runs, name, seed, loss, lr)
    assert main(["report", str(runs)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("seeds: ")]
    assert lines == [
        "seeds: a and its repetitions: held-out loss 2.2071 over 2 seeds",
        "seeds: done and its repetitions: held-out loss 2.2500 over 2 seeds",
        "seeds: standard deviation 0.0071, pooled; a difference below two standard errors is noise",
        "seeds: a is 0.0429 below done, 6.1 standard errors",
    ]
    shutil.copytree(runs / "a", runs / "a-copy")  # the same seed again
    for name, changed, old, new in (
        ("c", "config.yaml", "name: mlm", "name: sop"),
        ("d", "config.yaml", "/validation\n", "/held-out\n"),
        ("f", "config.yaml", "predict_from: itself", "predict_from: before"),
        ("g", "metrics.jsonl", '"predicted": ', '"predicted": 1'),
    ):
        repeated(runs, name, 1, 1.0, 1e-3)
        file = runs / name / changed
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    assert main(["report", str(runs)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert {"c", "d", "f", "g"} <= {line.split()[0] for line in said}
    same = [line for line in said if line.startswith("seeds: ")] == lines
    assert same, "another objective, text or number of predictions is no gain, and a copy no seed"
    shutil.rmtree(runs / "b")
    shutil.rmtree(runs / "e")
    assert main(["report", str(runs / "a"), str(runs / "done")]) == 0
    assert "seeds:" not in capsys.readouterr().out
