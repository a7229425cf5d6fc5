"""XLNet on packed buffers, top to bottom (arXiv 1906.08237): scores depend on distances, not on absolute positions.

A pair is scored by content, by distance (a sinusoid for each distance), and by whether both tokens are in the same
segment; for each of the three, a vector for every head is added to the query first. Distances are computed from
position ids, so packed sequences and query tokens work without further inputs. The paper's two streams are one buffer
here: in the order "given" a query token reads a learned vector instead of its id, and passes through the same weights.

Distance and segment terms are a bias that `sdpa` takes sequence by sequence; T x T scores are never built. There is no
memory of earlier text and no dropout of attention probabilities. Query, key and value are one matrix, Wqkv;
weights/formats/xlnet.py translates to transformers' names and shapes, and back.

Shape legend: T packed tokens, P distances, D model width, F hidden width, N heads, H head width; in one sequence Q
queries and K keys, equal in number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modernbert_train.batch import QUERY_RANK, Packed
from modernbert_train.config.schema import ComputeConfig, XLNetConfig
from modernbert_train.models.attention import Kernel, for_all_layers
from modernbert_train.models.bert import EncoderLayer
from modernbert_train.models.casts import Linear
from modernbert_train.models.compiler import region
from modernbert_train.models.encoder import GELU, Encoder
from modernbert_train.models.layers import compute_dtype
from modernbert_train.models.lookup import Embedding


def distance_table(longest: int, width: int, device: torch.device) -> Tensor:
    """Return table_PD: for each distance from 1 - longest to longest - 1, its sines, then its cosines, in fp32."""
    distance_P = torch.arange(1 - longest, longest, device=device, dtype=torch.float32)
    exponent = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    angle = distance_P.unsqueeze(1) * (1 / 10_000**exponent)
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


@dataclass(frozen=True)
class Places:
    """Positions and segments of tokens, shared by all layers of a microbatch.

    Attributes:
        position_ids_T: positions.
        segment_ids_T: token types; None: one segment.
        longest: the farthest distance in the table plus one.
        cache: first token of a sequence -> the result of `of`.
    """

    position_ids_T: Tensor
    segment_ids_T: Tensor | None
    longest: int
    cache: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    def reach(self, start: int, end: int) -> int:
        """Return the farthest possible distance in a sequence plus one."""
        return min(end - start, self.longest)

    def of(self, start: int, end: int) -> tuple[Tensor, Tensor | None]:
        """Return rows_QK, each pair's distance minus the lowest possible one, and True where segments differ."""
        if start not in self.cache:
            positions = self.position_ids_T[start:end]
            rows_QK = positions[:, None] - positions + self.reach(start, end) - 1
            types = None if self.segment_ids_T is None else self.segment_ids_T[start:end]
            self.cache[start] = rows_QK, None if types is None else types[:, None] != types
        return self.cache[start]


@dataclass(frozen=True)
class RelativeScores:
    """A `ScoreBias` that adds the distance and segment terms to the scores of a layer.

    Attributes:
        places: of the tokens.
        by_distance_TNH: queries for distances.
        distances_PNH: keys of the distances.
        by_segment_TN2: scores of the same and of another segment; None: there is one segment.
    """

    places: Places
    by_distance_TNH: Tensor
    distances_PNH: Tensor
    by_segment_TN2: Tensor | None

    def __call__(self, start: int, end: int) -> Tensor:
        reach, middle = self.places.reach(start, end), self.places.longest - 1
        rows_QK, other_QK = self.places.of(start, end)
        query_NQH = self.by_distance_TNH[start:end].transpose(0, 1)
        keys_NHP = self.distances_PNH[middle - reach + 1 : middle + reach].permute(1, 2, 0)
        scores_NQK = (query_NQH @ keys_NHP).gather(2, rows_QK.expand(query_NQH.shape[0], -1, -1))
        if self.by_segment_TN2 is not None and other_QK is not None:
            same_NQ1, other_NQ1 = self.by_segment_TN2[start:end].transpose(0, 1).split(1, dim=2)
            scores_NQK = scores_NQK + torch.where(other_QK, other_NQ1, same_NQ1)
        return scores_NQK * query_NQH.shape[-1] ** -0.5


class Embeddings(nn.Module):
    """Token embeddings; all query tokens read one learned vector. No positions, no norm."""

    def __init__(self, config: XLNetConfig) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.query = nn.Embedding(1, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, packed: Packed) -> Tensor:
        words_TD, query_1D = self.tok_embeddings(packed.input_ids_T), self.query.weight
        if packed.ranks_T is None:
            words_TD = words_TD + 0.0 * query_1D  # keep it in every graph: all ranks must have a gradient for it
        else:
            words_TD = torch.where((packed.ranks_T == QUERY_RANK).unsqueeze(1), query_1D.to(words_TD), words_TD)
        return self.dropout(words_TD)


class HeadBias(nn.Module):
    """A vector for each head, added to its queries."""

    def __init__(self, config: XLNetConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(config.num_heads, config.head_size))

    def forward(self, q_TNH: Tensor) -> Tensor:
        return q_TNH + self.bias.to(q_TNH.dtype)


class Attention(nn.Module):
    """Multi-head self-attention without biases in its matrices; dropout only after the output projection."""

    stacked: ClassVar = {"Wqkv": 3}  # number of matrices stacked along the rows of a weight; read by optim/groups.py

    def __init__(self, config: XLNetConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.split = (3, config.num_heads, config.head_size)
        self.Wqkv = Linear(width, 3 * width, bias=False)
        self.Wr = Linear(width, width, bias=False)  # keys of distances
        self.Wo = Linear(width, width, bias=False)
        self.content, self.position, self.segment = HeadBias(config), HeadBias(config), HeadBias(config)
        self.segments = nn.Embedding(2, width)  # keys of the same segment, and of another
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_TD: Tensor, table_PD: Tensor, places: Places, kernel: Kernel, layout: Any) -> Tensor:
        q_TNH, k_TNH, v_TNH = self.Wqkv(x_TD).unflatten(-1, self.split).unbind(1)
        distances_PNH = self.Wr(table_PD).unflatten(-1, self.split[1:])
        by_segment_TN2 = None
        if places.segment_ids_T is not None:
            keys_2NH = self.segments.weight.unflatten(-1, self.split[1:]).to(q_TNH.dtype)
            by_segment_TN2 = torch.einsum("tnh,snh->tns", self.segment(q_TNH), keys_2NH)
        bias = RelativeScores(places, self.position(q_TNH), distances_PNH, by_segment_TN2)
        out_TNH = kernel.attend(self.content(q_TNH), k_TNH, v_TNH, layout, False, bias)
        out_TD = self.Wo(out_TNH.flatten(1))
        if by_segment_TN2 is None:  # one segment shifts all scores equally: add only a zero gradient, for all ranks
            out_TD = out_TD + 0.0 * (self.segment.bias.sum() + self.segments.weight.sum())
        return self.dropout(out_TD)


class FeedForward(nn.Module):
    """Two matrices with biases, GELU between them, dropout within and after them."""

    def __init__(self, config: XLNetConfig) -> None:
        super().__init__()
        self.approximate = GELU[config.activation]
        self.Wi = Linear(config.hidden_size, config.intermediate_size)
        self.Wo = Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_TD: Tensor) -> Tensor:
        inner_TF = self.dropout(F.gelu(self.Wi(x_TD), approximate=self.approximate))
        return self.dropout(self.Wo(inner_TF))


class XLNet(Encoder):
    """Embeddings and layers, and dropout after the last."""

    def __init__(self, config: XLNetConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.config = config
        self.compute = compute
        self.embeddings = Embeddings(config)
        layers = ((Attention(config), FeedForward(config)) for _ in range(config.num_layers))
        self.layers = nn.ModuleList(EncoderLayer(config, *each) for each in layers)
        self.dropout = nn.Dropout(config.dropout)

    def prediction_head(self) -> nn.Module:
        """See `Encoder`: the identity, or a projection if the decoder is tied to a wider model's embedding."""
        width = self.embedding().shape[1]
        return nn.Identity() if width == self.config.hidden_size else Linear(self.config.hidden_size, width)

    @region
    def enter(self, packed: Packed) -> Tensor:
        """Return the first hidden states, hidden_TD."""
        hidden_TD: Tensor = self.embeddings(packed)
        return hidden_TD

    def forward(self, packed: Packed, positions_M: Tensor | None = None) -> Tensor:
        """See `Encoder`. On a GPU `sdpa` syncs with the device once, see there."""
        hidden_TD = self.enter(packed)
        device, dtype = hidden_TD.device, compute_dtype(hidden_TD)
        kernel, layout = for_all_layers(self.compute, packed, device, dtype, self.config.score_bias)
        places = Places(packed.position_ids_T, packed.segment_ids_T, packed.max_seqlen)
        table_PD = self.dropout(distance_table(packed.max_seqlen, hidden_TD.shape[1], device).to(hidden_TD.dtype))
        recompute = self.compute.activation_checkpointing and torch.is_grad_enabled()
        for layer in self.layers:
            inputs = (hidden_TD, table_PD, places, kernel, layout)
            hidden_TD = checkpoint(layer, *inputs, use_reentrant=False) if recompute else layer(*inputs)
        return self.leave(self.dropout(hidden_TD), positions_M)
