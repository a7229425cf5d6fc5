"""Check that the files of local shards exist with the sizes in index.json; contents are hashed on reading.

Only `check` does this: a start does not examine a quarter of a million files on a shared disk before its first step.
"""

from __future__ import annotations

from collections.abc import Mapping

from modernbert_train.config.schema import DataConfig, EvaluatorConfig
from modernbert_train.data.facts import FolderFacts, further_folders, named_folders, read_folder
from modernbert_train.data.remote import is_remote
from modernbert_train.data.shard_index import REMEDY, read_index, stored
from modernbert_train.errors import DataError

_SHOWN = 3  # files named in a message


def all_folders(data: DataConfig, evals: Mapping[str, EvaluatorConfig]) -> list[FolderFacts]:
    """Return every folder of shards that a run names. Raises as `read_facts`."""
    return [read_folder(*named, data) for named in [*named_folders(data), *further_folders(evals)]]


def is_in_store(folder: FolderFacts) -> bool:
    """Return True if the shards of a folder are not on this machine."""
    return is_remote(folder.shards)


def check_shard_sizes(data: DataConfig, evals: Mapping[str, EvaluatorConfig]) -> None:
    """Examine every file of the local shards.

    Raises:
        DataError: files are missing or have another size; one line for each folder. Or as `read_facts`.
    """
    mistakes = []
    for folder in all_folders(data, evals):
        if not is_in_store(folder) and (wrong := _wrong(folder)):
            shown = ", ".join(wrong[:_SHOWN]) + (", ..." if len(wrong) > _SHOWN else "")
            mistakes.append(
                f"{folder.key}={folder.path}: {len(wrong):,} shards do not match the index: {shown}. {REMEDY}"
            )
    if mistakes:
        raise DataError("\n".join(mistakes))


def _wrong(folder: FolderFacts) -> list[str]:
    card, wrong = folder.card, []
    home = folder.local / (card.shards or "")
    for shard in read_index(folder.local / card.index_file, card.column, nested=card.is_adopted):
        name, size = stored(shard)["basename"], stored(shard)["bytes"]
        try:
            num_bytes = (home / name).stat().st_size
        except OSError as error:
            wrong.append(f"{name} ({error.strerror})")
        else:
            if num_bytes != size:
                wrong.append(f"{name} ({num_bytes:,} bytes, not {size:,})")
    return wrong
