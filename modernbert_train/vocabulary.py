"""Facts about a tokenizer that training needs, read from its tokenizer.json without loading it."""

from __future__ import annotations

import hashlib
import re
import shutil
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modernbert_train.core.files import anything_as, os_errors_as, whole_folder
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.read_json import content_of, parse_json, read_json
from modernbert_train.core.read_once import read_once
from modernbert_train.errors import DataError, StorageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# as texts of tokens; Ċ is a line break, and the last three are full-width marks, in byte-level vocabularies
_SENTENCE_ENDS = (".", "!", "?", "\n", "\u3002", "\uff01", "\uff1f", "Ċ", "ãĢĤ", "ï¼ģ", "ï¼Ł")
_CLOSING = "\"'\u201d\u2019»)]"
_SPACES = ("Ġ", "▁", " ")  # prefix of a token after a space: byte-level, SentencePiece, neither
_GAPS = re.compile(r"(?<=[^Ġ▁ ])[Ġ▁ ]+(?=[^Ġ▁ ])")  # between words of one token
_CONTINUES = "##"  # prefix of a token that continues a word, if spaces leave no mark
SPARE = "[unused"  # prefix of a reserved entry
_LARGEST_ID = (1 << 31) - 1  # limit of ids in shards
TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
# role of a special token -> its name in a tokenizer of this project
CONVENTION = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]", "unk": "[UNK]"}
NEEDED = ("cls", "sep", "pad", "mask")
_DECODERS_NAMES = {"cls": "bos_token", "sep": "eos_token"}  # names in tokenizers made for decoders


@dataclass(frozen=True)
class Vocabulary:
    """Ids that packing, masking and export need.

    Attributes:
        num_entries: entries of the tokenizer, which is one more than its largest id.
        cls_id, sep_id, pad_id, mask_id: ids of the special tokens.
        ordinary: int64 ids for random replacements: every entry except special and unused ones.
        sha256: hash of tokenizer.json, the tokenizer's identity.
        sentence_ends: int64 ids of tokens that end a sentence: ., !, ? and their full-width forms, with or without a
            closing quote or bracket, or a line break.
        inside_words: int64 ids of tokens that continue a word: with WordPiece's ##, or letters and digits without the
            mark of a space, if the vocabulary marks spaces.
        further_words: int64 ids of tokens that hold several words, as a SuperBPE's: once for each word after the first.
        segments_of_pairs: True if the tokenizer gives the second text of a pair token type 1.
        roles: token of each role, as the tokenizer spells it.
        separators: number of sep tokens between the two texts of a pair; a RoBERTa has two.
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
    further_words: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    segments_of_pairs: bool = False
    roles: Mapping[str, str] = field(default_factory=lambda: CONVENTION)
    separators: int = 1

    @property
    def between(self) -> tuple[int, ...]:
        """The ids between the two texts of a pair."""
        return (self.sep_id,) * self.separators


_MAX_GROWTH = 100  # characters of normalized text for one of text


class _Tokenizer(NamedTuple):
    """The content of tokenizer.json.

    Attributes:
        sha256: of its bytes.
        ids: of every token.
        added: the entry of each added token, by its text.
        segments_of_pairs: see `Vocabulary`.
        ends: the tokens that its post-processor puts before and after a text; empty if it adds none.
        separators: see `Vocabulary`.
    """

    sha256: str
    ids: Mapping[str, int]
    added: Mapping[str, Any]
    segments_of_pairs: bool
    ends: tuple[str, str]
    separators: int


def read_vocabulary(folder: str | Path) -> Vocabulary:
    """Read a tokenizer folder; unchanged files are parsed once in a process.

    Raises:
        DataError: tokenizer.json is missing or damaged, or lacks a token for one of `NEEDED`.
    """
    path, parsed = Path(folder) / TOKENIZER, _parsed(folder)
    roles, ids = role_tokens(folder), parsed.ids
    if missing := [role for role in NEEDED if role not in roles]:
        raise DataError(
            f"{path}: lacks {', '.join(CONVENTION[role] for role in missing)}, and neither {TOKENIZER_CONFIG} nor "
            f"{SPECIAL_TOKENS_MAP} names a {'_token, a '.join(missing)}_token. Give the tokenizer to `prepare` as "
            "tokenizer.path."
        )
    words = read_once(path, _words)
    cls_id, sep_id, pad_id, mask_id = (ids[roles[role]] for role in NEEDED)
    special = [cls_id, sep_id, pad_id, mask_id]
    if np.isin(special, words.ordinary).any():  # tokenizer.json does not mark them as special
        words = _Words(*(each[~np.isin(each, special)] for each in words))
    return Vocabulary(
        num_entries=max(ids.values()) + 1,
        cls_id=cls_id,
        sep_id=sep_id,
        pad_id=pad_id,
        mask_id=mask_id,
        ordinary=words.ordinary,
        sha256=parsed.sha256,
        sentence_ends=words.sentence_ends,
        inside_words=words.inside_words,
        further_words=words.further_words,
        segments_of_pairs=parsed.segments_of_pairs,
        roles=roles,
        separators=parsed.separators,
    )


def copy_tokenizer(folder: str | Path, out: Path) -> None:
    """Copy a tokenizer's files; an earlier copy is replaced.

    Raises:
        StorageError: the disk refuses it.
    """
    unwritten = os_errors_as(StorageError, f"{out}: cannot be written", "Free the disk, or fix the permissions.")
    with unwritten, whole_folder(out) as partial:
        for name in (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP):
            if (file := Path(folder) / name).is_file():
                shutil.copyfile(file, partial / name)


def role_tokens(path: str | Path) -> dict[str, str]:
    """Return the token of each role: cls, sep, pad, mask, and unk where there is one.

    Sources, in this order: tokenizer_config.json, special_tokens_map.json, the post-processor, `CONVENTION`, and last
    bos_token and eos_token. A tokenizer without a token for each of `NEEDED` is no encoder's: then only `CONVENTION`
    counts.

    Args:
        path: the folder of a tokenizer, or its tokenizer.json.

    Raises:
        DataError: there is no tokenizer.json, or it is damaged.
    """
    roles = partial_roles(path)
    if any(role not in roles for role in NEEDED):
        ids = token_ids(path)
        roles = {role: text for role, text in CONVENTION.items() if text in ids}
    return roles


def partial_roles(path: str | Path) -> dict[str, str]:
    """Return the token of each role that has one, even in a tokenizer that was not made for encoders; see
    `role_tokens`."""
    file, parsed = _file(path), _parsed(path)
    sidecars = [file.parent / name for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP)] if file.name == TOKENIZER else []
    named = [read_once(each, _named_tokens) for each in sidecars if each.is_file()]
    ends = dict(zip(("cls", "sep"), parsed.ends, strict=True))
    roles = {}
    for role, ours in CONVENTION.items():
        candidates = [each.get(f"{role}_token", "") for each in named]
        candidates += [ends.get(role, ""), ours, *(each.get(_DECODERS_NAMES.get(role, ""), "") for each in named)]
        text = next((each for each in candidates if each and each in parsed.ids), None)
        if text is not None:
            roles[role] = text
    return roles


def _file(path: str | Path) -> Path:
    return Path(path) if Path(path).is_file() else Path(path) / TOKENIZER


def _parsed(path: str | Path) -> _Tokenizer:
    """Read the tokenizer.json at a path, or in the folder there; refuse links that lead out of the folder."""
    file = _file(path)
    require_own_files(file.parent)
    return read_once(file, _parse)


def _named_tokens(path: Path) -> dict[str, str]:
    """Return the special tokens that a JSON file names, by key."""
    with os_errors_as(DataError, f"{path}: cannot be read", "Restore it from a copy.", ValueError):
        content = read_json(path)
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a JSON object. Restore it from a copy.")
    tokens = {key: each.get("content") if isinstance(each, dict) else each for key, each in content.items()}
    return {key: text for key, text in tokens.items() if key.endswith("_token") and isinstance(text, str)}


def token_ids(folder: str | Path) -> Mapping[str, int]:
    """Return the id of every token, special and added ones too; tokenizers with equal ids can serve one model.

    Raises:
        DataError: there is no tokenizer.json, or it is damaged.
    """
    return _parsed(folder).ids


def open_tokenizer(folder: str | Path, *, spell_special: bool = True) -> Tokenizer:
    """Load the tokenizer of a folder without truncation, padding and BPE dropout.

    Args:
        folder: holds tokenizer.json.
        spell_special: take special tokens, written out in a text, for any other characters.

    Raises:
        DataError: the tokenizers library refuses it, such as a regular expression in it; or its normalizer makes long
            texts of short ones.
    """
    from tokenizers import Tokenizer  # which most runs do not need

    file = Path(folder) / TOKENIZER
    with anything_as(DataError, f"{file}: cannot be loaded", "Give a tokenizer.json of the tokenizers library."):
        tokenizer = Tokenizer.from_file(str(file))
    _refuse_growth(file, tokenizer.normalizer)
    tokenizer.encode_special_tokens = spell_special
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # the same text gives the same tokens
    return tokenizer


def _refuse_growth(file: Path, normalizer: Any) -> None:
    text = string.printable
    for step in [*normalizer] if hasattr(normalizer, "__getitem__") else [normalizer] * (normalizer is not None):
        text = step.normalize_str(text)
        if len(text) > _MAX_GROWTH * len(string.printable):
            raise DataError(
                f"{file}: its normalizer turns {len(string.printable)} characters into {len(text):,} or more. Remove "
                f"{type(step).__name__} from it, or name another tokenizer."
            )


def tokenizer_sha256(folder: str | Path) -> str:
    """Return the tokenizer's identity, even if it lacks a special token. Raises DataError as `token_ids`."""
    return _parsed(folder).sha256


def special_tokens(folder: str | Path) -> frozenset[str]:
    """Return the tokens that no text produces: special ones and [unused...]. Raises DataError as `token_ids`."""
    parsed = _parsed(folder)
    return frozenset(text for text in parsed.ids if _is_reserved(text, parsed.added))


def added_tokens(folder: str | Path) -> frozenset[str]:
    """Return tokens added to the tokenizer's model, spelled as in a text. Raises DataError as `token_ids`."""
    return frozenset(_parsed(folder).added)


def _is_reserved(text: str, added: Mapping[str, Any]) -> bool:
    return bool(added.get(text, {}).get("special")) or text.startswith(SPARE)


class _Words(NamedTuple):
    """Ids of the tokens that texts produce; see `Vocabulary`."""

    ordinary: NDArray[np.int64]
    sentence_ends: NDArray[np.int64]
    inside_words: NDArray[np.int64]
    further_words: NDArray[np.int64]


def _words(path: Path) -> _Words:
    parsed = read_once(path, _parse)
    ids = {text: i for text, i in parsed.ids.items() if not _is_reserved(text, parsed.added)}
    reserved = {*parsed.ids.values()} - {*ids.values()}
    ends = [i for text, i in ids.items() if text.rstrip(_CLOSING).endswith(_SENTENCE_ENDS)]
    further = [i for text, i in ids.items() for _ in _GAPS.findall(text)]
    kinds = ({*parsed.ids.values()} - reserved, ends, _inside_words(ids), further)
    words = _Words(*(np.array(sorted(each), dtype=np.int64) for each in kinds))
    for shared in words:
        shared.setflags(write=False)
    return words


def _inside_words(ids: Mapping[str, int]) -> set[int]:
    """Return `Vocabulary.inside_words`. Marks and line breaks are separate words, and never continue one."""
    continued = {i for text, i in ids.items() if text.startswith(_CONTINUES) and len(text) > len(_CONTINUES)}
    if len(continued) > len(ids) // 100:
        return continued
    if not any(text.startswith(_SPACES) for text in ids):
        return set()
    byte_level = any(text.startswith("Ġ") for text in ids)
    starts = (*_SPACES, "Ċ", "ĉ")

    def letter(first: str) -> bool:  # byte-level vocabularies show bytes beyond ASCII as letters or signs
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
        processor = tokenizer.get("post_processor") or {}
        pairs, ends = _segments_of_pairs(processor), _ends(processor)
        separators = _separators(processor, ends[1])
        return _Tokenizer(hashlib.sha256(content).hexdigest(), vocabulary, added, pairs, ends, separators)


def _segments_of_pairs(post_processor: Mapping[str, Any]) -> bool:
    """Return `Vocabulary.segments_of_pairs`, by the post-processors of the tokenizers library."""
    if post_processor.get("type") == "Sequence":
        return any(_segments_of_pairs(each) for each in post_processor["processors"])
    if post_processor.get("type") == "TemplateProcessing":
        sequences = [part["Sequence"] for part in post_processor["pair"] if "Sequence" in part]
        return any(part["id"] == "B" and part["type_id"] == 1 for part in sequences)
    return post_processor.get("type") == "BertProcessing"


def _ends(post_processor: Mapping[str, Any]) -> tuple[str, str]:
    """Return the tokens before and after a single text, if there is one of each; see `_segments_of_pairs`."""
    kind = post_processor.get("type")
    if kind == "Sequence":
        ends_of_parts = [ends for each in post_processor["processors"] if any(ends := _ends(each))]
        return ends_of_parts[0] if ends_of_parts else ("", "")
    if kind in ("BertProcessing", "RobertaProcessing"):
        return str(post_processor["cls"][0]), str(post_processor["sep"][0])
    if kind != "TemplateProcessing":
        return "", ""
    single = post_processor["single"]
    texts = [number for number, part in enumerate(single) if "Sequence" in part]
    if len(texts) != 1:
        return "", ""
    before, after = single[: texts[0]], single[texts[0] + 1 :]
    first, last = (str(part[0]["SpecialToken"]["id"]) if len(part) == 1 else "" for part in (before, after))
    return first, last


def _separators(post_processor: Mapping[str, Any], sep: str) -> int:
    """Return the number of `sep` between two texts; one for any other separator."""
    kind = post_processor.get("type")
    if kind == "Sequence":
        return max((_separators(each, sep) for each in post_processor["processors"]), default=1)
    if kind != "TemplateProcessing":
        return 2 if kind == "RobertaProcessing" else 1
    pair = post_processor["pair"]
    first, *second = [number for number, part in enumerate(pair) if "Sequence" in part]
    between = [part["SpecialToken"]["id"] for part in pair[first + 1 : second[0]]] if second else []
    return max(1, len(between)) if {*between} == {sep} else 1
