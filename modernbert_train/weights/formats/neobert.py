"""NeoBERT as its published code names and describes it; transformers lacks a class for it.

config.json names the code on the Hub (`auto_map`), which transformers fetches and runs where a user sets
`trust_remote_code=True`. This program never does.
"""

from __future__ import annotations

from typing import Any

from modernbert_train.config.neobert import NeoBertConfig
from modernbert_train.config.objective import Order
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats.config_json import Content
from modernbert_train.weights.formats.table_format import Format

_CODE = "chandar-lab/NeoBERT--model"
_CLASSES = {
    "AutoConfig": "NeoBERTConfig",
    "AutoModel": "NeoBERT",
    "AutoModelForMaskedLM": "NeoBERTLMHead",
    "AutoModelForSequenceClassification": "NeoBERTForSequenceClassification",
}
AUTO_MAP = {auto: f"{_CODE}.{name}" for auto, name in _CLASSES.items()}


def _more(config: NeoBertConfig, order: Order, vocabulary: Vocabulary) -> dict[str, Any]:
    spread = config.init_std * config.init_cutoff
    return {
        "auto_map": AUTO_MAP,
        "intermediate_size": config.intermediate_size * 3 // 2,
        "embedding_init_range": spread,
        "decoder_init_range": spread,
        "classifier_init_range": 0.02,
    }


def _build(raw: Content, fields: dict[str, Any], order: Order, longest: int) -> tuple[NeoBertConfig, Order]:
    wide = int(raw.number("intermediate_size", 3072))
    return NeoBertConfig(**fields, intermediate_size=-(-(2 * wide // 3) // 8) * 8), order


FORMAT = Format(
    config=NeoBertConfig,
    model_type="neobert",
    classes={"all": "NeoBERTLMHead"},
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "norm_eps": "norm_eps",
    },
    longest="max_length",
    special=("pad_token_id",),
    fixed={"tie_word_embeddings": False},
    defaults={"max_length": 1024},
    prefix="model.",
    layer="transformer_encoder.",
    parts={
        "attn.Wqkv": ("qkv",),
        "attn.Wo": ("wo",),
        "attn_norm": ("attention_norm",),
        "mlp_norm": ("ffn_norm",),
        "mlp.Wi": ("ffn.w12",),
        "mlp.Wo": ("ffn.w3",),
    },
    outside={
        "model.embeddings.tok_embeddings.weight": "encoder.weight",
        "model.final_norm.weight": "layer_norm.weight",
        "decoder": "decoder",
    },
    more=_more,
    build=_build,
)
