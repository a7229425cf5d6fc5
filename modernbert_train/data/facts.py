"""Read the small files of a run's data: its tokenizer, and the card of each folder of shards.

Results are cached: files are hashed and the tokenizer is parsed once in a process (read_once.py). check_shards.py
decides whether they belong together. Standard library only, so it works on a login node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from modernbert_train.config.evals import of_kind
from modernbert_train.config.schema import DataConfig, EvaluatorConfig, HeldoutStreamConfig
from modernbert_train.core.files import os_errors_as
from modernbert_train.core.read_once import read_once
from modernbert_train.data.dataset_card import TOKEN_COUNTS, DatasetCard, file_sha256, read_card
from modernbert_train.data.remote import is_remote, local_folder
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import Vocabulary, read_vocabulary


@dataclass(frozen=True)
class FolderFacts:
    """One folder of shards.

    Attributes:
        key: the configuration key that names it, for messages.
        path: the folder or its URL, as configured.
        local: folder of its small files: the same, or the copy of a remote one's.
        card: verified against its index.json and lengths.npy.
    """

    key: str
    path: str
    local: Path
    card: DatasetCard

    @property
    def shards(self) -> str:
        """Folder or URL of the shards, which differs from `path` for adopted shards with a separate card."""
        return self.path if self.card.shards is None else str(self.card.shards)

    def token_counts_sha256(self) -> str | None:
        """Hash of the token counts; None without counts.

        Raises:
            DataError: they cannot be read.
        """
        counts = self.local / TOKEN_COUNTS
        with os_errors_as(DataError, f"{counts}: cannot be read", "Fix the disk or the permission."):
            return read_once(counts, file_sha256) if counts.exists() else None


@dataclass(frozen=True)
class DataFacts:
    """All the data of a run.

    Attributes:
        vocabulary: of its tokenizer.
        streams: the training text by stream name; data.train is named train.
        validation: the held-out text, or None.
    """

    vocabulary: Vocabulary
    streams: Mapping[str, FolderFacts]
    validation: FolderFacts | None


def read_facts(data: DataConfig) -> DataFacts:
    """Read the facts without checking that they fit each other.

    Raises:
        DataError: the tokenizer or a folder of shards is missing or damaged.
        ConfigError, StorageError: a remote folder cannot be read.
    """
    vocabulary = read_vocabulary(data.tokenizer)
    folders = [read_folder(key, path, data) for key, path in named_folders(data)]
    streams = dict(zip(data.all_streams, folders, strict=False))  # the held-out text follows them
    validation = folders[-1] if data.validation is not None else None
    return DataFacts(vocabulary, streams, validation)


def read_folder(key: str, path: str, data: DataConfig) -> FolderFacts:
    """Read the facts of one folder. Raises as `read_facts`."""
    local = local_folder(path, data)
    if not local.is_dir():
        raise DataError(
            f"{key}={path}: no such folder, so no dataset.json of shards. Prepare the data, or set {key} to its folder."
        )
    card = read_card(local)
    if card.shards is not None and is_remote(path):
        raise DataError(
            f"{key}={path}: its card points at shards elsewhere ({card.shards}), which only a local one may. Copy the "
            "folder of the card to this machine, or adopt the shards again with `adopt`."
        )
    return FolderFacts(key, path, local, card)


def further_folders(evals: Mapping[str, EvaluatorConfig]) -> list[tuple[str, str]]:
    """Return key and path of the folders of other held-out text, which are only evaluated."""
    return [(f"evals.{name}.shards", settings.shards) for name, settings in of_kind(evals, HeldoutStreamConfig).items()]


def missing_stream(data: DataConfig) -> str | None:
    """Return the first folder of training text that is not on this machine; None if all are."""
    return next((stream.path for stream in data.all_streams.values() if not Path(stream.path).is_dir()), None)


def named_folders(data: DataConfig) -> list[tuple[str, str]]:
    """Return key and path of every folder of shards that a run names: its streams in order, then the held-out text."""
    many = data.train is None
    folders = [
        (f"data.streams.{name}.path" if many else "data.train", stream.path)
        for name, stream in data.all_streams.items()
    ]
    if data.validation is not None:
        folders.append(("data.validation", data.validation))
    return folders
