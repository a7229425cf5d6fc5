"""Write a task's texts, once, as ordinary shards with labels into the folder of its run.

A document is the tokens between [CLS] and [SEP]: a text, two of them with [SEP] between, the words of a sentence with
a space between each, a question and a window of its context, or all choices of a question. It is never split over
rows: a longer document is cut here, at its end, of a pair the longer text first, and counted. The folder appears when
it is complete. task.json records its origin; a folder of another origin is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.core.claim import changes, refuse
from modernbert_train.core.files import lock, os_errors_as, whole_folder
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.read_json import read_json
from modernbert_train.core.tokenizer_threads import tokenizer_threads
from modernbert_train.data.dataset_card import LABELS, read_card
from modernbert_train.errors import DataError, StorageError
from modernbert_train.evaluate.finetune.counts import Counts, in_words
from modernbert_train.evaluate.finetune.examples import TRAIN, Split
from modernbert_train.evaluate.finetune.kinds import kind_of
from modernbert_train.evaluate.finetune.numbers import Labels
from modernbert_train.evaluate.finetune.read_texts import files_of, read_splits
from modernbert_train.evaluate.finetune.result import hashed
from modernbert_train.evaluate.finetune.tokens import SPECIAL_TOKENS, Reader
from modernbert_train.evaluate.label_sidecar import file_of_texts
from modernbert_train.vocabulary import Vocabulary, read_vocabulary

ABOUT, TOKENIZER = "task.json", "tokenizer"
_SHARD_BYTES = 1 << 24
# keys of a task that determine its shards
DECIDES = (
    "kind",
    "data",
    "subset",
    "train",
    "validation",
    "text_columns",
    "label_column",
    "label_separator",
    "labels",
)
DECIDES_IF_SET = ("predict", "id_column")  # later keys: left out if unset, so that older folders still match


@dataclass(frozen=True)
class Prepared:
    """A task on disk.

    Attributes:
        folder: with a folder of shards for each split, and the tokenizer.
        labels: names of the classes, in the order of the logits.
        unseen: for each split, its classes that are missing in training.
        counts: of each split.
        longest: tokens of the longest document of all, special tokens included.
        tokens, texts: of the training split, special tokens included.
    """

    folder: Path
    labels: tuple[str, ...]
    unseen: Mapping[str, tuple[str, ...]]
    counts: Mapping[str, Counts]
    longest: int
    tokens: int
    texts: int

    @property
    def tokenizer(self) -> Path:
        return self.folder / TOKENIZER


def prepare(task: TaskConfig, tokenizer: Path, max_tokens: int, folder: Path) -> Prepared:
    """Write a task's shards, unless they exist.

    Args:
        task: its texts and labels.
        tokenizer: of the model, copied to the shards.
        max_tokens: longest document, special tokens included.
        folder: of the shards. Several ranks may call this at once; one writes.

    Raises:
        ConfigError: it holds shards of another task or model.
        DataError: the texts cannot be used; names the place.
        StorageError: the disk refuses it.
    """
    require_own_files(tokenizer)
    requested = _asked(task, read_vocabulary(tokenizer), max_tokens)
    with os_errors_as(StorageError, f"{folder}: cannot be written", "Free the disk, or name another runs_folder."):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / ".task.lock").open("w") as file:
            lock(file)
            if not folder.exists():
                _write(task, requested, tokenizer, max_tokens, folder)
    return _read(folder, requested)


def _asked(task: TaskConfig, vocabulary: Vocabulary, max_tokens: int) -> dict[str, Any]:
    about = {key: getattr(task, key) for key in DECIDES}
    about |= {key: value for key in DECIDES_IF_SET if (value := getattr(task, key))}
    about |= {key: getattr(task, key) for key in kind_of(task.kind).decides}
    about |= {"max_tokens": max_tokens, "tokenizer_sha256": vocabulary.sha256, "files": hashed(files_of(task))}
    return json.loads(json.dumps(about))


def _read(folder: Path, requested: Mapping[str, Any]) -> Prepared:
    unread, damage = f"{folder / ABOUT}: cannot be read", (ValueError, KeyError, TypeError)
    with os_errors_as(DataError, unread, f"Remove {folder}, and it is made again.", *damage):
        about = read_json(folder / ABOUT)
        recorded, counts = about["asked"], {name: Counts(**each) for name, each in about["counts"].items()}
        labels, unseen = tuple(about["labels"]), {name: tuple(each) for name, each in about["unseen"].items()}
        longest = int(about["longest"])
    refuse(
        f"{folder}: made from another task, other texts or another tokenizer",
        changes({key: recorded.get(key) for key in requested}, requested),
        f"Give this run another name=, or remove {folder.parent}.",
    )
    card = read_card(folder / TRAIN)
    tokens = card.tokens + SPECIAL_TOKENS * card.documents
    return Prepared(folder, labels, unseen, counts, longest, tokens, card.documents)


def _write(task: TaskConfig, requested: Mapping[str, Any], tokenizer: Path, max_tokens: int, folder: Path) -> None:
    splits = read_splits(task)
    labels = kind_of(task.kind).numbers(task, splits)
    with whole_folder(folder) as staging:
        (staging / TOKENIZER).mkdir(parents=True)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, staging / TOKENIZER / name)
        longest, counts = 0, {}
        for name, split in splits.items():
            counts[name], longest_of_split = _write_split(split, name, labels, task, staging, max_tokens)
            longest = max(longest, longest_of_split)
        _count_repeats(splits, labels, task, counts)
        about = {
            "asked": requested,
            "labels": labels.names,
            "unseen": labels.unseen,
            "sources": {name: split.source for name, split in splits.items()},
            "counts": {name: asdict(each) for name, each in counts.items()},
            "longest": longest,
        }
        (staging / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _count_repeats(splits: Mapping[str, Split], labels: Labels, task: TaskConfig, counts: Mapping[str, Counts]) -> None:
    """Count texts that are in training and measured too, and texts with several labels; spaces make no difference."""
    keys = {
        name: [tuple(" ".join(text.split()) for text in example.texts) for example in split.examples]
        for name, split in splits.items()
    }
    in_train = set(keys[TRAIN])
    for name, own in keys.items():
        if name != TRAIN and splits[name].labelled:
            counts[name].in_train = sum(key in in_train for key in own)
        if splits[name].labelled and kind_of(task.kind).repeats:
            labels_of: dict[tuple[str, ...], set[bytes]] = {}
            for key, value in zip(own, labels.values[name], strict=True):
                labels_of.setdefault(key, set()).add(value.tobytes())
            counts[name].many_labels = sum(len(labels_of[key]) > 1 for key in own)


def _write_split(
    split: Split, name: str, labels: Labels, task: TaskConfig, staging: Path, max_tokens: int
) -> tuple[Counts, int]:
    """Write one split; return its counts, and the tokens of its longest document."""
    from modernbert_train.data.shard_writer import ShardWriter  # imports streaming, which takes seconds

    reader = Reader(staging / TOKENIZER, task, max_tokens)
    writer = ShardWriter(staging / name, reader.vocabulary.num_entries, reader.vocabulary.sha256, _SHARD_BYTES)
    counts, longest = Counts(), 0
    with tokenizer_threads(False), file_of_texts(staging / name).open("w", encoding="utf-8") as about:
        encoded = kind_of(task.kind).encode(split, labels.values[name], labels, reader, counts)
        for encoded_example, example in zip(encoded, split.examples, strict=True):
            entry: dict[str, Any] = {
                "line": example.line,
                "document": writer.documents if encoded_example.documents else None,
            }
            entry |= ({"id": example.id} if task.id_column else {}) | encoded_example.entry
            about.write(json.dumps(entry) + "\n")
            for ids, value in encoded_example.documents:
                writer.write(ids, value)
                longest = max(longest, len(ids) + SPECIAL_TOKENS)
            if encoded_example.documents:
                counts.texts += 1
            elif encoded_example.left_out:
                setattr(counts, encoded_example.left_out, getattr(counts, encoded_example.left_out) + 1)
    if not counts.texts:
        raise DataError(f"{split.source}: contains no text with a letter. Name another file or column.")
    writer.finish()
    return counts, longest


def warnings_of(prepared: Prepared, task: TaskConfig) -> Iterator[str]:
    """Yield warnings about the texts, a line each."""
    for name, counts in prepared.counts.items():
        if problems := list(in_words(counts)):
            left_out = counts.empty + (counts.misplaced if name == TRAIN else 0)
            yield f"{name}: of {counts.texts + left_out:,} texts " + "; ".join(problems)
        if name in task.validation:
            labels = np.load(prepared.folder / name / LABELS, mmap_mode="r")
            if (only := kind_of(task.kind).only_label(labels)) is not None:
                yield f"{name}: all texts have {only}, so correlations say nothing"
