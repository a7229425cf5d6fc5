"""DistilBERT as transformers names and describes it: BERT's modules without token types, under other names."""

from __future__ import annotations

from modernbert_train.config.bert import DistilBertConfig
from modernbert_train.weights.formats.table_format import Format

_LAYER = {
    "attn.Wqkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attn.Wo": ("attention.out_lin",),
    "attn_norm": ("sa_layer_norm",),
    "mlp.Wi": ("ffn.lin1",),
    "mlp.Wo": ("ffn.lin2",),
    "mlp_norm": ("output_layer_norm",),
}

FORMAT = Format(
    config=DistilBertConfig,
    model_type="distilbert",
    classes={"all": "DistilBertForMaskedLM"},
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_layers": "n_layers",
        "num_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "max_positions": "max_position_embeddings",
        "init_std": "initializer_range",
    },
    activation="activation",
    dropout="dropout",
    without_dropout=("attention_dropout",),
    special=("pad_token_id",),
    fixed={"tie_word_embeddings": True, "sinusoidal_pos_embds": False},
    prefix="distilbert.",
    layer="transformer.layer.",
    parts=_LAYER,
    outside={
        "model.embeddings.tok_embeddings": "embeddings.word_embeddings",
        "model.embeddings.position_embeddings": "embeddings.position_embeddings",
        "model.embeddings.norm": "embeddings.LayerNorm",
        "head.dense": "vocab_transform",
        "head.norm": "vocab_layer_norm",
        "decoder": "vocab_projector",
    },
    unread=("embeddings.position_ids",),
)
