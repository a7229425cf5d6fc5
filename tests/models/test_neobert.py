"""NeoBERT's files read and written bit by bit; test_parity.py compares its results with the paper, written out.

If this breaks, the released model computes something else here, or an export computes something else in its own code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from modernbert_train.config.schema import NeoBertConfig
from modernbert_train.models.build import build_model, shapes_of
from modernbert_train.models.init import count_parameters, initialize
from modernbert_train.plan import parameters as planned
from modernbert_train.weights.formats import format_of, neobert
from modernbert_train.weights.formats.sentence_encoder import SentenceEncoder
from modernbert_train.weights.formats.tensors import from_hf, to_hf
from tests.support.encoders import NEOBERT, VOCABULARY, build, objective_of, twin_of

# config.json of chandar-lab/NeoBERT
RELEASED: dict[str, Any] = {
    "architectures": ["NeoBERTLMHead"],
    "auto_map": {
        "AutoConfig": "model.NeoBERTConfig", "AutoModel": "model.NeoBERT",
        "AutoModelForMaskedLM": "model.NeoBERTLMHead",
        "AutoModelForSequenceClassification": "model.NeoBERTForSequenceClassification",
    },
    "classifier_init_range": 0.02, "decoder_init_range": 0.02, "dim_head": 64, "embedding_init_range": 0.02,
    "hidden_size": 768, "intermediate_size": 3072,
    "kwargs": {
        "classifier_init_range": 0.02, "pretrained_model_name_or_path": "google-bert/bert-base-uncased",
        "trust_remote_code": True,
    },
    "max_length": 4096, "model_type": "neobert", "norm_eps": 1e-05, "num_attention_heads": 12,
    "num_hidden_layers": 28, "pad_token_id": 0, "pretrained_model_name_or_path": "google-bert/bert-base-uncased",
    "torch_dtype": "float32", "transformers_version": "4.48.2", "trust_remote_code": True, "vocab_size": 30522,
}  # fmt: skip


def test_the_released_model_is_read_and_written_bit_by_bit() -> None:
    """Its configuration, the shapes of its files, and weights under its names."""
    found = neobert.FORMAT.read(RELEASED, "config.json")
    assert (found.model, found.max_tokens, found.order) == (NeoBertConfig(), 4096, "all")
    # 28 x (2304 x 768 + 768^2 + 4096 x 768 + 768 x 2048 + 2 x 768) + 2 x 30522 x 768 + 30522 + 768
    assert planned.count_parameters(found.model).total == 245_136_954
    said = neobert.FORMAT.describe(found.model, "all", ("model",), 4096, VOCABULARY)
    assert {key: said[key] for key in said.keys() & RELEASED.keys() - {"auto_map", "pad_token_id"}} == {
        key: RELEASED[key] for key in said.keys() & RELEASED.keys() - {"auto_map", "pad_token_id"}
    }
    assert said["auto_map"]["AutoModel"] == "chandar-lab/NeoBERT--model.NeoBERT"
    shapes = shapes_of(found.model, objective_of(found.model))
    names = {name: shape for ours, shape in shapes.items() for name in neobert.FORMAT.theirs(ours, found.model)}
    assert len(names) == 172
    layer = "model.transformer_encoder.0"
    assert names[f"{layer}.qkv.weight"] == (2304, 768) and names[f"{layer}.ffn.w12.weight"] == (4096, 768)
    assert names["decoder.bias"] == (30522,) and names[f"{layer}.ffn.w3.weight"] == (768, 2048)

    stored = {name: tensor.clone() for name, tensor in twin_of(build(NEOBERT)).state_dict().items()}
    weights = from_hf(neobert.FORMAT, stored, NEOBERT, "file")
    assert not torch.equal(weights["decoder.weight"], weights["model.embeddings.tok_embeddings.weight"])
    back = to_hf(neobert.FORMAT, weights, NEOBERT)
    assert back.keys() == stored.keys() and all(torch.equal(back[name], stored[name]) for name in stored)


def test_an_encoder_for_vectors_is_the_bare_class_of_its_code() -> None:
    """As AutoModel opens it; and it is read again."""
    raw = SentenceEncoder(neobert.FORMAT).describe(NEOBERT, "all", ("model",), 96, VOCABULARY)
    assert raw["architectures"] == ["NeoBERT"] and raw["auto_map"]["AutoModel"].endswith(".NeoBERT")
    assert replace(format_of(raw, "file").read(raw, "file").model, init_cutoff=NEOBERT.init_cutoff) == NEOBERT


@pytest.mark.runs
def test_fresh_weights_are_uniform_as_published() -> None:
    """Within 0.02 of zero and as often at the edge as in the middle; the decoder's bias is zero."""
    config = NeoBertConfig(num_layers=1, hidden_size=64, num_heads=1, intermediate_size=64)
    model = build_model(config, objective_of(config))
    initialize(model, config, seed=1)
    assert count_parameters(model) == planned.count_parameters(config).total
    table = model.get_parameter("model.embeddings.tok_embeddings.weight").flatten()
    counts = torch.histc(table, bins=10, min=-0.02, max=0.02)
    assert counts.sum() == len(table)
    torch.testing.assert_close(counts / len(table), torch.full((10,), 0.1), atol=1e-3, rtol=0)
    assert not model.get_parameter("decoder.bias").any()


def test_a_width_that_its_code_would_round_is_refused() -> None:
    """An export of it would not load."""
    (line,) = replace(NEOBERT, intermediate_size=60).mistakes()
    assert line.startswith("model.intermediate_size=60: the published code rounds it to a multiple of 8")
    assert not [*NEOBERT.mistakes()]
