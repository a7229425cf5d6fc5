"""Reranking: a model that reads a query and a document together scores the candidates of a first stage.

Such a model is one of `finetune` with one output (kind=regression), or of two classes, of which the second is relevant;
or a CrossEncoder of sentence-transformers, whose code computes all scores. Candidates come from a file or a search by
mteb, which also scores both rankings.

Legend: P pairs, L outputs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modernbert_train.config.tools.retrieval import RANKING, EvaluateConfig, MeasureConfig
from modernbert_train.core.files import anything_as, os_errors_as
from modernbert_train.core.read_json import read_json
from modernbert_train.core.text import number_in, shorten
from modernbert_train.data.dataset_card import file_sha256
from modernbert_train.data.read.task_rows import lines_of
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.evaluate.finetune.result import RESULT, read_result
from modernbert_train.evaluate.retrieval.beir import checked
from modernbert_train.evaluate.retrieval.bm25 import open_searching
from modernbert_train.evaluate.retrieval.runs import choose_device, encoder_source, exported, quiet
from modernbert_train.evaluate.retrieval.sentence_model import (
    CROSS,
    check_sentence_model,
    class_of,
    files_hash,
    is_sentence_model,
    pinned,
)
from modernbert_train.evaluate.retrieval.sets import Measured, Set, evaluate_task, identity_of, task_of
from modernbert_train.report.counting import Counting

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

    from modernbert_train.weights.source import Source

Scores = dict[str, dict[str, float]]  # by query and document
WITHOUT_CANDIDATES = "queries_without_candidates"  # figure: judged ones, which count as 0
RUN_ENDS = (".trec", ".run", ".txt", ".tsv", ".json")  # of files of candidates
_PAIRS = 1024  # between two updates of the progress line
_TREC = 6  # columns: query, Q0, document, rank, score, name of the run
_FIRST_STAGE = f"first_stage_{RANKING[0]}"


def read_candidates(file: Path, documents: Collection[str], queries: Collection[str], name: str) -> Scores:
    """Read the candidates of each judged query that has some, with their scores.

    Args:
        file: a run as trec_eval reads it; or, ending in .json, BEIR's `{query: {document: score}}`.
        documents, queries: ids of the set; other queries are left out.
        name: of the set, for messages.

    Raises:
        DataError: it is broken, names documents that are not there or one twice, or lacks all of these queries.
    """
    candidates: Scores = {}
    for where, query, document, score in _json(file) if file.suffix == ".json" else _trec(file):
        if query not in queries:
            continue
        if document not in documents:
            raise DataError(f"{where}: {shorten(document, 40)} is no document of {name}. Give the run of this corpus.")
        if document in candidates.setdefault(query, {}):
            raise DataError(f"{where}: {shorten(document, 40)} is there twice for {shorten(query, 40)}. Remove one.")
        candidates[query][document] = score
    if not candidates:
        raise DataError(f"{file}: lacks every query that {name} judges. Give the run of this set and split.")
    return candidates


def by_score(scores: Mapping[str, float]) -> list[str]:
    """Return documents, the best first; ties in descending order of ids, as in trec_eval."""
    return sorted(scores, key=lambda name: (scores[name], name), reverse=True)


def _trec(file: Path) -> Iterator[tuple[str, str, str, float]]:
    for number, line in checked(file, lines_of(file)):
        words, where = line.split(), f"{file}: line {number}"
        if words and len(words) != _TREC:
            raise DataError(
                f"{where} has {len(words)} columns. Write {_TREC}, as trec_eval: query Q0 document rank score run."
            )
        if words:
            yield where, words[0], words[2], _score(words[4], where)


def _json(file: Path) -> Iterator[tuple[str, str, str, float]]:
    with os_errors_as(DataError, f"{file}: cannot be read", "Restore it, or correct the path.", ValueError):
        content = read_json(file)
    if not isinstance(content, dict) or not all(isinstance(scores, dict) for scores in content.values()):
        raise DataError(f'{file}: is no run. Write {{"query": {{"document": 1.5}}}}.')
    for query, scores in content.items():
        for document, score in scores.items():
            yield f"{file}: {shorten(query, 40)}", query, document, _score(score, f"{file}: {shorten(query, 40)}")


def _score(text: Any, where: str) -> float:
    score = number_in(text)
    if not math.isfinite(score):
        raise DataError(f"{where}: the score {shorten(str(text), 40)!r} is no number. Correct it.")
    return score


def _scoring(name: str) -> Source:
    """Open a model of `finetune` that scores pairs."""
    source = encoder_source(name)
    kind = source.objective.label_scheme[:1] if source.objective is not None else ()
    # result.json is in the run's folder, above checkpoints and the export
    result = read_result((source.folder if source.checkpoint is None else source.folder.parent).parent / RESULT) or {}
    columns = result.get("settings", {}).get("text_columns")
    if kind not in (("single-label",), ("regression",)) or (isinstance(columns, list) and len(columns) == 1):
        raise _no_pairs(name)
    return source


def _no_pairs(name: str) -> ConfigError:
    return ConfigError(f"--model={name}: scores no pairs of texts. Name a model of `finetune` with two text_columns.")


def open_reranker(name: str, config: MeasureConfig) -> CrossEncoder:
    """Open a model that scores pairs, in fp32.

    Raises:
        ConfigError: it does not score pairs, has more than two classes, or reads fewer tokens than configured.
        DataError, StorageError: see `open_model`.
    """
    from sentence_transformers import CrossEncoder

    def load(folder: str) -> CrossEncoder:
        own: dict[str, Any] = {"device": choose_device(config.device), "local_files_only": True}
        with anything_as(DataError, f"{name}: sentence-transformers cannot open it", "Name another model."):
            return CrossEncoder(folder, model_kwargs={"dtype": "float32"}, trust_remote_code=False, **own)

    if is_sentence_model(name):
        check_sentence_model(name, config)
        if class_of(Path(name)) != CROSS:  # the library would add a classifier with random weights
            raise _no_pairs(name)
        model = load(name)
    else:
        with exported(_scoring(name)) as folder, quiet():
            model = load(str(folder))
    if model.num_labels > 2:
        raise ConfigError(
            f"--model={name}: tells {model.num_labels} classes. A reranker has one output, or two classes of which the "
            "second is relevant: finetune with kind=regression."
        )
    limit = int(model.max_seq_length or config.max_tokens or 0)
    if config.max_tokens is not None and config.max_tokens > limit:
        raise ConfigError(f"max_tokens={config.max_tokens}: {name} reads {limit:,} at most. Lower it, or leave it out.")
    model.max_seq_length = config.max_tokens or limit
    return model


def score_pairs(model: CrossEncoder, pairs: Sequence[tuple[str, str]], batch: int) -> list[float]:
    """Return each pair's logit, or the second class's minus the first's; probabilities sort the same way."""
    from torch.nn import Identity

    logits_PL = model.predict(
        [*pairs], batch_size=batch, show_progress_bar=False, activation_fn=Identity(), convert_to_tensor=True
    ).double()
    scores = logits_PL if logits_PL.ndim == 1 else logits_PL[:, 1] - logits_PL[:, 0]
    if not scores.isfinite().all():
        raise DataError("the model gives scores that are not finite, and nothing can be ranked with them.")
    return scores.tolist()


@dataclass(frozen=True)
class Given:
    """Precomputed scores with the interface of mteb's search models.

    Attributes:
        scores: of each query's documents.
        mteb_model_meta: mteb's description of it.
    """

    scores: Scores
    mteb_model_meta: Any

    def index(self, corpus: Any, **_: Any) -> None:
        """Do nothing; see mteb's SearchProtocol."""

    def search(self, queries: Any, **_: Any) -> Scores:
        """Return the ranking."""
        return {name: dict(self.scores.get(name, {})) for name in queries["id"]}


class Reranking:
    """A model that reranks candidates.

    Args:
        model: see `open_reranker`.
        config: the first stage, and the number of candidates.

    Raises:
        ConfigError, DataError, StorageError: see `open_reranker` and `open_searching`.
    """

    def __init__(self, model: str, config: MeasureConfig) -> None:
        assert config.rerank is not None
        self._config, first = config, EvaluateConfig(device=config.device)
        self._file = Path(config.rerank) if is_candidates(config.rerank) else None
        self._searching = None if self._file is not None else open_searching(config.rerank, first)
        model = pinned(model)
        self._model, self._files_hash = open_reranker(model, config), files_hash(model)
        self.about = {
            "pooling": "none: reads query and document together",
            "max_tokens": self._model.max_seq_length,
        }

    @property
    def identity(self) -> dict[str, Any]:
        """All that determines the scores: the model, the candidates and their number, and the prompts."""
        keys = ("rerank_top", "query_prompt", "document_prompt")
        searching, file = self._searching, Path(str(self._config.rerank))
        first = file_sha256(file) if searching is None else identity_of(searching)
        own = {"weights": self._files_hash, "about": self.about, "first_stage": first}
        return own | {key: getattr(self._config, key) for key in keys}

    def measure(self, each: Set) -> Measured:
        """Return the figures of the new ranking on a set, and nDCG@10 of the first stage; no facts about its data.

        Raises:
            DataError: see `task_of` and `read_candidates`.
        """
        from mteb.models import ModelMeta

        config, meta = self._config, ModelMeta.create_empty({"name": "local/ranking", "revision": "local"})
        task = task_of(each, config)
        ((split, data),) = next(iter(task.dataset.values())).items()
        first = self._first_stage(each, task, split, data)
        if config.ignore_identical_ids:
            first = {
                query: {name: s for name, s in reranked.items() if name != query} for query, reranked in first.items()
            }
        before, _ = evaluate_task(Given(first, meta), task, config)
        reranked, _ = evaluate_task(Given(self._rerank(each, first, data), meta), task, config)
        figures = {name: reranked[name] for name in RANKING} | {_FIRST_STAGE: before[RANKING[0]]}
        lacking = sum(not first.get(query) for query in data["relevant_docs"])
        return figures | ({WITHOUT_CANDIDATES: float(lacking)} if lacking else {}), {}

    def _first_stage(self, each: Set, task: Any, split: str, data: Any) -> Scores:
        if self._file is not None:
            documents, queries = {*data["corpus"]["id"]}, data["relevant_docs"].keys()
            return read_candidates(self._file, documents, queries, each.name)
        assert self._searching is not None
        self._searching.begin(each.name, {"queries": len(data["queries"]), "documents": len(data["corpus"])})
        searching = self._searching.searcher(ranks=True)
        batch: Any = {"batch_size": self._config.encode_batch, "show_progress_bar": False}
        how: dict[str, Any] = {"task_metadata": task.metadata, "hf_split": split, "hf_subset": "default"}
        searching.index(data["corpus"], encode_kwargs=batch, **how)
        top = self._config.rerank_top + self._config.ignore_identical_ids
        scores: Scores = searching.search(data["queries"], top_k=top, encode_kwargs=batch, **how)
        return scores

    def _rerank(self, each: Set, first: Scores, data: Any) -> Scores:
        """Score the best `rerank_top` candidates of each query; all others are left out of the ranking."""
        config = self._config
        kept = {query: by_score(scores_of)[: config.rerank_top] for query, scores_of in first.items()}
        queries = {row["id"]: (config.query_prompt or "") + row["text"] for row in data["queries"]}
        texts = texts_of(data["corpus"], {name for names in kept.values() for name in names})
        pairs = [(query, name) for query, names in kept.items() for name in names]
        counting, scores = Counting(f"{each.name}: pairs", len(pairs)), {query: {} for query in kept}
        for start in range(0, len(pairs), _PAIRS):
            part = pairs[start : start + _PAIRS]
            both = [(queries[query], (config.document_prompt or "") + texts[name]) for query, name in part]
            for (query, name), score in zip(part, score_pairs(self._model, both, config.encode_batch), strict=True):
                scores[query][name] = score
            counting.add(len(part))
        return scores


def texts_of(rows: Any, ids: Collection[str]) -> dict[str, str]:
    """Return the texts of some documents of a corpus of mteb, title before text, by id."""
    documents = (row for row in rows if row["id"] in ids)
    return {row["id"]: f"{row.get('title') or ''} {row['text']}".strip() for row in documents}


def is_candidates(name: str) -> bool:
    """True if `rerank` names a file of candidates and not a model; a checkpoint of Composer is a file too."""
    return Path(name).is_file() and Path(name).suffix != ".pt"
