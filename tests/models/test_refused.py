"""Models of others that an encoder does not compute.

If this breaks, windows, experts or other positions are left out in silence.
tests/weights/formats refuses files of BERT and ModernBERT.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from modernbert_train.config.schema import DistilBertConfig, EsmConfig, ModelConfig, NeoBertConfig
from modernbert_train.errors import DataError
from modernbert_train.weights.formats import export_format, read
from tests.support.encoders import LLAMAS, VOCABULARY

ESM, NEOBERT, DISTILBERT, QWEN, GEMMA = (
    EsmConfig(),
    NeoBertConfig(),
    DistilBertConfig(),
    LLAMAS["qwen3"],
    LLAMAS["gemma"],
)
MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        # an ESM-1b has learned positions: read as an ESM-2 it would forget the order of its letters
        (ESM, {"position_embedding_type": None}, "position_embedding_type='absolute'; this encoder only knows rotary"),
        (ESM, {"emb_layer_norm_before": True}, "emb_layer_norm_before=True"),
        (ESM, {"is_folding_model": True}, "is_folding_model=True"),
        (ESM, {"architectures": ["EsmForProteinFolding"]}, r"architectures=\['EsmForMaskedLM'\] can be read"),
        (ESM, {"hidden_size": 60}, "rotary embeddings turn pairs"),
        (NEOBERT, {"architectures": ["NeoBERTForSequenceClassification"]}, r"=\['NeoBERTLMHead'\] can be read"),
        (NEOBERT, {"tie_word_embeddings": True}, "tie_word_embeddings=True; this encoder only knows False"),
        (NEOBERT, {"num_attention_heads": 256}, r"model\.num_heads=256: heads are 3 wide, and RoPE turns pairs"),
        (DISTILBERT, {"sinusoidal_pos_embds": True}, "there: .*sinusoidal_pos_embds="),
        (DISTILBERT, {"activation": "relu"}, "there: .*activation="),
        (DISTILBERT, {"pruned_heads": {"0": [1]}}, "there: .*pruned_heads="),
        (DISTILBERT, {"n_heads": 7}, "there: .*n_heads="),
        (QWEN, {"layer_types": MIXED[:3]}, "every layer of this encoder"),
        (QWEN, {"use_sliding_window": True}, "use_sliding_window=True; this encoder only knows False"),
        (QWEN, {"model_type": "qwen3_moe"}, "model_type='qwen3_moe'; only model_type=.*eurobert, llama, qwen2, qwen3"),
        (
            QWEN,
            {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}},
            "'longrope'.*default, linear, llama3",
        ),
        (QWEN, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'.*default, linear, llama3 and yarn"),
        (QWEN, {"rope_scaling": {"type": "yarn"}}, "without a factor"),
        (QWEN, {"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor=0.5, not a number from 1"),
        (QWEN, {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "with truncate=true"),
        (QWEN, {"partial_rotary_factor": 0.5}, "of whole heads"),
        (GEMMA, {"query_pre_attn_scalar": 24}, "query_pre_attn_scalar=24; this encoder only knows head_dim, 16"),
        (GEMMA, {"layer_types": MIXED}, "this encoder only knows one full_attention in every n"),
        (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0; this encoder only knows None"),
        (GEMMA, {"model_type": "gemma3"}, "model_type='gemma3'; only model_type=.*gemma3_text"),
    ],
)
def test_what_an_encoder_cannot_compute_is_named(config: ModelConfig, change: dict[str, Any], message: str) -> None:
    order: Any = "causal" if config in (QWEN, GEMMA) else "all"
    raw = export_format(config, order).describe(config, order, ("model",), 96, VOCABULARY)
    read(json.loads(json.dumps(raw)), "there")
    with pytest.raises(DataError, match=message):
        read(json.loads(json.dumps(raw)) | change, "there")
