"""Our weights as a Hugging Face model folder, and the way back.

A folder is the weights and a config.json, as formats/ has them, the tokenizer and a card. It appears whole or not at
all.
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
from modernbert_train.weights.formats.alone import DENSE, Alone
from modernbert_train.weights.formats.config_json import CONFIG_JSON, read_object
from modernbert_train.weights.formats.tensors import Shapes, from_hf, to_hf, without_place

WEIGHTS, INDEX, CARD = "model.safetensors", "model.safetensors.index.json", "README.md"
EXPORTED_FILES = {WEIGHTS, CONFIG_JSON, CARD, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP}
_WRAPPERS = ("_orig_mod.", "module.")
EXPORTED_FILES |= {"modules.json", "sentence_bert_config.json", "1_Pooling"}  # of an encoder alone
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
    says: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that transformers' AutoModel, the class that its config.json names, and AutoTokenizer load.

    A head that transformers' model has no place for is left out; `without_place` names it.

    Args:
        model_state: whole tensors under the model's own names; written in fp32, without the tied decoder.weight, which
            may be left out here too.
        config: the architecture of these weights, with the RoPE bases of the phase that they come from.
        order: what they were trained to see; causal becomes a decoder.
        max_tokens: longest sequence the weights were trained on; becomes the tokenizer's and the model's limit.
        tokenizer_folder: the tokenizer that made the training shards; special ids are read from it.
        out: the folder; an earlier export there is replaced, anything else refused.
        card: text of README.md.
        hub: the format; None: that of the architecture.
        shapes: see `to_hf`.
        pairs: it reads pairs of texts by their token types.
        says: further keys of config.json.

    Raises:
        ConfigError: a RoPE base is not positive and finite, the weights or the tokenizer do not fit `config`, or `out`
            holds something that is not an export.
        DataError: the tokenizer folder is damaged.
        StorageError: the folder cannot be written.
    """
    hub = hub or export_format(config, order, {module_of(name) for name in model_state})
    state = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in model_state.items()}
    weights = to_hf(hub, state, config, shapes)
    modules = {module_of(name) for name in state} - {*without_place(hub, state, config)}
    vocabulary = read_vocabulary(tokenizer_folder)
    if vocabulary.num_entries > config.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.vocab_size}, but the tokenizer in {tokenizer_folder} has "
            f"{vocabulary.num_entries} entries. Export with the tokenizer that the model was trained with."
        )
    tokenizer_config = read_object(tokenizer_folder / TOKENIZER_CONFIG) | {"model_max_length": max_tokens}
    if tokenizer_config.get("tokenizer_class") == "TokenizersBackend":  # transformers 5's name, unknown to version 4
        tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    of_pairs = any(module_of(name) == "pair_head" for name in state)
    if pairs or (of_pairs and config.segments > 1):  # it has learnt what token types mean
        tokenizer_config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    beside = hub.files(config.hidden_size, max_tokens) if isinstance(hub, Alone) else {}
    described = {**hub.describe(config, order, modules, max_tokens, vocabulary), **(says or {})}
    if out.exists() and not _is_export(out):
        raise ConfigError(f"{out} exists and is not an export of this program. Remove it or name another folder.")

    unwritten = os_errors_as(StorageError, f"{out}: cannot be written", "Free the disk or name another.")
    dense = {name.removeprefix(f"{DENSE}/"): weights.pop(name) for name in [*weights] if name.startswith(f"{DENSE}/")}
    with unwritten, whole_folder(out) as staging:
        write_tensors(staging / WEIGHTS, weights, metadata={"format": "pt"})
        _write_json(staging / CONFIG_JSON, described)
        _write_json(staging / TOKENIZER_CONFIG, tokenizer_config)
        (staging / CARD).write_text(card, encoding="utf-8")
        for name, content in beside.items():
            (staging / name).parent.mkdir(exist_ok=True)
            _write_json(staging / name, content)
        if dense:
            write_tensors(staging / DENSE / WEIGHTS, dense, metadata={"format": "pt"})
        for name in (TOKENIZER, SPECIAL_TOKENS_MAP):
            if (tokenizer_folder / name).exists():  # transformers 5 keeps the special tokens in tokenizer_config.json
                shutil.copyfile(tokenizer_folder / name, staging / name)


def load_weights(folder: Path, model: ModelConfig | None = None) -> dict[str, Tensor]:
    """Read the weights beside a config.json, whatever they are stored in, in fp32 under our names; see `from_hf`.

    One model.safetensors or several with an index; names of Composer checkpoints are understood too.

    Args:
        folder: of the model.
        model: the architecture to read them as, which is stored as the folder's is; None: what config.json says.

    Raises:
        DataError: a file is missing, damaged or cut short, or the weights do not fit config.json; names the file.
    """
    require_own_files(folder)
    raw, where = read_object(folder / CONFIG_JSON), str(folder / CONFIG_JSON)
    hub = format_of(raw, where)
    said = hub.read(raw, where)
    config = model or said.model
    shapes = None if said.objective is None else shapes_of(config, said.objective)
    stored: dict[str, Tensor] = {}
    parts = [(name, "") for name in _weight_files(folder)]
    if said.objective is not None and said.objective.compares and said.objective.projected_width is not None:
        require_own_files(folder / DENSE)
        parts.append((f"{DENSE}/{WEIGHTS}", f"{DENSE}/"))
    for name, begin in parts:
        remedy = "Restore it from a copy or export it again."
        with os_errors_as(DataError, f"{folder / name}: cannot be read", remedy, ValueError):
            stored |= {begin + each: tensor for each, tensor in read_tensors(folder / name).items()}
    file = folder / (WEIGHTS if (folder / WEIGHTS).exists() else INDEX)
    return from_hf(hub, _unwrapped(stored), config, str(file), shapes=shapes)


def _unwrapped(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take away what torch.compile and DistributedDataParallel put before all names of a state dict."""
    for wrapper in _WRAPPERS * 2:  # each may be around the other
        if stored and all(name.startswith(wrapper) for name in stored):
            stored = {name.removeprefix(wrapper): tensor for name, tensor in stored.items()}
    return stored


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


def _is_export(folder: Path) -> bool:
    """Whether nothing but our own earlier export (or nothing at all) would be lost by replacing the folder."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    known = names <= EXPORTED_FILES and CONFIG_JSON in names
    return not names or (known and "exported_by" in read_object(folder / CONFIG_JSON))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
