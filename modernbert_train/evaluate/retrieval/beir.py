"""A folder in BEIR's format, read with the standard library: corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv.

A corpus may be larger than memory: `read_beir` reads all of it once for mistakes and keeps the ids, and `texts` reads
it again, a part at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from modernbert_train.core.files import values_as
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.text import number_in, plural, shorten
from modernbert_train.data.read.task_rows import lines_of, objects
from modernbert_train.errors import DataError

BEIR = {  # public set -> task of mteb
    "arguana": "ArguAna",
    "climate-fever": "ClimateFEVER",
    "cqadupstack": "CQADupstackRetrieval",
    "dbpedia-entity": "DBPedia",
    "fever": "FEVER",
    "fiqa": "FiQA2018",
    "hotpotqa": "HotpotQA",
    "msmarco": "MSMARCO",
    "nfcorpus": "NFCorpus",
    "nq": "NQ",
    "quora": "QuoraRetrieval",
    "scidocs": "SCIDOCS",
    "scifact": "SciFact",
    "trec-covid": "TRECCOVID",
    "webis-touche2020": "Touche2020",
}
URL = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets"  # of their zip files
CORPUS, QUERIES, QRELS = "corpus.jsonl", "queries.jsonl", "qrels"
T = TypeVar("T")
_HEAD = ("query-id", "corpus-id", "score")


@dataclass(frozen=True)
class Beir:
    """The contents of a BEIR folder.

    Attributes:
        folder: its path.
        split: the split of the judgements.
        document_ids: ids of all documents, in the order of the corpus.
        queries: text of each judged query, by id, in the order of the file.
        qrels: for each judged query, the score of each judged document.
        counts: numbers of documents, queries, judgements, and of irregular ones among them.
    """

    folder: Path
    split: str
    document_ids: list[str] = field(repr=False)
    queries: dict[str, str] = field(repr=False)
    qrels: dict[str, dict[str, int]] = field(repr=False)
    counts: dict[str, int]

    @property
    def files(self) -> list[Path]:
        """Its files: corpus, queries and judgements."""
        return files_of_beir(self.folder, self.split)

    def texts(self, at_once: int) -> Iterator[list[str]]:
        """Yield lists of at most this many documents, title before text, in the order of the corpus."""
        part: list[str] = []
        for _, entry in _objects(self.folder / CORPUS):
            part.append(joined(entry))
            if len(part) == at_once:
                yield part
                part = []
        if part:
            yield part


def joined(entry: Mapping[str, Any]) -> str:
    """Return a document as one text: title, space, text; without a title only the text."""
    title = entry.get("title") or ""
    return f"{title} {entry['text']}".strip()


def beir_folder(name: str, home: str) -> Path:
    """Return the folder that a name means: itself, or the one in `home`."""
    in_home = Path(home) / name
    return in_home if not Path(name).exists() and in_home.exists() else Path(name)


def files_of_beir(folder: Path, split: str) -> list[Path]:
    """Return the files of a folder that a split is read from."""
    return [folder / CORPUS, folder / QUERIES, folder / QRELS / f"{split}.tsv"]


def fetching(name: str, home: str) -> str:
    """Return the command that brings a public set to `home`."""
    return f"With a network: curl -O {URL}/{name}.zip && unzip {name}.zip -d {home}"


def read_beir(folder: str | Path, split: str, key: str = "") -> Beir:
    """Read and verify a folder.

    Args:
        folder: holds corpus.jsonl, queries.jsonl and qrels.
        split: name of the file in qrels.
        key: the configuration key that names the folder, for messages.

    Raises:
        DataError: a file is missing or broken, an id is duplicated, or a judgement names an unknown id.
    """
    folder = Path(folder)
    lines = _read_qrels(find_judgements(folder, split, key))
    documents, empty = _read_corpus(folder / CORPUS)
    texts = _read_queries(folder / QUERIES)
    qrels = _judgements(lines, {*documents}, texts, folder, split)
    queries = {name: text for name, text in texts.items() if name in qrels}
    relevant = sum(score > 0 for judged in qrels.values() for score in judged.values())
    if not relevant:
        raise DataError(f"{folder / QRELS}/{split}.tsv: no document is relevant to any query. Name another split.")
    counts = {
        "documents": len(documents),
        "documents_without_text": empty,
        "queries": len(queries),
        "queries_without_judgement": len(texts) - len(queries),
        "queries_without_relevant_document": sum(not any(s > 0 for s in judged.values()) for judged in qrels.values()),
        "judgements": sum(map(len, qrels.values())),
        "relevant": relevant,
    }
    return Beir(folder, split, documents, queries, qrels, counts)


def find_judgements(folder: Path, split: str, key: str = "") -> Path:
    """Return the judgements of a folder that has all files; none of them is read. Raises DataError as `read_beir`."""
    named = f"{key}={folder}" if key else str(folder)
    if not folder.is_dir():
        raise DataError(
            f"{named}: no such folder. Name one with {CORPUS}, {QUERIES} and {QRELS}, or of BEIR {', '.join(BEIR)}."
        )
    require_own_files(folder)
    require_own_files(folder / QRELS)
    for name in (CORPUS, QUERIES):
        if not (folder / name).is_file():
            raise DataError(f"{named}: has no {name}, so it is not in BEIR's format. Put the file there.")
    return _qrels_file(folder, split, named)


def training_pairs(folder: Path, split: str) -> Iterator[tuple[str, str]]:
    """Yield each query of a split with each of its relevant documents, for training.

    Raises:
        DataError: see `read_beir`.
    """
    beir = read_beir(folder, split, "train")
    judged_ids = {name for judged in beir.qrels.values() for name, score in judged.items() if score > 0}
    ids = iter(beir.document_ids)
    texts = {name: text for part in beir.texts(1024) for text in part if (name := next(ids)) in judged_ids}
    for query, judged in beir.qrels.items():
        yield from ((beir.queries[query], texts[name]) for name, score in judged.items() if score > 0)


def _qrels_file(folder: Path, split: str, named: str) -> Path:
    file = folder / QRELS / f"{split}.tsv"
    if file.parent != folder / QRELS:
        raise DataError(f"split={split}: names a file elsewhere. Name one in {folder / QRELS}, without .tsv.")
    splits = sorted(path.stem for path in (folder / QRELS).glob("*.tsv"))
    if not splits:
        raise DataError(
            f"{named}: has no {QRELS}/{split}.tsv, so nothing says which document answers which query. Write it with "
            f"the columns {', '.join(_HEAD)}."
        )
    if not file.is_file():
        raise DataError(f"{named}: has no {QRELS}/{split}.tsv; its splits are {', '.join(splits)}. Set split to one.")
    return file


def _read_corpus(file: Path) -> tuple[list[str], int]:
    """Return the ids of all documents, and the number of documents with empty text."""
    lines: dict[str, int] = {}
    empty = 0
    for number, entry in _objects(file):
        name = _id(entry, lines, file, number)
        lines[name] = number
        if not isinstance(entry.get("title") or "", str):
            raise DataError(f"{file}: line {number}: title is no text. Correct it, or leave it out.")
        _text(entry, file, number)
        empty += not joined(entry)
    if not lines:
        raise DataError(f"{file}: is empty, so nothing can be found. Give it documents.")
    return list(lines), empty


def _read_queries(file: Path) -> dict[str, str]:
    lines: dict[str, int] = {}
    texts = {}
    for number, entry in _objects(file):
        name = _id(entry, lines, file, number)
        lines[name] = number
        texts[name] = _text(entry, file, number)
    if not texts:
        raise DataError(f"{file}: is empty, without a query. Give it queries.")
    return texts


def _objects(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    return checked(file, objects(file, ("_id", "text")))


def checked(file: Path, rows: Iterable[T]) -> Iterator[T]:
    """Yield the items read from a file; errors name the file."""
    with values_as(DataError, str(file)):
        yield from rows


def _id(entry: Mapping[str, Any], lines: dict[str, int], file: Path, number: int) -> str:
    name = entry.get("_id")
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if not isinstance(name, str) or not name:
        raise DataError(f"{file}: line {number} lacks an _id. Give it one, as text.")
    if name in lines:
        raise DataError(
            f"{file}: line {number}: the _id {shorten(name, 40)} is on line {lines[name]} too. Give one another."
        )
    return name


def _text(entry: Mapping[str, Any], file: Path, number: int) -> str:
    text = entry.get("text")
    if not isinstance(text, str):
        raise DataError(f"{file}: line {number} lacks a text. Give it one; it may be empty.")
    return text


def _read_qrels(file: Path) -> list[tuple[int, str, str, int]]:
    """Return line, query, document and score of each judgement."""
    judgements = []
    for number, line in checked(file, lines_of(file)):
        words = line.split("\t")
        if number == 1:
            if tuple(words) != _HEAD:
                raise DataError(
                    f"{file}: the first line is {shorten(line.strip(), 60)!r}. Begin with the names of the columns, "
                    f"with tabs between them: {' '.join(_HEAD)}."
                )
            continue
        if words == [""]:
            continue
        if len(words) != len(_HEAD):
            raise DataError(
                f"{file}: line {number} has {plural(len(words), 'value')}. Write {', '.join(_HEAD)}, with tabs between."
            )
        score = number_in(words[2])
        if not score.is_integer() or abs(score) >= 1 << 31:  # NaN and infinity are none either
            raise DataError(
                f"{file}: line {number}: the score {shorten(words[2], 40)!r} is no whole number. Write 1 for relevant."
            )
        judgements.append((number, words[0], words[1], int(score)))
    if not judgements:
        raise DataError(f"{file}: holds no judgement, so nothing can be measured. Name another split.")
    return judgements


def _judgements(
    lines: list[tuple[int, str, str, int]], documents: set[str], queries: dict[str, str], folder: Path, split: str
) -> dict[str, dict[str, int]]:
    file = folder / QRELS / f"{split}.tsv"
    qrels: dict[str, dict[str, int]] = {}
    for number, query, document, score in lines:
        for name, ids, where in ((query, queries, QUERIES), (document, documents, CORPUS)):
            if name not in ids:
                unknown = sum(q not in queries or d not in documents for _, q, d, _ in lines)
                raise DataError(
                    f"{file}: line {number}: {shorten(name, 40)} is not in {where}; of {len(lines):,} judgements "
                    f"{unknown:,} name an unknown id. Give the files that belong together, or remove them."
                )
        judged = qrels.setdefault(query, {})
        if judged.setdefault(document, score) != score:
            raise DataError(
                f"{file}: line {number}: {shorten(document, 40)} has the score {score} for {shorten(query, 40)}, and "
                f"{judged[document]} above. Keep one of them."
            )
    return qrels
