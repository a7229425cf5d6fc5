"""A checkpoint that is written while training continues, on one rank; for several see distributed/test_saver_ranks.py.

If this breaks, a checkpoint mixes weights of two steps, or a full disk is not reported.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from modernbert_train.checkpoints import saver as module
from modernbert_train.checkpoints.checkpoint import newest_valid
from modernbert_train.checkpoints.saver import Saver, Snapshot
from modernbert_train.config.load import to_yaml
from modernbert_train.errors import RunError, StorageError
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.weights.shares import Copier
from tests.support.small_checkpoint import CONFIG, WEIGHT, state_of, write


class Run:
    """A model that is trained by adding 1 to its weights, and its saver."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = ModernBertForMaskedLM(CONFIG.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.told: list[str] = []
        self.saver = Saver(folder, 2, [0], 30.0, lambda: self.told.append("failed"))
        self._copier = Copier(0, [0], 1)

    def set_weights(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)

    def save(self, step: int) -> None:
        share, needed = self._copier.copy(self.model, self.optimizer)
        state = state_of(step).as_json()
        self.saver.start(Snapshot(step, share, self._copier.wait, needed, state, to_yaml(CONFIG), False, False))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Block all writes until it is opened."""
    opened = threading.Event()
    real = module.write_part

    def gated(*args: Any) -> Any:
        assert opened.wait(30)
        return real(*args)

    monkeypatch.setattr(module, "write_part", gated)
    return opened


def test_what_is_trained_meanwhile_is_not_in_the_checkpoint(run: Run, gate: threading.Event) -> None:
    run.set_weights(1.0)
    run.save(1)
    run.set_weights(2.0)
    assert run.saver.take_saved() is None and newest_valid(run.folder) == (None, [])
    gate.set()
    run.saver.wait()
    saved = run.saver.take_saved()
    assert saved is not None and saved.step == 1 and run.saver.take_saved() is None
    found, _ = newest_valid(run.folder)
    assert found is not None and found.step == 1
    assert saved.bytes == sum(path.stat().st_size for path in found.folder.iterdir() if path.name != "MANIFEST.json")
    assert all(bool((tensor == 1).all()) for tensor in found.weights().values())
    run.save(2)  # into the same memory
    run.set_weights(3.0)
    run.saver.wait()
    found, _ = newest_valid(run.folder)
    assert found is not None and bool((found.weights()[WEIGHT] == 2).all())


class Panic(BaseException):
    """As pyo3 raises it for a panic in Rust; safetensors and tokenizers are written in Rust."""


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            OSError(28, "No space left on device"),
            StorageError,
            r"cannot write the checkpoint \(No space left on device",
        ),
        (KeyError("a bug"), RunError, "writing it failed with KeyError: "),
        (Panic("called"), RunError, "writing it failed with Panic: "),
    ],
)
def test_an_error_behind_the_run_is_reported_once_and_costs_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, kind: type[RunError], message: str
) -> None:
    run.save(1)
    run.saver.wait()
    assert run.saver.take_saved() is not None
    monkeypatch.setattr(module, "write_part", Mock(side_effect=error))
    run.save(2)
    with pytest.raises(kind, match=f"step-00000002: {message}"):
        run.saver.wait()
    assert run.told == ["failed"] and run.saver.take_saved() is None
    assert [path.name for path in run.folder.iterdir()] == ["step-00000001"]
    run.saver.settle(1.0)  # must not raise again


@pytest.mark.runs
def test_a_disk_that_stands_still_is_reported_and_ends_a_run_only_when_it_is_waited_for(
    run: Run, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parallel file system may take 5 to 15 minutes to switch servers; training continues meanwhile."""
    monkeypatch.setattr(module, "WARN", 0.2)
    run.save(1)
    assert run.saver.stall_warning() is None
    time.sleep(0.3)
    assert "the disk has taken nothing of a checkpoint for" in str(run.saver.stall_warning())
    assert run.saver.stall_warning() is None, "one warning only"
    assert run.told == [], "the run must not be ended"
    run.saver.settle(0.1)  # an error ends the run: the wait is short
    gate.set()
    run.saver.wait()
    assert run.saver.take_saved() is not None

    gate.clear()
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.0)
    run.saver._patience = 0.5
    run.save(2)
    with pytest.raises(StorageError, match="the disk has taken nothing of a checkpoint for"):
        run.saver.wait()
    gate.set()
    run.saver._patience = 30.0
    run.saver.wait()


def test_a_power_cut_leaves_no_checkpoint_whose_steps_the_record_lacks(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of its steps is synced before its name: a resumed run writes only later lines."""
    order: list[str] = []
    metrics, real = run.folder.parent / "metrics.jsonl", module.finish

    def finish(*args: Any, **kwargs: Any) -> int:
        order.append("named")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "sync", lambda path: order.append(str(path)))
    monkeypatch.setattr(module, "finish", finish)
    run.save(1)
    run.saver.wait()
    assert order == [str(metrics), "named"]


def test_what_a_killed_writer_left_goes_before_the_next_is_written(run: Run) -> None:
    """It may be the reason why the disk is full."""
    write(run.folder, 1)
    left = run.folder / "step-00000002.partial-77"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"torn")
    run.save(3)
    run.saver.wait()
    assert sorted(path.name for path in run.folder.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_thread_without_a_result_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.saver, "_run", lambda snapshot: None)
    run.save(1)
    assert run.saver._thread is not None
    run.saver._thread.join()
    assert run.saver.take_saved() is None
    with pytest.raises(RunError, match="ended without a word"):
        run.saver.wait()


def test_older_checkpoints_that_cannot_be_removed_cost_no_whole_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "clean", Mock(side_effect=PermissionError("denied")))
    run.save(1)
    run.saver.wait()
    found, _ = newest_valid(run.folder)
    assert found is not None and found.step == 1 and run.saver.take_saved() is not None
    assert "step-00000001 is written; those that checkpoint.keep=2 no longer keeps" in capsys.readouterr().err
