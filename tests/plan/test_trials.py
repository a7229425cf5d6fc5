"""Trials: a kernel that fails, or computes wrong values, is never called usable, and `doctor` never hangs."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modernbert_train.models.attention import KERNELS, sdpa
from modernbert_train.models.attention.visible import Visible
from modernbert_train.plan.trials import Outcome, attempt, command_of
from modernbert_train.plan.trials.attention import HALF_WINDOW, try_attention
from modernbert_train.plan.trials.compiler_and_backends import try_backend, try_compile
from modernbert_train.plan.trials.trials_table import TRIALS


def outcome_of(code: str, seconds: float = 60) -> Outcome:
    return attempt([sys.executable, "-c", code], seconds)


def test_every_kernel_and_choice_of_a_run_is_tried() -> None:
    """A new choice without a trial would be missing silently."""
    assert [*TRIALS][: len(KERNELS)] == [*KERNELS]
    assert {"compile", "fused", "gloo", "nccl"} <= {*TRIALS}


def test_the_reference_kernel_is_usable() -> None:
    assert try_attention("sdpa").startswith("within ")


@pytest.mark.parametrize("broken", ["window", "documents", "gradient", "nan"])
def test_a_kernel_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """It would silently train another model."""
    real_prepare, real_attend = sdpa.prepare, sdpa.attend

    def prepare(packed: Any, visible: Visible) -> Any:
        if broken == "documents":
            boundaries = torch.tensor([0, len(packed.input_ids_T)], dtype=torch.int32)
            packed = replace(packed, cu_seqlens_S=boundaries)
        return real_prepare(packed, Visible.around(HALF_WINDOW + (broken == "window")))

    def attend(q: Any, k: Any, v: Any, layout: Any, window: bool) -> Any:
        if broken == "gradient":
            return real_attend(q, k.detach(), v, layout, window)
        return real_attend(q, k, v, layout, window) * (float("nan") if broken == "nan" else 1)

    monkeypatch.setattr(sdpa, "prepare", prepare)
    monkeypatch.setattr(sdpa, "attend", attend)
    with pytest.raises(ArithmeticError, match="wrong by"):
        try_attention("sdpa")


def test_processes_can_exchange() -> None:
    assert "a sum over one process" in try_backend("gloo")
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_the_compiler_is_tried() -> None:
    assert "of the same not compiled" in try_compile()


@pytest.mark.slow
def test_a_trial_answers_from_its_own_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For any output of the libraries, and any working directory."""
    monkeypatch.chdir(tmp_path)
    assert attempt(command_of("sdpa"), 200).usable
    assert list(tmp_path.iterdir()) == []
    noisy = "print('warning'); print('trial: [true, \"yes\"]'); print('bye')"
    assert outcome_of(noisy) == Outcome(True, "yes")


@pytest.mark.runs
@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import os; os.abort()", "its process was ended by SIGABRT"),
        ("raise SystemExit(3)", "exit code 3"),
        ("", "exit code 0"),  # without an answer
        ("print('trial: [false, \"ImportError: /home/me/lib.so: no\"]')", "ImportError: ...: no"),
    ],
)
def test_a_trial_that_fails_in_any_way_is_not_usable(code: str, text: str) -> None:
    assert outcome_of(code) == Outcome(False, text)


@pytest.mark.runs
def test_a_trial_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """A compiler that waits for ever must not block doctor or its children."""
    child = tmp_path / "child"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    found = outcome_of(code, seconds=5)
    assert found == Outcome(False, "it gave no answer within 5 s")
    pid = int(child.read_text())
    deadline = time.monotonic() + 60
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return ") Z " not in Path(f"/proc/{pid}/stat").read_text()  # ended, but not yet reaped
