"""dataset.json: the card of a folder of shards, with its contents and the tokenizer that made them.

The card holds the hashes of the files that must belong together, so that a half-copied folder or another run's
tokenizer is found before training. Standard library, and xxhash if installed: `check` reads it without torch or
streaming.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from modernbert_train.core.files import os_errors_as
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.read_json import Count, as_type, content_of, parse_json, read_json
from modernbert_train.core.read_once import read_once
from modernbert_train.data.field_counts import FieldCounts
from modernbert_train.errors import DataError

CARD = "dataset.json"
INDEX = "index.json"
ADOPTED_INDEX = "adopted_index.json"
LENGTHS = "lengths.npy"
TOKEN_COUNTS = "token_counts.npy"
LABELS = "labels.npy"
INSIDE_WORDS = "inside_words"  # MDS column: uint8 for each token, 1 where it continues a word of a segmenter
PREPARE_REPORT = "prepare_report.json"  # next to the folders that one `prepare` made
SCHEMA = 1
_MAX_BYTES = 1 << 20
_READ_BYTES = 1 << 18  # at a time: fits a core's cache
_REMEDY = "Run `prepare` again, or copy the whole folder again."


@dataclass(frozen=True, kw_only=True)
class DatasetCard:
    """Contents and origin of one folder of shards.

    Attributes:
        column: name of the MDS column, a one-dimensional array of token ids per document.
        dtype: numpy name of the ids' type.
        documents: samples in the shards.
        tokens: ids over all documents, without special tokens.
        vocab_size: one more than the tokenizer's largest id.
        tokenizer_sha256: of the bytes of tokenizer.json.
        index_sha256: of the bytes of the index, which itself holds the hash of every shard.
        lengths_sha256: of the bytes of lengths.npy (uint32, tokens per document in shard order).
        special_tokens: which part adds [CLS] and [SEP]; "loader" is the only value.
        created_by: name and version of the writer.
        schema: version of this card.
        labels_sha256: of the bytes of labels.npy; not in the file for unlabelled documents.
        index: name of the index; None: index.json. This and the next two are used only for adopted shards, see
            data_prep/adopt.py: the original index is unchanged, and this one may name files in subfolders.
        shards: folder or URL of the shards; None: the card's own folder.
        stripped: ids that are removed from the beginning and the end of every document on reading, because the loader
            adds its own.
        fields: counts of documents and tokens by value of a field, such as the licence; by the field's name.
        lengths_xxh3: 128-bit hash of the bytes of lengths.npy, at an eighth of the cost of SHA-256; see `other_sha256`.
        sides: for documents that are a query, its positive and negatives, the largest number of texts; None: documents
            are single texts.
        longest: for such documents the length of the longest, in tokens with special ones; it must fit a row.
        prompts: for such documents the text put before each text, by `query` and `document`.
        text_lengths: for such documents the tokens of single texts, special ones included, in ascending order; an even
            sample if there are many. None in folders that an older version wrote.
        scored: True if a teacher scored the texts of such documents.
        text_bytes: UTF-8 bytes of the documents before tokenisation; None if they were not counted.
        words: True if the shards have the column INSIDE_WORDS in every document.
    """

    column: str
    dtype: str
    documents: Count
    tokens: Count
    vocab_size: Count
    tokenizer_sha256: str
    index_sha256: str
    lengths_sha256: str
    special_tokens: str
    created_by: str
    schema: Count = SCHEMA
    labels_sha256: str | None = None
    index: str | None = None
    shards: str | None = None
    stripped: list[Count] | None = None
    fields: dict[str, FieldCounts] | None = None
    lengths_xxh3: str | None = None
    text_bytes: Count | None = None
    sides: Count | None = None
    longest: Count | None = None
    text_lengths: list[Count] | None = None
    scored: bool | None = None
    words: bool | None = None
    prompts: dict[str, str] | None = None

    @property
    def is_adopted(self) -> bool:
        """True if the shards were written by another program."""
        return self.index is not None

    @property
    def index_file(self) -> str:
        return self.index or INDEX

    def hashes(self) -> dict[str, Hashes]:
        """Hashes of the files that belong to the card, by name."""
        hashes = {
            self.index_file: Hashes(self.index_sha256),
            LENGTHS: Hashes(self.lengths_sha256, self.lengths_xxh3),
        }
        return hashes | ({} if self.labels_sha256 is None else {LABELS: Hashes(self.labels_sha256)})


class Hashes(NamedTuple):
    """Hashes of a file's bytes; the second may be missing."""

    sha256: str
    xxh3: str | None = None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_xxh3(path: Path) -> str:
    """Return the 128-bit XXH3 of a file's bytes, in hexadecimal."""
    from xxhash import xxh3_128

    digest, part = xxh3_128(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(part):
            digest.update(part[:read])
    return digest.hexdigest()


def other_sha256(path: Path, expected: Hashes) -> str | None:
    """Return the SHA-256 of a file that differs from the expected one, else None; unchanged files are not hashed again.

    SHA-256 of the lengths of 1.6 billion documents takes six seconds at every start. XXH3 detects damage by a disk or a
    copy equally well, and on a difference SHA-256 decides. It does not protect against forgery; an attacker who writes
    lengths.npy can write the card too.

    Raises:
        OSError: the file cannot be read.
    """
    if expected.xxh3 is not None and read_once(path, file_xxh3) == expected.xxh3:
        return None
    sha256 = read_once(path, file_sha256)
    return None if sha256 == expected.sha256 else sha256


def write_card(folder: str | Path, card: DatasetCard) -> None:
    """Write the card into the folder of the shards."""
    present = {key: value for key, value in asdict(card).items() if value is not None}
    text = json.dumps(present, indent=2, sort_keys=True)
    (Path(folder) / CARD).write_text(text + "\n", encoding="utf-8")


def read_card(folder: str | Path) -> DatasetCard:
    """Read and verify the card of a folder of shards; unchanged files are hashed only once.

    Args:
        folder: the folder with index.json, lengths.npy and dataset.json, as written by data_prep/prepare.py.

    Returns:
        The card; index.json and lengths.npy match its hashes.

    Raises:
        DataError: the folder or the card is missing, the card is invalid, or a file does not match its hash.
    """
    path = Path(folder) / CARD
    require_own_files(path.parent)
    if not path.exists():
        raise DataError(
            f"{folder}: no {CARD}, so this is not a folder of shards written by `prepare`. "
            "Prepare the data, or give its train or validation folder."
        )
    with os_errors_as(DataError, f"{path}: cannot be read", _REMEDY, ValueError):
        content = content_of(path, _MAX_BYTES)
    card = parse_card(content, str(path))
    for name, expected in card.hashes().items():
        _require_hashes(path.with_name(name), expected)
    return card


def prepare_report(folder: Path, card: DatasetCard) -> dict[str, Any]:
    """Return the records of `prepare` on exactly these shards.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: there is none, it is damaged, or of other shards.
    """
    report: dict[str, Any] = read_json(folder.parent / PREPARE_REPORT)
    written = report["written"][folder.name]
    if (written["documents"], written["tokens"]) != (card.documents, card.tokens):
        raise ValueError("of other shards")
    return report


def parse_card(content: bytes, where: str) -> DatasetCard:
    """Parse a card; the files it names are not checked.

    Args:
        content: of dataset.json.
        where: its path or URL, for messages.

    Raises:
        DataError: it is not a card.
    """
    with os_errors_as(DataError, f"{where}: holds no dataset card", _REMEDY, ValueError):
        parsed = parse_json(content)
        if isinstance(parsed, dict) and parsed.get("schema", SCHEMA) != SCHEMA:
            raise DataError(
                f"{where}: schema {parsed['schema']!r}, this version reads {SCHEMA}. "
                "Prepare the data with this version, or train with the version that wrote it."
            )
        card: DatasetCard = as_type(DatasetCard, parsed)
        if card.index not in (None, ADOPTED_INDEX):
            raise ValueError(f"index: expected {ADOPTED_INDEX}, found {card.index[:40]!r}")
    return card


def _require_hashes(path: Path, expected: Hashes) -> None:
    with os_errors_as(DataError, f"{path}: {CARD} names it, and it cannot be read", _REMEDY):
        other = other_sha256(path, expected)
    if other is not None:
        raise DataError(f"{path}: sha256 {other[:12]}..., but {CARD} says {expected.sha256[:12]}.... {_REMEDY}")
