"""DeBERTa as transformers writes it, and as it was released. A single lost bit makes another model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.batches import lay_out
from modernbert_train.config.schema import ComputeConfig, MaskedLmConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.masked_lm import ForMaskedLM
from modernbert_train.models.replaced import Discriminator
from modernbert_train.weights.formats import deberta, export_format, read
from modernbert_train.weights.formats.tensors import from_hf, to_hf
from tests.support.encoders import DEBERTA, fill
from tests.weights.formats.models import assert_equal, describe


@torch.no_grad()
def test_the_head_of_released_files_is_read_as_transformers_does(tmp_path: Path) -> None:
    """With legacy=False, as `save_pretrained` stores it; otherwise transformers draws a new head."""
    torch.manual_seed(3)
    settings = transformers.DebertaV2Config(**describe(DEBERTA) | {"legacy": False, "initializer_range": 0.3})
    twin = transformers.DebertaV2ForMaskedLM(settings).eval()
    twin.save_pretrained(tmp_path)
    said = read(json.loads((tmp_path / "config.json").read_text()), "config.json")
    model = build_model(said.model, MaskedLmConfig(), ComputeConfig(attention="sdpa"))
    assert isinstance(model, ForMaskedLM)
    stored = load_file(tmp_path / "model.safetensors")
    model.load_state_dict(from_hf(export_format(said.model, "all"), stored, said.model, "file"))
    ids_T = torch.arange(5, 35)
    logits_TV = model.eval().logits(model.encode(lay_out(ids_T, [0, 30])), torch.arange(30))
    torch.testing.assert_close(logits_TV, twin(ids_T[None]).logits[0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_head_that_detects_replaced_tokens_is_v3s() -> None:
    """With the names of the released files, and computed the same: the first token's state is added, then norm, dense
    matrix, GELU and one logit."""
    encoder = build_model(DEBERTA, MaskedLmConfig()).model
    model = Discriminator(encoder).eval()  # type: ignore[arg-type]
    fill(model, DEBERTA)
    weights = model.state_dict()
    there = to_hf(deberta.FORMAT, weights, DEBERTA)
    assert_equal(from_hf(deberta.FORMAT, there, DEBERTA, "file"), weights)
    assert deberta.FORMAT.read(describe(DEBERTA, modules=("model", "token_head")), "file").detects
    packed = lay_out(torch.arange(5, 35), [0, 20, 30, 30])
    hidden_TD = model.encode(packed)
    logits_T = model.logits(model.model.token_states(hidden_TD, packed))

    def of(name: str) -> Tensor:
        return there[f"mask_predictions.{name}"]

    for own in (slice(0, 20), slice(20, 30)):
        mixed = hidden_TD[own] + hidden_TD[own.start]
        mixed = torch.nn.functional.layer_norm(mixed, (48,), of("LayerNorm.weight"), of("LayerNorm.bias"), 1e-7)
        mixed = torch.nn.functional.gelu(mixed @ of("dense.weight").T + of("dense.bias"))
        expected = (mixed @ of("classifier.weight").T + of("classifier.bias")).squeeze(-1)
        torch.testing.assert_close(logits_T[own], expected, atol=1e-5, rtol=1e-5)
