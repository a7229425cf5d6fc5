"""Training objectives: keys of every objective, and a dataclass for each.

Another objective is a dataclass here, a row in schema.VARIANTS and a file in objectives/. Properties give the planner
the facts that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from omegaconf import MISSING

from modernbert_train.config.knob import knob
from modernbert_train.config.model import ModelConfig

# visible tokens: all: both sides; causal: the token and those before it; given: defined by the objective for each token
Order = Literal["all", "causal", "given"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Keys of every objective."""

    name: str = MISSING
    # weight of the squared log-partition added to the loss; the release used none
    z_loss: float = knob(0.0, low=0)

    @property
    def title(self) -> tuple[str, str | None]:
        """The usual name, and the arXiv number of the paper."""
        return f"the objective {self.name}", None

    @property
    def summary(self) -> str:
        """The objective in a few words, for one line of output."""
        return f"objective {self.name}"

    @property
    def details(self) -> str | None:
        """The treatment of the text in words, for a model card; None: the title is enough."""
        return None

    @property
    def is_labelled(self) -> bool:
        """True if it is trained on texts with labels."""
        return bool(self.label_scheme)

    @property
    def reads_labels(self) -> bool:
        """True if it reads `labels.npy` for each document: classes, tags, answers, hashes of pairs.

        Such a document must be whole: the label of a part is unknown.
        """
        return self.is_labelled or self.compares

    @property
    def reads_words(self) -> bool:
        """True if it needs a segmenter's words of the texts."""
        return False

    @property
    def label_scheme(self) -> tuple[str, ...]:
        """The meaning of the classifier's logits: the kind of task, then the classes in order; empty: no classifier."""
        return ()

    @property
    def masking(self) -> str | None:
        """Name of the masking, which chooses the predicted tokens; None: no masking."""
        return None

    @property
    def predict_from(self) -> Literal["itself", "before"]:
        """The position where a masked token is predicted: its own, or the one before it."""
        return "itself"

    @property
    def pooling(self) -> str | None:
        """The pooling of a text's hidden states; None: texts are not pooled."""
        return None

    @property
    def segments(self) -> int:
        """Number of token types for a pair."""
        return 1

    @property
    def sequence_tokens(self) -> int | None:
        """Longest sequence, where a document holds several; None: a sequence may fill its row."""
        return None

    def has_shorter_sequences(self, max_tokens: int) -> bool:
        """Return True if no sequence exceeds this number of tokens, even if a document of several sequences does."""
        return self.sequence_tokens is not None and self.sequence_tokens <= max_tokens

    @property
    def max_tokens(self) -> int | None:
        """Longest text that the encoder was trained on; None: the rows of the last phase."""
        return None

    @property
    def compares(self) -> bool:
        """True if the loss of a text depends on all others of the global batch. Then every text is encoded twice: for
        all embeddings, then for the backward pass."""
        return "vectors" in self.heads

    @property
    def named_teacher(self) -> str | None:
        """The name of the model that is the teacher; None: no teacher."""
        return None

    @property
    def projected_width(self) -> int | None:
        """Width of a projection of the hidden states, such as to a teacher's width; None: no projection."""
        return None

    @property
    def trains_encoder(self) -> bool:
        """True if the encoder's weights change."""
        return True

    special_tokens: ClassVar[int] = 2
    """Special tokens of each chunk of text: [CLS] before it, [SEP] after it, and others."""

    @property
    def terms(self) -> Mapping[str, float]:
        """Loss term -> weight; the first is a mean over predicted tokens. One term has the objective's name."""
        return {self.name: 1.0}

    @property
    def counts_tokens(self) -> bool:
        """True if the first term is a mean over the tokens of text, predicted or not."""
        return False

    @property
    def predicted_share(self) -> float:
        """Share of the tokens of text that are predicted."""
        raise NotImplementedError

    @property
    def max_predicted_share(self) -> float:
        """The largest share of a sequence that is predicted, at any moment of a phase."""
        return self.predicted_share

    order: ClassVar[Order] = "all"
    """Tokens of the same sequence that a token attends to."""

    @property
    def plain_order(self) -> Order:
        """The order for evaluations and exports, which only read texts; "all" if the objective draws orders, as XLNet
        is fine-tuned."""
        return "all" if self.order == "given" else self.order

    @property
    def query_share(self) -> float:
        """Query tokens (see `Given` of batch.py) per token of text; in a given order, one per predicted token."""
        return self.predicted_share if self.order == "given" else 0.0

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

    token_head_key: ClassVar[str | None] = None
    """Key that adds the head for tokens to `idle_heads`; None: there is no such key."""

    def uses_of_heads(self, sequence_tokens: float) -> dict[str, float]:
        """Return how often each head is applied per token that is not padding, in sequences of this mean length."""
        return {"tokens": self.predicted_share * (1 - self.special_tokens / sequence_tokens)}

    def generator_of(self, model: ModelConfig) -> ModelConfig | None:
        """Return the architecture of a second encoder, derived from the model and trained with it; None: no second one.

        Phased keys of the model hold for it too.
        """
        return None

    @property
    def forward_passes(self) -> int:
        """Forward passes of each microbatch in training; one backward pass follows."""
        return 2 if self.compares else 1

    def encoded_tokens(self, sequence_tokens: float) -> float:
        """Return the tokens that the encoder reads per token that is not padding, in sequences of this mean length."""
        return 1 + self.query_share * (1 - self.special_tokens / sequence_tokens)

    def at(self, done: float) -> Self:
        """Return the objective at a moment of a phase, with this share done. The shapes of targets stay the same."""
        return self

    def for_validation(self) -> ObjectiveConfig:
        """Return the objective for held-out text, independent of training settings, so that runs can be compared."""
        return self

    def mistakes(self, model: ModelConfig) -> Iterator[str]:
        """Yield a message for every impossible combination of these keys, among themselves and with the model's.

        `check` calls it for the run and for each phase, once every number of both is within its bounds.
        """
        yield from ()

    def mistakes_after(self, own: ObjectiveConfig) -> Iterator[str]:
        """Yield a message for each key of a phase's objective that must equal the run's, because the model is built for
        it."""
        if self.z_loss != own.z_loss:
            yield (
                f"objective.z_loss={self.z_loss}: must be objective.z_loss={own.z_loss} of the run, which the model is "
                "built with. Set the same."
            )


@dataclass(frozen=True)
class Masking:
    """Properties of a masking, which checks and array shapes depend on; objectives/maskings.py has its function.

    Attributes:
        counts_exactly: True if a sequence never gets more than its share.
        takes_special: True if [CLS] and [SEP] are predicted too, padding is replaced, and random tokens may be special.
        whole_words: True if it chooses whole words, so a short sequence may get less than its share.
    """

    counts_exactly: bool = True
    takes_special: bool = False
    whole_words: bool = False


MASKINGS = {  # another one is a row here, and a function in objectives/maskings.py
    "exact": Masking(),
    "bernoulli": Masking(counts_exactly=False),
    "reference": Masking(counts_exactly=False, takes_special=True),
    "ngram": Masking(whole_words=True),
}
if TYPE_CHECKING:
    MaskingName = str
else:
    MaskingName = Literal[tuple(MASKINGS)]


def maskings(*, takes_special: bool = False, whole_words: bool | None = None) -> str:
    """Return the names of the maskings with these properties, for a remedy; whole_words=None: with either."""
    names = [name for name, each in MASKINGS.items()
             if each.takes_special == takes_special and whole_words in (None, each.whole_words)]  # fmt: skip
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


@dataclass(frozen=True, kw_only=True)
class MaskedLmConfig(ObjectiveConfig):
    """Masked-language modelling."""

    name: str = "mlm"
    # choice of tokens in training; ngram: whole words, up to three together; see objectives/mlm.py
    masking: MaskingName = "exact"
    # words for ngram: the tokenizer's pieces, or a segmenter's, stored by `prepare` (sources.NAME.words_field)
    words: Literal["tokenizer", "segmenter"] = "tokenizer"
    # share of the eligible tokens that are predicted, in training
    mask_rate: float = knob(
        0.3, above=0, high=1, why="as a share of the tokens; the published recipe uses 0.3", phased=True
    )
    # share at the end of the phase, reached along mask_curve; None: mask_rate throughout
    mask_rate_end: float | None = knob(None, above=0, high=1, phased=True)
    mask_curve: Literal["linear", "cosine"] = knob("linear", phased=True)
    # each sequence draws its own share, uniformly, from this much below the share to this much above it
    mask_spread: float = knob(0.0, low=0, high=0.5, phased=True)
    # weight of a prediction in the loss. 1/rate: one over its sequence's rate, at least 0.001, and the sum is divided
    # by all tokens of text, predicted or not. With mask_rate and mask_spread 0.5, masking bernoulli and
    # mask_token_share 1 this is the bound of masked diffusion (LLaDA, arXiv 2502.09992)
    mask_weight: Literal["none", "1/rate"] = knob("none", phased=True)
    # mask rate in validation, whose masking is always exact and never changes
    eval_mask_rate: float = knob(0.15, above=0, high=1, why="as a share of the tokens; the published recipe uses 0.15")
    # where a token is predicted: at its own position, or at the position of the token before it, as in a decoder that
    # is turned into an encoder (arXiv 2404.05961)
    predict_from: Literal["itself", "before"] = knob("itself", phased=True)
    mask_token_share: float = knob(0.8, low=0)  # share of the predicted tokens that are replaced by [MASK]
    # share of the predicted tokens that are replaced by a random token; the rest stay
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
        unchanged_share = 1 - self.mask_token_share - self.random_token_share
        return (
            f"{self.masking} masking, rate {self._rate};\n"
            f"  of the predicted tokens {self.mask_token_share:.0%} become `[MASK]`,\n"
            f"  {self.random_token_share:.0%} a random token, {unchanged_share:.0%} stay"
            + ("; predicted at the position of the token before" if self.predict_from == "before" else "")
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
    def max_predicted_share(self) -> float:
        """See `ObjectiveConfig`."""
        return min(1.0, max(self.mask_rate, self.mask_rate_end or 0.0) + self.mask_spread)

    def at(self, done: float) -> Self:
        """See `ObjectiveConfig`; rounded to six digits, so that every machine's cosine gives the same masks.

        `mask_rate_end` of the copy is the larger of both ends, so that `max_predicted_share` stays the same.
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
                "shares of sequences must be between 0 and 1. Set a smaller one."
            )
        masking = MASKINGS[self.masking]
        if self.reads_words and not masking.whole_words:
            words = maskings(whole_words=True)
            yield (
                f"objective.words=segmenter with {here}, objective.masking={self.masking}: only masking={words} masks "
                f"whole words. Set objective.words=tokenizer, or objective.masking={words}."
            )
        if self.counts_tokens and masking.whole_words:
            yield (
                f"objective.mask_weight=1/rate with objective.masking={self.masking}: in a short sequence whole words "
                "mask fewer tokens than the rate, so the weights would not add up. Set masking to "
                f"{maskings(whole_words=False)}, or mask_weight=none."
            )
        alone = self.heads == ("tokens",) and not masking.takes_special and not isinstance(self, TranslationConfig)
        if self.predict_from == "before" and not alone:
            yield (
                f"objective.predict_from=before with {here}, objective.masking={self.masking}: this objective predicts "
                "a token without one before it, or reads each at its own position. Set objective.predict_from=itself, "
                "or objective={name: mlm, masking: exact}."
            )
        if self.mask_token_share + self.random_token_share > 1:
            yield (
                f"objective.mask_token_share={self.mask_token_share} and objective.random_token_share="
                f"{self.random_token_share}: both are shares of the predicted tokens. Their sum must be between 0 "
                "and 1."
            )

    def for_validation(self) -> MaskedLmConfig:
        fixed: dict[str, Any] = {"masking": "exact", "mask_rate_end": None, "mask_spread": 0.0, "mask_weight": "none"}
        return replace(self, mask_rate=self.eval_mask_rate, words="tokenizer", **fixed)


@dataclass(frozen=True, kw_only=True)
class TranslationConfig(MaskedLmConfig):
    """Translation language modelling: masked tokens of a text and its translation, where each sees both.

    Documents are pairs, as `prepare` writes them with a section `pairs`; others are masked as in mlm.
    """

    name: str = "tlm"
    # positions of the translation restart at 0, as in XLM; otherwise they continue. A program that feeds pairs to the
    # exported model must pass such position_ids
    reset_positions: bool = knob(False, phased=True)

    title = "translation language modelling", "1901.07291"

    @property
    def details(self) -> str:
        return super().details + ("; positions of a translation start at 0" if self.reset_positions else "")

    def mistakes(self, model: ModelConfig) -> Iterator[str]:
        """See `ObjectiveConfig`."""
        if self.reads_words:
            yield (
                f"objective.words=segmenter with objective.name=tlm, objective.masking={self.masking}: pairs have no "
                "words. Set objective.words=tokenizer."
            )
        else:
            yield from super().mistakes(model)
        if MASKINGS[self.masking].takes_special:
            yield (
                f"objective.name=tlm with objective.masking={self.masking}, which masks special tokens too. Set "
                f"masking to {maskings()}."
            )


@dataclass(frozen=True, kw_only=True)
class CausalLmConfig(ObjectiveConfig):
    """Causal language modelling: every token is predicted from those before it and sees none after it.

    Exported as a decoder. As a phase it may precede masked-language modelling in one run (arXiv 2507.00994).
    """

    name: str = "causal"
    predicted_share = 1.0

    title = "causal language modelling", None

    order = "causal"

    def uses_of_heads(self, sequence_tokens: float) -> dict[str, float]:
        """See `ObjectiveConfig`: the text and its [SEP] are predicted, [CLS] is not."""
        return {"tokens": 1 - 1 / sequence_tokens}


@dataclass(frozen=True, kw_only=True)
class PermutationLmConfig(ObjectiveConfig):
    """Permutation language modelling (XLNet, arXiv 1906.08237, section 2.2), with any encoder that has positions.

    Spans of tokens are predicted token by token in a random order, each from all unpredicted tokens and from those
    before it in that order. No token is replaced by [MASK]; see objectives/permutation.py.
    """

    name: str = "permutation"
    # K: one token in K is predicted, and a span of n tokens has a context of K n; XLNet: 6
    context_ratio: int = knob(6, low=1, high=10)
    # longest span in tokens; length n has a probability proportional to 1/n; XLNet: 5
    longest_span: int = knob(5, low=1, high=50)

    title = "permutation language modelling", "1906.08237"

    @property
    def predicted_share(self) -> float:
        return 1 / self.context_ratio

    order = "given"


@dataclass(frozen=True, kw_only=True)
class SentenceOrderConfig(MaskedLmConfig):
    """Masked-language modelling and the order of two halves of a text (ALBERT, arXiv 1909.11942, section 3.1)."""

    name: str = "sop"
    swapped_share: float = knob(0.5, above=0, below=1)  # share of the pairs with the second half first
    order_weight: float = knob(1.0, above=0)  # weight of the order's loss; the masked tokens' is 1
    special_tokens = 3

    title = "masked-language modelling and sentence order", "1909.11942"

    @property
    def details(self) -> str:
        return super().details + (
            f"; in {self.swapped_share:.0%} of the texts the two halves\n"
            f"  are swapped, which the pair head predicts, with weight {self.order_weight:g}"
        )

    @property
    def terms(self) -> Mapping[str, float]:
        return {"mlm": 1.0, "sop": self.order_weight}

    heads = ("tokens", "pair")

    def uses_of_heads(self, sequence_tokens: float) -> dict[str, float]:
        """See `ObjectiveConfig`: every sequence is a pair, except texts of one token."""
        return {**super().uses_of_heads(sequence_tokens), "pair": 1 / sequence_tokens}

    def mistakes(self, model: ModelConfig) -> Iterator[str]:
        """See `ObjectiveConfig`; an encoder without token types separates pairs by [SEP]."""
        yield from super().mistakes(model)
        if model.segments == 1:
            yield (
                f"objective.name={self.name} with model.segments=1: it makes pairs, whose halves are two segments. Set "
                "model.segments=2, or objective.name=mlm."
            )
