"""Contrastive training on pairs of texts, as a variant of `objective`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from modernbert_train.config.knob import knob
from modernbert_train.config.model import ModelConfig
from modernbert_train.config.objective import ObjectiveConfig

SCORE_UNIT = 1 << 20  # a teacher's scores, 0 to 1, are stored as whole numbers of this unit
TOKEN_PROJECTION = "token_projection"  # module of the matrix from hidden states to token vectors


@dataclass(frozen=True, kw_only=True)
class ContrastiveConfig(ObjectiveConfig):
    """Finding a query's positive among all texts of the global batch (InfoNCE, arXiv 1807.03748), by cosine or MaxSim.

    Documents are pairs, or pairs with mined negatives, as `prepare` writes them with a section `pairs`.
    """

    name: str = "contrastive"
    # a text's vector: the hidden state of [CLS], or the mean of its hidden states, [CLS] and [SEP] included. late: one
    # vector for each token, and MaxSim instead of cosine, the sum over a query's tokens of the highest cosine with a
    # token of the text (late interaction: ColBERT, arXiv 2004.12832). sparse: one number for each token of the
    # vocabulary, the maximum over the text's tokens of log(1 + relu(logit)) of the masked-LM head, compared by dot
    # product (SPLADE, arXiv 2205.04733)
    pooling: Literal["cls", "mean", "late", "sparse"] = "mean"
    # late: width of a token's vector, by a matrix without bias that is trained with the encoder
    token_vectors: int = knob(128, low=1)
    # sparse: weight of the FLOPS regulariser of queries, the squared norm of their mean vector in the global batch
    # (arXiv 2004.05665); sentence-transformers trains with 5e-5 and 3e-5
    query_flops: float = knob(5e-5, low=0, phased=True)
    # sparse: the same weight for positives and negatives
    document_flops: float = knob(3e-5, low=0, phased=True)
    # sparse: share of the phase in which both weights grow from 0, with the square of its tokens
    flops_warmup: float = knob(0.33, low=0, high=1, phased=True)
    # divisor of scores; None: 0.05, and 1 for MaxSim and sparse, as sentence-transformers' scales of 20 and 1
    temperature: float | None = knob(None, above=0, phased=True)
    # trains the temperature from its value here, as the logarithm of its inverse, without weight decay, within 0.01 and
    # 1 (CLIP, arXiv 2103.00020)
    learn_temperature: bool = False
    # all pairs of a global batch come from one stream; streams alternate so that each keeps its share to within a batch
    one_source: bool = knob(False, phased=True)
    # each positive also searches for its query, and the two losses are averaged
    symmetric: bool = knob(False, phased=True)
    # a negative whose cosine exceeds the positive's by more than this counts as an unlabelled positive and is left out
    # (arXiv 2506.05176 has 0.1); for MaxSim, per token of the query; None: all negatives are kept
    margin: float | None = knob(None, low=-2, high=2, phased=True)
    # further widths: the first numbers of a vector are also trained as a vector, and the losses of all widths averaged
    # (arXiv 2205.13147)
    matryoshka: tuple[int, ...] = knob((), phased=True)
    # weight of the squared difference of two margins, of our scores and of a teacher's: a query's score with its
    # positive minus the score with a negative (arXiv 2010.02666); `prepare` stores a teacher's as shares of
    # pairs.score_range. 0: scores are not read
    score_weight: float = knob(0.0, low=0)
    # factor of a teacher's margins. Sparse scores are unbounded: set the width of pairs.score_range, to train towards
    # the teacher's own margins
    score_scale: float = knob(1.0, above=0)
    # gives the model a masked-LM head too, so that phases may train it by mlm, causal or permutation
    mlm_head: bool = False
    # longest text that the model reads, even if the pairs are shorter: the limit of the exported model; None: the limit
    # of the first weights, or without any the rows of the last phase
    max_tokens: int | None = knob(None, above=0, restart=True)
    # longest query that the exported model reads, where that is shorter; None: max_tokens
    query_max_tokens: int | None = knob(None, above=0, restart=True)
    predicted_share = 0.0  # no token is predicted
    token_head_key = "mlm_head"

    def __post_init__(self) -> None:
        object.__setattr__(self, "matryoshka", tuple(self.matryoshka))  # YAML gives a list, which cannot be hashed

    @property
    def is_late(self) -> bool:
        """True if each token has a vector."""
        return self.pooling == "late"

    @property
    def is_sparse(self) -> bool:
        """True if a text's vector has a number for each token of the vocabulary."""
        return self.pooling == "sparse"

    @property
    def sequence_tokens(self) -> int | None:
        """See `ObjectiveConfig`: a text."""
        return self.max_tokens

    @property
    def first_temperature(self) -> float:
        """The divisor of scores before training."""
        return self.temperature or (1.0 if self.is_late or self.is_sparse else 0.05)

    title = "contrastive training on pairs of texts", "2101.06983"

    @property
    def summary(self) -> str:
        return f"contrastive, temperature {self.first_temperature:g}"

    @property
    def details(self) -> str:
        learnt = " initially, learnt" if self.learn_temperature else ""
        how = f"MaxSim of tokens in {self.token_vectors} numbers" if self.is_late else f"{self.pooling} pooling"
        details = [f"{how}, temperature {self.first_temperature:g}{learnt}"]
        flops = f"FLOPS of queries weigh {self.query_flops:g}, of documents {self.document_flops:g}"
        details += [flops] if self.is_sparse else []
        details += ["both directions"] if self.symmetric else []
        details += ["each batch from one stream"] if self.one_source else []
        details += [] if self.margin is None else [f"negatives beyond a margin of {self.margin:g} left out"]
        details += [f"margins of a teacher's scores, weight {self.score_weight:g}"] if self.score_weight else []
        details += [f"widths {', '.join(map(str, self.matryoshka))} too"] if self.matryoshka else []
        return f"contrastive among the texts of the global batch; {'; '.join(details)}"

    @property
    def terms(self) -> Mapping[str, float]:
        score = {"score": self.score_weight} if self.score_weight else {}
        return {"contrastive": 1.0, **score, **({"flops": 1.0} if self.is_sparse else {})}

    @property
    def projected_width(self) -> int | None:
        """See `ObjectiveConfig`."""
        return self.token_vectors if self.is_late else None

    @property
    def heads(self) -> tuple[str, ...]:
        named = {"contrastive": "vectors", "score": "scores", "flops": "tokens"}
        return tuple(named[term] for term in self.terms)

    @property
    def idle_heads(self) -> tuple[str, ...]:
        return ("tokens",) if self.mlm_head and not self.is_sparse else ()

    def uses_of_heads(self, sequence_tokens: float) -> dict[str, float]:
        """See `ObjectiveConfig`: late interaction has a projection, sparse vectors need the logits of all tokens."""
        unused = dict.fromkeys((*self.heads, *self.idle_heads), 0.0)
        return unused | {"vectors": float(self.is_late)} | ({"tokens": 1.0} if self.is_sparse else {})

    def at(self, done: float) -> ContrastiveConfig:
        """See `ObjectiveConfig`: the warm-up of the FLOPS regularisers."""
        if not self.is_sparse or done >= self.flops_warmup:
            return self
        share = (done / self.flops_warmup) ** 2
        return replace(self, query_flops=share * self.query_flops, document_flops=share * self.document_flops)

    def for_validation(self) -> ContrastiveConfig:
        """See `ObjectiveConfig`: finding the positive, without a teacher's scores."""
        return replace(self, score_weight=0.0)

    def mistakes(self, model: ModelConfig) -> Iterator[str]:
        """See `ObjectiveConfig`."""
        if self.learn_temperature and not 0.01 <= self.first_temperature <= 1:
            yield (
                f"objective.temperature={self.first_temperature:g} with objective.learn_temperature=true: it must stay "
                "within 0.01 and 1. Start there, or set objective.learn_temperature=false."
            )
        if self.is_late and self.score_weight:
            yield (
                f"objective.score_weight={self.score_weight:g} with objective.pooling=late: a teacher's scores are "
                "compared with cosines of one vector a text. Set objective.score_weight=0, or another pooling."
            )
        if self.is_sparse and (self.matryoshka or self.margin is not None):
            key = "matryoshka" if self.matryoshka else "margin"
            yield (
                f"objective.{key}={getattr(self, key)} with objective.pooling=sparse: it is for vectors of length 1. "
                f"Remove objective.{key}, or set another pooling."
            )
        widths, key, limit = self.matryoshka, "model.hidden_size", model.hidden_size
        if self.is_late:
            key, limit = "objective.token_vectors", self.token_vectors
        if other := [width for width in widths if not 1 <= width < limit]:
            yield (
                f"objective.matryoshka={list(widths)} with {key}={limit}: {other[0]} is not below {limit}, the full "
                "width, which is trained anyway. Remove it."
            )
        if len({*widths}) < len(widths):
            yield f"objective.matryoshka={list(widths)} names a width twice. Remove one."

    def mistakes_after(self, own: ObjectiveConfig) -> Iterator[str]:
        """See `ObjectiveConfig`: a learnt temperature starts once in a run."""
        yield from super().mistakes_after(own)
        first = self.first_temperature
        if self.learn_temperature and isinstance(own, ContrastiveConfig) and first != own.first_temperature:
            yield (
                f"objective.temperature={first:g}, and objective.learn_temperature=true starts at "
                f"{own.first_temperature:g}: a phase cannot set a learnt value. Remove it from the phase, or set "
                "objective.learn_temperature=false."
            )
