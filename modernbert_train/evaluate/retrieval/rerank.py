"""Reranking: a model that reads a query and a document together scores the candidates of a first stage.

Such a model is one of `finetune` with one output (kind=regression), or of two classes, of which the second is relevant;
or a CrossEncoder of sentence-transformers, whose code computes all scores. Candidates come from a file or a search.

Legend: P pairs, L outputs.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modernbert_train.config.tools.retrieval import MeasureConfig
from modernbert_train.core.files import anything_as, os_errors_as
from modernbert_train.core.read_json import read_json
from modernbert_train.core.text import number_in, shorten
from modernbert_train.data.tables import lines_of
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.evaluate.retrieval.beir import Beir, checked
from modernbert_train.evaluate.retrieval.runs import choose_device, encoder_source, quiet
from modernbert_train.evaluate.retrieval.sentence_model import check_sentence_model, is_sentence_model

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

Candidates = dict[str, list[str]]
RUN_ENDS = (".trec", ".run", ".txt", ".tsv", ".json")  # of files of candidates
_PAIRS = 1 << 14  # that are in memory at once
_TREC = 6  # columns: query, Q0, document, rank, score, name of the run


def read_candidates(file: Path, beir: Beir) -> Candidates:
    """Return the candidates of each judged query that has some, by score, ties by descending id as in trec_eval.

    Args:
        file: a run as trec_eval reads it; or, ending in .json, BEIR's `{query: {document: score}}`.
        beir: whose queries and documents they name; queries without judgement are left out.

    Raises:
        DataError: it is broken, names documents that are not there or one twice, or has nothing of these queries.
    """
    known = {*beir.document_ids}
    found: dict[str, dict[str, float]] = {}
    for where, query, document, score in _json(file) if file.suffix == ".json" else _trec(file):
        if query not in beir.qrels:
            continue
        if document not in known:
            raise DataError(
                f"{where}: {shorten(document, 40)} is no document of {beir.folder}. Give the run of this corpus."
            )
        if document in found.setdefault(query, {}):
            raise DataError(f"{where}: {shorten(document, 40)} is there twice for {shorten(query, 40)}. Remove one.")
        found[query][document] = score
    if not found:
        raise DataError(f"{file}: has no query that {beir.folder} judges. Give the run of this set and split.")
    return {query: by_score(scores) for query, scores in found.items()}


def by_score(scores: Mapping[str, float]) -> list[str]:
    """Sort documents, the best first; with equal scores the greater id first."""
    return sorted(scores, key=lambda name: (scores[name], name), reverse=True)


def _trec(file: Path) -> Iterator[tuple[str, str, str, float]]:
    for number, line in checked(file, enumerate(lines_of(file), start=1)):
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


@contextmanager
def _exported(name: str) -> Iterator[Path]:
    """Export a model with its head to a transformers folder, in fp32."""
    from modernbert_train.weights.export import export_source

    source = encoder_source(name)
    kind = source.objective.told_classes[:1] if source.objective is not None else ()
    if kind not in (("single-label",), ("regression",)):
        raise ConfigError(
            f"--model={name}: scores no pairs of texts. Name a model of `finetune` with two text_columns."
        )
    with tempfile.TemporaryDirectory() as folder:
        yield export_source(source, Path(folder) / "reranker")


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
        model = load(name)
    else:
        with _exported(name) as folder, quiet():
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


def rerank(model: CrossEncoder, beir: Beir, candidates: Candidates, config: MeasureConfig) -> Candidates:
    """Rank the best `rerank_top` candidates of each query by the model; other documents are dropped."""
    kept = {query: names[: config.rerank_top] for query, names in candidates.items()}
    texts = _texts_of(beir, {name for names in kept.values() for name in names})
    before, about = config.query_prompt or "", config.document_prompt or ""
    pairs = [(query, name) for query, names in kept.items() for name in names]
    scores: dict[str, dict[str, float]] = {query: {} for query in beir.qrels}
    for start in range(0, len(pairs), _PAIRS):
        part = pairs[start : start + _PAIRS]
        asked = [(before + beir.queries[query], about + texts[name]) for query, name in part]
        for (query, name), score in zip(part, score_pairs(model, asked, config.encode_batch), strict=True):
            scores[query][name] = score
    return {query: by_score(found) for query, found in scores.items()}


def _texts_of(beir: Beir, wanted: set[str]) -> dict[str, str]:
    ids = iter(beir.document_ids)
    found = ((next(ids), text) for part in beir.texts(1024) for text in part)
    return {name: text for name, text in found if name in wanted}


def is_candidates(name: str) -> bool:
    """True if `rerank` names a file of candidates and not a model; a checkpoint of Composer is a file too."""
    return Path(name).is_file() and Path(name).suffix != ".pt"
