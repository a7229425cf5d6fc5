"""BERT and RoBERTa as transformers names and describes them: config.json and tensors, read and written.

One encoder here is two model types there: positions that begin after the padding's make it a RoBERTa. Query, key and
value are one matrix here and three there; nothing else is changed, so that both ways keep every bit. The tied decoder
is stored as the embedding alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from modernbert_train import __version__
from modernbert_train.config.bert import BertConfig
from modernbert_train.config.read import shown
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.models.bert import BertForMaskedLM
from modernbert_train.models.pairs import PairHead
from modernbert_train.vocabulary import Vocabulary

# model_type -> the classes whose weights are read; the first is the one that is written
ARCHITECTURES = {"bert": ("BertForMaskedLM", "BertForPreTraining"), "roberta": ("RobertaForMaskedLM",)}

# What the configuration can say and this encoder does not do otherwise.
FIXED = {
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "position_embedding_type": "absolute",
}

# BertConfig -> config.json, where one number is one key.
KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "segments": "type_vocab_size",
    "norm_eps": "layer_norm_eps",
    "init_std": "initializer_range",
}

# config.json's names for the two functions -> ours; the first of each is the one that is written
ACTIVATIONS: dict[str, Literal["gelu", "gelu_tanh"]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

EMBEDDING, DECODER = "model.embeddings.tok_embeddings.weight", "decoder.weight"
PAIR_HEAD = "pair_head."  # of `PairHead` beside the masked-LM model

# Beyond every model there is; a number out of a damaged file would take all memory before anything is compared with it.
_MAX_LAYERS = 1_000
_MAX_WIDTH = 1 << 24

# module here -> theirs; every one has a weight and a bias
_LAYER = {
    "attn.Wqkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attn.Wo": ("attention.output.dense",),
    "attn_norm": ("attention.output.LayerNorm",),
    "mlp.Wi": ("intermediate.dense",),
    "mlp.Wo": ("output.dense",),
    "mlp_norm": ("output.LayerNorm",),
}
# what follows the encoder; the decoder's bias stands beside its matrix, not in it
_HEAD = {
    "bert": {
        "dense": "cls.predictions.transform.dense",
        "norm": "cls.predictions.transform.LayerNorm",
        "decoder": "cls.predictions",
    },
    "roberta": {"dense": "lm_head.dense", "norm": "lm_head.layer_norm", "decoder": "lm_head"},
}
_POOLER, _CLASSIFIER = "pooler.dense", "cls.seq_relationship"
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")  # in files of older versions; not weights


def model_type(config: BertConfig) -> str:
    """Which of transformers' two this is."""
    return "roberta" if config.position_offset else "bert"


def names(config: BertConfig, *, pair_head: bool = False) -> dict[str, tuple[str, ...]]:
    """Our name of each tensor -> transformers' name, or those of the parts that lie there apart, along the rows.

    Args:
        config: the architecture.
        pair_head: with `PairHead`, under PAIR_HEAD.

    Raises:
        ConfigError: a pair head on what is a RoBERTa there, which has none.
    """
    kind = model_type(config)
    if pair_head and kind != "bert":
        raise ConfigError(
            f"model.position_offset={config.position_offset} makes this a RoBERTa, and transformers' RoBERTa has no "
            "head for pairs. Leave the head out, or train with model.position_offset=0."
        )
    modules: dict[str, tuple[str, ...]] = {"model.embeddings.norm": (f"{kind}.embeddings.LayerNorm",)}
    for layer in range(config.num_layers):
        for ours, theirs in _LAYER.items():
            modules[f"model.layers.{layer}.{ours}"] = tuple(f"{kind}.encoder.layer.{layer}.{name}" for name in theirs)
    head = _HEAD[kind]
    modules |= {"head.dense": (head["dense"],), "head.norm": (head["norm"],)}
    if pair_head:
        modules |= {f"{PAIR_HEAD}dense": (f"{kind}.{_POOLER}",), f"{PAIR_HEAD}classifier": (_CLASSIFIER,)}
    return {
        EMBEDDING: (f"{kind}.embeddings.word_embeddings.weight",),
        "model.embeddings.segment_embeddings.weight": (f"{kind}.embeddings.token_type_embeddings.weight",),
        "model.embeddings.position_embeddings.weight": (f"{kind}.embeddings.position_embeddings.weight",),
        **{
            f"{ours}.{end}": tuple(f"{name}.{end}" for name in theirs)
            for ours, theirs in modules.items()
            for end in ("weight", "bias")
        },
        "decoder.bias": (f"{head['decoder']}.bias",),
    }


def to_hf(weights: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """A state dict of ours under transformers' names; the tied decoder.weight may be there or not, and is left out.

    Args:
        weights: of `BertForMaskedLM`, with or without a `PairHead` under PAIR_HEAD.
        config: their architecture.

    Raises:
        ConfigError: see `names`.
        KeyError: a tensor is missing.
    """
    pair_head = any(name.startswith(PAIR_HEAD) for name in weights)
    return {
        name: part.contiguous()
        for ours, theirs in names(config, pair_head=pair_head).items()
        for name, part in zip(theirs, weights[ours].chunk(len(theirs)), strict=True)
    }


def from_hf(
    stored: Mapping[str, Tensor], config: BertConfig, where: str, *, pair_head: bool = False
) -> dict[str, Tensor]:
    """Tensors under our names, in fp32, with the tied decoder.weight; load_state_dict(strict=True) takes them.

    Args:
        stored: under transformers' names; LayerNorm.gamma and .beta, of files made from TensorFlow's, are understood.
        config: the architecture that they must be of.
        where: how a message names the file.
        pair_head: take pooler and pair classifier too, under PAIR_HEAD; otherwise they may be there and are left out.

    Raises:
        DataError: tensors are missing, unknown, of another shape or type, or not tied.
    """

    def mistake(what: str) -> DataError:
        return DataError(f"{where}: {what}. Name weights that fit the config.json there.")

    kind, head = model_type(config), _HEAD[model_type(config)]["decoder"]
    known = names(config, pair_head=pair_head)
    unused = [f"{kind}.{name}" for name in _BUFFERS]
    if not pair_head:
        unused += [f"{name}.{end}" for name in (f"{kind}.{_POOLER}", _CLASSIFIER) for end in ("weight", "bias")]
    found = {_present_name(name): tensor for name, tensor in stored.items()}
    for name in unused:
        found.pop(name, None)
    if whole := [name for name, tensor in found.items() if not tensor.is_floating_point()]:
        raise mistake(f"{whole[0]} is of type {found[whole[0]].dtype}")

    # a decoder that is stored a second time must be the same one
    tied = {f"{head}.decoder.weight": known[EMBEDDING][0], f"{head}.decoder.bias": f"{head}.bias"}
    for copy, name in tied.items():
        if copy in found and not torch.equal(found[copy], found.setdefault(name, found[copy])):
            raise mistake(f"{copy} is not tied to {name}")
        found.pop(copy, None)

    expected = {
        name: (shape[0] // len(known[ours]), *shape[1:])
        for ours, shape in _shapes(config, pair_head).items()
        for name in known[ours]
    }
    if missing := sorted(expected.keys() - found.keys()):
        raise mistake(f"{len(missing)} of {len(expected)} tensors are missing, the first is {missing[0]}")
    if unknown := sorted(found.keys() - expected.keys()):
        raise mistake(f"{len(unknown)} tensors are unknown, the first is {unknown[0]}")
    for name, tensor in found.items():
        if tuple(tensor.shape) != expected[name]:
            raise mistake(f"{name} has the shape {tuple(tensor.shape)} and not {expected[name]}")
    weights = {ours: torch.cat([found[name].float() for name in theirs]) for ours, theirs in known.items()}
    return weights | {DECODER: weights[EMBEDDING]}


def describe(config: BertConfig, vocabulary: Vocabulary, *, pair_head: bool = False) -> dict[str, Any]:
    """The content of config.json.

    Args:
        config: the architecture.
        vocabulary: of the tokenizer that the model was trained with.
        pair_head: whether the weights have one.

    Raises:
        ConfigError: a RoBERTa whose positions are not counted from the tokenizer's [PAD], or whose activation is not
            gelu; or see `names`.
    """
    names(config, pair_head=pair_head)
    kind = model_type(config)
    special: dict[str, int] = {"pad_token_id": vocabulary.pad_id}
    if kind == "roberta":
        if config.position_offset != vocabulary.pad_id + 1:
            raise ConfigError(
                f"model.position_offset={config.position_offset}, but transformers' RoBERTa counts positions from the "
                f"id of [PAD] + 1, which is {vocabulary.pad_id + 1} in this tokenizer. Set that before training, or 0 "
                "for a BERT."
            )
        if config.activation != "gelu":
            raise ConfigError(
                f"model.activation={config.activation}: transformers' RoBERTa has the exact GELU in its head whatever "
                "hidden_act says, and would compute something else. Train with model.activation=gelu, or a BERT with "
                "model.position_offset=0."
            )
        special |= {"bos_token_id": vocabulary.cls_id, "eos_token_id": vocabulary.sep_id}
    return {
        "architectures": [ARCHITECTURES[kind][1 if pair_head else 0]],
        "model_type": kind,
        "exported_by": f"modernbert_train {__version__}",
        "dtype": "float32",
        **{theirs: getattr(config, ours) for ours, theirs in KEYS.items()},
        **FIXED,
        "hidden_act": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation),
        "max_position_embeddings": config.max_positions + config.position_offset,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        **special,
    }


def read(raw: dict[str, Any], where: str) -> BertConfig:
    """What a config.json says.

    Dropout of attention probabilities is not taken over: it concerns training alone, and there is none here.

    Args:
        raw: its content.
        where: how messages name it.

    Raises:
        DataError: it describes another architecture, or none; names the key that differs.
    """
    kind, named = raw.get("model_type"), raw.get("architectures")
    known = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if known is None or not isinstance(named, list) or not any(name in named for name in known):
        choices = " or ".join(
            f"model_type={kind}, architectures=['{n}']" for kind, a in ARCHITECTURES.items() for n in a
        )
        raise DataError(
            f"{where}: model_type={shown(kind)}, architectures={shown(named)}; only {choices} can be read. Name such a "
            "model."
        )
    for key, value in FIXED.items():
        if raw.get(key) not in (None, value):
            raise DataError(f"{where}: {key}={shown(raw[key])}; this encoder only knows {value}. Name another model.")
    if raw.get("pruned_heads"):
        raise DataError(
            f"{where}: pruned_heads={shown(raw['pruned_heads'])}; this encoder has all. Name another model."
        )
    activation = raw.get("hidden_act", "gelu")
    usable = list(ACTIVATIONS) if kind == "bert" else ["gelu"]  # a RoBERTa's head has this one whatever is said
    if activation not in usable:
        raise DataError(
            f"{where}: hidden_act={shown(activation)}; of a {kind} this encoder only knows {', '.join(usable)}. Name "
            "another model."
        )
    offset = 0
    if kind == "roberta":
        raw = {"vocab_size": 50265, "pad_token_id": 1, **raw}  # transformers' defaults, where they are not BERT's
        offset = int(_number(raw, "pad_token_id", 1, where, least=0)) + 1
    defaults = BertConfig()
    numbers = {ours: _number(raw, theirs, getattr(defaults, ours), where) for ours, theirs in KEYS.items()}
    rows = int(_number(raw, "max_position_embeddings", defaults.max_positions, where, least=offset + 1))
    config = BertConfig(
        **numbers,  # type: ignore[arg-type]  # whole where the default is
        max_positions=rows - offset,
        position_offset=offset,
        activation=ACTIVATIONS[activation],
        dropout=float(_number(raw, "hidden_dropout_prob", defaults.dropout, where, least=0.0, most=0.999)),
    )
    if config.hidden_size % config.num_heads:
        raise DataError(
            f"{where}: hidden_size={config.hidden_size} is not a multiple of num_attention_heads={config.num_heads}. "
            "Restore the file from a copy."
        )
    return config


def _number(
    raw: dict[str, Any], key: str, default: float, where: str, *, least: float | None = None, most: float = _MAX_WIDTH
) -> float:
    """The number under a key, whole if the default is; least None: above 0."""
    value = default if raw.get(key) is None else raw[key]
    kinds = (int,) if isinstance(default, int) else (int, float)
    most = _MAX_LAYERS if key == "num_hidden_layers" else most
    enough = isinstance(value, kinds) and (value > 0 if least is None else value >= least)
    if isinstance(value, bool) or not enough or value > most:
        bound = "above 0" if least is None else f"from {least:,}"
        whole = "whole number" if kinds == (int,) else "number"
        raise DataError(
            f"{where}: {key}={shown(value)}, not a {whole} {bound} and up to {most:,}. Restore the file from a copy."
        )
    return value


def _shapes(config: BertConfig, pair_head: bool) -> dict[str, tuple[int, ...]]:
    """Of every tensor that is stored, by our names."""
    with torch.device("meta"):
        state = BertForMaskedLM(config).state_dict()
        if pair_head:
            pair = PairHead(config.hidden_size).state_dict()
            state |= {f"{PAIR_HEAD}{name}": tensor for name, tensor in pair.items()}
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name != DECODER}


def _present_name(name: str) -> str:
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
