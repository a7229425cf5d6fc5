"""The banner of a run. If it is wrong, the wrong run trains for a week."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from modernbert_train.config.load import load_run
from modernbert_train.config.schema import RunConfig, StreamConfig
from modernbert_train.data.dataset_card import read_card
from modernbert_train.data.facts import read_facts
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.transport import Transport
from modernbert_train.models.build import build_model
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.report import banner as banner_module
from modernbert_train.report.banner import banner
from tests.support.tiny_run import TinyRun


@pytest.fixture
def config(tiny_run: TinyRun) -> RunConfig:
    return load_run([tiny_run()[0]])


def said(config: RunConfig, ranks: int = 1, ranks_per_node: int = 1) -> list[str]:
    return banner(
        config,
        origin="step-00000004 (1,273 tokens)",
        facts=read_facts(config.data),
        compute=Compute(torch.device("cpu"), "fp32"),
        ranks=ranks,
        ranks_per_node=ranks_per_node,
    ).splitlines()


def test_a_torch_that_nobody_has_tried_is_named(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and defaults may differ in an untested torch; the line helps to find the reason later."""
    assert not [line for line in said(config) if line.startswith("  torch ")]
    monkeypatch.setattr(torch, "__version__", "2.16.1+cu132")
    named = [line for line in said(config) if line.startswith("  torch ")]
    assert named == ["  torch   torch 2.16.1+cu132 is newer than 2.15, the newest that this program was tested with"]


def test_it_says_what_will_be_trained(config: RunConfig, tiny_data: Path) -> None:
    """Parameters are counted on the real model; the hash is the beginning of the shards' hash."""
    lines = said(config)
    parameters = sum(p.numel() for p in ModernBertForMaskedLM(config.model).parameters())
    assert lines[0].startswith(f"tiny: {parameters:,} parameters, 6,000 tokens, 14 steps, ")
    assert [line.split()[:4] for line in lines[3:5]] == [["short", "4,000", "64", "4"], ["long", "2,000", "128", "4"]]
    text = "\n".join(lines)
    assert f"hash {read_card(tiny_data / 'train').index_sha256[:12]}" in text and "60 documents" in text
    assert "  on      1 x cpu (" in text and "), fp32\n" in text
    assert "  kernels sdpa, not compiled" in text
    assert "  from    step-00000004 (1,273 tokens)" in text
    assert f"  folder  {config.folder}" in text
    assert "  saves   at the end of each phase (kept); otherwise the newest 3 are kept" in text


def test_it_says_what_another_encoder_is(tiny_run: TinyRun, tmp_path: Path) -> None:
    run = yaml.safe_load(Path(tiny_run()[0]).read_text())
    del run["phases"]["long"]["model"]
    run["model"] = {"name": "bert", "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "max_positions": 128}
    run["objective"] = {"name": "sop"}
    file = tmp_path / "bert.yaml"
    file.write_text(yaml.safe_dump(run, sort_keys=False))
    config = load_run([file])
    lines = said(config)
    parameters = sum(p.numel() for p in build_model(config.model, config.objective).parameters())
    assert lines[0].startswith(f"tiny: {parameters:,} parameters, 6,000 tokens, ")
    assert lines[1] == "  model   12 layers (12 global) of width 32; 976,704 of the parameters are embeddings"
    assert "  kernels sdpa, not compiled" in lines


@pytest.mark.runs
def test_however_much_there_is_forty_lines_are_enough(config: RunConfig, tiny_data: Path) -> None:
    """The errors of a start must still be on the screen."""
    phases = {f"phase{number}": config.phases["long"] for number in range(30)}
    streams = {f"s{number:02}": StreamConfig(path=str(tiny_data / "train")) for number in range(40)}
    many = replace(config, phases=phases, data=replace(config.data, train=None, streams=streams))
    lines = said(many, ranks=16, ranks_per_node=8)
    assert len(lines) <= 40
    text = "\n".join(lines)
    assert "and 20 more phases" in text and "and 28 more streams" in text and "s11: " in text
    assert "  on      16 x cpu (" in text and "on 2 nodes, ddp" in text


@pytest.mark.parametrize(
    ("device", "ranks", "lines"),
    [("cuda", 16, ["  network TCP over eth0"]), ("cuda", 8, []), ("cpu", 16, [])],
)
def test_it_names_the_network_between_machines(
    monkeypatch: pytest.MonkeyPatch, device: str, ranks: int, lines: list[str]
) -> None:
    """NCCL falls back to TCP silently."""
    monkeypatch.setattr(banner_module, "find_transport", lambda environment: Transport("TCP over eth0"))
    assert banner_module._network(torch.device(device), ranks, 8) == lines
