"""DistilBERT against transformers': what is trained here must be what users load there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from benchmarks.batches import all_logits, mean_loss
from modernbert_train.config.bert import DistilBertConfig
from modernbert_train.config.objective import MaskedLmConfig
from modernbert_train.config.schema import ComputeConfig
from modernbert_train.errors import DataError
from modernbert_train.models.build import build_model
from modernbert_train.models.masked_lm import ForMaskedLM
from modernbert_train.weights.formats import distilbert, read
from modernbert_train.weights.formats.tensors import from_hf, to_hf
from tests.models.test_bert import fill, padded, rows_of

Make = Callable[..., Any]
LENGTHS = [300, 1, 64, 128, 129, 65]
STARTS = [0, 300, 352, 416, 544, 704]
PAD = 1
SMALL = DistilBertConfig(
    vocab_size=160, hidden_size=64, num_layers=3, num_heads=2, intermediate_size=96, max_positions=400, init_std=0.1
)
# the config.json of distilbert-base-uncased, without what describes the file
PUBLISHED: dict[str, Any] = {
    "activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1, "dim": 768,
    "dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02, "max_position_embeddings": 512,
    "model_type": "distilbert", "n_heads": 12, "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True, "vocab_size": 30522,
}  # fmt: skip


def build(config: DistilBertConfig) -> ForMaskedLM:
    model = build_model(config, MaskedLmConfig(), ComputeConfig(attention="sdpa"))
    fill(model, config)  # type: ignore[arg-type]
    assert isinstance(model, ForMaskedLM)
    return model.eval()


def twin_of(model: ForMaskedLM) -> Any:
    """transformers' model with the same weights, its configuration written by hand."""
    config = model.config
    settings = transformers.DistilBertConfig(
        vocab_size=config.vocab_size,
        dim=config.hidden_size,
        n_layers=config.num_layers,
        n_heads=config.num_heads,
        hidden_dim=config.intermediate_size,
        max_position_embeddings=config.max_positions,
        activation={"gelu": "gelu", "gelu_tanh": "gelu_new"}[config.activation],
        pad_token_id=PAD,
        attn_implementation="eager",
    )
    twin = transformers.DistilBertForMaskedLM(settings)
    found = twin.load_state_dict(to_hf(distilbert, dict(model.state_dict()), config), strict=False)
    assert found.missing_keys in ([], ["vocab_projector.weight"]) and not found.unexpected_keys
    return twin.eval()


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, activation="gelu_tanh")], ids=["gelu", "gelu_tanh"])
def test_packed_rows_equal_transformers_sequence_by_sequence(
    sequences: Make, pack: Make, config: DistilBertConfig
) -> None:
    """Hidden states, logits, loss, and all gradients of masked-language modelling; weights both ways."""
    model = build(config)
    twin = twin_of(model)
    apart = sequences(LENGTHS)
    batch = pack(rows_of(apart), row_tokens=352)
    mask = padded([torch.ones(len(ids)) for ids in apart], 0)
    out = twin(input_ids=padded(apart, PAD), attention_mask=mask, output_hidden_states=True)
    hidden_TD = model.encode(batch.packed)
    for index, start in enumerate(STARTS):
        expected = out.hidden_states[-1][index, : LENGTHS[index]]
        torch.testing.assert_close(hidden_TD[start : start + len(expected)], expected, atol=1e-5, rtol=0)
    logits = torch.cat([out.logits[index, :length:3] for index, length in enumerate(LENGTHS)])
    loss = F.cross_entropy(logits, torch.cat([ids[::3] for ids in apart]))
    chunked = mean_loss(model, batch)
    torch.testing.assert_close(all_logits(model, batch)[: batch.counts["mlm"]], logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(chunked, loss, atol=1e-6, rtol=0)

    chunked.backward()
    loss.backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    translated = to_hf(distilbert, ours, config)
    theirs = {name: parameter.grad for name, parameter in twin.named_parameters()}
    assert theirs.keys() == translated.keys()
    for name, expected in theirs.items():
        floor = 1e-5 if name.endswith("k_lin.bias") else 0.0  # it shifts all scores of a query alike
        assert (translated[name] - expected).norm() <= 1e-4 * expected.norm() + floor, name

    weights = model.state_dict()
    back = from_hf(distilbert, twin.state_dict(), config, "file")
    assert {*back} == {*weights} and all(torch.equal(back[name], tensor) for name, tensor in weights.items())


def test_the_published_configuration_is_read() -> None:
    """And every key of it that this encoder does not know otherwise is refused."""
    said = read(PUBLISHED, "there")
    assert said.model == DistilBertConfig() and (said.order, said.max_tokens) == ("all", 512)
    for wrong in ({"sinusoidal_pos_embds": True}, {"activation": "relu"}, {"pruned_heads": {"0": [1]}}, {"n_heads": 7}):
        with pytest.raises(DataError, match=f"there: .*{next(iter(wrong))}="):
            read(PUBLISHED | wrong, "there")
