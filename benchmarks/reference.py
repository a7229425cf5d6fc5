"""transformers' ModernBERT with the architecture of one of our models, for comparisons."""

from __future__ import annotations

import transformers
from torch import nn

from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.vocabulary import Vocabulary


def transformers_model(
    model: ModernBertConfig, row_tokens: int, vocabulary: Vocabulary, *, sparse: bool = True, attention: str = "sdpa"
) -> transformers.ModernBertForMaskedLM:
    """Build it with random weights, in evaluation mode.

    Dropout after attention is ours. transformers' own key would also drop attention probabilities.

    Args:
        model: the architecture in a phase.
        row_tokens: of that phase.
        vocabulary: ids of the special tokens.
        sparse: its switch `sparse_prediction`, which computes logits only at predicted positions.
        attention: transformers' name of the attention, `attn_implementation`.
    """
    thetas = {"full_attention": model.global_rope_theta, "sliding_attention": model.local_rope_theta}
    reference = transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            max_position_embeddings=row_tokens,
            local_attention=model.local_attention,
            norm_eps=model.norm_eps,
            rope_parameters={kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
            pad_token_id=vocabulary.pad_id,
            cls_token_id=vocabulary.cls_id,
            sep_token_id=vocabulary.sep_id,
            bos_token_id=vocabulary.cls_id,
            eos_token_id=vocabulary.sep_id,
            sparse_prediction=sparse,
            attn_implementation=attention,
        )
    )
    for layer in reference.model.layers:
        layer.attn.out_drop = nn.Dropout(model.attention_out_dropout)
    return reference
