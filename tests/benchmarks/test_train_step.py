"""The benchmark of training steps, at a tiny size. If it lies, so does every number that we publish from it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.nn.functional as F
import transformers
from torch import Tensor

from benchmarks.contenders import REFERENCES, Reference, Theirs, _documents
from benchmarks.corpus import write_corpus
from benchmarks.train_step import GPU, PRESETS, Case, as_trained, report, run, run_config, settings_of
from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.auto import open_settings
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.data.facts import read_facts
from modernbert_train.models.init import initialize
from modernbert_train.plan.speed_settings import RunGpus, close_settings
from modernbert_train.train.build_trainer import build_data, build_model

TINY = Case(
    ModernBertConfig(
        vocab_size=64, hidden_size=16, num_layers=4, num_heads=2, intermediate_size=8, attention_out_dropout=0.0
    ),
    row_tokens=128,
    microbatch_tokens=256,
    batch_tokens=512,
    rounds=2,
    steps=3,
    warm_up=1,
    reference_documents=3,
    median_tokens=40,
)


@pytest.mark.slow
def test_every_contender_trains_on_the_same_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run itself refuses contenders whose first losses differ; here it must pass, and measure every part."""
    write_corpus(tmp_path, 64, tokens=4000, median_tokens=40, longest=300)
    contenders = run(TINY, torch.device("cpu"), tmp_path, workers=0)
    padded = "transformers, padded, sdpa, eager"
    names = ["ours", "ours, through train", padded, f"{padded}, sparse_prediction"]
    assert list(contenders) == names
    for name, contender in contenders.items():
        assert len(contender.rates) == len(contender.flop_rates) == 2 and min(contender.rates) > 0
        through = ["data wait", "host between update and forward", "all"]
        parts = {"ours": ["data wait", "forward", "backward", "optimizer"], names[1]: through}
        assert list(contender.seconds) == parts.get(name, ["forward", "backward", "optimizer"])
    assert [len(times) for times in contenders["ours"].seconds.values()] == [6] * 4
    # FLOPs of a token for documents of some 40 tokens, about the same for every contender
    per_token = [median(each.flop_rates) / median(each.rates) for each in contenders.values()]
    assert max(per_token) < 1.2 * min(per_token)

    lines = report("tiny", TINY, contenders, {"of matmul": 1e12})
    assert [line["contender"] for line in lines] == names
    assert lines[0]["ours_is"] == 1.0 and lines[2]["ours_is"] > 0
    assert "rows of 128, microbatches of 256, steps of 512 tokens" in capsys.readouterr().out


def test_transformers_gets_the_documents_that_we_pack(tmp_path: Path) -> None:
    """If it got other tokens or labels, or padding, both would do different work."""
    write_corpus(tmp_path, 64, tokens=4000, median_tokens=40, longest=300)
    config = run_config(TINY, tmp_path, tmp_path, torch.device("cpu"), workers=0)
    batch = next(iter(build_data(config, read_facts(config.data)).loader(0, 1)))
    documents = list(_documents(batch))
    assert [len(ids) for ids, _ in documents] == [chunk.length + 2 for row in batch.rows for chunk in row]
    assert sum(len(ids) for ids, _ in documents) == sum(part.num_tokens for part in batch.microbatches)
    predicted = sum(int((labels != IGNORED_LABEL).sum()) for _, labels in documents)
    assert predicted == sum(part.counts["mlm"] for part in batch.microbatches) > 0
    assert all(int(ids[0]) == 1 and int(ids[-1]) == 2 for ids, _ in documents)  # [CLS] and [SEP] are never predicted


def test_a_case_leaves_speed_to_the_product(tmp_path: Path) -> None:
    """An open `fused` was taken for false here, and the figure that was published was no run's."""
    gpus = RunGpus("NVIDIA H200", 150 << 30, 1, True, ())
    for name, case in PRESETS["gpu"].items():
        config = run_config(case, tmp_path, tmp_path, torch.device("cpu"), workers=4)
        left = {*open_settings(config)}
        assert {"compute.compile", "optim.fused", "compute.attention"} <= left, name
        taken = close_settings(config, gpus=gpus, fresh=True).config
        assert taken.compute.compile is True and taken.optim.fused is True
        assert taken.model.attention_out_dropout == ModernBertConfig().attention_out_dropout > 0
    on_cpu = as_trained(run_config(GPU, tmp_path, tmp_path, torch.device("cpu"), workers=0), torch.device("cpu"))
    assert {"compute.compile=false", "optim.fused=false", "model.attention_out_dropout=0.1"} <= {*settings_of(on_cpu)}


def test_packed_documents_are_the_same_work(tmp_path: Path) -> None:
    """Flash attention is not here: an attention with its arguments takes its place, one document after the other."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, cu_seq_lens_q: Tensor, **more: Any
    ) -> tuple[Tensor, None]:
        assert mask is None and torch.equal(cu_seq_lens_q, more["cu_seq_lens_k"])
        assert more["max_length_q"] == more["max_length_k"] == int(cu_seq_lens_q.diff().max())
        parts = []
        for start, end in zip(cu_seq_lens_q[:-1].tolist(), cu_seq_lens_q[1:].tolist(), strict=True):
            q, k, v = (each[:, :, start:end] for each in (query, key, value))
            place = torch.arange(end - start)
            reach = end if more["sliding_window"] is None else more["sliding_window"] - 1  # as transformers calls it
            seen = (place[:, None] - place).abs() <= reach
            parts.append(F.scaled_dot_product_attention(q, k, v, seen))
        return torch.cat(parts, dim=2).transpose(1, 2), None

    transformers.AttentionInterface.register("one_by_one", attend)
    write_corpus(tmp_path, 64, tokens=4000, median_tokens=40, longest=300)
    config = run_config(TINY, tmp_path, tmp_path, torch.device("cpu"), workers=0)
    batch = next(iter(build_data(config, read_facts(config.data)).loader(0, 1)))
    model = build_model(config, sharded=False)
    initialize(model, TINY.model, config.seed)
    packed = Reference(sparse=True, attention="one_by_one", packed=True)
    assert replace(packed, attention="flash_attention_2") == REFERENCES["flash"]
    losses = [
        Theirs(model, config, torch.device("cpu"), 3, reference).first_loss(batch)
        for reference in (REFERENCES["plain"], packed)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_transformers_is_compiled_if_configured(tmp_path: Path) -> None:
    """Its first losses are compared in `run`; here the compiled model must take its steps."""
    write_corpus(tmp_path, 64, tokens=4000, median_tokens=40, longest=300)
    case = replace(TINY, references=("compiled",), rounds=1, steps=1)
    torch._dynamo.utils.counters.clear()
    contenders = run(case, torch.device("cpu"), tmp_path, workers=0, with_trainer=False)
    assert list(contenders) == ["ours", "transformers, padded, sdpa, compiled, sparse_prediction"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert all(len(each.rates) == 1 for each in contenders.values())
