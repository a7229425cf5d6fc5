"""What is fast must compute the same. If this lets something pass, `tune` turns on a switch that ruins a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modernbert_train.config.load import load_run, to_yaml
from modernbert_train.config.schema import RunConfig
from modernbert_train.distributed.compute import Compute
from modernbert_train.models.attention import sdpa
from modernbert_train.train.tune import parity
from modernbert_train.train.tune.candidates import Case, candidate_run
from modernbert_train.train.tune.loop import BareLoop
from modernbert_train.train.tune.parity import check_parity, verdict
from modernbert_train.train.tune.process import Failure, Process, command_of
from modernbert_train.train.tune.tuning import NEEDS
from tests.conftest import TinyRun
from tests.train.tune.test_candidates import CPU

HERE = Compute(torch.device("cpu"), "fp32")


@pytest.fixture
def candidate(tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """With blocks of 32, which the plain form does not have."""
    monkeypatch.setattr(parity, "STEPS", 3)
    case = Case(load_run([tiny_run()[0]]), "short", CPU)
    return candidate_run(case, case.plain | {"compute.query_block": 32}, rows=2)


@pytest.mark.runs
def test_another_block_of_queries_computes_the_same(candidate: RunConfig) -> None:
    equal, text = check_parity(candidate, HERE)
    assert equal and text.startswith("states within "), text


@pytest.mark.runs
def test_a_kernel_that_sees_too_much_is_found(candidate: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sdpa.attend

    def leaking(q: Any, k: Any, v: Any, layout: Any, window: bool, bias: Any = None) -> Any:
        out = real(q, k, v, layout, window, bias)
        return out + 0.1 * v.mean(0) if layout.visible.block == 32 else out

    monkeypatch.setattr(sdpa, "attend", leaking)
    equal, text = check_parity(candidate, HERE)
    assert not equal and " off by " in text, text


@pytest.mark.runs
def test_a_wrong_backward_pass_is_found(candidate: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sdpa.attend

    def forgetful(q: Any, k: Any, v: Any, layout: Any, window: bool, bias: Any = None) -> Any:
        return real(q, k.detach() if layout.visible.block == 32 else k, v, layout, window, bias)

    monkeypatch.setattr(sdpa, "attend", forgetful)
    equal, text = check_parity(candidate, HERE)
    assert not equal and text.startswith("gradients off by "), text


@pytest.mark.runs
def test_an_optimizer_that_goes_astray_is_found(candidate: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """States and gradients are those of the first batch; only the curve tells."""
    real: Callable[..., Any] = BareLoop.step

    def astray(self: BareLoop, *args: Any) -> Any:
        loss = real(self, *args)
        if self.config.compute.query_block == 32:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1.1)
        return loss

    monkeypatch.setattr(BareLoop, "step", astray)
    equal, text = check_parity(candidate, HERE)
    assert not equal and text.startswith("loss off by "), text


@pytest.mark.slow
def test_without_a_compiler_the_candidate_is_named_and_nothing_else_ends(
    candidate: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine as many are: torch is there, and g++ is not. The real worker says so, and goes on to serve."""
    file = tmp_path / "candidate.yaml"
    file.write_text(to_yaml(replace(candidate, compute=replace(candidate.compute, compile=True))))
    bare = {"CXX": "no-such-compiler", "PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    for name, value in bare.items():
        monkeypatch.setenv(name, value)
    process = Process(command_of(file), tmp_path / "log")
    try:
        with pytest.raises(Failure, match="Compiler") as found:
            process.ask(120, do="parity")
        assert any(each in found.value.text for each in NEEDS)
        facts = process.ask(120, do="look")
        assert facts["on_gpu"] is False and facts["kernels"]["sdpa"] is None and facts["fit"]["row_tokens"] == 64
    finally:
        process.close()


def test_rounding_is_measured_by_the_plain_form() -> None:
    """In bf16 what is off by 3 % is right where the plain form is off by as much, and wrong where it is not."""
    errors = {"states": 0.03, "gradients": 0.05, "loss": 1e-4}
    assert verdict(errors, {"states": 0.025, "gradients": 0.04, "loss": 1e-4})[0]
    equal, text = verdict(errors, dict.fromkeys(errors, 0.0))
    assert not equal and "states off by 3.0e-02, where 2.0e-03 is rounding" in text
    assert not verdict(errors | {"loss": float("nan")}, dict.fromkeys(errors, 1.0))[0]


@pytest.mark.runs
def test_nothing_is_dropped_while_it_is_compared(candidate: RunConfig) -> None:
    dropping = replace(candidate, model=replace(candidate.model, attention_out_dropout=0.3))
    assert check_parity(dropping, HERE)[0]
