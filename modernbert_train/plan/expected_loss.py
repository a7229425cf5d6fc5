"""Expected held-out loss for a number of parameters and tokens, by a rule fitted to runs of the quickstart's recipe.

    loss / unigram loss = FLOOR + size / parameters^ALPHA + data / tokens^beta      (both counted in millions)

This is equation 2 of Hoffmann et al. 2022 (arXiv 2203.15556), relative to the unigram loss of the text, so it applies
to texts and vocabularies of other entropy. Repeated text counts less and less: tokens are the effective ones of
Muennighoff et al. 2023 (arXiv 2305.16264, section 3.1), with their constant. The runs are in
`benchmarks/expected_loss.json`; `python -m benchmarks.expected_loss` makes them, and computes the constants of RULES.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modernbert_train.clock import Clock

# Runs this small determine neither the floor nor ALPHA: any floor of 0 to 0.2 and ALPHA of 0.3 to 0.8 fit as well.
# ALPHA is Hoffmann's; with this floor and an assumed unigram loss of 7.0 the rule predicts 1.34 nats for the
# RoBERTa-base that was trained on a billion tokens (its card, nyu-mll/roberta-base-1B-3: perplexity 3.84, 1.345 nats).
FLOOR, ALPHA = 0.16, 0.34
REPEATS = 15.39  # so many repeats are worth 1 - 1/e as many passes of new text; R*_D of Muennighoff et al.
# Deviation of a loss measured on 20,000 held-out tokens, as a share of the unigram loss; falls with the square root of
# the number of tokens. Compared with the table's 50,000 tokens, the first 20,000 of its two texts were harder by 0.05
# and easier by 0.003, as shares of the unigram loss.
SAMPLE = 0.05
PER_DOUBLING = 0.01  # growth of the deviation for every doubling beyond the runs of the table
# of the table's runs: ranges of parameters without embeddings and of tokens; tokens of a batch
PARAMETERS, TOKENS, BATCH = (148_000, 2_242_000), (401_000, 1_640_000), 2048
MAX_HALF_RANGE = 0.25  # half a range, as a share of the unigram loss, above which no loss is predicted


@dataclass(frozen=True)
class Expected:
    """Held-out loss in nats per predicted token.

    Attributes:
        loss: predicted by the rule.
        low, high: nine of ten runs end between them.
        extrapolates: how far the rule is extrapolated beyond its runs, as a clause; None within them.
        is_known: False if the range is too wide to say anything.
    """

    loss: float
    low: float
    high: float
    extrapolates: str | None
    is_known: bool = True

    def __str__(self) -> str:
        """Format for people, in nats: 'expect 3.9, 3.8 to 4.1'."""
        if not self.is_known:
            return f"unknown ({self.extrapolates})"
        text = f"{self.loss:.2f} expected, {self.low:.2f} to {self.high:.2f}"
        return text if self.extrapolates is None else f"{text} ({self.extrapolates})"


@dataclass(frozen=True)
class Rule:
    """The rule for one optimizer.

    Attributes:
        size, data, beta: constants of the rule.
        residual: share of the unigram loss; nine of ten runs left out of the fit deviate less.
    """

    size: float
    data: float
    beta: float
    residual: float

    def share(self, parameters: float, tokens: float) -> float:
        """Return held-out loss / unigram loss for effective tokens; at most 1."""
        return min(1.0, FLOOR + self.size / (parameters / 1e6) ** ALPHA + self.data / (tokens / 1e6) ** self.beta)

    def expect(
        self,
        parameters: float,
        tokens: float,
        *,
        unigram_loss: float,
        unique_tokens: float | None = None,
        batch_tokens: float = BATCH,
        held_out_tokens: float = 200_000,
    ) -> Expected:
        """Predict the loss at the end of a run whose learning rate has decayed.

        Args:
            parameters: without the embedding table: `Parameters.active`.
            tokens: trained, repeats included.
            unigram_loss: loss of the held-out text under the training text's token frequencies, in nats per token.
            unique_tokens: tokens of the training text; None: no text is repeated.
            batch_tokens: tokens of the full global batch. In batches larger than the table's a token may be worth less;
                the upper end then assumes as many steps of the table's batch.
            held_out_tokens: measured tokens: a short text is easier or harder by chance.
        """
        useful = effective_tokens(tokens, tokens if unique_tokens is None else unique_tokens)
        share = self.share(parameters, useful)
        highest_share = self.share(parameters, useful * min(1.0, BATCH / batch_tokens))
        spread = math.hypot(self.residual, SAMPLE * math.sqrt(20_000 / held_out_tokens))
        spread += PER_DOUBLING * (_doublings(parameters, PARAMETERS) + _doublings(useful, TOKENS))
        low, high = max(0.0, share - spread), min(1.0, highest_share + spread)
        beyond = [
            *_beyond(parameters, PARAMETERS, "parameters"),
            *_beyond(tokens, TOKENS, "tokens"),
            *([f"{_times(batch_tokens / BATCH)} larger batches"] if batch_tokens > 2 * BATCH else []),
        ]
        return Expected(
            loss=unigram_loss * share,
            low=unigram_loss * low,
            high=unigram_loss * high,
            extrapolates=" and ".join(beyond) + " than any measured run" if beyond else None,
            is_known=highest_share - share + 2 * spread <= 2 * MAX_HALF_RANGE,
        )

    def behind(
        self,
        loss: float,
        parameters: float,
        tokens: float,
        steps: int,
        *,
        unigram_loss: float,
        unique_tokens: float,
        held_out_tokens: float,
    ) -> str | None:
        """Return a message if a run is far behind at one of its validations; None if it is not, or without a verdict.

        While the learning rate is high, the table's runs are about as good as a run that ends after as many tokens, so
        its range applies to them: at most 0.05 of the unigram loss worse, mostly better. A run is behind if its loss is
        twice as far above the rule as the range reaches. Further than two doublings from the table there is no verdict.

        Args:
            loss: held-out loss, in nats per predicted token.
            parameters, unigram_loss, unique_tokens, held_out_tokens: see `expect`.
            tokens, steps: trained so far.
        """
        batch = max(BATCH, tokens / steps)
        useful = effective_tokens(tokens, unique_tokens)
        if useful * BATCH / batch < TOKENS[0] or _doublings(parameters, PARAMETERS) + _doublings(useful, TOKENS) > 2:
            return None
        expected = self.expect(
            parameters,
            tokens,
            unigram_loss=unigram_loss,
            unique_tokens=unique_tokens,
            batch_tokens=batch,
            held_out_tokens=held_out_tokens,
        )
        if loss <= 2 * expected.high - expected.loss:
            return None
        return (
            f"held-out loss {loss:.2f} is {loss - expected.loss:.2f} above what runs of this size and tokens had at "
            f"this point ({expected.low:.2f} to {expected.high:.2f}): look at optim.lr, model.init_std and the text "
            "(docs/stability.md)"
        )


RULES = {
    "stable_adamw": Rule(0.0968, 0.4205, 0.3905, 0.023),
    "normuon": Rule(0.1081, 0.3282, 0.561, 0.0361),  # with cautious decay, at twice the rate
}


def rule_of(clock: Clock, optimizer: str, *, from_scratch: bool) -> Rule | None:
    """Return an optimizer's rule for a ModernBERT from scratch with masked-language modelling; None for other runs."""
    kinds = {(now.model.name, now.objective.name) for now in clock.phases}
    return RULES.get(optimizer) if from_scratch and kinds == {("modernbert", "mlm")} else None


def effective_tokens(tokens: float, unique_tokens: float) -> float:
    """Return the tokens of new text that are worth as much as these tokens, of which `unique_tokens` are unique."""
    if tokens <= unique_tokens:
        return tokens
    repeats = tokens / unique_tokens - 1
    return unique_tokens * (1 + REPEATS * (1 - math.exp(-repeats / REPEATS)))


def _doublings(value: float, span: tuple[int, int]) -> float:
    """Return the doublings by which a value lies outside a span; 0 within it."""
    low, high = span
    return math.log2(max(1.0, value / high, low / value))


def _beyond(value: float, span: tuple[int, int], unit: str) -> list[str]:
    low, high = span
    if value > 1.05 * high:
        return [f"{_times(value / high)} more {unit}"]
    return [f"{_times(low / value)} fewer {unit}"] if value < low / 1.05 else []


def _times(factor: float) -> str:
    return f"{factor:,.0f} times" if factor >= 10 else f"{factor:.2g} times"
