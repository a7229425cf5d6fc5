"""ESM-2 in transformers' files; test_parity.py compares its results.

If this breaks, a model of proteins that is read, or one that is published, computes something else than it did.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from modernbert_train.errors import ConfigError
from modernbert_train.weights.formats import esm
from tests.support.encoders import ESM, VOCABULARY

CONFIGS = {"token dropout": ESM, "plain": replace(ESM, token_dropout=False, rope_theta=500.0)}
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
BOUNDARIES = (0, 45, 70, 76)
RELEASED = {  # config.json of facebook/esm2_t6_8M_UR50D
    "architectures": ["EsmForMaskedLM"], "attention_probs_dropout_prob": 0.0, "classifier_dropout": None,
    "emb_layer_norm_before": False, "esmfold_config": None, "hidden_act": "gelu", "hidden_dropout_prob": 0.0,
    "hidden_size": 320, "initializer_range": 0.02, "intermediate_size": 1280, "is_folding_model": False,
    "layer_norm_eps": 1e-05, "mask_token_id": 32, "max_position_embeddings": 1026, "model_type": "esm",
    "num_attention_heads": 20, "num_hidden_layers": 6, "pad_token_id": 1, "position_embedding_type": "rotary",
    "token_dropout": True, "torch_dtype": "float32", "use_cache": True, "vocab_list": None, "vocab_size": 33,
}  # fmt: skip


def test_the_released_model_is_read() -> None:
    found = esm.FORMAT.read(RELEASED, "config.json")
    assert (found.model.hidden_size, found.model.num_layers, found.model.head_size) == (320, 6, 16)
    assert (found.model.mask_id, found.model.token_dropout, found.max_tokens) == (32, True, 1026)


def test_a_mask_of_another_tokenizer_is_refused() -> None:
    """Exported, [MASK] would be an ordinary token, and an ordinary one would be zero."""
    with pytest.raises(ConfigError, match=r"model\.mask_id=5: the tokenizer's \[MASK\] is 4"):
        esm.FORMAT.describe(replace(ESM, mask_id=5), "all", (), 96, VOCABULARY)
    (line,) = replace(ESM, hidden_size=20).mistakes()
    assert "Make it even" in line
