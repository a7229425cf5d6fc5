"""Cleaning, counting and splitting: what happens to each document before it is tokenised.

The split is a function of the document's text alone, so equal texts can never be on both sides, and adding a source
moves no document of another. The corpus is read twice, first to count it and to train the tokenizer, then to write
it; both readings pass through `kept_documents` and must tally.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from data_prep.sources import Damaged, Document, read_source
from modernbert_train.config.prepare import PrepareConfig
from modernbert_train.errors import DataError

TRAIN = "train"
VALIDATION = "validation"
OFFENDERS_LISTED = 20

# Left out under any on_error: nothing is wrong with the document, it is only not wanted.
_NOT_WANTED = ("too_short", "duplicate")


@dataclass(frozen=True)
class Kept:
    """A document that will be written.

    Attributes:
        split: TRAIN or VALIDATION.
        id: where it comes from.
        text: valid UTF-8 without NUL.
        bytes: length of the text in UTF-8.
        draw: number in [0, 1) that depends on the text alone and not on what decided the split.
    """

    split: str
    id: str
    text: str
    bytes: int
    draw: float


@dataclass
class Tally:
    """What became of every document: `read` is the sum of `kept` and `dropped`."""

    read: int = 0
    kept: Counter[str] = field(default_factory=Counter)  # split -> documents
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> documents
    offenders: dict[str, list[str]] = field(default_factory=dict)  # reason -> the first few, with what is wrong
    bytes: int = 0  # UTF-8 bytes of the kept texts


def kept_documents(config: PrepareConfig, tally: Tally) -> Iterator[Kept]:
    """Read all sources and yield the documents to be written, in a fixed order.

    Args:
        config: the spec.
        tally: counts up as documents pass; complete when the iterator is exhausted.

    Raises:
        DataError: a document is damaged and `on_error` is `stop`.
    """
    seen: set[int] = set()  # about 100 bytes of memory a document
    for name, source in config.sources.items():
        for item in read_source(name, source, config.max_characters):
            tally.read += 1
            result = _examine(item, config, seen) if isinstance(item, Document) else item
            if isinstance(result, Kept):
                tally.kept[result.split] += 1
                tally.bytes += result.bytes
                yield result
            else:
                _leave_out(config, tally, result)


def no_tokens(config: PrepareConfig, tally: Tally, kept: Kept) -> None:
    """Turn a kept document into a damaged one, because the tokenizer makes nothing of it.

    Raises:
        DataError: `on_error` is `stop`.
    """
    tally.kept[kept.split] -= 1
    _leave_out(config, tally, Damaged(kept.id, "no_tokens", "the tokenizer makes no token of this text"))


def require_documents(config: PrepareConfig, tally: Tally) -> None:
    """Refuse a corpus that leaves a split empty.

    Raises:
        DataError: no document is left, or none for validation, or none for training.
    """
    kept = sum(tally.kept.values())
    if not kept:
        why = "; ".join(
            f"{reason} {count}, the first {tally.offenders[reason][0]}" for reason, count in tally.dropped.items()
        )
        paths = ", ".join(source.path or source.kind for source in config.sources.values())
        raise DataError(
            f"no documents left of {tally.read} read from {paths} ({why or 'the sources are empty'}). "
            "Correct sources, or mend the files."
        )
    empty = [split for split in (TRAIN, VALIDATION) if not tally.kept[split]]
    if empty == [TRAIN] or (empty and config.validation_share):
        raise DataError(
            f"validation_share={config.validation_share} of {kept} documents leaves none for {empty[0]}. "
            "Add documents (a file of many texts can be made JSONL, one text a line), or change validation_share; "
            "0 holds out none."
        )


def _leave_out(config: PrepareConfig, tally: Tally, damaged: Damaged) -> None:
    if config.on_error == "stop" and damaged.reason not in _NOT_WANTED:
        raise DataError(
            f"{damaged.id}: {damaged.detail}. Mend or remove it, or set on_error=skip to leave out and count what is "
            "damaged."
        )
    tally.dropped[damaged.reason] += 1
    listed = tally.offenders.setdefault(damaged.reason, [])
    if len(listed) < OFFENDERS_LISTED:
        listed.append(f"{damaged.id}: {damaged.detail}")


def _examine(document: Document, config: PrepareConfig, seen: set[int]) -> Kept | Damaged:
    id, text = document.id, document.text
    if (at := text.find("\0")) >= 0:
        return Damaged(id, "nul_byte", f"NUL character at character {at} of the text")
    if not text.strip():
        return Damaged(id, "empty", f"no text, {len(text)} characters of white space")
    if len(text) > config.max_characters:
        return Damaged(id, "too_long", f"{len(text)} characters, max_characters={config.max_characters}")
    if len(text) < config.min_characters:
        return Damaged(id, "too_short", f"{len(text)} characters, min_characters={config.min_characters}")
    try:
        encoded = text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which is no character
        return Damaged(id, "not_utf8", f"half a surrogate pair at character {error.start} of the text")
    digest = hashlib.sha256(encoded).digest()
    key = int.from_bytes(digest[16:24])
    if key in seen:
        return Damaged(id, "duplicate", "same text as an earlier document")
    seen.add(key)
    split = VALIDATION if _unit(digest[:8]) < config.validation_share else TRAIN
    return Kept(split, id, text, len(encoded), _unit(digest[8:16]))


def _unit(digest: bytes) -> float:
    """8 bytes of a hash as a number in [0, 1)."""
    return (int.from_bytes(digest) >> 11) / (1 << 53)
