"""The few facts about a tokenizer that training needs, read from its tokenizer.json without loading it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.errors import DataError
from modernbert_train.own_files import require_own_files
from modernbert_train.read_json import parse_json

_LARGEST_ID = (1 << 31) - 1  # what the shards' ids can be


@dataclass(frozen=True)
class Vocabulary:
    """Ids that packing, masking and export need.

    Attributes:
        num_entries: entries of the tokenizer, which is one more than its largest id.
        cls_id, sep_id, pad_id, mask_id: ids of the special tokens.
        ordinary: int64 ids that a random replacement is drawn from: every entry but special and unused ones.
        sha256: hash of tokenizer.json, the tokenizer's identity.
    """

    num_entries: int
    cls_id: int
    sep_id: int
    pad_id: int
    mask_id: int
    ordinary: NDArray[np.int64]
    sha256: str


def read_vocabulary(folder: str | Path) -> Vocabulary:
    """Read a tokenizer folder.

    Raises:
        DataError: there is no tokenizer.json, it is damaged, or one of [CLS], [SEP], [PAD], [MASK] is missing.
    """
    path = Path(folder) / "tokenizer.json"
    content, ids, added = _read(path)
    missing = [name for name in ("[CLS]", "[SEP]", "[PAD]", "[MASK]") if name not in ids]
    if missing:
        raise DataError(
            f"{path}: lacks {', '.join(missing)}. Give the tokenizer to data_prep/prepare.py as tokenizer.path."
        )
    reserved = {i for text, i in ids.items() if added.get(text, {}).get("special") or text.startswith("[unused")}
    return Vocabulary(
        num_entries=max(ids.values()) + 1,
        cls_id=ids["[CLS]"],
        sep_id=ids["[SEP]"],
        pad_id=ids["[PAD]"],
        mask_id=ids["[MASK]"],
        ordinary=np.array(sorted(set(ids.values()) - reserved), dtype=np.int64),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def token_ids(folder: str | Path) -> dict[str, int]:
    """The id of every token, special and added ones too; two tokenizers that agree here can serve one model.

    Raises:
        DataError: there is no tokenizer.json, or it is damaged.
    """
    return _read(Path(folder) / "tokenizer.json")[1]


def _read(path: Path) -> tuple[bytes, dict[str, int], dict[str, Any]]:
    """The file, the id of every token, and what it says about each added token."""
    require_own_files(path.parent)
    try:
        content = path.read_bytes()
        tokenizer = parse_json(content)
        listed = tokenizer["model"]["vocab"]
        if isinstance(listed, list):  # Unigram: [token, score] in the order of the ids
            listed = {token: i for i, (token, _) in enumerate(listed)}
        vocabulary = {str(token): int(i) for token, i in listed.items()}
        added = {str(token["content"]): token for token in tokenizer["added_tokens"]}
        vocabulary |= {text: int(token["id"]) for text, token in added.items()}
        if wrong := [text for text, i in vocabulary.items() if not 0 <= i <= _LARGEST_ID]:
            raise ValueError(f"{wrong[0][:40]!r} has the id {vocabulary[wrong[0]]:.9g}")
        return content, vocabulary, added
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file. data.tokenizer must name a tokenizer folder, as data_prep/prepare.py makes it."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"{path}: not a readable tokenizer ({type(error).__name__}: {error}).") from None
