"""The referee of the speedrun: the same text everywhere, every CPU second counted, no weights from elsewhere."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import speedrun
from modernbert_train.__main__ import read_run
from modernbert_train.config.load import to_yaml
from tests.support.tiny_run import TinyRun


def test_the_text_is_the_python_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    """Another order would be other shards, and every contestant would be refused."""
    with zipfile.ZipFile(tmp_path / "tea-1-py3-none-any.whl", "w") as wheel:
        for name in ("tea/b.py", "tea/a.py", "tea/notes.txt"):
            wheel.writestr(name, f"# {name}\n")
    speedrun.write_text([tmp_path / "tea-1-py3-none-any.whl"], tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == ["# tea/a.py\n", "# tea/b.py\n"]


def test_shards_of_another_text_are_refused(tmp_path: Path) -> None:
    for part in speedrun.SHARDS:
        (tmp_path / "data" / part).mkdir(parents=True)
        (tmp_path / "data" / part / "dataset.json").write_text('{"index_sha256": "0000"}')
    with pytest.raises(SystemExit, match=r"data/train: shards 0000, and the speedrun's are faa6155c"):
        speedrun.prepare(tmp_path)


@pytest.mark.runs
def test_cpu_seconds_of_all_starts_are_counted_and_a_lost_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that leaves a killed start out would be a false one."""
    clock = tmp_path / "mine.json"
    work = "import sys, time\nwhile time.process_time() < 0.3: pass\nsys.exit({})"
    monkeypatch.setattr(speedrun, "MODULE", [sys.executable, "-c", work.format(75)])
    with pytest.raises(SystemExit, match="train: exit code 75"):
        speedrun.train([], clock)
    first = json.loads(clock.read_text())["cpu_seconds"]
    monkeypatch.setattr(speedrun, "MODULE", [sys.executable, "-c", work.format(0)])
    both = speedrun.train([], clock)
    assert first >= 0.3 and both >= first + 0.3
    assert speedrun.train([], clock) == both, "a finished run is not started again"
    clock.write_text(json.dumps({"cpu_seconds": first, "state": "running"}))
    with pytest.raises(SystemExit, match=r"mine\.json: a start was killed, so its CPU seconds are not known"):
        speedrun.train([], clock)


@pytest.mark.runs
def test_weights_from_elsewhere_other_data_and_a_lost_step_are_refused(tiny_run: TinyRun, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    config = folder / "config.yaml"
    config.write_text(to_yaml(read_run(tiny_run("weights.init_from=other"))))
    with pytest.raises(SystemExit, match="begins with weights from elsewhere"):
        speedrun.referee(folder, tmp_path)
    config.write_text(to_yaml(read_run(tiny_run())))
    with pytest.raises(SystemExit, match=r"data\.train is not "):
        speedrun.referee(folder, tmp_path)
    places = [f"data.{part}={tmp_path}/data/{part}" for part in speedrun.SHARDS]
    config.write_text(to_yaml(read_run(tiny_run(*places))))
    steps = [{"kind": "step", "step": step, "tokens": 10 * step, "seconds": 0.5} for step in (1, 2, 3)]
    (folder / "evaluations.jsonl").write_text('{"figures": {"loss": 3.5}}\n')
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert speedrun.referee(folder, tmp_path) == {"loss": 3.5, "tokens": 30, "seconds": 1.5}
    metrics.write_text("".join(json.dumps(step) + "\n" for step in steps[::2]))
    with pytest.raises(SystemExit, match="does not have every step once"):
        speedrun.referee(folder, tmp_path)
