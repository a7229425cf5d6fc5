"""Read the small files of a run's data: its tokenizer, and the card of each folder of shards.

Whoever wants to know asks here, as often as it likes: files are hashed, and the tokenizer is parsed, once in a process
(see read_once.py). Whether all this belongs together is asked by check.py. Standard library only: a login node can ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from modernbert_train.config.evals import of_kind
from modernbert_train.config.schema import DataConfig, EvaluatorConfig, OtherTextConfig
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
        key: of the configuration that names it, for messages.
        path: the folder or its URL, as the configuration has it.
        local: where its small files can be read: in it, or in the copy of a remote one's.
        card: what its index.json and lengths.npy were found to belong to.
    """

    key: str
    path: str
    local: Path
    card: DatasetCard

    @property
    def shards(self) -> str:
        """The folder of the shards or its URL, which is another one where the card of others' shards lies apart."""
        return self.path if self.card.shards is None else str(self.card.shards)

    def token_counts_sha256(self) -> str | None:
        """Hash of how often each token stands in it; None where there are no counts.

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
        streams: the training text, by the names of its streams; that of data.train is called train.
        validation: the held-out text, if there is any.
    """

    vocabulary: Vocabulary
    streams: Mapping[str, FolderFacts]
    validation: FolderFacts | None


def read_facts(data: DataConfig) -> DataFacts:
    """The facts as they are, whether or not they fit each other.

    Raises:
        DataError: the tokenizer or a folder of shards is missing or damaged.
        ConfigError, StorageError: a remote folder cannot be read.
    """
    vocabulary = read_vocabulary(data.tokenizer)
    found = [read_folder(key, path, data) for key, path in named_folders(data)]
    streams = dict(zip(data.all_streams, found, strict=False))  # the held-out text comes after them
    validation = found[-1] if data.validation is not None else None
    return DataFacts(vocabulary, streams, validation)


def read_folder(key: str, path: str, data: DataConfig) -> FolderFacts:
    """The facts of one folder. Raises as `read_facts`."""
    local = local_folder(path, data)
    if not local.is_dir():
        raise DataError(
            f"{key}={path}: no such folder, so no dataset.json of shards. Prepare the data, or set {key} to where they "
            "lie."
        )
    card = read_card(local)
    if card.shards is not None and is_remote(path):
        raise DataError(
            f"{key}={path}: its card points at shards elsewhere ({card.shards}), which only a local one may. Copy the "
            "folder of the card to this machine, or adopt the shards anew with `adopt`."
        )
    return FolderFacts(key, path, local, card)


def further_folders(evals: Mapping[str, EvaluatorConfig]) -> list[tuple[str, str]]:
    """Key and path of the folders of other held-out text, which are measured and nothing else."""
    return [(f"evals.{name}.shards", settings.shards) for name, settings in of_kind(evals, OtherTextConfig).items()]


def missing_stream(data: DataConfig) -> str | None:
    """The first folder of training text that is not on this machine; None where all are."""
    return next((stream.path for stream in data.all_streams.values() if not Path(stream.path).is_dir()), None)


def named_folders(data: DataConfig) -> list[tuple[str, str]]:
    """Key and path of every folder of shards that a run names: those of its streams, in their order, and the held-out
    text."""
    many = data.train is None
    folders = [
        (f"data.streams.{name}.path" if many else "data.train", stream.path)
        for name, stream in data.all_streams.items()
    ]
    if data.validation is not None:
        folders.append(("data.validation", data.validation))
    return folders
