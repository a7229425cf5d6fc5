"""Training objectives: keys that every objective has, and a dataclass for each.

Another objective is one more here, a row in schema.VARIANTS and a file in objectives/. Properties say what planning has
to know of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from omegaconf import MISSING

from modernbert_train.config.knob import knob
from modernbert_train.config.model import ModelConfig

# a token sees: all, both sides; causal, itself and what stands before it; given, what the objective says of each token
Order = Literal["all", "causal", "given"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Keys that every objective has."""

    name: str = MISSING
    # weight of the squared log-partition added to the loss; the release used none
    z_loss: float = knob(0.0, low=0)

    @property
    def title(self) -> tuple[str, str | None]:
        """The usual name, and the arXiv number of the paper."""
        return f"the objective {self.name}", None

    @property
    def summary(self) -> str:
        """In a few words, for a line on the screen."""
        return f"objective {self.name}"

    @property
    def details(self) -> str | None:
        """The treatment of the text in words, for a model card; None: the title is enough."""
        return None

    @property
    def is_labelled(self) -> bool:
        """True if it is trained on texts with labels."""
        return bool(self.told_classes)

    @property
    def reads_labels(self) -> bool:
        """True if it reads what `labels.npy` says of each document: classes, tags, answers, hashes of pairs.

        Such a document must be whole: the label of a part is unknown.
        """
        return self.is_labelled or self.compares

    @property
    def reads_words(self) -> bool:
        """Whether it needs the words that a segmenter found in the texts."""
        return False

    @property
    def told_classes(self) -> tuple[str, ...]:
        """The meaning of the classifier's logits: the kind of task, then the classes in order; empty: no classifier."""
        return ()

    @property
    def masking(self) -> str | None:
        """How the tokens that are predicted are chosen; None: none are masked."""
        return None

    @property
    def predict_from(self) -> Literal["itself", "before"]:
        """The position where a masked token is predicted: its own, or the one before it."""
        return "itself"

    @property
    def pooling(self) -> str | None:
        """The pooling of a text's hidden states; None: a text has no vector."""
        return None

    @property
    def segments(self) -> int:
        """Token types that a pair's texts have."""
        return 1

    @property
    def max_tokens(self) -> int | None:
        """Longest text that the encoder was trained on; None: the rows of the last phase."""
        return None

    @property
    def compares(self) -> bool:
        """True if the loss of a text depends on all others of the global batch: every text is encoded twice, first for
        the vectors of all, then to go backward."""
        return "vectors" in self.heads

    @property
    def named_teacher(self) -> str | None:
        """The model whose outputs are trained towards, as it is named; None: no teacher."""
        return None

    @property
    def projected_width(self) -> int | None:
        """Columns that a matrix takes hidden states to, such as a teacher's width; None: there is no such matrix."""
        return None

    @property
    def trains_encoder(self) -> bool:
        """Whether the encoder's weights change."""
        return True

    special_tokens: ClassVar[int] = 2
    """That each chunk of text gets: [CLS] before it, [SEP] after it, and others."""

    @property
    def terms(self) -> Mapping[str, float]:
        """Loss term -> weight; the first is a mean over predicted tokens."""
        raise NotImplementedError

    @property
    def counts_tokens(self) -> bool:
        """Whether the first term is a mean over the tokens of text, predicted or not."""
        return False

    @property
    def predicted_share(self) -> float:
        """Of the tokens of text, how many are predicted."""
        raise NotImplementedError

    @property
    def most_predicted(self) -> float:
        """The same of the sequence that has most, at any moment of a phase."""
        return self.predicted_share

    order: ClassVar[Order] = "all"
    """Tokens of the same sequence that a token attends to."""

    @property
    def plain_order(self) -> Order:
        """The order for texts that are only read, by evaluations and in an export; "all" where the objective draws an
        order, as XLNet is fine-tuned."""
        return "all" if self.order == "given" else self.order

    @property
    def query_share(self) -> float:
        """Query tokens, see `Given` of batch.py, for each token of text."""
        return 0.0

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads on the encoder, one for each of `terms`. A run's phases may change between objectives with the same
        heads, or to an objective with only the `idle_heads` of the run's."""
        return ("tokens",)

    @property
    def idle_heads(self) -> tuple[str, ...]:
        """Further heads, for phases of other objectives. A phase computes nothing for a head that its objective lacks,
        nor for modules that only this head needs: they get no gradient, and no step of the optimizer."""
        return ()

    def uses_of_heads(self, sequence_tokens: float) -> dict[str, float]:
        """How often each head is applied for each token that is not padding, in sequences of this mean length."""
        return {"tokens": self.predicted_share * (1 - self.special_tokens / sequence_tokens)}

    def generator_of(self, model: ModelConfig) -> ModelConfig | None:
        """Return the architecture of a second encoder, derived from the model and trained with it; None: no second one.

        Phased keys of the model hold for it too.
        """
        return None

    @property
    def forward_passes(self) -> int:
        """Of each microbatch, in training; one backward pass follows."""
        return 2 if self.compares else 1

    def encoded_tokens(self, sequence_tokens: float) -> float:
        """Tokens that the encoder reads for each that is not padding, in sequences of this mean length."""
        return 1 + self.query_share * (1 - self.special_tokens / sequence_tokens)

    def at(self, done: float) -> Self:
        """The same at a moment of a phase, of which this share is done. Shapes of targets do not change on the way."""
        return self

    def for_validation(self) -> ObjectiveConfig:
        """Return the objective for held-out text, the same for every training, so that figures of all runs compare."""
        return self

    def mistakes(self, model: ModelConfig) -> Iterator[str]:
        """Yield a message for every combination of these keys, and of them with the model's, that cannot be.

        `check` calls it for the run and for each phase, once every number of both is within its bounds.
        """
        yield from ()

    def mistakes_after(self, own: ObjectiveConfig) -> Iterator[str]:
        """Yield a message for each key of a phase's objective that must be as in the run's own, for which the model is
        built."""
        if self.z_loss != own.z_loss:
            yield (
                f"objective.z_loss={self.z_loss}: must be objective.z_loss={own.z_loss} of the run, which the model is "
                "built with. Set the same."
            )


@dataclass(frozen=True, kw_only=True)
class MaskedLmConfig(ObjectiveConfig):
    """Masked-language modelling."""

    name: str = "mlm"
    # which tokens in training; ngram: whole words, up to three together; see objectives/mlm.py
    masking: Literal["exact", "bernoulli", "reference", "ngram"] = "exact"
    # whose words with ngram: the tokenizer's pieces, or a segmenter's, stored by `prepare` (sources.NAME.words_field)
    words: Literal["tokenizer", "segmenter"] = "tokenizer"
    # share of the tokens that may be predicted that are, in training
    mask_rate: float = knob(
        0.3, above=0, high=1, why="as a share of the tokens; the published recipe uses 0.3", phased=True
    )
    # the share at the end of the phase, which it comes to by mask_curve; None: mask_rate throughout
    mask_rate_end: float | None = knob(None, above=0, high=1, phased=True)
    mask_curve: Literal["linear", "cosine"] = knob("linear", phased=True)
    # each sequence has a share of its own, drawn from so much below the share to so much above it, all alike likely
    mask_spread: float = knob(0.0, low=0, high=0.5, phased=True)
    # of a prediction in the loss. 1/rate: one over the rate of its sequence, which is at least 0.001, and the sum is
    # divided by the tokens of text, predicted or not. With mask_rate and mask_spread 0.5, masking bernoulli and
    # mask_token_share 1 that is the bound of masked diffusion (LLaDA, arXiv 2502.09992)
    mask_weight: Literal["none", "1/rate"] = knob("none", phased=True)
    # the same in validation, whose masking is always exact and never changes
    eval_mask_rate: float = knob(0.15, above=0, high=1, why="as a share of the tokens; the published recipe uses 0.15")
    # where a token is predicted: in its own place, or in that of the token before it, as a decoder that is made an
    # encoder has learnt to (arXiv 2404.05961)
    predict_from: Literal["itself", "before"] = knob("itself", phased=True)
    mask_token_share: float = knob(0.8, low=0)  # of the predicted positions: replaced by [MASK]
    # of the predicted positions: replaced by a random token; the rest stay
    random_token_share: float = knob(0.1, low=0)

    title = "masked-language modelling", None

    @property
    def summary(self) -> str:
        return f"masking {self.masking}, rate {self._rate}"

    @property
    def reads_words(self) -> bool:
        """See `ObjectiveConfig`."""
        return self.words == "segmenter"

    @property
    def _rate(self) -> str:
        end = "" if self.mask_rate_end is None else f" to {self.mask_rate_end:.0%} ({self.mask_curve})"
        return f"{self.mask_rate:.0%}{end}" + (f", {self.mask_spread:.0%} more or less" if self.mask_spread else "")

    @property
    def details(self) -> str:
        rest = 1 - self.mask_token_share - self.random_token_share
        return (
            f"{self.masking} masking, rate {self._rate};\n"
            f"  of the predicted tokens {self.mask_token_share:.0%} become `[MASK]`,\n"
            f"  {self.random_token_share:.0%} a random token, {rest:.0%} stay"
            + ("; predicted in the place of the token before" if self.predict_from == "before" else "")
            + ("; each weighs 1/rate" if self.counts_tokens else "")
            + ("; words are a segmenter's" if self.reads_words else "")
        )

    @property
    def terms(self) -> Mapping[str, float]:
        return {"mlm": 1.0}

    @property
    def counts_tokens(self) -> bool:
        """See `ObjectiveConfig`."""
        return self.mask_weight == "1/rate"

    @property
    def predicted_share(self) -> float:
        """See `ObjectiveConfig`; the mean over a phase."""
        return self.mask_rate if self.mask_rate_end is None else (self.mask_rate + self.mask_rate_end) / 2

    @property
    def most_predicted(self) -> float:
        """See `ObjectiveConfig`."""
        return min(1.0, max(self.mask_rate, self.mask_rate_end or 0.0) + self.mask_spread)

    def at(self, done: float) -> Self:
        """See `ObjectiveConfig`; to six digits, so that no machine's cosine makes another mask.

        `mask_rate_end` of the copy is the larger of both ends, so that `most_predicted` is the same throughout.
        """
        if self.mask_rate_end is None:
            return self
        way = done if self.mask_curve == "linear" else (1 - math.cos(math.pi * done)) / 2
        rate = round(self.mask_rate + way * (self.mask_rate_end - self.mask_rate), 6)
        return replace(self, mask_rate=rate, mask_rate_end=max(self.mask_rate, self.mask_rate_end))

    def mistakes(self, model: ModelConfig) -> Iterator[str]:
        """See `ObjectiveConfig`."""
        here = f"objective.name={self.name}"
        ends = (self.mask_rate, self.mask_rate if self.mask_rate_end is None else self.mask_rate_end)
        if self.mask_spread > min(ends) or max(ends) + self.mask_spread > 1:
            yield (
                f"objective.mask_spread={self.mask_spread:g} with a mask_rate of {min(ends):g} to {max(ends):g}: "
                "shares of sequences must lie between 0 and 1. Set a smaller one."
            )
        if self.reads_words and self.masking != "ngram":
            yield (
                f"objective.words=segmenter with {here}, objective.masking={self.masking}: only masking=ngram masks "
                "whole words. Set objective.words=tokenizer, or objective.masking=ngram."
            )
        if self.counts_tokens and self.masking == "ngram":
            yield (
                "objective.mask_weight=1/rate with objective.masking=ngram: whole words come to less than the rate of "
                "a short sequence, so the weights would not add up to its tokens. Set masking to exact or bernoulli, "
                "or mask_weight=none."
            )
        alone = self.heads == ("tokens",) and self.masking != "reference" and not isinstance(self, TranslationConfig)
        if self.predict_from == "before" and not alone:
            yield (
                f"objective.predict_from=before with {here}, objective.masking={self.masking}: there a token without "
                "one before it is predicted, or each in its place is read again. Set objective.predict_from=itself, or "
                "objective={name: mlm, masking: exact}."
            )
        if self.mask_token_share + self.random_token_share > 1:
            yield (
                f"objective.mask_token_share={self.mask_token_share} and objective.random_token_share="
                f"{self.random_token_share}: both are shares of the predicted tokens. Their sum must lie between 0 "
                "and 1."
            )

    def for_validation(self) -> MaskedLmConfig:
        fixed: dict[str, Any] = {"masking": "exact", "mask_rate_end": None, "mask_spread": 0.0, "mask_weight": "none"}
        return replace(self, mask_rate=self.eval_mask_rate, words="tokenizer", **fixed)


@dataclass(frozen=True, kw_only=True)
class TranslationConfig(MaskedLmConfig):
    """Translation language modelling: masked tokens of a text and of its translation, each of which sees both.

    Documents are pairs, as `prepare` writes them with a section `pairs`; others are masked as by mlm.
    """

    name: str = "tlm"
    # positions of the translation begin at 0 again, as in XLM; otherwise they continue. A program that reads pairs with
    # the exported model must give it such position_ids
    reset_positions: bool = knob(False, phased=True)

    title = "translation language modelling", "1901.07291"

    @property
    def details(self) -> str:
        return super().details + ("; positions of a translation begin at 0" if self.reset_positions else "")

    def mistakes(self, model: ModelConfig) -> Iterator[str]:
        """See `ObjectiveConfig`."""
        if self.reads_words:
            yield (
                f"objective.words=segmenter with objective.name=tlm, objective.masking={self.masking}: pairs have no "
                "words. Set objective.words=tokenizer."
            )
        else:
            yield from super().mistakes(model)
        if self.masking == "reference":
            yield (
                "objective.name=tlm with objective.masking=reference, which masks special tokens too. Set masking to "
                "exact, bernoulli or ngram."
            )


@dataclass(frozen=True, kw_only=True)
class CausalLmConfig(ObjectiveConfig):
    """Causal language modelling: every token is predicted from those before it, and nothing sees what follows it.

    Exported as a decoder. As a phase it may come before masked-language modelling in one run (arXiv 2507.00994).
    """

    name: str = "causal"
    predicted_share = 1.0

    title = "causal language modelling", None

    @property
    def terms(self) -> Mapping[str, float]:
        return {"causal": 1.0}

    order = "causal"

    def uses_of_heads(self, sequence_tokens: float) -> dict[str, float]:
        """See `ObjectiveConfig`: the text and its [SEP] are predicted, [CLS] is not."""
        return {"tokens": 1 - 1 / sequence_tokens}


@dataclass(frozen=True, kw_only=True)
class PermutationLmConfig(ObjectiveConfig):
    """Permutation language modelling (XLNet, arXiv 1906.08237, section 2.2), with any encoder that has positions.

    Spans of tokens are predicted one token after the other in an order of their own, each from all tokens that are not
    predicted and from those before it in that order. Nothing is replaced by [MASK]; see objectives/permutation.py.
    """

    name: str = "permutation"
    # K: one token in so many is predicted, and a span of n tokens is in a context of K n; XLNet: 6
    context_ratio: int = knob(6, low=1, high=10)
    # longest span in tokens; of length n with a probability that falls as 1/n; XLNet: 5
    longest_span: int = knob(5, low=1, high=50)

    title = "permutation language modelling", "1906.08237"

    @property
    def terms(self) -> Mapping[str, float]:
        return {"permutation": 1.0}

    @property
    def predicted_share(self) -> float:
        return 1 / self.context_ratio

    order = "given"

    @property
    def query_share(self) -> float:
        return self.predicted_share


@dataclass(frozen=True, kw_only=True)
class SentenceOrderConfig(MaskedLmConfig):
    """Masked-language modelling and the order of two halves of a text (ALBERT, arXiv 1909.11942, section 3.1)."""

    name: str = "sop"
    swapped_share: float = knob(0.5, above=0, below=1)  # of the pairs: the second half comes first
    order_weight: float = knob(1.0, above=0)  # of the order's loss beside that of the masked tokens
    special_tokens = 3

    title = "masked-language modelling and sentence order", "1909.11942"

    @property
    def details(self) -> str:
        return super().details + (
            f"; the two halves of {self.swapped_share:.0%} of the texts\n"
            f"  change places, which the pair head is to tell, with weight {self.order_weight:g}"
        )

    @property
    def terms(self) -> Mapping[str, float]:
        return {"mlm": 1.0, "sop": self.order_weight}

    heads = ("tokens", "pair")

    def uses_of_heads(self, sequence_tokens: float) -> dict[str, float]:
        """See `ObjectiveConfig`: every sequence is a pair, but for texts of one token."""
        return {**super().uses_of_heads(sequence_tokens), "pair": 1 / sequence_tokens}

    def mistakes(self, model: ModelConfig) -> Iterator[str]:
        """See `ObjectiveConfig`; an encoder without token types reads pairs by [SEP] alone."""
        yield from super().mistakes(model)
        if model.segments == 1:
            yield (
                f"objective.name={self.name} with model.segments=1: it makes pairs, whose halves are two segments. Set "
                "model.segments=2, or objective.name=mlm."
            )
