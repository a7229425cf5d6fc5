"""bf16 on a CPU: a run configured so uses it in every verb, and is otherwise unchanged.

If this breaks, a run on a CPU uses another precision than it reports, or is slower. CPUs without bf16 emulate it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modernbert_train import load_model
from modernbert_train.__main__ import main
from modernbert_train.distributed import bf16
from modernbert_train.errors import ConfigError
from modernbert_train.models.attention import sdpa
from modernbert_train.models.attention.visible import Visible
from modernbert_train.models.layers import EncoderLayer
from tests.support.attention import packed
from tests.support.faulty import Fault, at_fault
from tests.support.jobs import losses
from tests.support.runs import newest, records
from tests.support.tiny_run import TinyRun

BF16 = "compute.precision=bf16"


@pytest.fixture(autouse=True)
def imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "cpu_has_bf16", lambda: True)


@pytest.mark.runs
def test_a_run_and_its_verbs_compute_in_bf16(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Products are rounded, weights and moments are not; vectors of a trained model in bf16 are rounded too."""
    folder = tmp_path / "runs/tiny"
    short = ("phases.long=null", "checkpoint.interval_steps=3", "checkpoint.keep=100")
    words = tiny_run(BF16, *short, "model.attention_out_dropout=0.2")
    assert main(["train", *words]) == 0
    assert ", bf16 autocast over fp32 weights" in capsys.readouterr().out
    steps = records(folder)
    last = newest(folder)
    tensors = last.weights() | last.optimizer()
    assert {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()} == {torch.float32}

    # killed after step 3, and given again
    for path in sorted((folder / "checkpoints").iterdir())[1:]:
        shutil.rmtree(path)
    assert main(["train", *words]) == 0
    assert records(folder) == steps
    torch.testing.assert_close(newest(folder).weights() | newest(folder).optimizer(), tensors, rtol=0, atol=0)

    # compared with fp32: other numbers, the same course
    assert main(["train", *tiny_run("name=exact", *words[2:], "compute.precision=fp32")]) == 0
    exact, rounded = losses(tmp_path / "runs/exact"), losses(folder)
    assert exact[0] != rounded[0] and rounded == pytest.approx(exact, rel=5e-3)

    # measured in either precision
    figures = []
    for precision in ("bf16", "fp32"):
        capsys.readouterr()
        assert main(["eval", str(folder / "config.yaml"), f"compute.precision={precision}"]) == 0
        figures.append(capsys.readouterr().out)
    assert figures[0] != figures[1]

    model = load_model(folder)
    whole, half = model.embed(["w1 w2 w3 w4"]), model.embed(["w1 w2 w3 w4"], precision="bf16")
    assert half.dtype == torch.float32 and not torch.equal(half, whole)
    torch.testing.assert_close(half, whole, rtol=0.05, atol=0.05)


@pytest.mark.runs
def test_a_residual_in_bf16_is_one_and_the_model_as_ever(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Only the residual between layers: weights, states and exports look the same to other programs."""
    short = ("phases.long=null", "phases.short.tokens=2000", "data.validation=null")
    words = tiny_run(BF16, "compute.residual_precision=bf16", *short)
    seen: set[tuple[torch.dtype, torch.dtype]] = set()
    forward = EncoderLayer.forward

    def noted(layer: EncoderLayer, *args: Any) -> tuple[Tensor, Tensor]:
        found = forward(layer, *args)
        seen.add((args[0].dtype, found[0].dtype))
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EncoderLayer, "forward", noted)
        assert main(["train", *words]) == 0
        assert seen == {(torch.bfloat16, torch.bfloat16)}
        seen.clear()
        assert main(["train", *tiny_run("name=plain", *words[1:], "compute.residual_precision=fp32")]) == 0
        assert seen == {(torch.float32, torch.float32)}
    folder = tmp_path / "runs/tiny"
    assert losses(folder) != losses(tmp_path / "runs/plain")
    assert losses(folder) == pytest.approx(losses(tmp_path / "runs/plain"), rel=5e-3)
    assert {tensor.dtype for tensor in newest(folder).weights().values()} == {torch.float32}
    for config, model in ((f"{tmp_path}/hf", "tiny"), (f"{tmp_path}/plain", "plain")):
        assert main(["export", str(tmp_path / "runs" / model), "--out", config]) == 0
    one, other = ((tmp_path / name / "config.json").read_text() for name in ("hf", "plain"))
    assert one == other


@pytest.mark.parametrize("lengths", [(5, 9, 1), (400, 300), (800,)])
@pytest.mark.parametrize("window", [True, False])
def test_attention_is_in_fp32_where_that_is_faster(lengths: tuple[int, ...], window: bool) -> None:
    """Autocast would use bf16 within the kernel, and its backward pass would be slower than in fp32."""
    batch = packed([*lengths], 0)
    layout = sdpa.prepare(batch, Visible.around(4))
    x = torch.randn(sum(lengths), 3, 2, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out_TNH = sdpa.attend(*x.unbind(1), layout, window)
    exact_TNH = sdpa.attend(*x.float().unbind(1), layout, window).bfloat16()
    in_fp32 = window or lengths != (800,)
    assert out_TNH.dtype == torch.bfloat16 and torch.equal(out_TNH, exact_TNH) == in_fp32


@pytest.mark.runs
def test_a_fault_names_the_precision(tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user who sees a loss diverge would look for the cause in the text, and never try fp32."""
    short = ("phases.long=null", "phases.short.tokens=1500", "data.validation=null", "checkpoint.interval_steps=1")
    words = tiny_run(BF16, *short)
    with at_fault(Fault("forward", steps=(3,), microbatch=0)):
        assert main(["train", *words, "stability.non_finite=stop"]) != 0
    told = capsys.readouterr().err
    folder = tmp_path / "runs/tiny"
    assert "not finite, loss nan, computed in bf16" in told
    assert f"another run with start.checkpoint={folder} and compute.precision=fp32." in told
    # the remedy works
    remedy = (f"start.checkpoint={folder}", "start.clock=keep", "compute.precision=fp32", "name=in-fp32")
    assert main(["train", *(word for word in words if word != BF16), *remedy]) == 0


def test_what_a_processor_lacks_is_refused(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    residual = ("compute.device=auto", "compute.residual_precision=bf16")
    if not torch.cuda.is_available():
        assert main(["train", *tiny_run(*residual)]) == 78
        assert "products are in fp32 here, by compute.precision=auto. Set" in capsys.readouterr().err
    monkeypatch.setattr(bf16, "cpu_has_bf16", lambda: False)
    assert main(["train", *tiny_run(BF16)]) == 78
    said = capsys.readouterr().err
    assert "compute.precision=bf16: this processor lacks bf16, and torch would emulate it, slowly. Set" in said
    with pytest.raises(ConfigError, match="precision=bf16: this processor lacks bf16"):
        bf16.takes_bf16("bf16", "precision", on_gpu=False)
