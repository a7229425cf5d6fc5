"""Pairs of texts to shards for objective.name=contrastive: `prepare` with a spec that has a section `pairs`.

A row is a query, a text that answers it, and any number of texts that do not. It becomes one document, see
objectives/contrastive.py, whose labels are a hash of each text and a teacher's score of it. What cannot be learnt from
is left out and counted. Queries are held out whole, by their hash: no query is in both folders.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.clean.fields import as_score
from data_prep.make_tokenizer import tokenizer_file
from data_prep.read.tables import hub_rows
from data_prep.report import Fingerprint, inputs_of, is_finished
from data_prep.write.workspace import workspace
from modernbert_train.config.contrastive import SCORE_UNIT
from modernbert_train.config.tools.prepare import (
    PairsConfig,
    PairSourceConfig,
    PairTextsConfig,
    SourceConfig,
    pairs_problems,
)
from modernbert_train.core.files import os_errors_as, values_as
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.read_json import read_json
from modernbert_train.core.text import plural
from modernbert_train.data.dataset_card import write_card
from modernbert_train.data.parquet import open_parquet, parquet_rows
from modernbert_train.data.tables import read_rows
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.vocabulary import Vocabulary, open_tokenizer, read_vocabulary

REPORT = "pairs_report.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_AT_ONCE = 1024  # examples that are tokenised together
_SHARD_BYTES = 1 << 24
_MOST_LENGTHS = 1024  # of texts, in the card
_HASH_BITS = 62  # two halves of 31, which travel as int32


class Row(NamedTuple):
    """One of a file.

    Attributes:
        query, positive: texts.
        negatives: without empty ones.
        scores: of a teacher, 0 to 1, of the positive and each negative; empty: none.
    """

    query: str
    positive: str
    negatives: tuple[str, ...]
    scores: tuple[float, ...] = ()


@dataclass
class Counts:
    """What became of the rows."""

    train: int = 0
    validation: int = 0
    negatives: int = 0  # of both
    truncated: int = 0  # texts that were cut at the end
    empty: int = 0  # rows left out: a query or positive without a letter
    same: int = 0  # rows left out: the query is its own positive
    duplicates: int = 0  # rows left out: there before
    contradictions: int = 0  # negatives left out: they are the query or its positive
    more_negatives: int = 0  # left out beyond pairs.max_negatives
    repeated: int = 0  # texts that were there before in the same folder: no wrong answers to each other in a batch


def prepare_pairs(config: PairsConfig, overwrite: bool = False) -> str:
    """Make the dataset that a spec of pairs describes, or find that it is there already; as `prepare` does of text.

    Raises:
        ConfigError: the spec is wrong, or `out` holds something else.
        DataError: a file or the tokenizer cannot be read, or nothing is left.
        StorageError: the disk refuses it.
    """
    if problems := list(pairs_problems(config)):
        raise ConfigError("\n".join(problems))
    out, tokenizer = Path(config.out), Path(config.tokenizer.path)
    require_own_files(tokenizer)
    vocabulary, counts = read_vocabulary(tokenizer), Counts()
    fingerprint = _fingerprint(config)
    if is_finished(out, fingerprint, overwrite, REPORT):
        return f"already complete, made from the same spec and files; --overwrite makes it again\n{describe(out)}"
    texts = config.pairs
    max_negatives = len(texts.negatives) if texts.max_negatives is None else texts.max_negatives
    found = (row for name, source in config.sources.items() for row in _read(name, source, texts))
    rows = _kept(found, max_negatives, counts)
    with workspace(out) as folder:
        (folder / "tokenizer").mkdir()
        for name in _TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / "tokenizer" / name)
        longest = _write(rows, folder, vocabulary, 2 + max_negatives, config, counts)
        report = {"fingerprint": fingerprint, "longest": longest, "counts": asdict(counts)}
        (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return describe(out)


def _fingerprint(config: PairsConfig) -> Fingerprint:
    spec = {key: value for key, value in asdict(config).items() if key != "out"}
    files = [Path(source.path) for source in config.sources.values() if source.kind != "hub"]
    return {"spec": spec, "inputs": inputs_of(files, [("tokenizer.path", tokenizer_file(config.tokenizer.path))])}


def describe(out: Path) -> str:
    """A finished dataset in a few lines for a person."""
    report = read_json(out / REPORT)
    counts = report["counts"]
    others = "".join(f"{n:,} {key}\n" for key, n in counts.items() if n and key not in ("train", "validation"))
    return (
        f"{out}: {counts['train']:,} examples to train, {counts['validation']:,} held out\n"
        f"{others}the longest has {report['longest']:,} tokens: row_tokens must be at least that"
    )


def _read(name: str, source: PairSourceConfig, keys: PairTextsConfig) -> Iterator[Row]:
    """The rows of a source.

    Raises:
        DataError: it cannot be read, or a row is damaged; names the place.
    """
    columns, path = (keys.query, keys.positive), Path(source.path)
    if source.kind == "hub":
        hub = SourceConfig(kind="hub", path=source.path, subset=source.subset, split=source.split)
        with values_as(DataError, source.path):
            yield from _of_columns(hub_rows(name, hub), columns, keys)
        return
    with os_errors_as(DataError, f"{path}: cannot be read", "Name a file of pairs."), values_as(DataError, str(path)):
        if source.kind == "parquet":
            yield from _parquet(path, columns, keys)
            return
        for row in read_rows(path, columns, (*keys.negatives, *keys.scores), "pairs.query, .positive and .negatives"):
            yield _row(row.texts, row.values, f"line {row.line}", keys)


def _row(texts: Sequence[str], cells: Sequence[Any], place: str, keys: PairTextsConfig) -> Row:
    """Of the columns of negatives, then of scores."""
    number = len(keys.negatives)
    if not keys.scores:
        return Row(texts[0], texts[1], tuple(text for cell in cells for text in _texts(cell, place)))
    (positive,) = _scores([None], cells[number], place, keys)
    found: list[tuple[str, float]] = []
    for cell, scored in zip(cells[:number], cells[number + 1 :], strict=True):
        own = _listed(cell)
        _texts(own, place)
        found += [each for each in zip(own, _scores(own, scored, place, keys), strict=True) if (each[0] or "").strip()]
    return Row(texts[0], texts[1], tuple(text for text, _ in found), (positive, *(score for _, score in found)))


def _scores(texts: Sequence[Any], cell: Any, place: str, keys: PairTextsConfig) -> list[float]:
    """The scores of a cell as shares of their range, as many as there are texts."""
    found, (low, high) = _listed(cell), keys.score_range
    scores = [score for each in found if (score := as_score(each)) is not None]
    if len(scores) < len(found):
        raise ValueError(f"{place}: {found} is no score. Give numbers.")
    if len(scores) != len(texts):
        raise ValueError(
            f"{place}: {plural(len(texts), 'text')}, and {plural(len(scores), 'score')}. Give one for each."
        )
    if wrong := [score for score in scores if not low <= score <= high]:
        raise ValueError(
            f"{place}: score {wrong[0]:g} lies outside pairs.score_range, {low:g} to {high:g}. Correct one."
        )
    return [(score - low) / (high - low) for score in scores]


def _listed(cell: Any) -> list[Any]:
    return cell if isinstance(cell, list) else [] if cell is None else [cell]


def _of_columns(rows: Iterable[dict[str, Any]], columns: Sequence[str], keys: PairTextsConfig) -> Iterator[Row]:
    others = (*keys.negatives, *keys.scores)
    for number, row in enumerate(rows, start=1):
        if missing := [column for column in (*columns, *others) if column not in row]:
            raise ValueError(f"has no column {missing[0]}; it has {', '.join(row)}. Name others.")
        texts = [[*_texts(row[column], f"row {number}"), ""][0] for column in columns]
        yield _row(texts, [row[column] for column in others], f"row {number}", keys)


def _parquet(path: Path, columns: Sequence[str], keys: PairTextsConfig) -> Iterator[Row]:
    wanted = [*columns, *keys.negatives, *keys.scores]
    with open_parquet(path, wanted) as table:
        own = [name for name in table.schema_arrow.names if name in wanted] or table.schema_arrow.names
        yield from _of_columns((row for _, row in parquet_rows(path, table, own)), columns, keys)


def _texts(value: Any, place: str) -> list[str]:
    """The texts of a cell: one, a list of them, or none."""
    found = _listed(value)
    if not all(isinstance(text, str) for text in found):
        raise ValueError(f"{place}: {found} is neither a text nor a list of texts. Correct it.")
    return [text for text in found if text.strip()]


def _kept(rows: Iterable[Row], most: int, counts: Counts) -> Iterator[Row]:
    """The rows that something can be learnt from."""
    seen: set[int] = set()
    for row in rows:
        if not (row.query.strip() and row.positive.strip()):
            counts.empty += 1
        elif row.query == row.positive:
            counts.same += 1
        elif (known := text_hash("\0".join((row.query, row.positive, *row.negatives)))) in seen:
            counts.duplicates += 1
        else:
            seen.add(known)
            scored = dict(zip(row.negatives[::-1], row.scores[:0:-1] or [0.0] * len(row.negatives), strict=True))
            negatives = tuple(text for text in dict.fromkeys(row.negatives) if text not in (row.query, row.positive))
            counts.contradictions += len(row.negatives) - len(negatives)
            counts.more_negatives += max(0, len(negatives) - most)
            counts.negatives += len(negatives[:most])
            scores = (*row.scores[:1], *(scored[text] for text in negatives[:most])) if row.scores else ()
            yield row._replace(negatives=negatives[:most], scores=scores)


def text_hash(text: str) -> int:
    """Of a text, without what surrounds it; not negative."""
    digest = hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _HASH_BITS)


def _write(
    rows: Iterator[Row], folder: Path, vocabulary: Vocabulary, sides: int, config: PairsConfig, counts: Counts
) -> int:
    """Write both folders; returns the tokens of the longest document, special ones included."""
    from modernbert_train.data.shard_writer import ShardWriter  # imports streaming, which takes seconds

    writers: dict[str, ShardWriter] = {}
    lengths: dict[str, array[int]] = {}
    known: dict[str, array[int]] = {}  # hashes
    longest, held_out = 0, config.validation_share * (1 << _HASH_BITS)
    for row, parts in _tokenised(rows, folder / "tokenizer", vocabulary, config.pairs, counts):
        split = "validation" if text_hash(row.query) < held_out else "train"
        if split not in writers:
            writers[split] = ShardWriter(folder / split, vocabulary.num_entries, vocabulary.sha256, _SHARD_BYTES)
            lengths[split], known[split] = array("I"), array("q")
        ids = [id for part in parts for id in (vocabulary.sep_id, vocabulary.cls_id, *part)][2:]
        hashes = [text_hash(text) for text in (row.query, row.positive, *row.negatives)]
        labels = np.zeros((sides, 2), dtype=np.int64)
        labels[: len(hashes), 0] = hashes
        labels[1 : 1 + len(row.scores), 1] = [round(score * SCORE_UNIT) for score in row.scores]
        writers[split].write(ids, labels.reshape(1, -1))
        lengths[split].extend(len(part) + 2 for part in parts)
        known[split].extend(hashes)
        longest = max(longest, len(ids) + 2)
        setattr(counts, split, getattr(counts, split) + 1)
    if not counts.train:
        raise DataError(f"sources: no row is left to train on ({asdict(counts)}). Give others.")
    counts.repeated = sum(len(each) - len(np.unique(np.frombuffer(each, np.int64))) for each in known.values())
    for split, writer in writers.items():
        sample = _even_sample(np.sort(np.frombuffer(lengths[split], np.uint32)))
        scored = bool(config.pairs.scores)
        prompts = {"query": config.pairs.query_prefix, "document": config.pairs.document_prefix}
        own = {"scored": scored, "prompts": prompts if any(prompts.values()) else None}
        card = replace(writer.finish(), sides=sides, longest=longest, text_lengths=sample, **own)
        write_card(folder / split, card)
    return longest


def _even_sample(ascending: NDArray[np.uint32]) -> list[int]:
    number = min(len(ascending), _MOST_LENGTHS)
    found: list[int] = ascending[((np.arange(number) + 0.5) * len(ascending) / number).astype(np.int64)].tolist()
    return found


def _tokenised(
    rows: Iterator[Row], folder: Path, vocabulary: Vocabulary, keys: PairTextsConfig, counts: Counts
) -> Iterator[tuple[Row, list[list[int]]]]:
    """Token ids of the texts of each row, cut; a row with a text of no token is left out."""
    tokenizer = open_tokenizer(folder)
    most = keys.max_tokens - 2
    most_of_query = (keys.query_max_tokens or keys.max_tokens) - 2
    special = {vocabulary.sep_id, vocabulary.cls_id}
    while some := list(islice(rows, _AT_ONCE)):
        texts = [
            prefix + text
            for row in some
            for prefix, text in [
                (keys.query_prefix, row.query),
                *((keys.document_prefix, text) for text in (row.positive, *row.negatives)),
            ]
        ]
        encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for row in some:
            whole = [next(encoded).ids for _ in range(2 + len(row.negatives))]
            if any(special & {*ids} for ids in whole):
                raise DataError(f"the tokenizer reads [CLS] or [SEP] out of {row.query[:60]!r}. Name another.")
            parts = [whole[0][:most_of_query], *(ids[:most] for ids in whole[1:])]
            if not all(parts):
                counts.empty += 1
                continue
            counts.truncated += sum(len(part) < len(ids) for part, ids in zip(parts, whole, strict=True))
            yield row, parts
