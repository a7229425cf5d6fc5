"""Vectors of texts (one a text, or one a token; sparse ones: sparse.py) and the contrastive loss over a global batch.

See objectives/contrastive.py. A query is compared with the texts of all microbatches, so one microbatch lacks a loss.
Each is encoded twice (GradCache, arXiv 2101.06983): first for its vectors; `compare` then returns the loss
of the global batch and its gradient by each vector; with that gradient among its targets, the microbatch runs again,
forward and backward.

Shape legend: T packed tokens, S segments of the buffer, P texts of a microbatch (padded), D model width, N texts of the
global batch, V their vectors, W the width of a vector, Q queries, C candidates (positives and negatives), R queries
compared at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modernbert_train.batch import Batch, Sums
from modernbert_train.config.contrastive import SCORE_UNIT
from modernbert_train.config.schema import ContrastiveConfig, ModelConfig
from modernbert_train.models.casts import Linear
from modernbert_train.models.encoder import Encoder, OnEncoder
from modernbert_train.models.layers import compute_dtype
from modernbert_train.models.masked_lm import ForMaskedLM
from modernbert_train.models.maxsim import MaxSim
from modernbert_train.models.sparse import SparseVectors

# keys of the targets that objectives/contrastive.py makes
FIRSTS, ROLES, LOW, HIGH = "firsts_P", "roles_P", "low_P", "high_P"
EXAMPLES, MARGINS = "examples_P", "margins_P"
# keys of the results of `compare` for the microbatch
GRADIENT, LOSS, SCALE_GRADIENT = "gradient", "loss", "scale_gradient"
FLOPS = "flops_2V"  # see `flops_of`
QUERY, POSITIVE = 0, 1
_COSINES = 1 << 25  # maximum number computed at a time
_MAX_SCALE = 100.0  # CLIP's, arXiv 2103.00020


class LogScale(nn.Module):
    """The factor of cosines, 1 to 100, as a parameter: its logarithm minus the logarithm of its initial value.

    The parameter starts at 0 and is not decayed, like a bias.

    Args:
        temperature: initial temperature (inverse of the factor), 0.01 to 1.
    """

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self._begin = -math.log(temperature)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self) -> Tensor:
        """Return the scale, [1]."""
        return (self.bias + self._begin).clamp(0, math.log(_MAX_SCALE)).exp()

    @torch.no_grad()
    def bound(self) -> None:
        """Clamp the parameter to its bounds, which an update may have left."""
        self.bias.clamp_(-self._begin, math.log(_MAX_SCALE) - self._begin)


class ForVectors(OnEncoder):
    """An encoder with one vector a text, or one a token through its own projection; the temperature may be learned.

    Args:
        encoder: of any architecture.
        objective: pooling and temperature.
    """

    def __init__(self, encoder: Encoder, objective: ContrastiveConfig) -> None:
        super().__init__(encoder)
        self.pooling, self._margin = objective.pooling, objective.score_scale / SCORE_UNIT
        self.log_scale = LogScale(objective.first_temperature) if objective.learn_temperature else None
        if objective.is_late:
            self.token_projection = Linear(encoder.config.hidden_size, objective.token_vectors, bias=False)

    @classmethod
    def build(cls, encoder: Encoder, objective: Any, another: Callable[[ModelConfig], Encoder]) -> Self:
        """See `OnEncoder`."""
        return cls(encoder, objective)

    @classmethod
    def alone(cls, encoder: Encoder) -> OnEncoder:
        """See `OnEncoder`."""
        return OnEncoder(encoder)

    def set_phase(self, model: Any) -> None:
        """See `OnEncoder`."""
        super().set_phase(model)
        if self.log_scale is not None:
            self.log_scale.bound()

    def vectors(self, batch: Batch) -> Tensor:
        """Return vectors_PD in fp32, not normalised; the mean is summed without atomics, so it is reproducible.

        Late interaction: return vectors_TW of all tokens; `rows_of` selects the rows of texts.
        """
        hidden_TD, firsts_P, boundaries_S = self.encode(batch.packed), batch.targets[FIRSTS], batch.packed.cu_seqlens_S
        if self.pooling == "late":
            vectors_TW: Tensor = self.token_projection(hidden_TD)
            return vectors_TW.float()
        if self.pooling == "cls":
            return hidden_TD.index_select(0, firsts_P).float()
        lengths_S = boundaries_S.diff().long()
        sums_SD = torch.segment_reduce(hidden_TD.float(), "sum", lengths=lengths_S, axis=0, unsafe=True)
        number_P = torch.searchsorted(boundaries_S.long(), firsts_P, right=True) - 1
        return sums_SD.index_select(0, number_P) / lengths_S.index_select(0, number_P).unsqueeze(1)

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        """See `OnEncoder`. Return the vectors; if the targets hold their gradient, return a loss with this gradient."""
        vectors = self.vectors(batch)
        if GRADIENT not in batch.targets:
            return Sums({}, {}, vectors, None if self.log_scale is None else self.log_scale())
        tangent = (vectors * batch.targets[GRADIENT]).sum()
        if self.log_scale is not None:
            tangent = tangent + (self.log_scale.bias * batch.targets[SCALE_GRADIENT]).sum()
        losses = {"contrastive": tangent - tangent.detach() + batch.targets[LOSS]}
        if "score" in batch.counts:
            losses["score"] = score_loss_sum(vectors, batch, self._margin, dot=self.pooling == "sparse")
        if FLOPS in batch.targets:
            queries = batch.counts["contrastive"]
            of_queries_V, of_documents_V = batch.targets[FLOPS].unbind()
            flops = (vectors[:queries] @ of_queries_V).sum() + (vectors[queries:] @ of_documents_V).sum()
            losses["flops"] = 2 * flops - flops.detach()  # the value of the square of a mean, and its gradient
        return Sums(losses, {})


def score_loss_sum(vectors_PD: Tensor, batch: Batch, unit: float = 1 / SCORE_UNIT, *, dot: bool = False) -> Tensor:
    """Sum, over the negatives of a microbatch, of the squared difference of two margins; see `score_weight`.

    Args:
        vectors_PD: of its texts.
        batch: the microbatch.
        unit: of the teacher's margins.
        dot: score by dot product rather than by cosine.
    """
    queries, number = batch.counts["contrastive"], batch.counts["score"]
    examples_K, margins_K = (batch.targets[name][:number] for name in (EXAMPLES, MARGINS))
    query_KD, positive_KD = (vectors_PD.index_select(0, first + examples_K) for first in (0, queries))
    negative_KD = vectors_PD[2 * queries : 2 * queries + number]
    if dot:
        ours_K = (query_KD * (positive_KD - negative_KD)).sum(dim=1)
    else:
        ours_K = F.cosine_similarity(query_KD, positive_KD) - F.cosine_similarity(query_KD, negative_KD)
    return (ours_K - margins_K * unit).square().sum()


class ForVectorsAndMasked(ForVectors):
    """`ForVectors` with a masked-LM head, for sparse vectors, or trained by batches without the term `contrastive`.

    Its parameters are named as in a masked-LM model: `head` and `decoder`.

    Args:
        encoder: of any architecture.
        objective: see `ForVectors`; also the weight of `masked_lm_loss_sum`'s z_loss.
    """

    idles = True

    def __init__(self, encoder: Encoder, objective: ContrastiveConfig) -> None:
        super().__init__(encoder, objective)
        masked = ForMaskedLM(encoder, z_loss=objective.z_loss)
        self.head, self.decoder = masked.head, masked.decoder
        self._masked = (masked,)  # in a tuple: its parameters are registered as `head` and `decoder` above

    def set_phase(self, model: Any) -> None:
        """See `OnEncoder`."""
        super().set_phase(model)
        self._masked[0].config = model

    def compile_heads(self, **options: Any) -> None:
        """See `OnEncoder`; compiles the masked-LM head and its loss too."""
        super().compile_heads(**options)
        self._masked[0].compile_heads(**options)

    def vectors(self, batch: Batch) -> Tensor:
        """See `ForVectors`; sparse: return vectors_NV of the texts alone, without the padding of the targets."""
        if self.pooling != "sparse":
            return super().vectors(batch)
        masked, decoder = self._masked[0], self.decoder
        hidden_TE = masked.transformed(self.encode(batch.packed))
        logits = masked.logit_chunk(compute_dtype(hidden_TE), on_gpu=hidden_TE.is_cuda) * len(decoder.weight)
        columns, firsts_N = max(1, logits // len(hidden_TE)), batch.targets[FIRSTS][: batch.counts["flops"]]
        boundaries_S, cast_VE = batch.packed.cu_seqlens_S, decoder.cast
        vectors_NV: Tensor = SparseVectors.apply(
            hidden_TE, decoder.weight, decoder.bias, boundaries_S, firsts_N, columns, cast_VE
        )
        return vectors_NV

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        """See `ForVectors`; a batch of any other objective is computed by `ForMaskedLM`."""
        if "contrastive" in batch.counts:
            return super().forward(batch, figures)
        return self._masked[0](batch, figures)


@dataclass(frozen=True)
class Texts:
    """Roles, hashes and lengths of the texts of some microbatches, in the order of their vectors, on the host.

    Attributes:
        roles_N: int64: query, positive or negative; the n-th positive belongs to the n-th query.
        hashes_N: int64, equal for equal texts.
        lengths_N: int64, vectors of each text.
    """

    roles_N: Tensor
    hashes_N: Tensor
    lengths_N: Tensor

    @classmethod
    def of(cls, batch: Batch, settings: ContrastiveConfig) -> Texts:
        """Return the texts of a microbatch, which is still on the host."""
        roles_P, low_P, high_P = (batch.targets[name].long() for name in (ROLES, LOW, HIGH))
        real_P = roles_P >= 0
        return cls(roles_P[real_P], ((high_P << 31) | low_P)[real_P], _lengths(batch, settings))

    @classmethod
    def joined(cls, texts: Sequence[Texts]) -> Texts:
        """Concatenate several sets of texts."""
        return cls(*(torch.cat([getattr(each, name) for each in texts]) for name in _OF_TEXTS))

    def __len__(self) -> int:
        return len(self.roles_N)

    @property
    def num_queries(self) -> int:
        return int((self.roles_N == QUERY).sum())


_OF_TEXTS = tuple(each.name for each in fields(Texts))


def rows_of(batch: Batch, settings: ContrastiveConfig) -> Tensor:
    """Return the rows of a microbatch's vectors that belong to its texts, in order; on the host, as the batch is."""
    lengths_N = _lengths(batch, settings)
    if not settings.is_late:
        return torch.arange(len(lengths_N))
    firsts_N = batch.targets[FIRSTS][batch.targets[ROLES] >= 0].long()
    before_N = lengths_N.cumsum(0) - lengths_N
    return torch.arange(int(lengths_N.sum())) + (firsts_N - before_N).repeat_interleave(lengths_N)


def _lengths(batch: Batch, settings: ContrastiveConfig) -> Tensor:
    """Return the number of vectors of each text: one, or one for each of its tokens."""
    lengths_N = text_lengths(batch)
    return lengths_N if settings.is_late else torch.ones_like(lengths_N)


def text_lengths(batch: Batch) -> Tensor:
    """Return the number of tokens of each text, [CLS] and [SEP] included; int64, on the batch's device."""
    firsts_N = batch.targets[FIRSTS][batch.targets[ROLES] >= 0].long()
    boundaries_S = batch.packed.cu_seqlens_S.long()
    return boundaries_S[torch.searchsorted(boundaries_S, firsts_N, right=True)] - firsts_N


@dataclass(frozen=True)
class Compared:
    """Losses, hits and gradients of one rank's queries.

    Attributes:
        losses_Q: fp32, in nats, of each query.
        hits: number of queries whose nearest text is their positive.
        gradient_VW: of the sum of these losses, by the vectors of all ranks; None without `backward`.
        scale_gradient_Q: of each loss by the logarithm of the scale; None without `backward`.
    """

    losses_Q: Tensor
    hits: Tensor
    gradient_VW: Tensor | None
    scale_gradient_Q: Tensor | None


def compare(
    vectors_VW: Tensor,
    texts: Texts,
    own: slice,
    settings: ContrastiveConfig,
    *,
    backward: bool,
    scale: Tensor | None = None,
) -> Compared:
    """Compare the queries of one rank with the texts of all ranks (in-batch negatives).

    A text is no negative of a query if it equals the query or its positive, if it is the positive of an equal query, or
    if `settings.margin` excludes it.

    Args:
        vectors_VW: of all ranks, fp32.
        texts: the texts of these vectors.
        own: this rank's vectors.
        settings: the objective in the current phase.
        backward: compute the gradients.
        scale: [1], the factor of cosines; None: the inverse of the temperature.
    """
    find = _Search(texts, own, settings, vectors_VW.device)
    widths = (vectors_VW.shape[1], *settings.matryoshka)
    losses_Q, gradient_VW = torch.zeros(len(find), device=vectors_VW.device), torch.zeros_like(vectors_VW)
    hits = losses_Q.sum()
    log_scale_Q = torch.full_like(losses_Q, -math.log(settings.first_temperature)) if scale is None else scale.log()
    log_scale_Q = log_scale_Q.detach().expand(len(find)).clone().requires_grad_(backward)
    for width in widths:
        with torch.enable_grad():
            cut_VW = vectors_VW[:, :width].detach().requires_grad_(backward)
            unit_VW = cut_VW if settings.is_sparse else F.normalize(cut_VW, dim=1)
            leaf_VW = unit_VW.detach().requires_grad_(backward)
            for part, losses_R, hits_R in find.parts(leaf_VW, log_scale_Q):
                losses_R = losses_R / len(widths)
                if backward:
                    losses_R.sum().backward()
                losses_Q[part] += losses_R.detach()
                hits = hits + hits_R.sum() if width == widths[0] else hits
            if backward and leaf_VW.grad is not None:
                unit_VW.backward(leaf_VW.grad)
                assert cut_VW.grad is not None
                gradient_VW[:, :width] += cut_VW.grad
    return Compared(losses_Q, hits, gradient_VW if backward else None, log_scale_Q.grad)


def flops_of(vectors_NV: Tensor, texts: Texts, settings: ContrastiveConfig) -> Tensor:
    """Return flops_2V, for queries and for documents: their mean vector over the global batch, times the regulariser's
    weight, over their share of all texts (losses are means over all texts, the regulariser over either kind).

    The mean of its products with the texts is the regulariser, whose gradient is twice the gradient of these products.
    """
    is_query_N = (texts.roles_N == QUERY).to(vectors_NV.device)
    weights = ((is_query_N, settings.query_flops), (~is_query_N, settings.document_flops))
    means = [vectors_NV[which_N].mean(dim=0) * (weight / which_N.float().mean()) for which_N, weight in weights]
    return torch.stack(means)


class _Cosines:
    """Cosine scores for texts of one vector each; `MaxSim` has the same methods for late interaction."""

    def __call__(self, unit_VW: Tensor, queries_R: Tensor, documents_C: Tensor) -> Tensor:
        return unit_VW.index_select(0, queries_R) @ unit_VW.index_select(0, documents_C).T

    def per_token(self, queries_R: Tensor) -> Tensor:
        return torch.ones_like(queries_R).unsqueeze(1)


class _Search:
    """Queries, candidates and masks of one comparison, as indices into the texts.

    Args:
        texts, own, settings: see `compare`.
        device: of the vectors.
    """

    def __init__(self, texts: Texts, own: slice, settings: ContrastiveConfig, device: torch.device) -> None:
        roles_N, hashes_N, self._settings = texts.roles_N, texts.hashes_N, settings
        queries_Q, positives_Q = (roles_N == QUERY).nonzero()[:, 0], (roles_N == POSITIVE).nonzero()[:, 0]
        candidates_C = (roles_N != QUERY).nonzero()[:, 0]
        right_Q = torch.searchsorted(candidates_C, positives_Q)
        asked_C = torch.full_like(candidates_C, -1)  # for positives, the hash of their query
        asked_C[right_Q] = hashes_N[queries_Q]
        begin_Q = (texts.lengths_N.cumsum(0) - texts.lengths_N)[queries_Q]
        first, end = (int((begin_Q < bound).sum()) for bound in (own.start, own.stop))
        self._mine = range(first, end)
        self._scores = MaxSim(texts.lengths_N, device, _COSINES) if settings.is_late else _Cosines()
        longest = int(texts.lengths_N[queries_Q].max()) if len(queries_Q) else 1
        self._at_once = max(1, _COSINES // max(1, longest * len(candidates_C)))
        self._queries_Q, self._positives_Q, self._candidates_C = (
            each.to(device) for each in (queries_Q, positives_Q, candidates_C)
        )
        self._right_Q, self._asked_C, self._hashes_C = (
            each.to(device) for each in (right_Q, asked_C, hashes_N[candidates_C])
        )
        self._of_query_Q, self._of_positive_Q = hashes_N[queries_Q].to(device), hashes_N[positives_Q].to(device)

    def __len__(self) -> int:
        return len(self._mine)

    def parts(self, unit_VW: Tensor, log_scale_Q: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield, for a slice of this rank's queries at a time: the slice, their losses, and True for each hit."""
        for first in range(0, len(self), self._at_once):
            part = slice(first, min(first + self._at_once, len(self)))
            now = slice(self._mine.start + part.start, self._mine.start + part.stop)
            yield part, *self._part(unit_VW, now, log_scale_Q[part].exp().unsqueeze(1))

    def _part(self, unit_VW: Tensor, now: slice, scale_R1: Tensor) -> tuple[Tensor, Tensor]:
        query_R, positive_R = self._of_query_Q[now, None], self._of_positive_Q[now, None]
        same_RC = (self._hashes_C == positive_R) | (self._hashes_C == query_R) | (self._asked_C == query_R)
        queries_R, right_R = self._queries_Q[now], self._right_Q[now]
        scores_RC = self._scores(unit_VW, queries_R, self._candidates_C)
        logits_RC = self._logits(scores_RC, self._scores.per_token(queries_R), scale_R1, right_R, same_RC)
        hits_R = logits_RC.detach().argmax(dim=1) == right_R
        losses_R = F.cross_entropy(logits_RC, right_R, reduction="none")
        if self._settings.symmetric:
            same_RQ = (self._of_query_Q == query_R) | (self._of_positive_Q == positive_R)
            same_RQ |= self._of_query_Q == positive_R
            itself_R = torch.arange(now.start, now.stop, device=unit_VW.device)
            scores_RQ = self._scores(unit_VW, self._queries_Q, self._positives_Q[now]).T
            tokens_1Q = self._scores.per_token(self._queries_Q).T
            logits_RQ = self._logits(scores_RQ, tokens_1Q, scale_R1, itself_R, same_RQ)
            losses_R = (losses_R + F.cross_entropy(logits_RQ, itself_R, reduction="none")) / 2
        return losses_R, hits_R

    def _logits(self, scores_RC: Tensor, tokens: Tensor, scale_R1: Tensor, right_R: Tensor, same_RC: Tensor) -> Tensor:
        """Scale the scores and mask possible false negatives; `tokens` is the token count of each score's query."""
        left_out_RC, right_R1 = same_RC, right_R.unsqueeze(1)
        if self._settings.margin is not None:
            found_RC = scores_RC.detach() / tokens
            left_out_RC = left_out_RC | (found_RC > found_RC.gather(1, right_R1) + self._settings.margin)
        left_out_RC = left_out_RC.scatter(1, right_R1, False)
        return (scores_RC * scale_R1).masked_fill(left_out_RC, float("-inf"))
