"""A task's texts as ordinary shards with labels beside them, in the folder of its run; written once.

A document is what stands between [CLS] and [SEP]: a text, two of them with [SEP] between, or the words of a sentence
with a space between each. It is never cut over rows: what is longer than the context is cut here, at its end, of a pair
the longer text first, and counted. The folder appears when it is whole. What it was made of stands in task.json; made
of something else, it is refused and never mixed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.core.files import lock, os_errors_as, publish
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.read_json import read_json
from modernbert_train.core.tokenizer_threads import tokenizer_threads
from modernbert_train.data.dataset_card import file_sha256, read_card
from modernbert_train.errors import ConfigError, DataError, StorageError
from modernbert_train.evaluate.finetune.examples import TRAIN, Split, files_of, read_splits
from modernbert_train.evaluate.finetune.numbers import Labels, number_labels, of_tokens
from modernbert_train.vocabulary import Vocabulary, read_vocabulary

ABOUT, TOKENIZER = "task.json", "tokenizer"
TEXTS = ".texts.jsonl"  # behind the name of a split: where each of its texts stands, what it is told, and its document
SPECIAL_TOKENS = 2  # [CLS] and [SEP]; the one between two texts is a part of the document
_SHARD_BYTES = 1 << 24
_AT_ONCE = 1024  # texts that are tokenised together
# of the task, what decides the shards
_DECIDES = (
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
_DECIDES_IF_SET = ("predict", "id_column")  # so that folders of before they were are found


@dataclass
class Counts:
    """What became of the texts of a split."""

    texts: int = 0  # written
    truncated: int = 0  # of them cut to the context
    empty: int = 0  # without a letter, left out
    unseen: int = 0  # with a class that training has not
    loose_tags: int = 0  # I-x and E-x that go on with no entity of type x, read as a beginning
    in_train: int = 0  # of a split that is measured: texts that the training split has too
    many_labels: int = 0  # with a text that stands elsewhere in the split with another label
    lost_words: int = 0  # tagged words cut off, or without a token of their own: neither learned nor measured


@dataclass(frozen=True)
class Prepared:
    """A task on disk.

    Attributes:
        folder: with a folder of shards for each split, and the tokenizer.
        labels: names of the classes, in the order of the logits.
        unseen: of each split, classes that training has not.
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
    """Write a task's shards, or find that they are there.

    Args:
        task: its texts and labels.
        tokenizer: of the model, copied beside the shards.
        max_tokens: longest document, special tokens included.
        folder: where to. Several ranks may ask at once: one writes.

    Raises:
        ConfigError: it holds another task's, or another model's.
        DataError: the texts cannot be used; names the place.
        StorageError: the disk refuses it.
    """
    require_own_files(tokenizer)
    asked = _asked(task, read_vocabulary(tokenizer), max_tokens)
    with os_errors_as(StorageError, f"{folder}: cannot be written", "Free the disk, or name another runs_folder."):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / ".task.lock").open("w") as file:
            lock(file)
            if not folder.exists():
                _write(task, asked, tokenizer, max_tokens, folder)
    return _read(folder, asked)


def _asked(task: TaskConfig, vocabulary: Vocabulary, max_tokens: int) -> dict[str, Any]:
    files = {name: {"file": str(path), "sha256": file_sha256(path)} for name, path in files_of(task).items()}
    about = {key: getattr(task, key) for key in _DECIDES}
    about |= {key: value for key in _DECIDES_IF_SET if (value := getattr(task, key))}
    about |= {"max_tokens": max_tokens, "tokenizer_sha256": vocabulary.sha256, "files": files}
    return json.loads(json.dumps(about))


def _read(folder: Path, asked: Mapping[str, Any]) -> Prepared:
    try:
        about = read_json(folder / ABOUT)
        made, counts = about["asked"], {name: Counts(**each) for name, each in about["counts"].items()}
        labels, unseen = tuple(about["labels"]), {name: tuple(each) for name, each in about["unseen"].items()}
        longest = int(about["longest"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / ABOUT}: cannot be read ({error}). Remove {folder}, and it is made again.") from None
    if other := [key for key in asked if made.get(key) != asked[key]]:
        changed = "; ".join(f"{key}: {made.get(key)} there, {asked[key]} now" for key in other)
        raise ConfigError(
            f"{folder}: made of another task, other texts or another tokenizer ({changed}). Give this run another "
            f"name=, or remove {folder.parent}."
        )
    card = read_card(folder / TRAIN)
    tokens = card.tokens + SPECIAL_TOKENS * card.documents
    return Prepared(folder, labels, unseen, counts, longest, tokens, card.documents)


def _write(task: TaskConfig, asked: Mapping[str, Any], tokenizer: Path, max_tokens: int, folder: Path) -> None:
    splits = read_splits(task)
    labels = number_labels(task, splits)
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        (staging / TOKENIZER).mkdir(parents=True)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, staging / TOKENIZER / name)
        longest, counts = 0, {}
        for name, split in splits.items():
            counts[name], most = _write_split(split, name, labels, task, staging, max_tokens)
            longest = max(longest, most)
        _count_repeats(splits, labels, task, counts)
        about = {
            "asked": asked,
            "labels": labels.names,
            "unseen": labels.unseen,
            "sources": {name: split.source for name, split in splits.items()},
            "counts": {name: asdict(each) for name, each in counts.items()},
            "longest": longest,
        }
        (staging / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        publish(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _count_repeats(splits: Mapping[str, Split], labels: Labels, task: TaskConfig, counts: Mapping[str, Counts]) -> None:
    """Count texts that are in training and measured too, and texts with several labels; spaces make no difference."""
    keys = {
        name: [tuple(" ".join(text.split()) for text in example.texts) for example in split.examples]
        for name, split in splits.items()
    }
    known = set(keys[TRAIN])
    for name, own in keys.items():
        if name != TRAIN and splits[name].labelled:
            counts[name].in_train = sum(key in known for key in own)
        if splits[name].labelled and task.kind != "regression":  # where several people's scores of a text may differ
            said: dict[tuple[str, ...], set[bytes]] = {}
            for key, value in zip(own, labels.values[name], strict=True):
                said.setdefault(key, set()).add(value.tobytes())
            counts[name].many_labels = sum(len(said[key]) > 1 for key in own)


def _write_split(
    split: Split, name: str, labels: Labels, task: TaskConfig, staging: Path, max_tokens: int
) -> tuple[Counts, int]:
    """Write one split; returns what became of it, and its longest document."""
    from modernbert_train.data.shard_writer import ShardWriter  # imports streaming, which takes seconds

    vocabulary = read_vocabulary(staging / TOKENIZER)
    writer = ShardWriter(staging / name, vocabulary.num_entries, vocabulary.sha256, _SHARD_BYTES)
    counts, longest, most = Counts(loose_tags=split.loose_tags), 0, max_tokens - SPECIAL_TOKENS
    with tokenizer_threads(False), (staging / f"{name}{TEXTS}").open("w", encoding="utf-8") as about:
        encode = _words if task.kind == "tokens" else _texts
        encoded = encode(split, staging / TOKENIZER / "tokenizer.json", vocabulary)
        for (parts, firsts), example, value in zip(encoded, split.examples, labels.values[name], strict=True):
            said: dict[str, Any] = {"line": example.line, "document": None}
            said |= ({"id": example.id} if task.id_column else {}) | _label(split, name, value, labels, task)
            if not any(parts) or not any(text.strip() for text in example.texts):
                counts.empty += 1
                about.write(json.dumps(said) + "\n")
                continue
            whole = sum(map(len, parts)) + len(parts) - 1
            parts = _cut(parts, most - (len(parts) - 1))
            ids = list(parts[0]) if len(parts) == 1 else [*parts[0], vocabulary.sep_id, *parts[1]]
            if task.kind == "tokens":
                value = of_tokens(value, firsts, len(ids))
                counts.lost_words += len(firsts) - int((value != -100).sum())
                said["told"] = [0 <= first < len(ids) for first in firsts]
            writer.write(ids, value)
            about.write(json.dumps(said | {"document": counts.texts}) + "\n")
            counts.texts += 1
            counts.truncated += len(ids) < whole
            counts.unseen += bool(task.kind not in ("regression", "multi-label") and (value >= len(labels.names)).any())
            longest = max(longest, len(ids) + SPECIAL_TOKENS)
    if not counts.texts:
        raise DataError(f"{split.source}: holds no text with a letter. Name another file or column.")
    writer.finish()
    return counts, longest


def _label(split: Split, name: str, value: Any, labels: Labels, task: TaskConfig) -> dict[str, Any]:
    """The label of a text in words."""
    if not split.labelled:
        return {}
    if task.kind == "regression":
        return {"label": float(value[0, 0])}
    names = (*labels.names, *labels.unseen.get(name, ()))
    if task.kind == "multi-label":
        return {"label": [names[number] for number in np.flatnonzero(value[0])]}
    said = [names[number] for number in value.reshape(-1)]
    return {"label": said if task.kind == "tokens" else said[0]}


def _texts(split: Split, file: Path, vocabulary: Vocabulary) -> Iterator[tuple[list[list[int]], Sequence[int]]]:
    """Token ids of each text of each example."""
    tokenizer = _tokenizer(file)
    for at in range(0, len(split.examples), _AT_ONCE):
        some = split.examples[at : at + _AT_ONCE]
        flat = [text for example in some for text in example.texts]
        encoded = iter(tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        for example in some:
            parts = [next(encoded).ids for _ in example.texts]
            if any(vocabulary.sep_id in ids for ids in parts):
                raise DataError(f"{example.place}: the tokenizer reads [SEP] out of this text. Name another model.")
            yield parts, ()


def _words(split: Split, file: Path, vocabulary: Vocabulary) -> Iterator[tuple[list[list[int]], Sequence[int]]]:
    """Token ids of each sentence, written with a space between words, and the place of each word's first token."""
    tokenizer = _tokenizer(file)
    for example in split.examples:
        encoding = tokenizer.encode(" ".join(example.texts), add_special_tokens=False)
        firsts: list[int] = []
        at = token = 0
        for word in example.texts:
            while token < len(encoding.offsets) and encoding.offsets[token][1] <= at:
                token += 1
            begins = token < len(encoding.offsets) and encoding.offsets[token][0] < at + len(word)
            firsts.append(token if begins and token not in firsts[-1:] else -1)
            at += len(word) + 1
        yield [encoding.ids], firsts


def _tokenizer(file: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.encode_special_tokens = True  # written out in a text, they are spelled like any other characters
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _cut(parts: list[list[int]], most: int) -> list[list[int]]:
    """The texts in at most so many tokens: of two the longer loses its end until they are equal, then both."""
    if sum(map(len, parts)) <= most:
        return parts
    if len(parts) == 1:
        return [parts[0][:most]]
    first, second = map(len, parts)
    shorter = min(first, second, most // 2)
    keep = (shorter, most - shorter) if first <= second else (most - shorter, shorter)
    return [ids[:length] for ids, length in zip(parts, keep, strict=True)]


def warnings_of(prepared: Prepared, task: TaskConfig) -> Iterator[str]:
    """What a person should know of the texts, a line each."""
    said = {
        "truncated": "longer than the context, cut at the end",
        "empty": "without a letter, left out",
        "unseen": "of classes that training has not, which cannot be predicted correctly",
        "in_train": "that train has too, so figures tell what was learned by heart",
        "many_labels": "of which the same text has another label elsewhere",
        "loose_tags": "tags I-x or E-x that continue no entity, read as its beginning",
        "lost_words": "tagged words cut off or without a token of their own, neither learned nor measured",
    }
    for name, counts in prepared.counts.items():
        found = [
            f"{getattr(counts, each.name):,} {said[each.name]}"
            for each in fields(counts)
            if each.name in said and getattr(counts, each.name)
        ]
        if found:
            yield f"{name}: of {counts.texts + counts.empty:,} texts " + "; ".join(found)
        if name in task.validation and (only := _only_label(prepared.folder / name, task)):
            yield f"{name}: all texts have {only}, so correlations say nothing"


def _only_label(folder: Path, task: TaskConfig) -> str | None:
    if task.kind not in ("single-label", "regression"):
        return None
    values = np.unique(np.load(folder / "labels.npy"))
    return ("one score" if task.kind == "regression" else "one class") if len(values) == 1 else None
