"""The card of a folder of shards: without it a run may train on another tokenizer's ids and just look unlucky."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.data.dataset_card import Hashes, file_xxh3, other_sha256, parse_card, read_card, write_card
from modernbert_train.errors import DataError
from tests.support.make_shards import write_plain_card


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "index.json").write_text("{}")
    (tmp_path / "lengths.npy").write_bytes(b"lengths")
    assert write_plain_card(tmp_path, documents=3, tokens=12) == read_card(tmp_path)
    return tmp_path


def test_missing_folder_and_card(folder: Path) -> None:
    """A wrong data.train is the first mistake of many users."""
    for where in (folder / "gone", folder.parent):
        with pytest.raises(DataError, match=r"no dataset\.json.*Prepare the data"):
            read_card(where)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema 2, this version reads 1"),
        ({"tokens": "12"}, "tokens: expected"),
        ({"tokens": None}, "tokens: expected"),
        ({"documents": True}, "documents: expected"),
        ({"surprise": 1}, "surprise: unknown"),
        ({"fields": []}, "fields: expected"),
        ({"index": "../x"}, "index"),
        ({"stripped": [-1]}, "stripped"),
        ({"stripped": ["a"]}, "stripped"),
        ({"shards": 3}, "shards"),
        ({"fields": {"licence": {"values": {"MIT": 3}, "missing": {}, "other": {}}}}, "fields.licence.values.MIT"),
    ],
)
def test_card_that_is_not_one(folder: Path, change: dict[str, Any], message: str) -> None:
    """A card of another version, or edited by hand, must not be read in part."""
    content = json.loads((folder / "dataset.json").read_text()) | change
    (folder / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        read_card(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", "null"])
def test_card_that_is_damaged(folder: Path, text: str) -> None:
    """A full disk leaves an empty file."""
    (folder / "dataset.json").write_text(text)
    with pytest.raises(DataError, match=r"dataset\.json: .*`prepare` again"):
        read_card(folder)


@pytest.mark.parametrize("name", ["index.json", "lengths.npy"])
def test_files_of_another_dataset_are_found(folder: Path, name: str) -> None:
    """A copy partly overwritten by another contains files that are each valid."""
    (folder / name).write_bytes(b"other")
    with pytest.raises(DataError, match=rf"{name}: sha256 .* dataset\.json says"):
        read_card(folder)
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: dataset.json names it"):
        read_card(folder)


def test_one_flipped_bit_of_the_lengths_is_reported_with_and_without_the_fast_hash(folder: Path) -> None:
    """Lengths of 1.6 billion documents are no longer hashed by SHA-256 at each start, and must be as safe."""
    plain = parse_card((folder / "dataset.json").read_bytes(), "here")
    for card in (plain, replace(plain, lengths_xxh3=file_xxh3(folder / "lengths.npy"))):
        write_card(folder, card)
        (folder / "lengths.npy").write_bytes(b"lengths")
        assert read_card(folder) == card
        (folder / "lengths.npy").write_bytes(b"lengthr")
        with pytest.raises(DataError, match=r"lengths\.npy: sha256 .* dataset\.json says"):
            read_card(folder)


def test_where_the_fast_hash_fits_no_other_is_computed_and_where_it_does_not_sha256_decides(folder: Path) -> None:
    """Computing it took six seconds at each start; a mismatch of only the fast hash must not be an error."""
    lengths, plain = folder / "lengths.npy", parse_card((folder / "dataset.json").read_bytes(), "here")
    fast = file_xxh3(lengths)
    assert other_sha256(lengths, Hashes("0" * 64, fast)) is None
    assert other_sha256(lengths, Hashes(plain.lengths_sha256, "0" * 32)) is None
    assert other_sha256(lengths, Hashes("0" * 64, "0" * 32)) == plain.lengths_sha256
