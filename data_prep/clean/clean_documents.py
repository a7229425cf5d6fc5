"""Clean and split documents before they are tokenised, and count the results.

The split is a function of the document's text alone, so equal texts are never on both sides, and adding a source moves
no document of another.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import floor
from typing import Any

from data_prep.clean.fields import Fields, add_fields, as_text, count_fields, stream_of
from data_prep.clean.filters import Screen
from data_prep.read.documents import Document
from modernbert_train.config.tools.prepare import REST, PrepareConfig, field_names
from modernbert_train.core.read_json import as_type
from modernbert_train.data.field_counts import FieldCounts
from modernbert_train.data.read.rows import LeftOut
from modernbert_train.errors import DataError

TRAIN = "train"
VALIDATION = "validation"
OUTSIDE_SHARE = "outside_document_share"
SPLITS = (TRAIN, VALIDATION)
_SHARES = 1000  # resolution of a share in an error
OFFENDERS_LISTED = 20
_NAMED = 20  # values of a field in an error


@dataclass(frozen=True)
class Kept:
    """A document that will be written, unless it is a duplicate.

    Attributes:
        split: one of `splits_of`.
        text: valid UTF-8 without NUL.
        bytes: length of the text in UTF-8.
        altered: changes to the text, in words that the report counts.
        fields: the value of each field of the spec, as counted; None if the document lacks it.
    """

    split: str
    text: str
    bytes: int
    altered: list[str]
    fields: Mapping[str, str | None] = field(default_factory=dict)
    draw: float = 0.0  # from 0 to 1, by its text: below validation_share it is held out


@dataclass
class SourceTally:
    """Results for the documents of one source: in the end, `read` is the sum of `documents` and `dropped`."""

    read: int = 0
    altered: Counter[str] = field(default_factory=Counter)  # change -> documents read
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> documents
    damaged: Counter[str] = field(default_factory=Counter)  # reason -> dropped documents that are damaged
    documents: Counter[str] = field(default_factory=Counter)  # split -> kept documents
    text_bytes: Counter[str] = field(default_factory=Counter)  # split -> their UTF-8 bytes
    tokens: Counter[str] = field(default_factory=Counter)  # split -> their tokens
    input_bytes: Counter[str] = field(default_factory=Counter)  # "all", and "lost": files not read to the end
    first: dict[str, str] = field(default_factory=dict)  # reason -> the first damaged document, with its fault

    def add(self, other: SourceTally) -> None:
        self.read += other.read
        self.first = other.first | self.first
        for name in ("altered", "dropped", "damaged", "input_bytes", "documents", "text_bytes", "tokens"):
            getattr(self, name).update(getattr(other, name))


@dataclass
class Tally:
    """Results for every document, by source; tallies of tasks add up to the whole."""

    sources: dict[str, SourceTally] = field(default_factory=dict)
    fields: dict[str, Fields] = field(default_factory=dict)  # split -> its documents by their fields
    offenders: dict[str, list[str]] = field(default_factory=dict)  # reason -> the first few, with their faults
    seconds: dict[str, float] = field(default_factory=dict)  # stage -> summed time of its tasks
    draws: list[float] = field(default_factory=list)  # the lowest and the highest of a kept document

    def source(self, name: str) -> SourceTally:
        if name not in self.sources:  # called several times a document, and creating a tally takes microseconds
            self.sources[name] = SourceTally()
        return self.sources[name]

    def count_fields(self, split: str, values: Mapping[str, str | None], tokens: int) -> None:
        """Count a document by its fields."""
        if values:
            count_fields(self.fields.setdefault(split, {}), values, tokens)

    def total(self) -> SourceTally:
        """Return the sum over all sources."""
        total = SourceTally()
        for each in self.sources.values():
            total.add(each)
        return total

    def leave_out(self, source: str, item: LeftOut, on_error: str) -> None:
        """Count a dropped document.

        Raises:
            DataError: it is damaged and `on_error` is `stop`.
        """
        if on_error == "stop" and item.damaged:
            raise DataError(
                f"{item.id}: {item.detail}. Fix or remove it, or set on_error=skip to drop and count damaged documents."
            )
        counts, line = self.source(source), f"{item.id}: {item.detail}"
        counts.dropped[item.reason] += 1
        if item.damaged:
            counts.damaged[item.reason] += 1
            counts.first.setdefault(item.reason, line)
        self._list(item.reason, line)

    def add(self, other: Tally) -> None:
        for name, each in other.sources.items():
            self.source(name).add(each)
        for split, fields in other.fields.items():
            add_fields(self.fields.setdefault(split, {}), fields)
        for reason, offenders in other.offenders.items():
            for offender in offenders:
                self._list(reason, offender)
        for stage, seconds in other.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        for draw in other.draws:
            self.drawn(draw)

    def drawn(self, draw: float) -> None:
        """Record a document's random draw for the validation split; advice on validation_share reads the range."""
        lowest, highest = self.draws or (draw, draw)
        self.draws = [draw if draw < lowest else lowest, draw if draw > highest else highest]

    def to_json(self) -> dict[str, Any]:
        fields = {split: {name: asdict(each) for name, each in counts.items()} for split, counts in self.fields.items()}
        return vars(self) | {"sources": {name: vars(each) for name, each in self.sources.items()}, "fields": fields}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Tally:
        sources = {}
        for name, counts in content["sources"].items():
            read, first = counts.pop("read"), counts.pop("first")
            sources[name] = SourceTally(read, **{key: Counter(value) for key, value in counts.items()}, first=first)
        fields = as_type(dict[str, Fields], content["fields"])
        return cls(sources, fields, content["offenders"], content["seconds"], content["draws"])

    def _list(self, reason: str, offender: str) -> None:
        listed = self.offenders.setdefault(reason, [])
        if len(listed) < OFFENDERS_LISTED:
            listed.append(offender)


def examine(document: Document, config: PrepareConfig, screen: Screen) -> Kept | LeftOut:
    """Decide whether a document is written, and to which split; duplicates are found later."""
    id, text = document.id, document.text
    if (at := text.find("\0")) >= 0:
        return LeftOut(id, "nul_byte", f"NUL character at character {at} of the text")
    if problem := _wrong_size(id, text, config):
        return problem
    try:
        encoded = text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can encode half a surrogate pair, which is not a character
        return LeftOut(id, "not_utf8", f"half a surrogate pair at character {error.start} of the text")
    if config.document_share < 1 and _unit(encoded, 16) >= config.document_share:
        return LeftOut(id, OUTSIDE_SHARE, f"document_share={config.document_share:g}", damaged=False)
    screened = screen.check(id, text)
    if isinstance(screened, LeftOut):
        return screened
    if screened.altered:
        if problem := _wrong_size(id, screened.text, config):
            return problem
        encoded = screened.text.encode("utf-8")
    altered = ([document.altered] if document.altered else []) + screened.altered
    draw = _unit(encoded, 0)
    split = VALIDATION if draw < config.validation_share else _training_split(config, document)
    return Kept(split, screened.text, len(encoded), altered, values_of(document, config), draw)


def values_of(document: Document, config: PrepareConfig) -> dict[str, str | None]:
    """Return the value of each field of the spec, as counted."""
    return {name: as_text(document.fields.get(name)) for name in field_names(config)}


def splits_of(config: PrepareConfig) -> tuple[str, ...]:
    """Return the names of the possible splits of a spec, in the order of their numbers."""
    streams = config.streams
    if streams.field is None:
        return SPLITS
    return (*(f"{TRAIN}-{name}" for name in sorted([*streams.values, *streams.scores, REST])), VALIDATION)


def _training_split(config: PrepareConfig, document: Document) -> str:
    if config.streams.field is None:
        return TRAIN
    return f"{TRAIN}-{stream_of(config.streams, document.fields)}"


def training_draw(text: str) -> float:
    """Return a number in [0, 1) by the text alone, independent of the draw for its split."""
    return _unit(text.encode("utf-8"), 8)


def require_documents(config: PrepareConfig, tally: Tally) -> None:
    """Refuse a corpus that leaves a split empty.

    Raises:
        DataError: no document is left, or none for validation, for training, or for a stream of the spec.
    """
    total = tally.total()
    kept = sum(total.documents.values())
    if not kept:
        why = "; ".join(
            f"{reason} {count}, the first {tally.offenders[reason][0]}" for reason, count in total.dropped.items()
        )
        paths = ", ".join(source.path or source.kind for source in config.sources.values())
        raise DataError(
            f"no documents left of {total.read} read from {paths} ({why or 'the sources are empty'}). "
            "Correct sources, or fix the files."
        )
    empty = [split for split in splits_of(config) if not total.documents[split] and split != f"{TRAIN}-{REST}"]
    if VALIDATION in empty and not config.validation_share:
        empty.remove(VALIDATION)
    if empty and empty[0] not in SPLITS:
        raise DataError(_empty_stream(config, tally, empty[0]))
    if empty:
        raise DataError(
            f"validation_share={config.validation_share} of {kept} documents leaves none for {empty[0]}. "
            f"{_shares_that_work(tally)} Or add documents (a file of many texts can be converted to JSONL, one text a "
            "line); validation_share=0 holds out none."
        )


def _shares_that_work(tally: Tally) -> str:
    """Return the usable range of validation_share: documents are drawn by hash, so a few may need an unusual share."""
    lowest, highest = tally.draws or [0.0, 0.0]
    low, high = (floor(lowest * _SHARES) + 1) / _SHARES, floor(highest * _SHARES) / _SHARES
    if low > high:
        return "No share gives both splits a document."
    return f"With these documents a validation_share from {low:g} to {high:g} gives both splits one."


def _empty_stream(config: PrepareConfig, tally: Tally, split: str) -> str:
    """Describe a stream without documents, and the values of its field."""
    streams, counts = config.streams, FieldCounts()
    assert streams.field is not None
    for fields in tally.fields.values():
        if streams.field in fields:
            counts.add(fields[streams.field])
    rows = ", ".join(f"{value} in {amount.documents:,}" for value, amount in counts.rows()[:_NAMED]) or "nothing"
    key = f"streams.{'values' if streams.values else 'scores'}.{split.removeprefix(f'{TRAIN}-')}"
    return (
        f"{key}: no training document belongs to it. {streams.field} is: {rows}. Correct the stream, or the columns "
        f"that sources.NAME.fields.{streams.field} name."
    )


def _wrong_size(id: str, text: str, config: PrepareConfig) -> LeftOut | None:
    if not text or text.isspace():
        return LeftOut(id, "empty", f"no text, {len(text)} characters of white space")
    if len(text) > config.max_characters:
        return LeftOut(id, "too_long", f"{len(text)} characters, max_characters={config.max_characters}")
    if len(text) < config.min_characters:
        detail = f"{len(text)} characters, min_characters={config.min_characters}"
        return LeftOut(id, "too_short", detail, damaged=False)
    return None


def _unit(encoded: bytes, begin: int) -> float:
    """Return 8 bytes of the hash of a text as a number in [0, 1)."""
    digest = hashlib.sha256(encoded).digest()[begin : begin + 8]
    return (int.from_bytes(digest) >> 11) / (1 << 53)
