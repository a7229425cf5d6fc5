"""The few facts about a tokenizer that training needs, read from its tokenizer.json without loading it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modernbert_train.core.files import os_errors_as
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.read_json import content_of, parse_json
from modernbert_train.core.read_once import read_once
from modernbert_train.errors import DataError

# as texts of tokens; Ċ is a line break, and the last three are full-width marks, in byte-level vocabularies
_SENTENCE_ENDS = (".", "!", "?", "\n", "\u3002", "\uff01", "\uff1f", "Ċ", "ãĢĤ", "ï¼ģ", "ï¼Ł")
_CLOSING = "\"'\u201d\u2019»)]"
_SPACES = ("Ġ", "▁", " ")  # begins a token that stands after a space: byte-level, SentencePiece, neither
_CONTINUES = "##"  # begins one that does not, where a space leaves no mark
SPARE = "[unused"  # begins an entry that is kept free
_LARGEST_ID = (1 << 31) - 1  # what the shards' ids can be


@dataclass(frozen=True)
class Vocabulary:
    """Ids that packing, masking and export need.

    Attributes:
        num_entries: entries of the tokenizer, which is one more than its largest id.
        cls_id, sep_id, pad_id, mask_id: ids of the special tokens.
        ordinary: int64 ids that a random replacement is drawn from: every entry but special and unused ones.
        sha256: hash of tokenizer.json, the tokenizer's identity.
        sentence_ends: int64 ids of those whose text ends as a sentence does: ., !, ? and their full-width forms, with
            or without a closing quote or bracket, or a line break.
        inside_words: int64 ids of those that go on with a word that a token before them began: with WordPiece's ##, or
            letters and digits without the mark of a space where words have one.
        segments_of_pairs: whether the tokenizer gives the second text of a pair token type 1.
    """

    num_entries: int
    cls_id: int
    sep_id: int
    pad_id: int
    mask_id: int
    ordinary: NDArray[np.int64]
    sha256: str
    sentence_ends: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    inside_words: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    segments_of_pairs: bool = False


class _Tokenizer(NamedTuple):
    """What tokenizer.json says.

    Attributes:
        sha256: of its bytes.
        ids: of every token.
        added: what it says about each added token, by its text.
        segments_of_pairs: see `Vocabulary`.
    """

    sha256: str
    ids: Mapping[str, int]
    added: Mapping[str, Any]
    segments_of_pairs: bool


def read_vocabulary(folder: str | Path) -> Vocabulary:
    """Read a tokenizer folder, once in a process for as long as its tokenizer.json is the same.

    Raises:
        DataError: there is no tokenizer.json, it is damaged, or one of [CLS], [SEP], [PAD], [MASK] is missing.
    """
    require_own_files(Path(folder))
    return read_once(Path(folder) / "tokenizer.json", _vocabulary)


def token_ids(folder: str | Path) -> Mapping[str, int]:
    """The id of every token, special and added ones too; two tokenizers that agree here can serve one model.

    Raises:
        DataError: there is no tokenizer.json, or it is damaged.
    """
    require_own_files(Path(folder))
    return read_once(Path(folder) / "tokenizer.json", _parse).ids


def tokenizer_sha256(folder: str | Path) -> str:
    """Its identity, also of one that lacks a special token. Raises DataError as `token_ids`."""
    require_own_files(Path(folder))
    return read_once(Path(folder) / "tokenizer.json", _parse).sha256


def special_tokens(folder: str | Path) -> frozenset[str]:
    """Those that no text gives: special ones and [unused...]. Raises DataError as `token_ids`."""
    require_own_files(Path(folder))
    found = read_once(Path(folder) / "tokenizer.json", _parse)
    return frozenset(text for text in found.ids if _is_reserved(text, found.added))


def added_tokens(folder: str | Path) -> frozenset[str]:
    """Those that were added to the tokenizer's model, spelled as in a text. Raises DataError as `token_ids`."""
    require_own_files(Path(folder))
    return frozenset(read_once(Path(folder) / "tokenizer.json", _parse).added)


def _is_reserved(text: str, added: Mapping[str, Any]) -> bool:
    return bool(added.get(text, {}).get("special")) or text.startswith(SPARE)


def _vocabulary(path: Path) -> Vocabulary:
    sha256, ids, added, segments_of_pairs = read_once(path, _parse)
    missing = [name for name in ("[CLS]", "[SEP]", "[PAD]", "[MASK]") if name not in ids]
    if missing:
        raise DataError(f"{path}: lacks {', '.join(missing)}. Give the tokenizer to `prepare` as tokenizer.path.")
    reserved = {i for text, i in ids.items() if _is_reserved(text, added)}
    ordinary = np.array(sorted(set(ids.values()) - reserved), dtype=np.int64)
    ends = [i for text, i in ids.items() if i not in reserved and text.rstrip(_CLOSING).endswith(_SENTENCE_ENDS)]
    sentence_ends = np.array(sorted(ends), dtype=np.int64)
    inside_words = np.array(sorted(_inside_words({t: i for t, i in ids.items() if i not in reserved})), dtype=np.int64)
    for shared in (ordinary, sentence_ends, inside_words):
        shared.setflags(write=False)
    return Vocabulary(
        num_entries=max(ids.values()) + 1,
        cls_id=ids["[CLS]"],
        sep_id=ids["[SEP]"],
        pad_id=ids["[PAD]"],
        mask_id=ids["[MASK]"],
        ordinary=ordinary,
        sentence_ends=sentence_ends,
        inside_words=inside_words,
        segments_of_pairs=segments_of_pairs,
        sha256=sha256,
    )


def _inside_words(ids: Mapping[str, int]) -> set[int]:
    """See `Vocabulary.inside_words`. Marks and line breaks are words of their own, as a word's first part is."""
    continued = {i for text, i in ids.items() if text.startswith(_CONTINUES) and len(text) > len(_CONTINUES)}
    if len(continued) > len(ids) // 100:
        return continued
    if not any(text.startswith(_SPACES) for text in ids):
        return set()
    byte_level = any(text.startswith("Ġ") for text in ids)
    starts = (*_SPACES, "Ċ", "ĉ")

    def letter(first: str) -> bool:  # a byte of one beyond ASCII is shown as a letter, or as a sign
        return first.isalnum() or (byte_level and ord(first) > 127)

    return {i for text, i in ids.items() if text and not text.startswith(starts) and letter(text[0])}


def _parse(path: Path) -> _Tokenizer:
    damage = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
    remedy = "data.tokenizer must name a tokenizer folder, as `prepare` makes it."
    with os_errors_as(DataError, f"{path}: not a readable tokenizer", remedy, *damage):
        content = content_of(path)
        tokenizer = parse_json(content)
        listed = tokenizer["model"]["vocab"]
        if isinstance(listed, list):  # Unigram: [token, score] in the order of the ids
            listed = {token: i for i, (token, _) in enumerate(listed)}
        vocabulary = {str(token): int(i) for token, i in listed.items()}
        added = {str(token["content"]): token for token in tokenizer["added_tokens"]}
        vocabulary |= {text: int(token["id"]) for text, token in added.items()}
        if wrong := [text for text, i in vocabulary.items() if not 0 <= i <= _LARGEST_ID]:
            raise ValueError(f"{wrong[0][:40]!r} has the id {vocabulary[wrong[0]]:.9g}")
        pairs = _segments_of_pairs(tokenizer.get("post_processor") or {})
        return _Tokenizer(hashlib.sha256(content).hexdigest(), vocabulary, added, pairs)


def _segments_of_pairs(post_processor: Mapping[str, Any]) -> bool:
    """See `Vocabulary`; by the kinds of post-processor that the tokenizers library has."""
    if post_processor.get("type") == "Sequence":
        return any(_segments_of_pairs(each) for each in post_processor["processors"])
    if post_processor.get("type") == "TemplateProcessing":
        parts = [part["Sequence"] for part in post_processor["pair"] if "Sequence" in part]
        return any(part["id"] == "B" and part["type_id"] == 1 for part in parts)
    return post_processor.get("type") == "BertProcessing"
