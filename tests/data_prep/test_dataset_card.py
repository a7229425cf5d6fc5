"""The card beside the shards: without it a run can train on another tokenizer's ids and only look unlucky."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.data.dataset_card import DatasetCard, file_sha256, read_card, write_card
from modernbert_train.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "index.json").write_text("{}")
    (tmp_path / "lengths.npy").write_bytes(b"lengths")
    card = DatasetCard(
        column="tokens",
        dtype="uint16",
        documents=3,
        tokens=12,
        vocab_size=384,
        tokenizer_sha256="0" * 64,
        index_sha256=file_sha256(tmp_path / "index.json"),
        lengths_sha256=file_sha256(tmp_path / "lengths.npy"),
        special_tokens="loader",
        created_by="test",
    )
    write_card(tmp_path, card)
    assert read_card(tmp_path) == card
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
        ({"tokens": "12"}, "wrong type: tokens"),
        ({"tokens": None}, "wrong type: tokens"),
        ({"documents": True}, "wrong type: documents"),
        ({"surprise": 1}, "unknown.*surprise"),
        ({"fields": []}, "wrong type: fields"),
        ({"fields": {"licence": {"values": {"MIT": 3}, "missing": {}, "other": {}}}}, "fields.licence.values.MIT"),
    ],
)
def test_card_that_is_not_one(folder: Path, change: dict[str, Any], message: str) -> None:
    """A card of another version, or edited by hand, must not be half understood."""
    content = json.loads((folder / "dataset.json").read_text()) | change
    (folder / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        read_card(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", "null"])
def test_card_that_is_damaged(folder: Path, text: str) -> None:
    """An empty file is what a full disk leaves."""
    (folder / "dataset.json").write_text(text)
    with pytest.raises(DataError, match=r"dataset\.json: .*prepare\.py again"):
        read_card(folder)


@pytest.mark.parametrize("name", ["index.json", "lengths.npy"])
def test_files_of_another_dataset_are_found(folder: Path, name: str) -> None:
    """Half of a copy overwritten by another leaves files that are each fine."""
    (folder / name).write_bytes(b"other")
    with pytest.raises(DataError, match=rf"{name}: sha256 .* dataset\.json says"):
        read_card(folder)
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: No such file"):
        read_card(folder)


@pytest.mark.runs
def test_needs_no_torch() -> None:
    """`check` runs on login nodes where neither torch nor streaming is installed."""
    code = "import sys, modernbert_train.data.dataset_card; print({'torch', 'streaming', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
