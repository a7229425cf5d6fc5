"""Weights, architecture and tokenizer from a checkpoint file of Composer, as AnswerDotAI's training code writes it.

Such a file is a pickle, which may name any function to be called. It is read by torch's weights-only unpickler, and
every class that this unpickler does not know (clocks, random states, metrics of any version) is replaced by an empty
object. Nothing is imported and nothing is called, so no list of allowed classes can be too short for an old file or too
long for a hostile one. The tensors stay in the file until they are used.
"""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.config.tools.import_config import FIXED
from modernbert_train.core.files import anything_as
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import SPECIAL_TOKENS_MAP, TOKENIZER, TOKENIZER_CONFIG
from modernbert_train.weights.formats import modernbert
from modernbert_train.weights.formats.config_json import CONFIG_JSON, read_object
from modernbert_train.weights.formats.modernbert import OUT_DROPOUT
from modernbert_train.weights.formats.tensors import from_hf

_TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP)

# Keys of FIXED that are not checked here: config.json states the first, and its reader checks them; the others only
# affect training.
_STATED = ("hidden_act", "attn_qkv_bias", "attn_out_bias", "mlp_in_bias", "mlp_out_bias", "norm_kwargs.bias")
_STATED += ("rotary_emb_dim", "local_attn_rotary_emb_dim")
_OF_TRAINING = ("init_method", "attention_probs_dropout_prob", "embed_dropout_prob", "mlp_dropout_prob")

# FlexBERT's prefixes for implementations of the same module: unpadded or padded, or a Triton kernel.
_FLEXBERT_WAYS = r"^(unpadded_|padded_|triton_)"

# FlexBERT's key -> transformers' key in config.json.
_FLEXBERT_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "global_attn_every_n_layers": "global_attn_every_n_layers",
    "sliding_window": "local_attention",
    "rotary_emb_base": "global_rope_theta",
    "hidden_act": "hidden_activation",
    "decoder_bias": "decoder_bias",
    "init_std": "initializer_range",
    "init_cutoff_factor": "initializer_cutoff_factor",
}


@dataclass(frozen=True)
class ComposerFile:
    """Contents of a checkpoint file.

    Attributes:
        path: the file.
        model: the architecture.
        max_tokens: longest sequence; transformers' default for FlexBERT, whose configuration lacks it.
        tokenizer_files: name -> text of the tokenizer's files; empty if the file has none.
        described_by: source of the architecture, for messages.
        stored: tensors under Composer's names, mapped from the file.
    """

    path: Path
    model: ModernBertConfig
    max_tokens: int
    tokenizer_files: dict[str, str]
    described_by: str
    stored: dict[str, Tensor]

    def weights(self) -> dict[str, Tensor]:
        """Return every parameter in fp32 under this program's names, like `hf_folder.load_weights`.

        Raises:
            DataError: they do not fit the architecture.
        """
        return from_hf(modernbert.FORMAT, self.stored, self.model, str(self.path), self.described_by)


def open_composer(path: Path) -> ComposerFile:
    """Open a checkpoint file without running anything in it.

    The architecture is the configuration that Composer's HuggingFaceModel stored in the file, of FlexBERT or
    transformers' ModernBERT; without one, the transformers config.json in the same folder.

    Raises:
        DataError: the file is damaged, not such a checkpoint, or of an architecture that this encoder lacks.
    """
    content = _read(path)
    state = content["state"] if isinstance(content.get("state"), dict) else {"model": content}
    stored = state.get("model")
    if not isinstance(stored, dict) or not stored or not all(isinstance(t, Tensor) for t in stored.values()):
        raise DataError(
            f"{path}: holds {list(content)[:4]} and no tensors under state, model. Name a checkpoint of Composer, "
            "such as ep0-ba4000-rank0.pt."
        )
    wrapper = _dig(state, "integrations", "huggingface")
    raw, where, described_by = _dig(wrapper, "model", "config", "content"), str(path), "configuration"
    if not isinstance(raw, dict) or not raw:
        config_file = path.parent / CONFIG_JSON
        if not config_file.is_file():
            raise DataError(
                f"{path}: does not record its architecture, and its folder lacks a {CONFIG_JSON}. Put the "
                f"{CONFIG_JSON} of a ModernBertForMaskedLM of the same shape and RoPE bases there."
            )
        raw, where, described_by = read_object(config_file), str(config_file), CONFIG_JSON
    elif not raw.get("architectures"):  # transformers only writes it when a model is saved
        raw = raw | {"architectures": [str(_dig(wrapper, "model", "config", "class")).rpartition(".")[2]]}
    is_flexbert = "bert_layer" in raw
    described = modernbert.FORMAT.read(_from_flexbert(raw, where) if is_flexbert else raw, where)
    files = {name: _dig(wrapper, "tokenizer", name, "content") for name in _TOKENIZER_FILES}
    return ComposerFile(
        path=path,
        model=cast(ModernBertConfig, described.model),
        max_tokens=described.max_tokens,
        tokenizer_files={name: json.dumps(parsed, ensure_ascii=False) for name, parsed in files.items() if parsed},
        described_by=described_by,
        stored=stored,
    )


class _Nothing:
    """Placeholder for an object of a class that is not loaded."""

    def __new__(cls, *args: object) -> _Nothing:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


def _read(path: Path) -> dict[Any, Any]:
    if not path.is_file():
        raise DataError(f"{path}: no such file. Name a checkpoint of Composer, such as ep0-ba4000-rank0.pt.")
    with anything_as(DataError, f"{path}: damaged, or no checkpoint of torch", "Copy it again."):
        content = _unpickled(path)
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds a {type(content).__name__} and not a checkpoint. Name another file.")
    return content


def _unpickled(path: Path) -> Any:
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(_Nothing, name) for name in unknown]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("Check the doc")]
        raise DataError(
            f"{path}: not read, because it could run code ({lines[-1].strip()}). If you trust its author, extract the "
            "weights and name the new file: python -c \"import torch; s = torch.load('old.pt', "
            "map_location='cpu', weights_only=False)['state']; torch.save({'state': {k: s[k] for k in ('model', "
            "'integrations')}}, 'new.pt')\""
        ) from None


def _dig(content: Any, *keys: str) -> Any:
    """Return a value deep inside nested dicts; None if a key is missing."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def _from_flexbert(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Translate FlexBERT's configuration to transformers' keys of ModernBERT."""
    for key, (only, _) in FIXED.items():
        if key in (*_STATED, *_OF_TRAINING):
            continue
        value: Any = raw.get(key)
        if isinstance(value, str):
            value = re.sub(_FLEXBERT_WAYS, "", value)
        if (value or None) != (only or None):
            raise DataError(f"{where}: {key}={raw.get(key)}; this encoder only knows {only}. Name another model.")
    if missing := [key for key in _FLEXBERT_KEYS if raw.get(key) is None]:
        raise DataError(f"{where}: its configuration lacks {', '.join(missing)}. Name another checkpoint.")
    window, every_n = raw["sliding_window"], raw["global_attn_every_n_layers"]
    if window == -1 or every_n == -1:
        raise DataError(
            f"{where}: sliding_window={window}, global_attn_every_n_layers={every_n}; this encoder has both kinds of "
            "layers. Name another model."
        )
    width, heads = raw["hidden_size"], raw["num_attention_heads"]
    for key in ("rotary_emb_dim", "local_attn_rotary_emb_dim"):
        if raw.get(key) is not None and not (_is_number(heads) and _is_number(raw[key]) and raw[key] * heads == width):
            raise DataError(
                f"{where}: {key}={raw[key]}, hidden_size={width}, num_attention_heads={heads}; this encoder rotates "
                "whole heads. Name another model."
            )
    local_theta = raw.get("local_attn_rotary_emb_base", -1)  # -1: as in global layers
    norm = raw.get("norm_kwargs") or {}
    if not isinstance(norm, dict):
        raise DataError(f"{where}: norm_kwargs={norm}, not a section. Name another checkpoint.")
    return {
        "model_type": "modernbert",
        "architectures": ["ModernBertForMaskedLM"],
        **{theirs: raw[flexbert] for flexbert, theirs in _FLEXBERT_KEYS.items()},
        "local_rope_theta": raw["rotary_emb_base"] if local_theta in (-1, None) else local_theta,
        "norm_eps": norm.get("eps", 1e-5),  # torch's defaults, which the reference leaves in place
        "norm_bias": norm.get("bias", True),
        OUT_DROPOUT: raw.get("attn_out_dropout_prob", 0.0),
        "attention_bias": bool(raw.get("attn_qkv_bias") or raw.get("attn_out_bias")),
        "mlp_bias": bool(raw.get("mlp_in_bias") or raw.get("mlp_out_bias")),
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
