"""`pack` and the collator for transformers, and the page that shows them.

If this breaks, users of the collator train on documents that see each other, without a warning.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

from modernbert_train.collate import PackingCollator, pack
from tests.support.pages import blocks
from tests.support.paths import ROOT

PAD = 1
LENGTHS = [40, 7, 64, 1, 33, 20, 58, 12, 3]


@pytest.fixture(scope="module")
def model() -> ModernBertForMaskedLM:
    """Three local layers with a window of 8 on each side, one global; weights large enough for attention to matter."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    special = {"pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    config = ModernBertConfig(**sizes, **special, intermediate_size=48, local_attention=16, attn_implementation="sdpa")
    model = ModernBertForMaskedLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.2)
    return model


@pytest.fixture
def examples() -> list[dict[str, Any]]:
    draw = np.random.default_rng(2)
    return [{"input_ids": draw.integers(4, 96, length).tolist()} for length in LENGTHS]


def places(batch: dict[str, Any], examples: list[dict[str, Any]]) -> list[tuple[int, slice]]:
    """Row and span of each example, found again by its tokens."""
    found = []
    for example in examples:
        ids = example["input_ids"]
        hits = [
            (row, slice(at, at + len(ids)))
            for row, line in enumerate(batch["input_ids"].tolist())
            for at in range(len(line) - len(ids) + 1)
            if line[at : at + len(ids)] == ids and batch["position_ids"][row, at] == 0
        ]
        found.append(hits[0])
    return found


def test_pack_takes_ids_or_lengths_and_places_each_once() -> None:
    lengths = [int(n) for n in np.random.default_rng(1).integers(1, 100, 200)]
    rows = pack(lengths, 128)
    assert sorted(index for row in rows for index in row) == list(range(200))
    assert all(sum(lengths[index] for index in row) <= 128 for row in rows)
    assert sum(lengths) / (128 * len(rows)) > 0.95
    assert pack([[7] * n for n in lengths], 128) == rows == pack(np.array(lengths), 128)  # type: ignore[arg-type]


def test_pack_refuses_what_no_row_can_hold() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 129 tokens, a row holds 1 to 128"):
        pack([5, 129], 128)
    with pytest.raises(ValueError, match="sequence 0 has 0 tokens"):
        pack([[]], 128)


def test_packed_documents_have_the_logits_they_have_alone(
    model: ModernBertForMaskedLM, examples: list[dict[str, Any]]
) -> None:
    batch = PackingCollator(row_tokens=80, pad_id=PAD, local_attention=16)(examples)
    assert "labels" not in batch
    assert batch["input_ids"].shape == (3, 80)  # 238 tokens
    with torch.no_grad():
        packed = model(**batch).logits
        without_masks = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        worst = 0.0
        for (row, span), example in zip(places(batch, examples), examples, strict=True):
            alone = model(input_ids=torch.tensor([example["input_ids"]])).logits[0]
            torch.testing.assert_close(packed[row, span], alone, rtol=1e-5, atol=1e-5)
            worst = max(worst, float((without_masks[row, span] - alone).abs().max()))
    assert worst > 0.1  # the effect of positions alone, without masks
    assert not packed.isnan().any()


def test_labels_of_examples_follow_their_tokens(examples: list[dict[str, Any]]) -> None:
    labelled = [{**example, "labels": [10 * n for n in example["input_ids"]]} for example in examples]
    batch = PackingCollator(row_tokens=80, pad_id=PAD)(labelled)
    pads = batch["input_ids"] == PAD
    assert (batch["labels"][pads] == -100).all()
    assert (batch["labels"][~pads] == 10 * batch["input_ids"][~pads]).all()


def test_masked_tokens_are_those_of_the_given_function(examples: list[dict[str, Any]]) -> None:
    def mask_first(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.full_like(ids, -100)
        labels[:, 0] = ids[:, 0]
        return ids.index_fill(1, torch.tensor([0]), 4), labels

    plain = PackingCollator(row_tokens=80, pad_id=PAD)(examples)
    batch = PackingCollator(row_tokens=80, pad_id=PAD, mask_tokens=mask_first)(examples)
    assert (batch["input_ids"][:, 0] == 4).all() and (batch["labels"][:, 0] == plain["input_ids"][:, 0]).all()
    assert (batch["input_ids"][:, 1:] == plain["input_ids"][:, 1:]).all() and (batch["labels"][:, 1:] == -100).all()


@pytest.mark.runs
def test_the_page_works_as_it_stands(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/packing.md, block by block. The one with Trainer is left out where accelerate is not installed."""
    shutil.copytree(tiny_data / "tokenizer", tmp_path / "data/quickstart/tokenizer")
    monkeypatch.chdir(tmp_path)
    shown = blocks(ROOT / "docs/packing.md", "python")
    assert len(shown) == 3 and "Trainer(" in shown[2]
    names: dict[str, Any] = {}
    for block in shown if importlib.util.find_spec("accelerate") else shown[:2]:
        exec(compile(block, "docs/packing.md", "exec"), names)
    assert torch.isfinite(names["loss"]) and len(names["batch"]["input_ids"]) > 1
