"""dataset.json: the card beside a folder of shards that says what they hold and which tokenizer made them.

The card carries the hashes of the files that must belong together, so that a half-copied folder or another run's
tokenizer is found before training. Standard library, and xxhash where it is: `check` reads it where neither torch nor
streaming exists.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from modernbert_train.core.files import os_errors_as
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.read_json import Count, as_type, content_of, parse_json
from modernbert_train.core.read_once import read_once
from modernbert_train.data.field_counts import FieldCounts
from modernbert_train.errors import DataError

CARD = "dataset.json"
INDEX = "index.json"
ADOPTED_INDEX = "adopted_index.json"
LENGTHS = "lengths.npy"
TOKEN_COUNTS = "token_counts.npy"
LABELS = "labels.npy"
INSIDE_WORDS = "inside_words"  # MDS column: uint8 for each token, 1 where it continues a word of a segmenter's
PREPARE_REPORT = "prepare_report.json"  # beside the folders that data_prep/prepare.py made at once
SCHEMA = 1
_MOST_BYTES = 1 << 20
_READ_BYTES = 1 << 18  # at a time: what fits into the cache of a core
_REMEDY = "Run `prepare` again, or copy the whole folder again."


@dataclass(frozen=True, kw_only=True)
class DatasetCard:
    """What one folder of shards holds.

    Attributes:
        column: name of the MDS column, a one-dimensional array of token ids per document.
        dtype: numpy name of the ids' type.
        documents: samples in the shards.
        tokens: ids over all documents; special tokens are not among them.
        vocab_size: one more than the tokenizer's largest id.
        tokenizer_sha256: of the bytes of tokenizer.json.
        index_sha256: of the bytes of the index, which itself carries the hash of every shard.
        lengths_sha256: of the bytes of lengths.npy (uint32, tokens per document in shard order).
        special_tokens: who adds [CLS] and [SEP]; "loader" is the only value there is.
        created_by: name and version of the writer.
        schema: version of this card.
        labels_sha256: of the bytes of labels.npy; not in the file where the documents have no labels.
        index: name of the index; None: index.json. Like the next two only of shards that others wrote, see
            data_prep/adopt.py: theirs stays as it was, and this one names files in folders below as well.
        shards: folder or URL of the shards; None: the card's own folder.
        stripped: ids that are taken off the beginning and the end of every document when it is read, because the
            loader adds its own.
        fields: how many documents and tokens have which value of a field, such as the licence; by the field's name.
        lengths_xxh3: of the bytes of lengths.npy, a hash of 128 bits that costs an eighth of a SHA-256 to compute; see
            `other_sha256`.
        sides: of documents that are a query, its positive and negatives, how many texts the longest may have; None:
            documents are single texts.
        longest: of such documents the longest, in tokens with special ones, which must fit a row.
        prompts: of such documents what was put before each text, by `query` and `document`.
        text_lengths: of such documents the tokens of single texts, special ones included, in ascending order; of many
            texts an even sample. None of folders that an older version wrote.
        scored: whether a teacher gave the texts of such documents scores.
        text_bytes: of the documents in UTF-8, before they became tokens; None where nobody counted them.
        words: whether the shards have the column INSIDE_WORDS, of every document.
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
        """Whether the shards were written by others."""
        return self.index is not None

    @property
    def index_file(self) -> str:
        return self.index or INDEX

    def hashes(self) -> dict[str, Hashes]:
        """File -> what it is known by, of those beside the card that belong to it."""
        found = {
            self.index_file: Hashes(self.index_sha256),
            LENGTHS: Hashes(self.lengths_sha256, self.lengths_xxh3),
        }
        return found | ({} if self.labels_sha256 is None else {LABELS: Hashes(self.labels_sha256)})


class Hashes(NamedTuple):
    """Of a file's bytes; the second may be missing."""

    sha256: str
    xxh3: str | None = None


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_xxh3(path: Path) -> str:
    """XXH3 of 128 bits of a file's bytes, in hexadecimal."""
    from xxhash import xxh3_128

    digest, part = xxh3_128(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(part):
            digest.update(part[:read])
    return digest.hexdigest()


def other_sha256(path: Path, expected: Hashes) -> str | None:
    """The sha256 of a file that is not the expected one; None if it is. What is as it was is not hashed again.

    The lengths of 1.6 billion documents take a SHA-256 six seconds at every start. XXH3 finds what a disk or a copy
    does to a file as surely, and where it finds anything, SHA-256 decides. It is no defence against somebody who
    makes another file of the same hash; whoever writes lengths.npy can write the card beside it as well.

    Raises:
        OSError: the file cannot be read.
    """
    if expected.xxh3 is not None and read_once(path, file_xxh3) == expected.xxh3:
        return None
    found = read_once(path, file_sha256)
    return None if found == expected.sha256 else found


def write_card(folder: str | Path, card: DatasetCard) -> None:
    """Write the card into the folder of the shards."""
    there = {key: value for key, value in asdict(card).items() if value is not None}
    text = json.dumps(there, indent=2, sort_keys=True)
    (Path(folder) / CARD).write_text(text + "\n", encoding="utf-8")


def read_card(folder: str | Path) -> DatasetCard:
    """Read and verify the card of a folder of shards; files that are as they were are not hashed a second time.

    Args:
        folder: the folder with index.json, lengths.npy and dataset.json; data_prep/prepare.py writes it.

    Returns:
        The card; index.json and lengths.npy are the files it was written for.

    Raises:
        DataError: the folder or the card is missing, the card is not one, or a file does not have its hash.
    """
    path = Path(folder) / CARD
    require_own_files(path.parent)
    if not path.exists():
        raise DataError(
            f"{folder}: no {CARD}, so this is not a folder of shards written by `prepare`. "
            "Prepare the data, or give its train or validation folder."
        )
    with os_errors_as(DataError, f"{path}: cannot be read", _REMEDY, ValueError):
        content = content_of(path, _MOST_BYTES)
    card = parse_card(content, str(path))
    for name, expected in card.hashes().items():
        _require_hashes(path.with_name(name), expected)
    return card


def parse_card(content: bytes, where: str) -> DatasetCard:
    """A card out of its bytes; the files it names are not looked at.

    Args:
        content: of dataset.json.
        where: its path or URL, for messages.

    Raises:
        DataError: it is not a card.
    """
    with os_errors_as(DataError, f"{where}: holds no dataset card", _REMEDY, ValueError):
        found = parse_json(content)
        if isinstance(found, dict) and found.get("schema", SCHEMA) != SCHEMA:
            raise DataError(
                f"{where}: schema {found['schema']!r}, this version reads {SCHEMA}. "
                "Prepare the data with this version, or train with the version that wrote it."
            )
        card: DatasetCard = as_type(DatasetCard, found)
        if card.index not in (None, ADOPTED_INDEX):
            raise ValueError(f"index: expected {ADOPTED_INDEX}, found {card.index[:40]!r}")
    return card


def _require_hashes(path: Path, expected: Hashes) -> None:
    with os_errors_as(DataError, f"{path}: {CARD} names it, and it cannot be read", _REMEDY):
        other = other_sha256(path, expected)
    if other is not None:
        raise DataError(f"{path}: sha256 {other[:12]}..., but {CARD} says {expected.sha256[:12]}.... {_REMEDY}")
