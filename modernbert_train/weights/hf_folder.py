"""Our weights as a Hugging Face model folder, and the way back.

Parameter names are transformers' own, so that a folder is the weights, a config.json (see modernbert.py), the tokenizer
and a card. A folder appears whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modernbert_train.config.schema import ModelConfig
from modernbert_train.errors import ConfigError, DataError, RunError, StorageError
from modernbert_train.files import publish
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.tensor_files import read_tensors, write_tensors
from modernbert_train.vocabulary import read_vocabulary
from modernbert_train.weights.formats.modernbert import CONFIG_JSON, hf_config, model_config_from_hf, read_object

WEIGHTS, INDEX, CARD = "model.safetensors", "model.safetensors.index.json", "README.md"
TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
EXPORTED_FILES = {WEIGHTS, CONFIG_JSON, CARD, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS}

EMBEDDING, DECODER = "model.embeddings.tok_embeddings.weight", "decoder.weight"

# Names in checkpoints of Composer -> transformers' names; the longer prefix first. `bert` is AnswerDotAI's FlexBERT,
# `model.` in front is Composer's HuggingFaceModel around it, or around transformers' own ModernBERT.
PREFIXES = {
    "model.bert.encoder.layers.": "model.layers.",
    "model.bert.": "model.",
    "model.model.": "model.",
    "model.head.": "head.",
    "model.decoder.": "decoder.",
    "bert.encoder.layers.": "model.layers.",
    "bert.": "model.",
}


def export(
    model_state: Mapping[str, Tensor],
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
    tokenizer_config = read_object(tokenizer_folder / TOKENIZER_CONFIG) | {"model_max_length": max_tokens}
    if tokenizer_config.get("tokenizer_class") == "TokenizersBackend":  # transformers 5's name, unknown to version 4
        tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    described = hf_config(config, global_rope_theta, max_tokens, vocabulary)
    if out.exists() and not _is_export(out):
        raise ConfigError(f"{out} exists and is not an export of this program. Remove it or name another folder.")

    staging = out.parent / f".{out.name}.{os.getpid()}.partial"
    try:
        staging.mkdir(parents=True)
        write_tensors(staging / WEIGHTS, weights, metadata={"format": "pt"})
        _write_json(staging / CONFIG_JSON, described)
        _write_json(staging / TOKENIZER_CONFIG, tokenizer_config)
        (staging / CARD).write_text(card, encoding="utf-8")
        for name in (TOKENIZER, SPECIAL_TOKENS):
            if (tokenizer_folder / name).exists():  # transformers 5 keeps the special tokens in tokenizer_config.json
                shutil.copyfile(tokenizer_folder / name, staging / name)
        replaced = publish(staging, out)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"{out}: the export could not be written ({error}). Free the disk or name another."
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights beside a config.json, whatever they are stored in, as fp32 and complete: strict loading works.

    One model.safetensors or several with an index; names of Composer checkpoints are understood too.

    Raises:
        DataError: a file is missing, damaged or cut short, or the weights do not fit config.json; names the file.
    """
    config, _ = model_config_from_hf(folder)
    stored: dict[str, Tensor] = {}
    for name in _weight_files(folder):
        try:
            stored |= read_tensors(folder / name)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{folder / name}: cannot be read ({error}). Restore it from a copy or export it again."
            ) from None
    return complete(stored, config, str(folder / (WEIGHTS if (folder / WEIGHTS).exists() else INDEX)), CONFIG_JSON)


def complete(stored: Mapping[str, Tensor], config: ModelConfig, where: str, described_by: str) -> dict[str, Tensor]:
    """Tensors under our names, in fp32, with the tied decoder.weight; load_state_dict(strict=True) takes them.

    Args:
        stored: under the names of transformers or of a Composer checkpoint.
        config: the architecture that they must be of.
        where, described_by: how a message names the file and what describes its architecture.

    Raises:
        DataError: tensors are missing, unknown, of another shape, or not tied.
    """

    def mistake(what: str) -> RunError:
        return DataError(f"{where}: {what}. Name weights that fit the {described_by} there.")

    if whole := [
        f"{name} is of type {tensor.dtype}" for name, tensor in stored.items() if not tensor.is_floating_point()
    ]:
        raise mistake(whole[0])
    weights = {_hf_name(name): tensor.float() for name, tensor in stored.items()}
    if EMBEDDING in weights:
        weights.setdefault(DECODER, weights[EMBEDDING])
    _check_weights(weights, config, mistake)
    return weights


def _weight_files(folder: Path) -> list[str]:
    """Names of the files that hold the weights."""
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    if (folder / INDEX).exists():
        shards = read_object(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(s, str) and Path(s).name == s for s in shards.values()):
            raise DataError(f"{folder / INDEX}: its weight_map does not name files there. Restore it from a copy.")
        return sorted(set(shards.values()))
    others = sorted(path.name for pattern in ("*.bin", "*.h5", "*.msgpack") for path in folder.glob(pattern))
    found = f", only {', '.join(others)}" if others else ""
    raise DataError(
        f"{folder / WEIGHTS}: no such file, nor {INDEX}{found}. Fetch it; or write it from other formats with "
        "transformers: AutoModelForMaskedLM.from_pretrained(old).save_pretrained(new)."
    )


def _hf_name(name: str) -> str:
    for old, new in PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _check_weights(weights: Mapping[str, Tensor], config: ModelConfig, mistake: Callable[[str], RunError]) -> None:
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


def _is_export(folder: Path) -> bool:
    """Whether nothing but our own earlier export (or nothing at all) would be lost by replacing the folder."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    known = names <= EXPORTED_FILES and CONFIG_JSON in names
    return not names or (known and "exported_by" in read_object(folder / CONFIG_JSON))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
