"""Convert pairs of texts to shards for objective.name=contrastive: `prepare` for a spec with a section `pairs`.

A row is a query, a text that answers it, and any number of texts that do not. It becomes one document, see
objectives/contrastive.py, whose labels are a hash of each text and a teacher's score. Rows without use for
training are left out and counted. Queries are held out whole, by their hash: no query is in both folders.

    tokenise    read, clean and tokenise the rows of a task; arrays of them
    merge       leave out duplicates, and write the rows of all tasks as one dataset

One process does the second stage, so the shards do not depend on the cuts of the sources.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datatrove.data import DocumentsPipeline
from numpy.typing import NDArray
from tokenizers import Tokenizer

from data_prep.clean.clean_documents import TRAIN, VALIDATION, Tally
from data_prep.clean.damage import require_little_lost
from data_prep.clean.fields import as_score
from data_prep.read.reader_steps import Step, read_tallies
from data_prep.report import Fingerprint
from data_prep.tasks.executors import Stage, is_alone
from data_prep.tasks.stage_progress import Progress
from data_prep.tasks.stages import Settle
from data_prep.tasks.task_workers import Documents
from data_prep.tasks.work import Work
from data_prep.write.workspace import workspace
from modernbert_train.config.contrastive import SCORE_UNIT
from modernbert_train.config.tools.pairs import PairsConfig, PairTextsConfig
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.read_json import read_json
from modernbert_train.core.text import plural
from modernbert_train.core.tokenizer_threads import tokenizer_threads
from modernbert_train.data.dataset_card import write_card
from modernbert_train.data.read.rows import HALF_PAIR, Columns, LeftOut, Row, lacking_field, value_of
from modernbert_train.data.read.sources import read_rows
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import Vocabulary, open_tokenizer, read_vocabulary

REPORT = "pairs_report.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_AT_ONCE = 1024  # rows that are tokenised together
_MOST_LENGTHS = 1024  # maximum number of text lengths stored in the card
_HASH_BITS = 62  # two halves of 31, which travel as int32
# a task's record of a row: hash of its texts, their number (0: a text without tokens), True if it is held out, and
# counts for a row that is not a duplicate
_COUNTED = ("negatives", "contradictions", "more_negatives", "truncated")
_ROW = np.dtype([("key", "<i8"), ("texts", "<i4"), ("held_out", "?"), *((name, "<i4") for name in _COUNTED)])
_TEXT = np.dtype([("hash", "<i8"), ("score", "<i8"), ("tokens", "<i4")])


class Pair(NamedTuple):
    """The texts of a row.

    Attributes:
        query, positive: texts.
        negatives: without empty ones.
        scores: a teacher's scores, 0 to 1, for the positive and each negative; empty: none.
        prefixes: put before the query, and before each other text.
    """

    query: str
    positive: str
    negatives: tuple[str, ...]
    scores: tuple[float, ...]
    prefixes: tuple[str, str]


@dataclass
class Counts:
    """Numbers of rows and texts by outcome."""

    train: int = 0
    validation: int = 0
    negatives: int = 0  # in train and validation
    truncated: int = 0  # texts that were cut at the end
    empty: int = 0  # rows left out: a query or positive without a letter
    same: int = 0  # rows left out: the query is its own positive
    duplicates: int = 0  # rows left out: equal to an earlier one
    contradictions: int = 0  # negatives left out: they are the query or its positive
    more_negatives: int = 0  # left out beyond pairs.max_negatives
    repeated: int = 0  # texts equal to an earlier one of the same folder: no negatives of each other in a batch
    damaged: int = 0  # rows left out: on_error=skip


def check(config: PairsConfig) -> None:
    """Try the tokenizer before a stage needs it.

    Raises:
        DataError: it cannot be used.
    """
    require_own_files(Path(config.tokenizer.path))
    read_vocabulary(Path(config.tokenizer.path))


def make_stages(work: Work, config: PairsConfig, identity: Fingerprint) -> list[Stage]:
    """Return the stages of a spec of pairs, like tasks/stages.py for text."""

    def rows() -> Documents:
        return Documents(Progress(work, "tokenise").count, None)

    settle = Settle(work.folder, ("tokenise/{rank:05d}.json", "tokenise/{rank:05d}/*"))
    return [
        Stage("tokenise", work.tasks, [TokenisePairs(work, config, "tokenise"), settle], rows),
        Stage("merge", 1, [MergePairs(work, config, "merge", identity)]),
    ]


def describe(out: Path) -> str:
    """Return a description of a finished dataset for the user."""
    report = read_json(out / REPORT)
    counts = report["counts"]
    others = "".join(f"{n:,} {key}\n" for key, n in counts.items() if n and key not in (TRAIN, VALIDATION))
    return (
        f"{out}: {counts[TRAIN]:,} examples to train, {counts[VALIDATION]:,} held out\n"
        f"{others}the longest has {report['longest']:,} tokens: row_tokens must be at least that"
    )


def take_pair(row: Row, keys: PairTextsConfig, max_characters: int) -> Pair | LeftOut:
    """Return the texts of a row, and their scores, from the columns of a spec."""
    if problem := next(filter(None, (lacking_field(row.fields, column) for column in keys.columns)), None):
        return LeftOut(row.id, "no_text", problem)
    try:
        pair = _pair({column: value_of(row.fields, column) for column in keys.columns}, keys)
        for text in (pair.query, pair.positive, *pair.negatives, *pair.prefixes):
            if len(text) > max_characters:
                raise ValueError(f"a text of {len(text):,} characters, max_characters={max_characters:,}")
            text.encode()
    except UnicodeEncodeError:
        return LeftOut(row.id, "not_utf8", HALF_PAIR)
    except ValueError as error:
        return LeftOut(row.id, "no_pair", str(error))
    if not (pair.query.strip() and pair.positive.strip()):
        return LeftOut(row.id, "empty", "a query or a positive without a letter", damaged=False)
    if pair.query == pair.positive:
        return LeftOut(row.id, "same", "the query is its own positive", damaged=False)
    return pair


def _pair(values: dict[str, Any], keys: PairTextsConfig) -> Pair:
    query, positive = (_text(values[column], column) for column in (keys.query, keys.positive))
    prefixes = tuple(
        fixed if column is None else _text(values[column], column)
        for fixed, column in (
            (keys.query_prefix, keys.query_prefix_column),
            (keys.document_prefix, keys.document_prefix_column),
        )
    )
    cells = [_listed(values[column]) for column in keys.negatives]
    for cell in cells:
        if not all(isinstance(text, str) for text in cell):
            raise ValueError(f"{cell} is neither a text nor a list of texts")
    texts = [text for cell in cells for text in cell]
    scores: list[float] = []
    for column, scored in zip(keys.scores, [[positive], *cells], strict=bool(keys.scores)):
        scores += _scores(scored, values[column], keys)
    kept = [number for number, text in enumerate(texts) if text.strip()]
    scores = scores and [scores[0], *(scores[1 + number] for number in kept)]
    return Pair(query, positive, tuple(texts[number] for number in kept), tuple(scores), (prefixes[0], prefixes[1]))


def _text(value: Any, column: str) -> str:
    """Return a text; empty if it is missing."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{column} is {value!r:.60}, and not a text")
    return value or ""


def _scores(texts: Sequence[Any], cell: Any, keys: PairTextsConfig) -> list[float]:
    """Return the scores of a cell as shares of their range, one for each text."""
    cells, (low, high) = _listed(cell), keys.score_range
    scores = [score for each in cells if (score := as_score(each)) is not None]
    if len(scores) < len(cells):
        raise ValueError(f"{cells} is no score. Give numbers")
    if len(scores) != len(texts):
        raise ValueError(f"{plural(len(texts), 'text')}, and {plural(len(scores), 'score')}. Give one for each")
    if wrong := [score for score in scores if not low <= score <= high]:
        raise ValueError(f"score {wrong[0]:g} lies outside pairs.score_range, {low:g} to {high:g}")
    return [(score - low) / (high - low) for score in scores]


def _listed(cell: Any) -> list[Any]:
    return cell if isinstance(cell, list) else [] if cell is None else [cell]


def text_hash(text: str) -> int:
    """Return the hash of a text without surrounding white space; not negative."""
    digest = hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _HASH_BITS)


class _Kept(NamedTuple):
    """A row that is tokenised.

    Attributes:
        pair: with the negatives that are written.
        key: the hash of all its texts, by which duplicates are found.
        contradictions, more_negatives: negatives that are left out.
    """

    pair: Pair
    key: int
    contradictions: int
    more_negatives: int


def _reduced(pair: Pair, keys: PairTextsConfig) -> _Kept:
    """Leave out negatives that are the query or its positive, that are repeated, or that are too many."""
    max_negatives = len(keys.negatives) if keys.max_negatives is None else keys.max_negatives
    own = pair.prefixes if keys.query_prefix_column or keys.document_prefix_column else ()
    key = text_hash("\0".join((*own, pair.query, pair.positive, *pair.negatives)))
    texts = [text for text in dict.fromkeys(pair.negatives) if text not in (pair.query, pair.positive)]
    scores = pair.scores
    if scores:
        scored = dict(zip(pair.negatives[::-1], scores[:0:-1], strict=True))  # the first of a repeated text
        scores = (scores[0], *(scored[text] for text in texts[:max_negatives]))
    reduced = pair._replace(negatives=tuple(texts[:max_negatives]), scores=scores)
    return _Kept(reduced, key, len(pair.negatives) - len(texts), max(0, len(texts) - max_negatives))


class TokenisePairs(Step[PairsConfig]):
    """Step that reads the rows of a task, cleans and tokenises them, and writes arrays."""

    type = "reader"
    name = "pairs"

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the arrays and the tally of a task.

        Raises:
            DataError: a row is damaged and `on_error` is `stop`; the tokenizer reads special tokens out of text.
        """
        started, tally, threads = time.monotonic(), Tally(), is_alone(self._work, self._config.executor)
        rows, texts, ids = [], [], array("I")
        kept, progress = self._kept(rank, tally), Progress(self._work, self._stage)
        folder = Path(self._config.tokenizer.path)
        tokenizer, vocabulary = open_tokenizer(folder), read_vocabulary(folder)
        while some := list(islice(kept, _AT_ONCE)):
            with tokenizer_threads(threads):
                encoded = self._encoded(tokenizer, vocabulary, [each.pair for each in some])
            for (pair, key, *left_out), (ids_of_texts, truncated) in zip(some, encoded, strict=True):
                number = len(ids_of_texts) if all(ids_of_texts) else 0
                rows.append((key, number, self._is_held_out(pair), len(pair.negatives), *left_out, truncated))
                if number:
                    scores = [0, *(round(score * SCORE_UNIT) for score in pair.scores)]
                    hashes = map(text_hash, (pair.query, pair.positive, *pair.negatives))
                    texts += zip(hashes, scores + [0] * (number - len(scores)), map(len, ids_of_texts), strict=True)
                    ids.extend(
                        [id for part in ids_of_texts for id in (vocabulary.sep_id, vocabulary.cls_id, *part)][2:]
                    )
            progress.write(rank, tally.total().read)
        folder = self._work.shards(rank)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, array_ in (("rows", np.array(rows, _ROW)), ("texts", np.array(texts, _TEXT)), ("ids", np.array(ids))):
            np.save(folder / f"{name}.npy", array_)
        self._leave(tally, rank, started)

    def _kept(self, rank: int, tally: Tally) -> Iterator[_Kept]:
        """Yield the rows that are of use; count the others."""
        keys, max_characters = self._config.pairs, self._config.max_characters
        columns = Columns(keys.columns, unique=True)
        for span in self._work.spans(rank):
            counts = tally.source(span.source)
            counts.input_bytes["all"] += span.size
            for row in read_rows(span, self._config.sources[span.source], columns, max_characters):
                counts.read += 1
                item = take_pair(row, keys, max_characters) if isinstance(row, Row) else row
                if isinstance(item, LeftOut):
                    counts.input_bytes["lost"] += span.size * item.rest
                    tally.leave_out(span.source, item, self._config.on_error)
                else:
                    counts.documents[VALIDATION if self._is_held_out(item) else TRAIN] += 1
                    yield _reduced(item, keys)

    def _is_held_out(self, pair: Pair) -> bool:
        return text_hash(pair.query) < self._config.validation_share * (1 << _HASH_BITS)

    def _encoded(
        self, tokenizer: Tokenizer, vocabulary: Vocabulary, pairs: Sequence[Pair]
    ) -> Iterator[tuple[list[list[int]], int]]:
        """Yield, for each pair, the truncated token ids of its texts and the number of truncated texts."""
        keys = self._config.pairs
        limits = [(keys.query_max_tokens or keys.max_tokens) - 2, keys.max_tokens - 2]
        special = {vocabulary.sep_id, vocabulary.cls_id}
        texts = []
        for (query, *_, (before, before_others)), others in (
            (pair, (pair.positive, *pair.negatives)) for pair in pairs
        ):
            texts += [before + query, *(before_others + text for text in others)]
        encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for pair in pairs:
            ids_of_texts = [next(encoded).ids for _ in range(2 + len(pair.negatives))]
            if any(special & {*ids} for ids in ids_of_texts):
                raise DataError(f"the tokenizer turns {pair.query[:60]!r} into [CLS] or [SEP]. Use another tokenizer.")
            cut_ids = [ids[: limits[number > 0]] for number, ids in enumerate(ids_of_texts)]
            yield cut_ids, sum(len(part) < len(ids) for part, ids in zip(cut_ids, ids_of_texts, strict=True))


class MergePairs(Step[PairsConfig]):
    """Step that writes the rows of all tasks, without duplicates, and puts the finished dataset into its place.

    Args:
        work, config, stage: see `Step`; with all tasks done.
        identity: the fingerprint of the dataset, see report.fingerprint.
    """

    type = "writer"
    name = "merge"

    def __init__(self, work: Work, config: PairsConfig, stage: str, identity: Fingerprint) -> None:
        super().__init__(work, config, stage)
        self._identity = identity

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the dataset.

        Raises:
            DataError: no row is left to train on, or too much of a source is lost.
            StorageError: a disk operation fails.
        """
        tally, tokenizer = read_tallies(self._work, "tokenise"), Path(self._config.tokenizer.path)
        require_little_lost(self._config, tally)
        total = tally.total()
        counts = Counts(damaged=total.damaged.total(), empty=total.dropped["empty"], same=total.dropped["same"])
        with workspace(Path(self._config.out)) as folder:
            (folder / "tokenizer").mkdir()
            for name in _TOKENIZER_FILES:
                if (tokenizer / name).is_file():
                    shutil.copyfile(tokenizer / name, folder / "tokenizer" / name)
            longest = self._write(folder, counts)
            report = {"fingerprint": self._identity, "longest": longest, "counts": asdict(counts)}
            if tally.offenders:
                report["first_dropped"] = dict(sorted(tally.offenders.items()))
            (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

    def _load(self, name: str) -> Iterator[NDArray[Any]]:
        return (np.load(self._work.shards(rank) / f"{name}.npy") for rank in range(self._work.tasks))

    def _first_of_their_kind(self) -> Iterator[NDArray[np.bool_]]:
        """Yield for each task which of its rows equal no earlier row."""
        keys = [rows["key"] for rows in self._load("rows")]
        first = np.zeros(sum(map(len, keys)), np.bool_)
        first[np.unique(np.concatenate(keys), return_index=True)[1]] = True
        return iter(np.split(first, np.cumsum([len(each) for each in keys])[:-1]))

    def _write(self, folder: Path, counts: Counts) -> int:
        """Write both folders; returns the tokens of the longest document, special ones included."""
        from modernbert_train.data.shard_writer import ShardWriter  # imports streaming, which takes seconds

        keys, vocabulary = self._config.pairs, read_vocabulary(Path(self._config.tokenizer.path))
        sides = 2 + (len(keys.negatives) if keys.max_negatives is None else keys.max_negatives)
        writers: dict[str, ShardWriter] = {}
        written: dict[str, list[NDArray[Any]]] = {}  # texts
        longest = 0
        arrays = zip(self._first_of_their_kind(), *map(self._load, ("rows", "texts", "ids")), strict=True)
        for first, rows, texts, ids in arrays:
            counts.duplicates += int((~first).sum())
            for name in ("negatives", "contradictions", "more_negatives"):
                setattr(counts, name, getattr(counts, name) + int(rows[name][first].sum()))
            counts.empty += int((first & (rows["texts"] == 0)).sum())
            ends = np.cumsum(rows["texts"])
            at = 0
            for number in np.flatnonzero(rows["texts"]).tolist():
                row, own = rows[number], texts[ends[number] - rows["texts"][number] : ends[number]]
                size = int(own["tokens"].sum()) + 2 * (len(own) - 1)
                at += size
                if not first[number]:
                    continue
                split = VALIDATION if row["held_out"] else TRAIN
                if split not in writers:
                    writers[split] = ShardWriter(
                        folder / split, vocabulary.num_entries, vocabulary.sha256, self._config.shard_bytes
                    )
                    written[split] = []
                labels = np.zeros((sides, 2), np.int64)
                labels[: len(own), 0], labels[: len(own), 1] = own["hash"], own["score"]
                writers[split].write(ids[at - size : at], labels.reshape(1, -1))
                written[split].append(own)
                counts.truncated += int(row["truncated"])
                longest = max(longest, size + 2)
                setattr(counts, split, getattr(counts, split) + 1)
        if not counts.train:
            raise DataError(f"sources: no row is left to train on ({asdict(counts)}). Give others.")
        prompts = {"query": keys.query_prefix, "document": keys.document_prefix}
        about: dict[str, Any] = {"scored": bool(keys.scores), "prompts": prompts if any(prompts.values()) else None}
        for split, writer in writers.items():
            own = np.concatenate(written[split])
            counts.repeated += len(own) - len(np.unique(own["hash"]))
            sample = _even_sample(np.sort(own["tokens"] + 2))
            write_card(
                folder / split, replace(writer.finish(), sides=sides, longest=longest, text_lengths=sample, **about)
            )
        return longest


def _even_sample(ascending: NDArray[np.integer]) -> list[int]:
    number = min(len(ascending), _MOST_LENGTHS)
    sample: list[int] = ascending[((np.arange(number) + 0.5) * len(ascending) / number).astype(np.int64)].tolist()
    return sample
