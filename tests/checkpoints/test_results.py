"""Results measured after training. If this breaks, figures are lost, or shown with weights they do not belong to."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from modernbert_train.checkpoints.evaluations import EVALUATIONS, keep_result, read_results, run_of, table_rows
from modernbert_train.core.files import append_line


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "run/checkpoints/step-00000003"
    folder.mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("name: run\n")
    return folder


def test_a_line_is_added_whole_behind_whatever_a_crash_left(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    append_line(file, "one")
    file.write_bytes(file.read_bytes() + b'{"torn')
    append_line(file, "two")
    append_line(file, "three")
    assert file.read_text() == 'one\n{"torn\ntwo\nthree\n'


def test_the_same_is_kept_once_and_another_beside_it(checkpoint: Path) -> None:
    for _ in range(2):
        keep_result(checkpoint, "finetune rte, dev", {"accuracy": 0.5, "f1": math.nan}, step=3, weights="aa", seed=1)
    keep_result(checkpoint, "finetune rte, dev", {"accuracy": 0.7}, step=3, weights="aa", seed=2)
    run = run_of(checkpoint)
    assert run is not None
    first, second = read_results(run)
    assert (first.figures, first.seed, first.checkpoint, first.weights) == ({"accuracy": 0.5}, 1, checkpoint.name, "aa")
    assert second.seed == 2
    assert table_rows([first, second]) == [
        (checkpoint.name, "finetune rte, dev, mean of 2 seeds", "accuracy", "0.6000")
    ]


def test_of_one_thing_measured_twice_the_last_is_shown_without_counts_and_baselines(checkpoint: Path) -> None:
    for value in (0.1, 0.2):
        keep_result(
            checkpoint, "topic", {"accuracy": value, "num_texts": 9, "baseline/accuracy": 0}, step=3, weights="a"
        )
    run = run_of(checkpoint)
    assert run is not None and [row[2:] for row in table_rows(read_results(run))] == [("accuracy", "0.2000")]


def test_a_folder_that_cannot_be_written_is_a_warning(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures are already printed; an hour of evaluation must not end as an error."""
    (checkpoint.parents[1] / EVALUATIONS).mkdir()
    keep_result(checkpoint, "topic", {"accuracy": 0.2}, step=3, weights="a")
    assert "evaluations.jsonl: cannot be written" in capsys.readouterr().err


def test_damaged_lines_and_checkpoints_without_a_run_are_let_be(checkpoint: Path, tmp_path: Path) -> None:
    lines = ["[1]", "{", json.dumps({"name": 7, "figures": {}, "step": 1}), json.dumps({"name": "x", "step": 1})]
    (tmp_path / "run" / EVALUATIONS).write_text("\n".join(lines))
    assert read_results(tmp_path / "run") == []
    alone = tmp_path / "step-00000003"
    alone.mkdir()
    keep_result(alone, "topic", {"accuracy": 0.2}, step=3, weights="a")
    assert run_of(alone) is None and not (tmp_path / EVALUATIONS).exists()
