"""Write weights as a Hugging Face model folder, and read one.

A folder holds the weights and a config.json in one of the formats of formats/, the tokenizer and a card. It is written
atomically.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modernbert_train.config.objective import Order
from modernbert_train.config.schema import ModelConfig
from modernbert_train.core.files import os_errors_as, whole_folder
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.tensor_files import read_tensors, write_tensors
from modernbert_train.errors import ConfigError, DataError, StorageError
from modernbert_train.models.build import shapes_of
from modernbert_train.models.init import module_of
from modernbert_train.vocabulary import SPECIAL_TOKENS_MAP, TOKENIZER, TOKENIZER_CONFIG, read_vocabulary
from modernbert_train.weights.formats import HubFormat, export_format, format_of
from modernbert_train.weights.formats.config_json import CONFIG_JSON, read_object
from modernbert_train.weights.formats.sentence_encoder import DENSE, SentenceEncoder
from modernbert_train.weights.formats.table_format import EXPORTED_BY
from modernbert_train.weights.formats.tensors import Shapes, from_hf, to_hf, unsupported_heads

WEIGHTS, INDEX, CARD = "model.safetensors", "model.safetensors.index.json", "README.md"
EXPORTED_FILES = {WEIGHTS, CONFIG_JSON, CARD, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP}
EXPORTED_FILES |= {"modules.json", "sentence_bert_config.json", "1_Pooling", "1_SpladePooling"}  # of embeddings
EXPORTED_FILES |= {"config_sentence_transformers.json", DENSE, "2_MultiVectorMask", "3_Normalize"}  # late interaction


def export(
    model_state: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    order: Order = "all",
    max_tokens: int,
    tokenizer_folder: Path,
    out: Path,
    card: str,
    hub: HubFormat | None = None,
    shapes: Shapes | None = None,
    pairs: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder for transformers' AutoModel, the class named in its config.json, and AutoTokenizer.

    Heads that transformers' class cannot store are left out; `unsupported_heads` names them.

    Args:
        model_state: whole tensors under the model's own names; written in fp32, without the tied decoder.weight, which
            may be missing here too.
        config: the architecture of these weights, with the RoPE bases of their phase.
        order: which tokens each token saw in training; causal becomes a decoder.
        max_tokens: longest sequence the weights were trained on; becomes the tokenizer's and the model's limit.
        tokenizer_folder: the tokenizer that made the training shards; special ids are read from it.
        out: the folder; an earlier export there is replaced, anything else refused.
        card: text of README.md.
        hub: the format; None: the architecture's.
        shapes: see `to_hf`.
        pairs: the model distinguishes the texts of a pair by token types.
        extra: further keys of config.json.

    Raises:
        ConfigError: a RoPE base is not positive and finite, the weights or the tokenizer do not fit `config`, or `out`
            holds something that is not an export.
        DataError: the tokenizer folder is damaged.
        StorageError: the folder cannot be written.
    """
    hub = hub or export_format(config, order, {module_of(name) for name in model_state})
    state = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in model_state.items()}
    weights = to_hf(hub, state, config, shapes)
    modules = {module_of(name) for name in state} - {*unsupported_heads(hub, state, config)}
    vocabulary = read_vocabulary(tokenizer_folder)
    if vocabulary.num_entries > config.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.vocab_size}, but the tokenizer in {tokenizer_folder} has "
            f"{vocabulary.num_entries} entries. Export with the tokenizer that the model was trained with."
        )
    tokenizer_config = read_object(tokenizer_folder / TOKENIZER_CONFIG) | {"model_max_length": max_tokens}
    if tokenizer_config.get("tokenizer_class") == "TokenizersBackend":  # transformers 5's name, unknown to version 4
        tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    has_pair_head = any(module_of(name) == "pair_head" for name in state)
    if pairs or (has_pair_head and config.segments > 1):  # token types were trained
        tokenizer_config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    modules_files = hub.files(config.hidden_size, max_tokens) if isinstance(hub, SentenceEncoder) else {}
    described = {**hub.describe(config, order, modules, max_tokens, vocabulary), **(extra or {})}
    if out.exists() and not _is_export(out):
        raise ConfigError(f"{out} exists and is not an export of this program. Remove it or name another folder.")

    unwritten = os_errors_as(StorageError, f"{out}: cannot be written", "Free the disk or name another.")
    dense = {name.removeprefix(f"{DENSE}/"): weights.pop(name) for name in [*weights] if name.startswith(f"{DENSE}/")}
    with unwritten, whole_folder(out) as staging:
        write_tensors(staging / WEIGHTS, weights, metadata={"format": "pt"})
        _write_json(staging / CONFIG_JSON, described)
        _write_json(staging / TOKENIZER_CONFIG, tokenizer_config)
        (staging / CARD).write_text(card, encoding="utf-8")
        for name, content in modules_files.items():
            (staging / name).parent.mkdir(exist_ok=True)
            _write_json(staging / name, content)
        if dense:
            write_tensors(staging / DENSE / WEIGHTS, dense, metadata={"format": "pt"})
        for name in (TOKENIZER, SPECIAL_TOKENS_MAP):
            if (tokenizer_folder / name).exists():  # transformers 5 keeps the special tokens in tokenizer_config.json
                shutil.copyfile(tokenizer_folder / name, staging / name)


def load_weights(folder: Path, model: ModelConfig | None = None) -> dict[str, Tensor]:
    """Read the weights in the folder of a config.json, of any dtype, in fp32 under this program's names; see `from_hf`.

    Reads one model.safetensors or several with an index; accepts names of Composer checkpoints too.

    Args:
        folder: of the model.
        model: the architecture to read them as, with the same stored tensors; None: config.json's.

    Raises:
        DataError: a file is missing, damaged or cut short, or the weights do not fit config.json; names the file.
    """
    require_own_files(folder)
    raw, where = read_object(folder / CONFIG_JSON), str(folder / CONFIG_JSON)
    hub = format_of(raw, where)
    described = hub.read(raw, where)
    config, objective = model or described.model, described.objective
    shapes = None if objective is None else shapes_of(config, objective)
    stored: dict[str, Tensor] = {}
    files = [(name, "") for name in _weight_files(folder)]
    if (
        described.objective is not None
        and described.objective.compares
        and described.objective.projected_width is not None
    ):
        require_own_files(folder / DENSE)
        files.append((f"{DENSE}/{WEIGHTS}", f"{DENSE}/"))
    for name, begin in files:
        remedy = "Restore it from a copy or export it again."
        with os_errors_as(DataError, f"{folder / name}: cannot be read", remedy, ValueError):
            stored |= {begin + each: tensor for each, tensor in read_tensors(folder / name).items()}
    file = folder / (WEIGHTS if (folder / WEIGHTS).exists() else INDEX)
    return from_hf(hub, stored, config, str(file), shapes=shapes)


def _weight_files(folder: Path) -> list[str]:
    """Return the names of the files that hold the weights."""
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    if (folder / INDEX).exists():
        shards = read_object(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(s, str) and Path(s).name == s for s in shards.values()):
            raise DataError(f"{folder / INDEX}: its weight_map names no files of this folder. Restore it from a copy.")
        return sorted(set(shards.values()))
    others = sorted(path.name for pattern in ("*.bin", "*.h5", "*.msgpack") for path in folder.glob(pattern))
    only_others = f", only {', '.join(others)}" if others else ""
    raise DataError(
        f"{folder / WEIGHTS}: no such file, nor {INDEX}{only_others}. Fetch it, or convert other formats with "
        "transformers: AutoModelForMaskedLM.from_pretrained(old).save_pretrained(new)."
    )


def _is_export(folder: Path) -> bool:
    """Return True if the folder is empty or holds only an earlier export of this program, so it may be replaced."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    is_ours = names <= EXPORTED_FILES and CONFIG_JSON in names
    return not names or (is_ours and EXPORTED_BY in read_object(folder / CONFIG_JSON))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
