"""Our weights as a Hugging Face model folder, and the way back.

Parameter names are transformers' own, so what is left to write is config.json. It states the architecture twice: in the
keys of transformers 5 (layer_types, rope_parameters) and in those of 4.48 to 4.57 (global_attn_every_n_layers and the
two *_rope_theta), so that one folder loads in both without remote code. A folder appears whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from modernbert_train import __version__
from modernbert_train.config.schema import ModelConfig
from modernbert_train.errors import ConfigError, DataError, RunError, StorageError
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.vocabulary import Vocabulary, read_vocabulary

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
EXPORTED_FILES = {WEIGHTS, CONFIG, CARD, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS}

EMBEDDING, DECODER = "model.embeddings.tok_embeddings.weight", "decoder.weight"

# Names of AnswerDotAI's Composer checkpoints -> transformers' names; the longer prefix first.
PREFIXES = {
    "model.bert.encoder.layers.": "model.layers.",
    "model.bert.": "model.",
    "model.head.": "head.",
    "model.decoder.": "decoder.",
    "bert.encoder.layers.": "model.layers.",
    "bert.": "model.",
}

# What ModernBERT's configuration can say and this encoder does not do otherwise.
FIXED = {
    "hidden_activation": "gelu",
    "classifier_activation": "gelu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "classifier_bias": False,
    "decoder_bias": True,
    "tie_word_embeddings": True,
}

# ModelConfig -> config.json, where one number is one key.
KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "local_attention": "local_attention",
    "norm_eps": "norm_eps",
    "init_std": "initializer_range",
    "init_cutoff": "initializer_cutoff_factor",
}


def export(
    model_state: dict[str, Tensor],
    config: ModelConfig,
    *,
    global_rope_theta: float,
    max_tokens: int,
    tokenizer_folder: Path,
    out: Path,
    card: str,
) -> None:
    """Write a folder that transformers' AutoModelForMaskedLM, AutoModel and AutoTokenizer load.

    Args:
        model_state: whole tensors under the model's own names; written in fp32, without the tied decoder.weight, which
            may be left out here too.
        config: the architecture of these weights.
        global_rope_theta: RoPE base of global layers in the phase that the weights come from.
        max_tokens: longest sequence the weights were trained on; becomes the tokenizer's and the model's limit.
        tokenizer_folder: the tokenizer that made the training shards; special ids are read from it.
        out: the folder; an earlier export there is replaced, anything else refused.
        card: text of README.md.

    Raises:
        ConfigError: a RoPE base is not positive and finite, the weights or the tokenizer do not fit `config`, or `out`
            holds something that is not an export.
        DataError: the tokenizer folder is damaged.
        StorageError: the folder cannot be written.
    """
    for key, theta in (("global_rope_theta", global_rope_theta), ("model.local_rope_theta", config.local_rope_theta)):
        if not (math.isfinite(theta) and theta > 0):
            raise ConfigError(f"{key}={theta}: not exported, the model would give NaN. Set a positive RoPE base.")
    weights = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in model_state.items()}
    if EMBEDDING in weights:
        weights.setdefault(DECODER, weights[EMBEDDING])
    _check_weights(weights, config, lambda what: ConfigError(f"the model's weights: {what}. Nothing was exported."))
    del weights[DECODER]
    vocabulary = read_vocabulary(tokenizer_folder)
    if vocabulary.num_entries > config.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.vocab_size}, but the tokenizer in {tokenizer_folder} has "
            f"{vocabulary.num_entries} entries. Export with the tokenizer that the model was trained with."
        )
    tokenizer_config = _read_json(tokenizer_folder / TOKENIZER_CONFIG) | {"model_max_length": max_tokens}
    if tokenizer_config.get("tokenizer_class") == "TokenizersBackend":  # transformers 5's name, unknown to version 4
        tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    hf_config = _hf_config(config, global_rope_theta, max_tokens, vocabulary)
    if out.exists() and not _is_export(out):
        raise ConfigError(f"{out} exists and is not an export of this program. Remove it or name another folder.")

    staging = out.parent / f".{out.name}.{os.getpid()}.partial"
    try:
        staging.mkdir(parents=True)
        save_file(weights, staging / WEIGHTS, metadata={"format": "pt"})
        _write_json(staging / CONFIG, hf_config)
        _write_json(staging / TOKENIZER_CONFIG, tokenizer_config)
        (staging / CARD).write_text(card, encoding="utf-8")
        for name in (TOKENIZER, SPECIAL_TOKENS):
            if (tokenizer_folder / name).exists():  # transformers 5 keeps the special tokens in tokenizer_config.json
                shutil.copyfile(tokenizer_folder / name, staging / name)
        _publish(staging, out)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"{out}: the export could not be written ({error}). Free the disk or name another."
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def model_config_from_hf(folder: Path) -> tuple[ModelConfig, float]:
    """Read config.json of a masked-LM ModernBERT, ours or any other.

    Returns:
        The architecture, and the RoPE base of its global layers. What only concerns training (dropout, z-loss, kernel)
        is not in the file and has the schema's defaults.

    Raises:
        DataError: the file is missing or damaged, or describes another architecture; names what differs.
    """
    path = folder / CONFIG
    raw = _read_json(path)
    if raw.get("model_type") != "modernbert" or "ModernBertForMaskedLM" not in raw.get("architectures", ()):
        raise DataError(
            f"{path}: model_type={raw.get('model_type')}, architectures={raw.get('architectures')}. "
            "Only ModernBertForMaskedLM can be read; name such a model."
        )
    for key, value in FIXED.items():
        if raw.get(key, value) != value:
            raise DataError(f"{path}: {key}={raw[key]}; this encoder only knows {value}. Name another model.")
    given = {ours: raw[theirs] for ours, theirs in KEYS.items() if raw.get(theirs) is not None}
    global_theta, local_theta = _rope_thetas(raw, path)
    config = ModelConfig(**given, local_rope_theta=local_theta)
    every_n = _global_attn_every_n_layers(raw, config.num_layers, path)
    return replace(config, global_attn_every_n_layers=every_n), global_theta


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights beside a config.json, in fp32 and complete: load_state_dict(strict=True) takes them.

    Names of AnswerDotAI's Composer checkpoints are understood too; the tied decoder.weight is filled in.

    Raises:
        DataError: a file is missing, damaged or cut short, or the weights do not fit config.json; names the file.
    """
    config, _ = model_config_from_hf(folder)
    path = folder / WEIGHTS
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Restore it from a copy or export it again.") from None
    weights = {_hf_name(name): tensor.float() for name, tensor in stored.items()}
    if EMBEDDING in weights:
        weights.setdefault(DECODER, weights[EMBEDDING])
    _check_weights(weights, config, lambda what: DataError(f"{path}: {what}. Name weights that fit {CONFIG} there."))
    return weights


def _hf_name(name: str) -> str:
    for old, new in PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _check_weights(weights: dict[str, Tensor], config: ModelConfig, mistake: Callable[[str], RunError]) -> None:
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in ModernBertForMaskedLM(config).state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if missing := sorted(expected.keys() - found.keys()):
        raise mistake(f"{len(missing)} of {len(expected)} tensors are missing, the first is {missing[0]}")
    if unknown := sorted(found.keys() - expected.keys()):
        raise mistake(f"{len(unknown)} tensors are unknown, the first is {unknown[0]}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise mistake(f"{name} has the shape {found[name]} and not {shape}")
    if not torch.equal(weights[DECODER], weights[EMBEDDING]):
        raise mistake(f"{DECODER} is not tied to {EMBEDDING}")


def _hf_config(config: ModelConfig, global_theta: float, max_tokens: int, vocabulary: Vocabulary) -> dict[str, Any]:
    thetas = {"full_attention": global_theta, "sliding_attention": config.local_rope_theta}
    return {
        "architectures": ["ModernBertForMaskedLM"],
        "model_type": "modernbert",
        "exported_by": f"modernbert_train {__version__}",
        "dtype": "float32",
        **{theirs: getattr(config, ours) for ours, theirs in KEYS.items()},
        **FIXED,
        "max_position_embeddings": max_tokens,
        "layer_types": _layer_types(config.global_attn_every_n_layers, config.num_layers),
        "global_attn_every_n_layers": config.global_attn_every_n_layers,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": float(t)} for kind, t in thetas.items()},
        "global_rope_theta": float(global_theta),
        "local_rope_theta": float(config.local_rope_theta),
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "classifier_dropout": 0.0,
        "classifier_pooling": "mean",
        "bos_token_id": vocabulary.cls_id,
        "cls_token_id": vocabulary.cls_id,
        "eos_token_id": vocabulary.sep_id,
        "sep_token_id": vocabulary.sep_id,
        "pad_token_id": vocabulary.pad_id,
    }


def _layer_types(every_n: int, num_layers: int) -> list[str]:
    return ["sliding_attention" if layer % every_n else "full_attention" for layer in range(num_layers)]


def _global_attn_every_n_layers(raw: dict[str, Any], num_layers: int, path: Path) -> int:
    stated = raw.get("global_attn_every_n_layers")
    types = raw.get("layer_types")
    if types is None:
        return stated or ModelConfig.global_attn_every_n_layers
    for every_n in [stated] if stated else range(1, num_layers + 1):
        if types == _layer_types(every_n, num_layers):
            return every_n
    raise DataError(f"{path}: layer_types is not one global layer in every n from layer 0. Name another model.")


def _rope_thetas(raw: dict[str, Any], path: Path) -> tuple[float, float]:
    """Bases of global and local layers: from transformers 5's key if it is there, else from the older two."""
    rope = raw.get("rope_parameters") or {}
    types = {kind.get("rope_type", "default") for kind in rope.values() if kind}
    if raw.get("rope_scaling") or types - {"default"}:
        raise DataError(f"{path}: scaled rotary positions are not supported. Name a model without rope_scaling.")
    old_global = raw.get("global_rope_theta", 160_000.0)  # transformers' defaults for ModernBERT
    old_local = raw.get("local_rope_theta", 10_000.0)
    thetas = (
        (rope.get("full_attention") or {}).get("rope_theta", old_global),
        (rope.get("sliding_attention") or {}).get("rope_theta", old_global if old_local is None else old_local),
    )
    for theta in thetas:
        if not (isinstance(theta, int | float) and math.isfinite(theta) and theta > 0):
            raise DataError(
                f"{path}: a RoPE base is {theta}, which gives NaN. Write the bases that the model was trained with."
            )
    return float(thetas[0]), float(thetas[1])


def _is_export(folder: Path) -> bool:
    """Whether nothing but our own earlier export (or nothing at all) would be lost by replacing the folder."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    known = names <= EXPORTED_FILES and CONFIG in names
    return not names or (known and "exported_by" in _read_json(folder / CONFIG))


def _publish(staging: Path, out: Path) -> None:
    for path in staging.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    replaced = staging.with_suffix(".replaced")
    if out.exists():
        out.rename(replaced)
    staging.rename(out)
    shutil.rmtree(replaced, ignore_errors=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Restore it from a copy.") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a JSON object. Restore it from a copy.")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
