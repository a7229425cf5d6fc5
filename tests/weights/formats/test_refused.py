"""Models of others that no encoder here computes.

If this breaks, windows, experts or other positions are left out in silence. A single field of a config.json that has
another value is in test_fields.py.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest

from modernbert_train.config.objective import Order
from modernbert_train.config.schema import DistilBertConfig, EsmConfig, ModelConfig, NeoBertConfig
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import read
from tests.support.encoders import ALBERT, BERT, DEBERTA, ESM, LLAMAS, ROBERTA, VOCABULARY, XLNET
from tests.support.exported import CONFIG as MODERNBERT
from tests.weights.formats.models import TOKENS, WEIRD, describe

DETECTOR = ("model", "token_head")
MODELS: dict[str, tuple[ModelConfig, Order, tuple[str, ...]]] = {
    "modernbert": (MODERNBERT, "all", TOKENS),
    "decoder": (MODERNBERT, "causal", TOKENS),
    "detector": (MODERNBERT, "all", DETECTOR),
    "bert": (BERT, "all", TOKENS),
    "electra": (BERT, "all", DETECTOR),
    "roberta": (ROBERTA, "all", TOKENS),
    "albert": (ALBERT, "all", TOKENS),
    "xlnet": (XLNET, "all", TOKENS),
    "deberta": (DEBERTA, "all", TOKENS),
    "esm": (EsmConfig(), "all", ("model",)),
    "neobert": (NeoBertConfig(), "all", ("model",)),
    "distilbert": (DistilBertConfig(), "all", ("model",)),
    "qwen3": (LLAMAS["qwen3"], "causal", ("model",)),
    "gemma": (LLAMAS["gemma"], "causal", ("model",)),
}
ABSENT = object()
NO_PAD = replace(VOCABULARY, pad_id=0)
LINEAR = {"rope_type": "linear", "factor": 2.0}
MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize("name", MODELS)
def test_no_value_of_any_key_ends_in_a_traceback(name: str) -> None:
    """Any value in a downloaded file is accepted or refused; 10^30 layers must be refused before they are built."""
    config, order, modules = MODELS[name]
    good = describe(config, order, modules)
    assert read(good, "there").model == config
    for key in {*good, "rope_scaling"}:
        for odd in WEIRD:
            with contextlib.suppress(DataError):
                read(good | {key: odd}, "there")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "bert",
            {"model_type": "gpt2"},
            "model_type='gpt2'; only model_type=modernbert, modernbert-decoder, bert, rob",
        ),
        ("bert", {"model_type": ["bert"]}, r"model_type=\['bert'\]; only"),
        ("qwen3", {"model_type": "qwen3_moe"}, "model_type='qwen3_moe'; only .*eurobert, llama, qwen2, qwen3"),
        ("gemma", {"model_type": "gemma3"}, "model_type='gemma3'; only model_type=.*gemma3_text"),
        ("modernbert", {"model_type": "bert"}, "model_type='bert', architectures="),
        ("modernbert", {"architectures": ["ModernBertForImages"]}, "ModernBertForImages"),
        (
            "decoder",
            {"architectures": ["ModernBertDecoderForSequenceClassification"]},
            "only model_type=modernbert-decoder",
        ),
        ("bert", {"model_type": "roberta"}, "model_type='roberta', architectures="),
        ("electra", {"architectures": ["ElectraForQuestionAnswering"]}, r"=\['ElectraForMaskedLM'\] or"),
        ("albert", {"architectures": ["BertForMaskedLM"]}, "only model_type=albert, architectures="),
        ("xlnet", {"architectures": ["BertForMaskedLM"]}, "only model_type=xlnet, architectures="),
        (
            "deberta",
            {"architectures": ["BertForMaskedLM"]},
            r"only model_type=deberta-v2, architectures=\['DebertaV2ForMaskedLM'\] or",
        ),
        ("esm", {"architectures": ["EsmForProteinFolding"]}, r"architectures=\['EsmForMaskedLM'\] can be read"),
        ("neobert", {"architectures": ["NeoBERTForSequenceClassification"]}, r"=\['NeoBERTLMHead'\] can be read"),
        # values of a wrong type or beyond their range
        ("bert", {"hidden_size": "32"}, "hidden_size='32', not a whole number above 0"),
        ("modernbert", {"vocab_size": 64.5}, "vocab_size=64.5, not a whole number above 0"),
        ("bert", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, not a whole number"),
        ("bert", {"layer_norm_eps": float("nan")}, "layer_norm_eps=nan"),
        ("bert", {"hidden_dropout_prob": 1}, "hidden_dropout_prob=1, not a number from 0.0"),
        ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings=2, not a whole number from 3"),
        ("roberta", {"pad_token_id": -1}, "pad_token_id=-1"),
        ("deberta", {"position_buckets": None}, "position_buckets=-1, not a whole number from 2"),
        ("modernbert", {"global_attn_every_n_layers": 0, "layer_types": ABSENT}, "global_attn_every_n_layers=0"),
        ("modernbert", {"rope_parameters": ABSENT, "local_rope_theta": -1}, "local_rope_theta=-1, not a number above"),
        # values that contradict one another
        ("bert", {"num_attention_heads": 3}, "hidden_size=64 is not a multiple of num_attention_heads=3"),
        ("modernbert", {"num_attention_heads": 3}, "hidden_size=64 is not a multiple of num_attention_heads=3"),
        ("albert", {"num_hidden_groups": 3}, "num_hidden_layers=4 is not a multiple of num_hidden_groups=3"),
        ("albert", {"inner_group_num": 999}, "num_hidden_layers=4 times inner_group_num=999 is above 1,000"),
        ("xlnet", {"d_model": 33}, "d_model=33 is not a multiple of n_head=4"),
        ("deberta", {"hidden_size": 33, "embedding_size": None}, "=33 is not a multiple of num_attention_heads=4"),
        (
            "deberta",
            {"position_buckets": 256, "max_relative_positions": 100},
            "max_distance=100 with model.buckets=256",
        ),
        ("esm", {"hidden_size": 60}, "rotary embeddings turn pairs"),
        ("neobert", {"num_attention_heads": 256}, r"model\.num_heads=256: heads are 3 wide, and RoPE turns pairs"),
        ("distilbert", {"n_heads": 7}, "n_heads="),
        ("electra", {"embedding_size": 16}, "embedding_size=16, hidden_size=64; this encoder only knows"),
        ("decoder", {"sliding_window": 5}, "sliding_window=5; with local_attention=8 this encoder only k"),
        ("decoder", {"local_attention": None}, "local_attention=None; this encoder has local layers"),
        ("modernbert", {"layer_types": ["sliding_attention"] * 5}, r"layer_types makes layers \[\] of 5 global"),
        (
            "modernbert",
            {"global_attn_every_n_layers": 3},
            r"layers \[0, 2, 4\] of 5 global.*global_attn_every_n_layers=3",
        ),
        # features that the encoders lack, by old fields or by parts of a field
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ("roberta", {"position_embedding_type": "relative_key_query"}, "position_embedding_type='relative_key_query'"),
        ("bert", {"pruned_heads": {"0": [1]}}, "pruned_heads="),
        ("distilbert", {"pruned_heads": {"0": [1]}}, "pruned_heads="),
        ("xlnet", {"untie_r": False}, "untie_r=False; this encoder only knows True"),
        ("deberta", {"conv_kernel_size": 3, "conv_act": "tanh"}, "conv_act='tanh', conv_groups=None; this encoder"),
        ("deberta", {"share_att_key": False}, "share_att_key=False"),
        ("deberta", {"norm_rel_ebd": None}, "norm_rel_ebd='none'"),
        ("deberta", {"attention_head_size": 16}, "attention_head_size=16"),
        # an ESM-1b has learned positions: read as an ESM-2 it would forget the order of its letters
        (
            "esm",
            {"position_embedding_type": None},
            "position_embedding_type='absolute'; this encoder only knows rotary",
        ),
        ("neobert", {"tie_word_embeddings": True}, "tie_word_embeddings=True; this encoder only knows False"),
        ("detector", {"id2label": None}, "id2label=None"),
        ("detector", {"classifier_bias": True}, "classifier_bias=True"),
        ("modernbert", {"rope_parameters": LINEAR}, "not an object for each of full_attention and"),
        ("modernbert", {"rope_parameters": {"sliding_attention": LINEAR}}, "local layers are scaled as"),
        ("modernbert", {"rope_parameters": {"full_attention": LINEAR | {"rope_type": "longrope"}}}, "'longrope'"),
        ("modernbert", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "transformers ignores a `type` here"),
        ("modernbert", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic'.*default, linear, llama3"),
        ("qwen3", {"rope_parameters": LINEAR | {"rope_type": "longrope"}}, "'longrope'.*default, linear, llama3"),
        ("qwen3", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'.*default, linear, llama3 and yarn"),
        ("qwen3", {"rope_scaling": {"type": "yarn"}}, "without a factor"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor=0.5, not a number from 1"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "with truncate=true"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "of whole heads"),
        ("qwen3", {"layer_types": MIXED[:3]}, "every layer of this encoder"),
        ("gemma", {"layer_types": MIXED}, "this encoder only knows one full_attention in every n"),
    ],
)
def test_another_architecture_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    """Its weights might even load, with another meaning."""
    changed = describe(*MODELS[name]) | changes
    with pytest.raises(DataError, match=f"^there: .*{message}"):
        read({key: value for key, value in changed.items() if value is not ABSENT}, "there")


class Toy(ModelConfig):
    pass


@pytest.mark.parametrize(
    ("config", "vocabulary", "message"),
    [
        # transformers computes positions from [PAD]: with another one, every position would be another vector
        (ROBERTA, NO_PAD, r"model\.position_offset=2.*which is 1 in this tokenizer"),
        # transformers' RobertaLMHead ignores hidden_act: with the other GELU logits were off by 1e-3
        (replace(ROBERTA, activation="gelu_tanh"), VOCABULARY, r"=gelu_tanh: .* RoBERTa always has the exact GELU"),
        # [MASK] would be an ordinary token, and an ordinary one would be zero
        (replace(ESM, mask_id=5), VOCABULARY, r"model\.mask_id=5: the tokenizer's \[MASK\] is 4"),
        (Toy(name="toy"), VOCABULARY, r"model\.name=toy: transformers lacks such a model"),
    ],
)
def test_what_transformers_would_compute_otherwise_is_not_exported(
    config: ModelConfig, vocabulary: Vocabulary, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        describe(config, vocabulary=vocabulary)


def test_a_roberta_counts_positions_from_its_tokenizers_pad() -> None:
    written = describe(replace(ROBERTA, position_offset=1), vocabulary=NO_PAD)
    assert (written["model_type"], written["pad_token_id"], written["max_position_embeddings"]) == ("roberta", 0, 401)
