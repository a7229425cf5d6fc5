"""Start, kill, read and compare runs."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from modernbert_train.__main__ import main
from modernbert_train.checkpoints.checkpoint import Checkpoint, newest_valid
from modernbert_train.models.build import build_model
from modernbert_train.weights.gather import load_weights
from tests.support import forked
from tests.support.faulty import Killed, at_fault
from tests.support.paths import ROOT
from tests.support.tiny_run import TIMES

TRAIN = [sys.executable, "-m", "modernbert_train", "train"]


def start(words: list[str], *flags: str) -> forked.Popen:
    """Start a run as a user does, with fewer imports; always two threads, so that sums have the same order."""
    environment = {"OMP_NUM_THREADS": "2"} | os.environ | {"PYTHONPATH": str(ROOT)}
    command = [*TRAIN, *words, *flags]
    return forked.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(words: list[str], *flags: str) -> tuple[int, str]:
    process = start(words, *flags)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def records(folder: Path, kind: str = "step", file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    entries = []
    for line in (folder / file).read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # torn by a kill
        if entry["kind"] == kind:
            entries.append({key: value for key, value in entry.items() if key not in TIMES})
    return entries


def interrupt_after(words: list[str], folder: Path, steps: int, number: signal.Signals, checkpoints: int = 0) -> int:
    """Start the run, signal all its processes after this many new steps and checkpoints, and wait for its end."""
    already = len(records(folder)) if (folder / "metrics.jsonl").exists() else 0
    process = start(words)
    deadline = time.monotonic() + 100
    while process.poll() is None and time.monotonic() < deadline:
        saved = [path for path in folder.glob("checkpoints/step-*") if path.suffix == ""]
        if (
            (folder / "metrics.jsonl").exists()
            and len(records(folder)) >= already + steps
            and len(saved) >= checkpoints
        ):
            break
        time.sleep(0.002)
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0, f"the run ended before it could be interrupted:\n{output}"
    return process.returncode


SAME = ("step", "phase", "epoch", "tokens", "rows", "row_tokens", "lr", "packing_efficiency")
MEASURED = ("loss", "grad_norm", "update_norm")


def launch(words: list[str], ranks: int = 2) -> None:
    command = [sys.executable, str(ROOT / "launch/run.py"), *words, "--ranks", str(ranks)]
    done = forked.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr


def assert_alike(folder: Path, expected: Path, apart: Mapping[str, float], least: int) -> None:
    """Assert that all steps of two runs have equal tokens, and finite values no further apart than these shares."""
    found, wanted = records(folder), records(expected)
    assert len(found) == len(wanted) >= least
    for one, other in zip(found, wanted, strict=True):
        assert one["tokens"] == other["tokens"]
        for key, share in apart.items():
            assert math.isfinite(one[key]), (one["step"], key)
            assert one[key] == pytest.approx(other[key], rel=share), (one["step"], key)


def assert_same_run(folder: Path, expected: Path) -> None:
    found, wanted = records(folder), records(expected)
    assert len(found) == len(wanted) > 5
    for one, other in zip(found, wanted, strict=True):
        assert [one[key] for key in SAME] == [other[key] for key in SAME]
        for key in MEASURED:
            assert one[key] == pytest.approx(other[key], rel=2e-4, abs=1e-6), (one["step"], key)
    for one, other in zip(records(folder, "validation"), records(expected, "validation"), strict=True):
        assert one["predicted"] == other["predicted"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def newest(folder: Path, last_step: int | None = None) -> Checkpoint:
    """Return the newest checkpoint of the run, up to last_step; no newer one may have been passed over."""
    found, passed_over = newest_valid(folder / "checkpoints", last_step)
    assert found is not None and not passed_over
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return newest(folder).weights()


def model_of(checkpoint: Checkpoint) -> Any:
    """The trained model, for evaluation."""
    model = build_model(checkpoint.config.model, checkpoint.config.objective)
    load_weights(model, checkpoint.weights())
    return model.eval()


def assert_equal_runs(folder: Path, expected: Path, least: int = 11) -> None:
    assert records(folder) == records(expected) and len(records(folder)) >= least
    assert records(folder, "validation") == records(expected, "validation")
    torch.testing.assert_close(weights(folder), weights(expected), rtol=0, atol=0)


def assert_same_state(one: Checkpoint, other: Checkpoint) -> None:
    """Assert equal weights, moments and step counts, bit for bit."""
    assert one.weights() and one.optimizer()
    torch.testing.assert_close(one.weights(), other.weights(), rtol=0, atol=0)
    torch.testing.assert_close(one.optimizer(), other.optimizer(), rtol=0, atol=0)


def killed_and_gone_on(words: list[str], step: int) -> None:
    with at_fault(kill_at=step), pytest.raises(Killed):
        main(["train", *words])
    assert main(["train", *words]) == 0


def assert_goes_on_to_the_bit(words: list[str], folder: Path) -> None:
    """Delete the newest checkpoint of a finished run, resume it, and assert equal weights."""
    whole = weights(folder)
    shutil.rmtree(max((folder / "checkpoints").iterdir()))
    assert main(["train", *words]) == 0
    assert all(torch.equal(whole[name], tensor) for name, tensor in weights(folder).items())


def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [entry for line in lines if (entry := json.loads(line))["kind"] == kind]
