"""MaxSim, the score of late interaction (ColBERT, arXiv 2004.12832), for texts of any lengths.

The score of a query and a document is the sum, over the query's tokens, of the highest product with a token of the
document. Products of all tokens with all tokens would be larger than everything else in training. So they exist for
some documents and some query tokens at a time; only the index of the highest token is kept, and the backward pass
rebuilds the gradient from it, again in parts. No sum depends on an order that may change.

Shape legend: V vectors of all tokens, W their width, N texts, R queries, C documents, A tokens of the queries, B
documents at a time, L tokens of the longest of them, S query tokens at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class MaxSim:
    """MaxSim scores of texts.

    Args:
        lengths_N: tokens of each text, at least one; their vectors are concatenated.
        device: of the vectors.
        max_products: products that may exist at a time, at least as many as the longest text has tokens.
    """

    def __init__(self, lengths_N: Tensor, device: torch.device, max_products: int) -> None:
        self._lengths_N, self._max_products = lengths_N.to(device), max_products
        self._firsts_N = self._lengths_N.cumsum(0) - self._lengths_N

    def __call__(self, vectors_VW: Tensor, queries_R: Tensor, documents_C: Tensor) -> Tensor:
        """Return scores_RC.

        Args:
            vectors_VW: of all texts.
            queries_R, documents_C: indices of texts, on the device.
        """
        lengths_R = self._lengths_N[queries_R]
        tokens_A = self._tokens(queries_R, lengths_R)
        scores: Tensor = _MaxSim.apply(vectors_VW, tokens_A, lengths_R, tuple(self._blocks(documents_C, len(tokens_A))))
        return scores

    def per_token(self, queries_R: Tensor) -> Tensor:
        """Return the number of products summed in a query's score, [R, 1]."""
        return self._lengths_N[queries_R].unsqueeze(1)

    def _tokens(self, texts_R: Tensor, lengths_R: Tensor) -> Tensor:
        """Return the indices of the tokens of texts, concatenated."""
        before_R = lengths_R.cumsum(0) - lengths_R
        return torch.arange(int(lengths_R.sum()), device=lengths_R.device) + (
            self._firsts_N[texts_R] - before_R
        ).repeat_interleave(lengths_R)

    def _blocks(self, documents_C: Tensor, num_tokens: int) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
        """Yield blocks of documents of similar length: their indices, their tokens (padded by the first one), the mask
        of real tokens, and the number of query tokens to compare at a time."""
        lengths_C = self._lengths_N[documents_C]
        order_C = lengths_C.argsort(descending=True, stable=True)
        lengths = lengths_C[order_C].tolist()
        first = 0
        while first < len(lengths):
            longest = lengths[first]
            at_once = min(max(1, num_tokens), max(1, self._max_products // longest))
            places_B = order_C[first : first + max(1, self._max_products // (at_once * longest))]
            texts_B = documents_C[places_B]
            steps_L = torch.arange(longest, device=places_B.device)
            real_BL = steps_L < self._lengths_N[texts_B].unsqueeze(1)
            yield places_B, self._firsts_N[texts_B].unsqueeze(1) + steps_L * real_BL, real_BL, at_once
            first += len(places_B)


class _MaxSim(torch.autograd.Function):
    """The autograd function of `MaxSim`."""

    @staticmethod
    def forward(ctx: Any, vectors_VW: Tensor, tokens_A: Tensor, lengths_R: Tensor, blocks: Any) -> Tensor:
        num_documents = sum(len(places_B) for places_B, *_ in blocks)
        best_AC = vectors_VW.new_empty(len(tokens_A), num_documents)
        which_AC = torch.empty_like(best_AC, dtype=torch.int32)
        for places_B, tokens_BL, real_BL, at_once in blocks:
            documents_BLW = vectors_VW[tokens_BL]
            for part in _parts(len(tokens_A), at_once):
                products_SBL = vectors_VW[tokens_A[part]] @ documents_BLW.flatten(0, 1).T
                products_SBL = products_SBL.unflatten(1, real_BL.shape).masked_fill_(~real_BL, float("-inf"))
                best = products_SBL.max(dim=2)
                best_AC[part, places_B], which_AC[part, places_B] = best.values, best.indices.int()
        ctx.save_for_backward(vectors_VW, tokens_A, lengths_R, which_AC)
        ctx.blocks = blocks
        return torch.segment_reduce(best_AC, "sum", lengths=lengths_R, axis=0, unsafe=True)

    @staticmethod
    def backward(ctx: Any, gradient_RC: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        vectors_VW, tokens_A, lengths_R, which_AC = ctx.saved_tensors
        gradient_VW = torch.zeros_like(vectors_VW)
        of_query_A = torch.arange(len(lengths_R), device=lengths_R.device).repeat_interleave(lengths_R)
        for places_B, tokens_BL, real_BL, at_once in ctx.blocks:
            documents_EW = vectors_VW[tokens_BL].flatten(0, 1)
            of_documents_EW = torch.zeros_like(documents_EW)
            for part in _parts(len(tokens_A), at_once):
                tokens_S = tokens_A[part]
                by_products_SBL = gradient_RC.new_zeros(len(tokens_S), *real_BL.shape)
                by_score_SB = gradient_RC[of_query_A[part].unsqueeze(1), places_B]
                by_products_SBL.scatter_(2, which_AC[part, places_B].long().unsqueeze(2), by_score_SB.unsqueeze(2))
                by_products_SE = by_products_SBL.flatten(1)
                gradient_VW[tokens_S] += by_products_SE @ documents_EW  # safe: no token occurs twice in tokens_S
                of_documents_EW += by_products_SE.T @ vectors_VW[tokens_S]
            gradient_VW[tokens_BL[real_BL]] += of_documents_EW[real_BL.flatten()]
        return gradient_VW, None, None, None


def _parts(number: int, at_once: int) -> Iterator[slice]:
    return (slice(first, first + at_once) for first in range(0, number, at_once))
