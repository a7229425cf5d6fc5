"""Every field of transformers' config classes is implemented, refused by name, or known to have an effect nowhere here.

An ignored field would silently make another model of the same weights, with wrong hidden states.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from modernbert_train.errors import DataError
from modernbert_train.weights.formats import FORMATS, format_of

# training, special ids that the tokenizer has, heads that are not read here, and caches of generation
NO_EFFECT = {
    "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id",
    "attention_probs_dropout_prob", "embedding_dropout", "mlp_dropout", "classifier_dropout",
    "classifier_dropout_prob",
    "qa_dropout", "seq_classif_dropout", "pooler_dropout", "pooler_hidden_act", "classifier_pooling",
    "sparse_prediction",    "sparse_pred_ignore_index", "deterministic_flash_attn",
    "summary_type", "summary_use_proj", "summary_activation",
    "summary_last_dropout", "start_n_top", "end_n_top", "mem_len", "reuse_len", "use_mems_eval", "use_mems_train",
    "pretraining_tp", "legacy", "max_window_layers", "sliding_window of qwen2", "sliding_window of qwen3",
    "attention_dropout of distilbert", "attention_dropout of eurobert", "attention_dropout of llama",
    "attention_dropout of qwen2", "attention_dropout of qwen3", "attention_dropout of gemma3_text",
    "hidden_dropout_prob of esm", "esmfold_config of esm", "vocab_list of esm",
}  # fmt: skip
COMMON = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
KINDS = [kind for kind in FORMATS if kind != "neobert"]  # transformers lacks a class of NeoBERT
FOLLOWED = {"num_hidden_layers"}  # a list of layers beside it is named when it does not fit
SMALL = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 130, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96, "d_model": 64,
    "n_layer": 2, "n_head": 4, "d_inner": 96, "embedding_size": 64, "num_key_value_heads": 2, "head_dim": 16,
    "query_pre_attn_scalar": 16, "sliding_window": 16, "local_attention": 16,
}  # fmt: skip
DEBERTA = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip
V2 = {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_buckets": 16}


def small(kind: str) -> dict[str, Any]:
    """Return the content of a config.json of this kind, as transformers writes it."""
    return filled(kind, given(kind))


def given(kind: str) -> dict[str, Any]:
    own = DEBERTA if kind.startswith("deberta") else {}
    own = own | V2 if kind == "deberta-v2" else own
    own = {"position_embedding_type": "rotary"} if kind == "esm" else own
    names = {field.name for field in dataclasses.fields(transformers.CONFIG_MAPPING[kind])}
    return {key: value for key, value in SMALL.items() if key in names} | own


def filled(kind: str, said: dict[str, Any]) -> dict[str, Any]:
    found = json.loads(transformers.CONFIG_MAPPING[kind](**said).to_json_string(use_diff=False))
    return found | {"model_type": kind, "architectures": architectures(kind)}


def architectures(kind: str) -> list[str] | None:
    return ["ModernBertDecoderForCausalLM"] if kind == "modernbert-decoder" else None


def read(raw: dict[str, Any]) -> object:
    """Return the configuration that we read, or the message of a refusal."""
    try:
        return format_of(raw, "x").read(raw, "x")
    except DataError as error:
        return str(error)


def another(value: Any) -> list[Any]:
    """Return other values for a field, each of which makes another model."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2 or 0.25]
    return [{"a": 1}, ["odd"], "odd"] if value is None else ["odd"] if isinstance(value, str) else [["odd"]]


def fields_of(kind: str) -> list[str]:
    names = {field.name for field in dataclasses.fields(transformers.CONFIG_MAPPING[kind])} - COMMON - NO_EFFECT
    return sorted(name for name in names if f"{name} of {kind}" not in NO_EFFECT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_is_done_or_refused_by_name(kind: str) -> None:
    raw = small(kind)
    plain = read(raw)
    assert not isinstance(plain, str), plain
    ignored = []
    for name in fields_of(kind):
        for value in another(raw.get(name)):
            found = read(raw | {name: value})
            if found == plain or (isinstance(found, str) and name not in found and name not in FOLLOWED):
                ignored.append(f"{name}={value}")
    assert ignored == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_is_left_out_is_what_transformers_fills_in(kind: str) -> None:
    """Field by field, with sizes other than the defaults, since some defaults follow from others."""
    compared = 0
    for name in given(kind):
        less = {key: value for key, value in given(kind).items() if key != name}
        try:
            whole = filled(kind, less)
        except StrictDataclassError:
            continue  # transformers cannot open it either
        ours, theirs = read(less | {"model_type": kind, "architectures": architectures(kind)}), read(whole)
        if not isinstance(theirs, str):
            assert ours == theirs, name
            compared += 1
    assert compared > 3
