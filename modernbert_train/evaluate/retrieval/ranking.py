"""Exact search, and the figures of its ranks as trec_eval counts them: ties in score go by document id, backwards.

Legend: Q queries, C documents of a part of the corpus, D width of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modernbert_train.errors import DataError

CUT, RECALL_CUT = 10, 100  # ranks that count
FIGURES = (f"ndcg_at_{CUT}", f"recall_at_{RECALL_CUT}", f"mrr_at_{CUT}", f"map_at_{CUT}")
_QUERIES, _DOCUMENTS = 256, 1 << 14  # whose scores are looked through at once

Vectors = Tensor | list[Tensor]  # of each text one, or one for each of its tokens
Score = Callable[[Any, Any], Tensor]
_Kept = tuple[NDArray[np.int64], NDArray[np.float32]]


class Search:
    """Search for the best documents of each query, over a corpus given in parts."""

    def __init__(self, queries_QD: Vectors, document_ids: Sequence[str], score: Score, top: int) -> None:
        """
        Args:
            queries_QD: their vectors; or a matrix of each, a vector for each token.
            document_ids: of the whole corpus.
            score: queries [Q, D] or Q matrices, and documents [C, D] or C matrices -> [Q, C].
            top: how many documents are kept for each query.
        """
        self._queries_QD, self._score, self._top = queries_QD, score, top
        self._seen = 0
        backwards = sorted(range(len(document_ids)), key=document_ids.__getitem__, reverse=True)
        self._tie = np.empty(len(document_ids), dtype=np.int64)  # of two with one score the lower is first
        self._tie[backwards] = np.arange(len(document_ids))
        empty = np.empty((0, 2), dtype=np.int64)  # query of the block, place in the corpus
        self._blocks = range(0, len(queries_QD), _QUERIES)
        self._kept: list[_Kept] = [(empty, np.empty(0, np.float32)) for _ in self._blocks]

    def add(self, documents_CD: Vectors) -> None:
        """Search the next documents."""
        for start in range(0, len(documents_CD), _DOCUMENTS):
            part_CD = documents_CD[start : start + _DOCUMENTS]
            for number, block in enumerate(self._blocks):
                scores_QC = self._score(self._queries_QD[block : block + _QUERIES], part_CD).float()
                if not scores_QC.isfinite().all():
                    raise DataError("the model gives vectors that are not finite, and nothing can be found with them.")
                least_Q1 = scores_QC.topk(min(self._top, scores_QC.shape[1]), dim=1).values[:, -1:]
                pairs = (scores_QC >= least_Q1).nonzero()  # more than `top`, where some are equal
                values = scores_QC[pairs[:, 0], pairs[:, 1]].cpu().numpy()
                self._merge(number, pairs.cpu().numpy() + np.array([0, self._seen]), values)
            self._seen += len(part_CD)

    def _merge(self, block: int, pairs: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        pairs, values = np.concatenate([self._kept[block][0], pairs]), np.concatenate([self._kept[block][1], values])
        order = np.lexsort((self._tie[pairs[:, 1]], -values, pairs[:, 0]))
        pairs, values = pairs[order], values[order]
        starts = np.searchsorted(pairs[:, 0], pairs[:, 0], side="left")
        best = np.arange(len(pairs)) - starts < self._top
        self._kept[block] = pairs[best], values[best]

    def ranks(self) -> list[list[int]]:
        """Return the corpus indices of each query's documents, the best first."""
        found = []
        for block, (pairs, _) in zip(self._blocks, self._kept, strict=True):
            size = min(_QUERIES, len(self._queries_QD) - block)
            ends = np.searchsorted(pairs[:, 0], np.arange(size + 1))
            found += [pairs[start:end, 1].tolist() for start, end in pairwise(ends)]
        return found


def search(
    queries_QD: Vectors, parts: Iterable[Vectors], document_ids: Sequence[str], score: Score, top: int = RECALL_CUT
) -> list[list[str]]:
    """Return the ids of each query's best documents, the best first; see `Search`."""
    with torch.no_grad():
        found = Search(queries_QD, document_ids, score, top)
        for part_CD in parts:
            found.add(part_CD)
    return [[document_ids[place] for place in ranks] for ranks in found.ranks()]


def figures(ranked: Mapping[str, Sequence[str]], qrels: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Return the mean over queries of each of FIGURES.

    A document counts for nDCG with its score, and for the others as relevant if that is above 0. A query without a
    relevant document counts 0.

    Args:
        ranked: of each query at least RECALL_CUT documents, the best first, where there are so many.
        qrels: of each query the score of each judged document.
    """
    each = [_of_query(ranked[query], judged) for query, judged in qrels.items()]
    return {name: math.fsum(column) / len(each) for name, column in zip(FIGURES, zip(*each, strict=True), strict=True)}


def _of_query(ranked: Sequence[str], judged: Mapping[str, int]) -> tuple[float, float, float, float]:
    gains = [max(judged.get(document, 0), 0) for document in ranked]
    ideal = _discounted(sorted((max(score, 0) for score in judged.values()), reverse=True))
    relevant = sum(score > 0 for score in judged.values())
    if not relevant:
        return 0.0, 0.0, 0.0, 0.0
    places = [place for place, gain in enumerate(gains[:CUT], start=1) if gain]
    precision = [hits / place for hits, place in enumerate(places, start=1)]
    recall = sum(gain > 0 for gain in gains[:RECALL_CUT]) / relevant
    return _discounted(gains) / ideal, recall, 1 / places[0] if places else 0.0, math.fsum(precision) / relevant


def _discounted(gains: Sequence[int]) -> float:
    return math.fsum(gain / math.log2(place + 1) for place, gain in enumerate(gains[:CUT], start=1))
