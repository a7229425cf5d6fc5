"""DeBERTa on packed buffers, top to bottom (arXiv 2006.03654; V3: 2111.09543): content and distance scored separately.

The score of a pair is the sum of three products, each over sqrt(3 H): content by content, content of the query by the
distance, and the distance by content of the key. There are no absolute positions. All layers read one table with a row
for each distance; `distance_rows` chooses it, and distances beyond the table use its last row, so sequences may be
longer than any in training. In version 2 the rows pass through a norm and then through the same matrix that makes
queries and keys; in version 1 through two separate matrices, and keys lack a bias.

The distance terms are a bias. `sdpa` takes it sequence by sequence: computing a sequence of n tokens needs N n (n + 2
P) further values, where P is the number of its rows; N n^2 are kept for the backward pass. `flex` looks it up pair by
pair in two tables of N T P values, which are kept: more memory than `sdpa` while n < 2 P, less beyond. T x T scores are
never built. Rows beyond half the buckets serve several keys, whose gradients are summed: on GPUs in no fixed order, so
runs with compute.deterministic use `sdpa`.

Query, key and value are one matrix, Wqkv: stacked one below another in version 2; head by head in version 1, as in its
files. weights/formats/deberta.py translates to transformers' names and back. Not implemented: dropout of attention
probabilities, and the decoder with absolute positions that predicts masked tokens in the published training, which
transformers lacks too.

Shape legend: T packed tokens, P rows of distances, D model width, E width of the embedding, F hidden width, N heads,
H head width, C tokens of a convolution; in one sequence Q queries and K keys, equal in number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modernbert_train.batch import Packed
from modernbert_train.config.schema import ComputeConfig, DebertaConfig
from modernbert_train.models.attention import Kernel, for_all_layers
from modernbert_train.models.bert import EncoderLayer, FeedForward, layer_norm
from modernbert_train.models.compiler import region
from modernbert_train.models.encoder import GELU, Encoder
from modernbert_train.models.heads import PredictionHead
from modernbert_train.models.layers import compute_dtype
from modernbert_train.models.lookup import Embedding

SCORES = 3**-0.5  # three products are summed


def distance_rows(config: DebertaConfig, longest: int) -> Tensor:
    """Return rows_P, the table's row for each distance from 1 - longest to longest - 1 (query minus key).

    Computed on the host in fp64, so all devices agree. The n-th of B buckets of a direction, n above m = B/2, ends at
    m (r / m) ^ ((n - m) / (m - 1)) with r = max_distance - 1.

    Source: microsoft/DeBERTa, DeBERTa/deberta/da_utils.py.
    """
    distance_P = torch.arange(1 - longest, longest, device="cpu")
    bucket_P = distance_P
    if config.version == "v2":
        middle = config.buckets // 2
        stretch = (middle - 1) / math.log((config.max_distance - 1) / middle)
        size_P = distance_P.abs()
        # slightly less, or rounding would put the last distance of the last bucket above it
        steps_P = (stretch * (size_P.double() / middle).clamp(min=1).log() - 1e-9).ceil().long()
        bucket_P = torch.where(size_P <= middle, distance_P, distance_P.sign() * (middle + steps_P))
    return (bucket_P + config.buckets).clamp(0, config.distance_rows - 1)


@dataclass(frozen=True)
class Places:
    """Positions of tokens and rows of their distances, shared by all layers of a microbatch.

    Attributes:
        position_ids_T: positions.
        rows_P: of `distance_rows`, on the host.
        reachable: rows of the table that distances in the microbatch can have.
        row_of_P: for each distance, its row within `reachable`, on the device.
        cache: first token of a sequence -> the result of `of`.
    """

    position_ids_T: Tensor
    rows_P: Tensor
    reachable: slice
    row_of_P: Tensor
    cache: dict[int, tuple[slice, Tensor]] = field(default_factory=dict)

    @classmethod
    def within(cls, position_ids_T: Tensor, rows_P: Tensor) -> Places:
        """Build it for a microbatch, without a host sync."""
        first, last = int(rows_P[0]), int(rows_P[-1])
        row_of_P = (rows_P - first).to(position_ids_T.device, non_blocking=True)
        return cls(position_ids_T, rows_P, slice(first, last + 1), row_of_P)

    def of(self, start: int, end: int) -> tuple[slice, Tensor]:
        """Return the table's rows that distances in a sequence can have, and for each pair its row among these."""
        if start not in self.cache:
            middle = len(self.rows_P) // 2
            reach = min(end - start - 1, middle)  # query tokens reuse positions of others: they do not add distances
            rows = self.rows_P[middle - reach : middle + reach + 1]
            first, last = int(rows[0]), int(rows[-1])
            positions = self.position_ids_T[start:end]
            by_distance = (rows - first).to(positions.device, non_blocking=True)
            self.cache[start] = slice(first, last + 1), by_distance[positions[:, None] - positions + reach]
        return self.cache[start]


@dataclass(frozen=True)
class DisentangledScores:
    """A `PairBias` that adds the distance terms to the scores of a layer.

    Attributes:
        places: of the tokens.
        queries_TNH, keys_TNH: of the tokens.
        distance_queries_PNH, distance_keys_PNH: of all rows of the table.
    """

    places: Places
    queries_TNH: Tensor
    keys_TNH: Tensor
    distance_queries_PNH: Tensor
    distance_keys_PNH: Tensor

    def __call__(self, start: int, end: int) -> Tensor:
        rows, row_QK = self.places.of(start, end)
        to_distance_NQP = _products(self.queries_TNH[start:end], self.distance_keys_PNH[rows])
        from_distance_NKP = _products(self.keys_TNH[start:end], self.distance_queries_PNH[rows])
        heads = to_distance_NQP.shape[0]
        to_distance_NQK = to_distance_NQP.gather(2, row_QK.expand(heads, -1, -1))
        from_distance_NKQ = from_distance_NKP.gather(2, row_QK.t().expand(heads, -1, -1))
        return (to_distance_NQK + from_distance_NKQ.transpose(1, 2)) * self.queries_TNH.shape[-1] ** -0.5

    def of_pairs(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """See `PairBias`."""
        rows, scale = self.places.reachable, self.queries_TNH.shape[-1] ** -0.5
        to_distance_NTP = _products(self.queries_TNH, self.distance_keys_PNH[rows] * scale)  # scale the small factor
        from_distance_NTP = _products(self.keys_TNH, self.distance_queries_PNH[rows] * scale)
        place_T, row_of_P = self.places.position_ids_T, self.places.row_of_P
        middle = len(row_of_P) // 2

        def added(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            row = row_of_P[place_T[query] - place_T[key] + middle]
            return to_distance_NTP[head, query, row] + from_distance_NTP[head, key, row]

        return added


def _products(x_QNH: Tensor, of_PNH: Tensor) -> Tensor:
    return x_QNH.transpose(0, 1) @ of_PNH.permute(1, 2, 0)


class Embeddings(nn.Module):
    """Token embedding of width E; norm and dropout follow the projection, which a generator may replace by its own."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(config.vocab_size, config.embedding_width)

    def forward(self, packed: Packed) -> Tensor:
        words_TE: Tensor = self.tok_embeddings(packed.input_ids_T)
        return words_TE


class Attention(nn.Module):
    """Multi-head self-attention of version 2, with biases; dropout on distances and after the output projection."""

    stacked: ClassVar = {"Wqkv": 3}  # number of matrices stacked along the rows of a weight; read by optim/groups.py

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.split = (config.num_heads, config.head_size)
        self.Wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.version == "v2")
        self.Wo = nn.Linear(config.hidden_size, config.hidden_size)
        self.distance_dropout = nn.Dropout(config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def of_tokens(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of the tokens, [T, N, H] each."""
        return self.Wqkv(x_TD).unflatten(-1, (3, *self.split)).unbind(1)

    def of_distances(self, table_PD: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys of the distances, [P, N, H] each."""
        queries_PNH, keys_PNH, _ = self.of_tokens(table_PD)
        return queries_PNH, keys_PNH

    def forward(self, x_TD: Tensor, table_PD: Tensor, positions: Places, kernel: Kernel, layout: Any) -> Tensor:
        q_TNH, k_TNH, v_TNH = self.of_tokens(x_TD)
        q_PNH, k_PNH = self.of_distances(self.distance_dropout(table_PD))
        q_TNH, q_PNH = q_TNH * SCORES, q_PNH * SCORES
        bias = DisentangledScores(positions, q_TNH, k_TNH, q_PNH, k_PNH)
        out_TNH = kernel.attend(q_TNH, k_TNH, v_TNH, layout, False, bias)
        return self.dropout(self.Wo(out_TNH.flatten(1)))


class FirstAttention(Attention):
    """Attention of version 1: the rows of Wqkv are query, key and value of the first head, then of the next."""

    stacked: ClassVar = {}

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.query, self.value = Bias(width), Bias(width)
        self.Wquery = nn.Linear(width, width)  # for distances
        self.Wkey = nn.Linear(width, width, bias=False)

    def of_tokens(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """See `Attention`."""
        heads, width = self.split
        q_TNH, k_TNH, v_TNH = self.Wqkv(x_TD).unflatten(-1, (heads, 3, width)).unbind(2)
        return self.query(q_TNH), k_TNH, self.value(v_TNH)

    def of_distances(self, table_PD: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention`."""
        return self.Wquery(table_PD).unflatten(-1, self.split), self.Wkey(table_PD).unflatten(-1, self.split)


class Bias(nn.Module):
    """A vector added to the heads of each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x_TNH: Tensor) -> Tensor:
        return x_TNH + self.bias.to(x_TNH.dtype).view(x_TNH.shape[1:])


class Convolution(nn.Module):
    """norm(x + gelu(W e)): x is the first layer's output, e the embeddings of a token and its neighbours."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.span, self.approximate = config.convolution, GELU[config.activation]
        self.dense = nn.Linear(config.hidden_size * config.convolution, config.hidden_size)
        self.norm = layer_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_TD: Tensor, embedded_TD: Tensor, sequence_T: Tensor) -> Tensor:
        side = self.span // 2
        near_TDC = F.pad(embedded_TD, (0, 0, side, side)).unfold(0, self.span, 1)
        same_TC = F.pad(sequence_T, (side, side), value=-1).unfold(0, self.span, 1) == sequence_T[:, None]
        mixed_TD = self.dense(near_TDC.masked_fill(~same_TC.unsqueeze(1), 0.0).flatten(1))
        return self.norm(x_TD + F.gelu(self.dropout(mixed_TD), approximate=self.approximate))


def sequences_of(packed: Packed) -> Tensor:
    """Return sequence_T, the number of each token's sequence."""
    place_T = torch.arange(len(packed.input_ids_T), device=packed.cu_seqlens_S.device)
    return torch.searchsorted(packed.cu_seqlens_S[1:].contiguous(), place_T, right=True)


class Deberta(Encoder):
    """Embeddings, the table of distances, and layers; the output is the last layer's norm."""

    def __init__(self, config: DebertaConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.config = config
        self.compute = compute
        self.embeddings = Embeddings(config)
        self.projection: nn.Module = nn.Identity()
        if config.embedding_width != config.hidden_size:
            self.projection = nn.Linear(config.embedding_width, config.hidden_size, bias=False)
        self.norm = layer_norm(config)
        self.dropout = nn.Dropout(config.dropout)
        self.distances = nn.Embedding(config.distance_rows, config.hidden_size)
        self.distance_norm = layer_norm(config) if config.version == "v2" else nn.Identity()
        attention = FirstAttention if config.version == "v1" else Attention
        layers = ((attention(config), FeedForward(config)) for _ in range(config.num_layers))
        self.layers = nn.ModuleList(EncoderLayer(config, *each) for each in layers)
        self.convolution = Convolution(config) if config.convolution else None

    def prediction_head(self) -> nn.Module:
        """See `Encoder`."""
        approximate = GELU[self.config.activation]
        return PredictionHead(self.config, self.embedding().shape[1], bias=True, approximate=approximate)

    def token_head(self) -> nn.Module:
        """See `Encoder`; the same as in DeBERTaV3."""
        return TokenHead(self.config)

    def token_states(self, hidden_TD: Tensor, packed: Packed) -> Tensor:
        """See `Encoder`; adds the state of the sequence's first token to each."""
        return hidden_TD + hidden_TD[packed.cu_seqlens_S[sequences_of(packed)].long()]

    @region
    def enter(self, packed: Packed) -> Tensor:
        """Return the first hidden states, hidden_TD."""
        hidden_TD: Tensor = self.dropout(self.norm(self.projection(self.embeddings(packed))))
        return hidden_TD

    def forward(self, packed: Packed, positions_M: Tensor | None = None) -> Tensor:
        """See `Encoder`. On a GPU `sdpa` syncs with the device once, see there.

        Raises:
            ValueError: sequences may exceed `max_positions`.
        """
        if packed.max_seqlen > self.config.max_positions:
            raise ValueError(
                f"sequences of up to {packed.max_seqlen} tokens, but model.max_positions={self.config.max_positions}. "
                "Raise it, in the phase too; it changes no weights."
            )
        hidden_TD = self.enter(packed)
        device, dtype = hidden_TD.device, compute_dtype(hidden_TD)
        kernel, layout = for_all_layers(self.compute, packed, device, dtype, self.config.score_bias)
        positions = Places.within(packed.position_ids_T, distance_rows(self.config, packed.max_seqlen))
        table_PD = self.distance_norm(self.distances.weight)
        recompute = self.compute.activation_checkpointing and torch.is_grad_enabled()
        embedded_TD = hidden_TD
        for number, layer in enumerate(self.layers):
            inputs = (hidden_TD, table_PD, positions, kernel, layout)
            hidden_TD = checkpoint(layer, *inputs, use_reentrant=False) if recompute else layer(*inputs)
            if number == 0 and self.convolution is not None:
                hidden_TD = self.convolution(hidden_TD, embedded_TD, sequences_of(packed))
        return self.leave(hidden_TD, positions_M)


class TokenHead(nn.Module):
    """gelu(dense(norm(h))), with biases; h is the output of `Deberta.token_states`."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.approximate = GELU[config.activation]
        self.norm = layer_norm(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return F.gelu(self.dense(self.norm(hidden_TD)), approximate=self.approximate)
