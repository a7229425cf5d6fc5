"""Find the layout of a dataset of another program: its shards by their indexes, and the column of the ids.

The folder has one index, which may name files in subfolders, as Streaming's `merge_index` writes it; or each subfolder
has one. Only indexes are opened here.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from data_prep.write.workspace import require_space
from modernbert_train.core.files import os_errors_as, saying
from modernbert_train.core.own_files import require_own_file, require_own_files
from modernbert_train.core.read_json import is_count, read_json
from modernbert_train.core.text import plural
from modernbert_train.data.dataset_card import INDEX
from modernbert_train.data.download import Downloader
from modernbert_train.data.remote import is_remote
from modernbert_train.data.shard_file import BYTES, IdColumn
from modernbert_train.data.shard_index import MAX_BYTES, is_inside, stored
from modernbert_train.errors import ConfigError, DataError

_ID_COLUMNS = ("input_ids", "tokens")  # Ettin, mmBERT and AnswerDotAI; llm-foundry
_TEXT_COLUMN = "text"
SHARD_ENDS = (".mds", ".mds.zstd", ".mds.gz", ".mds.br", ".mds.bz2", ".mds.snappy")
_HELD_OUT = frozenset(("validation", "valid", "val", "val_small", "val_xsmall", "eval", "test", "dev"))
_RAW_DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_LISTED = 5
_APART = "Adopt the folders one by one, and name them as data.streams."
TIMEOUT_SECONDS = 60.0  # without a byte from a store

Entry = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """A dataset of MDS shards.

    Attributes:
        root: its folder, absolute, or its URL.
        entries: of the index, one for each existing shard, with its file's path relative to the root. A shard that
            exists in both forms is read from the compressed one.
        column: column of the ids.
        encoding: of that column, the same in all shards.
        indexes: number of indexes read.
        notes: remarks for the user.
    """

    root: str
    entries: list[Entry]
    column: str
    encoding: str
    indexes: int
    notes: list[str]

    @property
    def num_bytes(self) -> int:
        return sum(stored(entry)["bytes"] for entry in self.entries)


def find_layout(root: str, column: str | None, dtype: str | None) -> Layout:
    """Read the indexes of a dataset.

    Args:
        root: folder or URL.
        column: column of the ids; None: input_ids, or else tokens.
        dtype: numpy name of the ids' type, for a column of raw bytes.

    Raises:
        DataError: shards are missing, a column is pickled, or folders differ.
        ConfigError: the column or its type must be named, or the dataset holds text.
    """
    if dtype is not None and dtype not in _RAW_DTYPES:
        raise ConfigError(f"--dtype={dtype}: not a type of token ids. Known: {', '.join(_RAW_DTYPES)}.")
    notes: list[str] = []
    if is_remote(root):
        root, indexes = root.rstrip("/"), 1
        entries = _as_stored(root, _remote_entries(root), notes)
    else:
        folder = Path(root).resolve()
        if not folder.is_dir():
            raise DataError(f"{root}: no such folder. Correct the path.")
        root, index_files = str(folder), sorted(_indexes(folder))
        _require_complete(folder, index_files)
        entries = [entry for index in index_files for entry in _local_entries(folder, index)]
        indexes = len(index_files)
        notes += _unnamed(folder, entries)
    if not entries:
        raise DataError(f"{root}: its index lists no shards. Write the dataset again.")
    name = column or _id_column(root, _columns(entries[0]))
    encoding = _same_encoding(root, entries, name)
    if encoding == BYTES and dtype is None:
        raise ConfigError(
            f"{root}: column {name} holds raw bytes of unknown type. Name the type: --dtype int64 is numpy's default, "
            "and what old versions of llm-foundry and AnswerDotAI's convert_dataset.py wrote."
        )
    if encoding != BYTES and dtype is not None:
        raise ConfigError(f"--dtype={dtype}: column {name} has the type {encoding} already. Leave it out.")
    remedy = "Name another column with --column."
    with os_errors_as(DataError, f"{root}/{INDEX}: cannot be opened", remedy, ValueError, TypeError):
        IdColumn(entries[0], name, dtype)
    return Layout(root, entries, name, encoding, indexes, notes)


def _indexes(folder: Path) -> Iterator[Path]:
    """Yield the topmost index of every branch."""
    if (folder / INDEX).is_file():
        yield folder / INDEX
        return
    for below in sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith(".")):
        yield from _indexes(below)


def _require_complete(folder: Path, indexes: Sequence[Path]) -> None:
    """Refuse an incomplete dataset, and training and held-out text in one."""
    folders = [index.parent for index in indexes]
    for folder_path, below, files in os.walk(folder):
        here = Path(folder_path)
        if here in folders:
            below.clear()
            continue
        shards = [name for name in files if name.endswith(SHARD_ENDS)]
        if shards:
            raise DataError(
                f"{here}: {plural(len(shards), 'shard')} and no {INDEX}, which is written last: its writer was "
                "interrupted, or the copy is incomplete. Write or copy this folder again; nothing was adopted."
            )
    if not indexes:
        raise DataError(
            f"{folder}: no {INDEX} here or in a subfolder. Give a folder of MDS shards; Streaming's MDSWriter can "
            "write them from ids in other files."
        )
    splits = sorted({home.relative_to(folder).parts[0] for home in folders if home != folder})
    if len(splits) > 1 and not _HELD_OUT.isdisjoint(splits):
        raise ConfigError(
            f"{folder}: holds {', '.join(splits)}, which must not be trained on together. Adopt one after the other."
        )


def _read_entries(path: Path, name: str) -> list[Entry]:
    wrong = (ValueError, KeyError, TypeError, AttributeError)
    with os_errors_as(DataError, f"{name}: not a readable MDS index", "Copy it again.", *wrong):
        entries = list(read_json(path, MAX_BYTES)["shards"])
        for entry in entries:
            if entry["format"] != "mds":
                raise DataError(f"{name}: shards of format {entry['format']!r}; only MDS ones hold arrays of ids.")
            pickled = [column for column, encoding in _columns(entry).items() if encoding == "pkl"]
            if pickled:
                raise DataError(
                    f"{name}: column {pickled[0]!r} is pickled, and unpickling could run code. Write the "
                    "shards again without it; nothing was adopted."
                )
            infos = [info for info in (entry["zip_data"], entry["raw_data"]) if info is not None]
            for info in infos:
                if not is_inside(info["basename"], nested=True):
                    raise DataError(f"{name}: names a file outside its folder: {info['basename']!r}. Do not use it.")
                if not is_count(info["bytes"]) or type(info["hashes"]) is not dict:
                    raise ValueError(f"{info['basename']} has no size")
            if len(entry.get("column_sizes") or []) != len(entry["column_names"]):
                raise ValueError("a shard lacks the size of each column (column_sizes)")
            if not is_count(entry["samples"]) or not infos or entry["raw_data"] is None:
                raise ValueError("a shard lacks its number of documents or its file")
    return entries


def _local_entries(root: Path, index: Path) -> Iterator[Entry]:
    require_own_file(index, root)
    below = index.parent.relative_to(root)
    missing, number = [], 0
    shared: dict[str, list[Any]] = {}
    looked_at = set()
    for entry in _read_entries(index, str(index)):
        number += 1
        present = _present(entry, index.parent)
        if present is None:
            missing.append(stored(entry)["basename"])
        else:
            home = (index.parent / stored(present)["basename"]).parent
            if home not in looked_at:
                require_own_file(home, root)
                require_own_files(home)
                looked_at.add(home)
            yield _moved(present, str(below), shared)
    if missing:
        raise DataError(
            f"{index}: names {plural(len(missing), 'file')} of {number:,} that {'is' if len(missing) == 1 else 'are'} "
            f"missing or of another size: {', '.join(missing[:_LISTED])}"
            f"{', ...' if len(missing) > _LISTED else ''}. The copy is incomplete: copy the rest. Or the index is of "
            "another folder: remove it, and the indexes of the subfolders are read. Nothing was adopted."
        )


def _present(entry: Entry, folder: Path) -> Entry | None:
    """Return the entry for the existing file: the compressed one, or the plain one; None for neither."""
    for kind in ("zip_data", "raw_data"):
        info = entry[kind]
        if info is not None and (file := folder / info["basename"]).exists() and file.stat().st_size == info["bytes"]:
            return entry if kind == "zip_data" else _plain(entry)
    return None


def _plain(entry: Entry) -> Entry:
    return {**entry, "zip_data": None, "compression": None}


def _moved(entry: Entry, below: str, shared: dict[str, list[Any]]) -> Entry:
    """Return the entry with paths relative to the root; equal lists are shared, since all shards repeat them."""
    moved: Entry = {
        key: shared.setdefault(repr(value), value) if isinstance(value, list) else value for key, value in entry.items()
    }
    for kind in ("zip_data", "raw_data"):
        info = moved[kind]
        if info is not None:
            moved[kind] = info | {"basename": os.path.normpath(os.path.join(below, info["basename"]))}
    return moved


def _remote_entries(url: str) -> list[Entry]:
    with TemporaryDirectory() as scratch:
        require_space(Path(scratch), 1 << 26)
        remedy = f"A folder in a store needs its own {INDEX}: merge the subfolders' with Streaming's "
        with saying(after=f" {remedy}merge_index, or adopt them one by one.", kind=DataError):
            file = Downloader(url, TIMEOUT_SECONDS).fetch(INDEX, Path(scratch))
        return _read_entries(file, f"{url}/{INDEX}")


def _as_stored(url: str, entries: list[Entry], notes: list[str]) -> list[Entry]:
    """Return entries of plain files if the first archive is missing: some users unpack before they upload."""
    if not entries or entries[0]["zip_data"] is None:
        return entries
    name, size = entries[0]["zip_data"]["basename"], entries[0]["zip_data"]["bytes"]
    with TemporaryDirectory() as scratch, suppress(DataError):
        Downloader(url, TIMEOUT_SECONDS).fetch(name, Path(scratch), size)
        return entries
    notes.append(f"the index names archives such as {name}, which are missing; the plain files are read")
    return [_plain(entry) for entry in entries]


def _unnamed(root: Path, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a note on shards in the folder that no index names."""
    named = {info["basename"] for entry in entries for info in (entry["zip_data"], entry["raw_data"]) if info}
    named |= {name.rpartition(".mds")[0] + ".mds" for name in named}  # may be unpacked next to its archive
    others = [
        path
        for folder_path, _, files in os.walk(root)
        for name in files
        if name.endswith(SHARD_ENDS) and (path := os.path.relpath(os.path.join(folder_path, name), root)) not in named
    ]
    if others:
        yield (
            f"{plural(len(others), 'file')} of shards that no index names, such as {min(others)}, left out: remove "
            "leftover files, or merge the indexes again"
        )


def _id_column(root: str, columns: Mapping[str, str]) -> str:
    """Return the column of the ids, from columns and their encodings. Raises ConfigError if none has a usual name."""
    for name in _ID_COLUMNS:
        if name in columns:
            return name
    if _TEXT_COLUMN in columns:
        raise ConfigError(
            f"{root}: holds text (column {_TEXT_COLUMN}) and no ids. Tokenise it: python -m modernbert_train prepare "
            f"out=data/mine sources.mine.kind=mds {shlex.quote(f'sources.mine.path={root}')} "
            f"sources.mine.text_field={_TEXT_COLUMN} tokenizer.path=TOKENIZER"
        )
    shown = ", ".join(f"{name} ({what})" for name, what in columns.items())
    raise ConfigError(f"{root}: no column {' or '.join(_ID_COLUMNS)} among {shown}. Name it with --column.")


def _columns(entry: Entry) -> dict[str, str]:
    return dict(zip(entry["column_names"], entry["column_encodings"], strict=True))


def _same_encoding(root: str, entries: Sequence[Entry], column: str) -> str:
    """Return the encoding of the ids; it must be the same in all shards."""
    shard_of: dict[str, str] = {}  # encoding -> the first shard of it
    for entry in entries:
        columns, basename = _columns(entry), stored(entry)["basename"]
        if column not in columns:
            raise DataError(
                f"{root}/{basename}: no column {column!r} among {', '.join(columns)}, which other shards have. {_APART}"
            )
        shard_of.setdefault(columns[column], basename)
    return the_only(root, f"column {column}", shard_of)


def the_only(root: str, what: str, place_of: Mapping[str, str]) -> str:
    """Return the only key of `places`, which maps values to places. Raises DataError if there are several."""
    if len(place_of) > 1:
        shown = ", ".join(f"{each} in {place}" for each, place in place_of.items())
        raise DataError(f"{root}: {what} is {shown}; different programs wrote them. {_APART}")
    return next(iter(place_of))
