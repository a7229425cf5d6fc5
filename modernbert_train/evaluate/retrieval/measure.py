"""Measure a model on sets: by search, by reranking, or by a task of mteb."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modernbert_train.config.tools.retrieval import MTEB, RANKING, EvaluateConfig, MeasureConfig
from modernbert_train.core.files import errors_to
from modernbert_train.data.dataset_card import file_sha256
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.evaluate.retrieval.beir import CORPUS, Beir
from modernbert_train.evaluate.retrieval.rerank import is_candidates, open_reranker, read_candidates, rerank
from modernbert_train.evaluate.retrieval.sentence_model import describe, is_multi_vector, open_sentence_model

if TYPE_CHECKING:
    from modernbert_train.evaluate.retrieval.sentence_model import Model

_OF_DOCUMENTS = ("normalize", "document_prompt", "max_tokens")  # keys that determine document vectors, with the weights
AT_ONCE, _MANY_AT_ONCE = 8192, 512  # documents in memory; fewer with a vector for each token
SHOWN = ("main_score", *RANKING)
Figures = dict[str, dict[str, float]]


def measure_all(
    model: str, folders: Mapping[str, Beir], tasks: Sequence[str], config: MeasureConfig, out: Path
) -> tuple[Figures, dict[str, Any], list[str]]:
    """Return figures by set, how texts became vectors or scores, and problems of tasks whose data is missing."""
    figures: Figures = {}
    about: dict[str, Any] = {}
    lost: list[str] = []
    if tasks:
        from modernbert_train.evaluate.retrieval.mteb_tasks import find_task, measure_task, open_for_mteb
    found = {name: find_task(name) for name in tasks}  # report a wrong name before computing anything
    if folders and config.rerank is not None:
        figures, about = _rerank_all(model, folders, config)
    elif folders:
        opened = open_sentence_model(model, config)
        figures = {name: measure(opened, each, config) for name, each in folders.items()}
        about |= asdict(describe(opened))
    if found:
        for_mteb, described = open_for_mteb(model, config)
        about |= asdict(described)
        for name, task in found.items():
            with errors_to(lost.append, DataError):
                figures[name], about[f"{MTEB}{name}"] = measure_task(task, for_mteb, config, out)
    return figures, about, lost


def _rerank_all(model: str, folders: Mapping[str, Beir], config: MeasureConfig) -> tuple[Figures, dict[str, Any]]:
    from modernbert_train.evaluate.retrieval.ranking import figures

    assert config.rerank is not None
    first = EvaluateConfig(device=config.device, encode_batch=config.encode_batch)
    searching = None if is_candidates(config.rerank) else open_sentence_model(config.rerank, first)
    reranker = open_reranker(model, config)
    found: Figures = {}
    for name, beir in folders.items():
        if searching is None:
            candidates = read_candidates(Path(config.rerank), beir)
        else:
            candidates = _search(searching, beir, first, config.rerank_top + config.ignore_identical_ids)
        if config.ignore_identical_ids:
            candidates = _without_identical(candidates)
        before = figures({query: candidates.get(query, []) for query in beir.qrels}, beir.qrels)
        found[name] = figures(rerank(reranker, beir, candidates, config), beir.qrels)
        found[name] |= {f"first_stage_{SHOWN[1]}": before[SHOWN[1]]}
    return found, {"pooling": "none: reads query and document together", "max_tokens": reranker.max_seq_length}


def mean_of(figures: Mapping[str, Mapping[str, float]]) -> Figures:
    """Return the mean over sets of each figure that all have."""
    if len(figures) < 2:
        return {}
    shared = [name for name in SHOWN if all(name in each for each in figures.values())]
    return {"mean": {name: math.fsum(each[name] for each in figures.values()) / len(figures) for name in shared}}


def measure(model: Model, beir: Beir, config: EvaluateConfig) -> dict[str, float]:
    """Return the figures of a model on a BEIR folder, by exact search over all of it; see `ranking.figures`."""
    from modernbert_train.evaluate.retrieval.ranking import RECALL_CUT, figures

    found = _search(model, beir, config, RECALL_CUT + config.ignore_identical_ids)
    return figures(_without_identical(found) if config.ignore_identical_ids else found, beir.qrels)


def _without_identical(ranked: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    return {query: [name for name in names if name != query] for query, names in ranked.items()}


def _search(model: Model, beir: Beir, config: EvaluateConfig, top: int) -> dict[str, list[str]]:
    """Return the best documents of each query."""
    from modernbert_train.evaluate.retrieval.ranking import search

    many, index = is_multi_vector(model), config.index
    if index is not None and not many:
        raise ConfigError(f"index={index}: is of late interaction, and this model has one vector a text. Leave it out.")
    settings: dict[str, Any] = {"batch_size": config.encode_batch, "show_progress_bar": False}
    if not many:
        settings["convert_to_tensor"] = True

    def encode(texts: list[str]) -> Any:
        return model.encode_document(texts, **settings)

    queries_QD = model.encode_query(list(beir.queries.values()), **settings)
    texts = beir.texts(_MANY_AT_ONCE if many else AT_ONCE)
    parts: Iterable[Any] = map(encode, texts)
    if index is not None:
        from modernbert_train.evaluate.retrieval.index import make_index, weights_sha256

        about: dict[str, Any] = {"corpus": file_sha256(beir.folder / CORPUS), "weights": weights_sha256(model)}
        about |= {key: value for key, value in asdict(describe(model)).items() if key in _OF_DOCUMENTS}
        kept = make_index(Path(index) / f"{beir.folder.resolve().name}-{about['weights'][:8]}", about, texts, encode)
        parts = kept.parts(model.device)
    found = search(queries_QD, parts, beir.document_ids, model.similarity, top)
    return dict(zip(beir.queries, found, strict=True))
