"""The benchmark of single parts, at a tiny size. If it is wrong, we tune code that is not slow, and publish it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from benchmarks import kernels
from benchmarks.attention import Sizes, attention_flops, attention_groups, draw_lengths
from benchmarks.kernels import Preset
from benchmarks.measure import Case, Rates, Stage, Work, take_turns
from benchmarks.optimizer import parameter_shapes
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.attention import KERNELS
from modernbert_train.models.modernbert import ModernBertForMaskedLM

CPU = torch.device("cpu")
MODEL = ModernBertConfig(vocab_size=64, hidden_size=16, num_layers=4, num_heads=2, intermediate_size=8)
TINY = Preset(
    Sizes(256, documents=((60, 128),), heads=(1,), half_window=8, padded_documents=2),
    MODEL,
    {"tiny": MODEL},
    rounds=2,
    compile=False,
    matrix_size=64,
    copied_floats=1 << 12,
)


@pytest.mark.slow
def test_every_part_is_measured_against_a_floor(capsys: pytest.CaptureFixture[str]) -> None:
    """A part that a CPU cannot run is a line with the reason; others have a time, and a floor unless they prepare."""
    _, found = kernels.run(TINY, CPU)
    assert list(dict.fromkeys(line["part"] for line in found)) == [
        "attention", "layer", "head", "optimizer",
    ]  # fmt: skip
    failed = {line["case"]: line["error"] for line in found if "error" in line}
    never = {"varlen", "flash", "flex", "tiles", "cudnn", "torch.linear_cross_entropy"}
    assert {"varlen", "flex", "tiles", "cudnn"} <= set(failed) <= never, failed
    for line in found:
        if "error" not in line:
            assert line["ms"] >= line["min_ms"] > 0
            assert line["stage"] == "prepare" or line["x_floor"] == pytest.approx(line["ms"] / line["floor_ms"])
    assert {line["stage"] for line in found if line.get("case") == "sdpa"} == {"prepare", "forward", "backward"}
    printed = capsys.readouterr().out
    assert all(line["group"] in printed for line in found)
    assert printed.count("it needs a CUDA device") == 3  # of varlen, tiles and cudnn


def test_attention_floor_counts_the_pairs_that_the_kernel_computes() -> None:
    """A floor below the true work sends us after gains that do not exist; one above it hides real ones."""
    lengths = [5, 1, 9]
    everyone = sum(n * n for n in lengths)
    near = sum(abs(q - k) <= 2 for n in lengths for q in range(n) for k in range(n))
    assert attention_flops(lengths, None, heads=3) == pytest.approx(4 * 64 * 3 * everyone)
    assert attention_flops(lengths, 2, heads=3) == pytest.approx(4 * 64 * 3 * near)
    drawn = draw_lengths(98_304, 300, 1024)
    assert sum(drawn) == 98_304 and max(drawn) == 1024 and sorted(drawn)[len(drawn) // 2] == pytest.approx(300, rel=0.2)


def test_the_optimizer_steps_the_weights_of_the_model() -> None:
    """Times for another list of tensors would not be training's."""
    with torch.device("meta"):
        model = ModernBertForMaskedLM(MODEL)
    assert sorted(parameter_shapes(MODEL)) == sorted(tuple(p.shape) for p in model.parameters())


def test_the_padded_form_computes_the_same_attention() -> None:
    """A contender with other work would make the ratio to it meaningless: outputs and gradients must agree."""
    lengths = draw_lengths(256, 60, 128)
    for group in attention_groups(TINY.attention, CPU, torch.float32):
        stages = {case.name: case.build() for case in group.cases if case.name in ("sdpa", "torch, padded")}
        prepare, forward, backward = stages["sdpa"]
        out_TNH = forward.call(prepare.call(None))
        padded_forward, padded_backward = stages["torch, padded"]
        outs = padded_forward.call(None)
        torch.testing.assert_close(unpadded(outs, lengths), out_TNH)
        grads, padded_grads = backward.call(out_TNH), padded_backward.call(outs)
        for index in range(3):
            torch.testing.assert_close(unpadded(padded_grads[index::3], lengths), grads[index])


def unpadded(batches: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    documents = [document.transpose(0, 1) for batch in batches for document in batch]
    return torch.cat([document[:n] for document, n in zip(documents, lengths, strict=True)])


@pytest.mark.runs
def test_a_case_that_fails_is_a_line_and_the_others_continue() -> None:
    """One kernel without memory or a compiler must not cost the whole table, early or late."""
    late = Mock(side_effect=[None, None, None, RuntimeError("out of\nmemory")])

    def case(name: str, call: Callable[[object], object]) -> Case:
        return Case(name, lambda: [Stage("", lambda _: None), Stage("step", call, Work(flops=2e6))])

    cases = [case("never", lambda _: 1 / 0), case("late", late), case("good", lambda _: None)]
    never, found_late, good = take_turns(cases, 3, CPU, Rates(flops=1e9, bytes=1.0))
    assert never.error == "ZeroDivisionError: division by zero"
    assert found_late.error == "RuntimeError: out of" and late.call_count == 4
    assert len(good.ms) == 3 and good.floor_ms == pytest.approx(2.0) and not good.error


def test_figures_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A comparison of two commits reads the selected parts, and the rates behind the floors."""
    monkeypatch.setitem(kernels.PRESETS, "cpu", TINY)
    words = ["--preset", "cpu", "--device", "cpu", "--only", "optimizer", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["kernels.py", *words])
    kernels.main()
    figures = json.loads((tmp_path / "found.json").read_text())
    assert figures["flops_per_second"] > 0 and figures["torch"] == torch.__version__
    assert [line["case"] for line in figures["lines"]][:2] == ["torch AdamW, fused", "StableAdamW (ours)"]
    assert {line["part"] for line in figures["lines"]} == {"optimizer"}


def test_every_kernel_is_in_the_table() -> None:
    """A new kernel must not be left out of what decides between them."""
    (group, *_) = attention_groups(TINY.attention, CPU, torch.float32)
    assert [case.name for case in group.cases] == [*KERNELS, "torch, padded"]
