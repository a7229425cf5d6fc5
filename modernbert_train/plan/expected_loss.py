"""Expected held-out loss for a number of parameters and tokens: a rule fitted to runs of the quickstart's recipe.

    loss / unigram loss = FLOOR + SIZE / parameters^ALPHA + DATA / tokens^BETA

is equation 2 of Hoffmann et al. 2022 (arXiv 2203.15556), in units of the unigram loss of the text, so that it holds for
texts and vocabularies of other entropy. Text that is read again counts less and less: tokens are the effective ones of
Muennighoff et al. 2023 (arXiv 2305.16264, section 3.1), with their constant. The runs are
`benchmarks/expected_loss.json`; `python -m benchmarks.expected_loss --fit` makes the constants of this file from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOOR, SIZE, ALPHA, DATA, BETA = 0.10, 20.0, 0.34, 16.5, 0.28
REPEATS = 15.39  # passes after the first that are worth 1 - 1/e of as many of new text; R*_D of Muennighoff et al.
RESIDUAL = 0.03  # of loss / unigram loss; nine of ten runs that were left out of the fit are nearer
PER_DOUBLING = 0.02  # the same grows by this for every doubling beyond the runs of the table
PARAMETERS = (139_000, 2_230_000)  # without embeddings, of the runs
TOKENS = (400_000, 1_640_000)  # of the runs


@dataclass(frozen=True)
class Expected:
    """Held-out loss in nats per predicted token.

    Attributes:
        loss: by the rule.
        low, high: nine of ten runs end between them.
        extrapolates: how far the rule is taken beyond its runs, as a clause; None within them.
    """

    loss: float
    low: float
    high: float
    extrapolates: str | None


def expect(parameters: float, tokens: float, *, unigram_loss: float, unique_tokens: float | None = None) -> Expected:
    """The loss at the end of a run whose learning rate has decayed.

    Args:
        parameters: without the embedding table: `Parameters.active`.
        tokens: trained, repeats included.
        unigram_loss: of the held-out text under the frequencies of the training text, in nats per token.
        unique_tokens: of the training text; None: nothing is read twice.
    """
    useful = effective_tokens(tokens, tokens if unique_tokens is None else unique_tokens)
    share = FLOOR + SIZE / parameters**ALPHA + DATA / useful**BETA
    beyond = max(_doublings(parameters, PARAMETERS), 0) + max(_doublings(useful, TOKENS), 0)
    spread = RESIDUAL + PER_DOUBLING * beyond
    loss, low, high = (unigram_loss * max(0.0, min(1.0, each)) for each in (share, share - spread, share + spread))
    return Expected(loss, low, max(high, loss), _extrapolation(parameters, useful))


def effective_tokens(tokens: float, unique_tokens: float) -> float:
    """Tokens of new text that are worth as much as these, of which only some are unique."""
    if tokens <= unique_tokens:
        return tokens
    repeats = tokens / unique_tokens - 1
    return unique_tokens * (1 + REPEATS * (1 - math.exp(-repeats / REPEATS)))


def _doublings(value: float, span: tuple[int, int]) -> float:
    """By how many doublings a value lies outside a span; 0 within it."""
    low, high = span
    return math.log2(max(1.0, value / high, low / value))


def _extrapolation(parameters: float, tokens: float) -> str | None:
    found = [
        text
        for value, span, unit in ((parameters, PARAMETERS, "parameters"), (tokens, TOKENS, "tokens"))
        if (text := _beyond(value, span, unit)) is not None
    ]
    return " and ".join(found) + " than any run of the table" if found else None


def _beyond(value: float, span: tuple[int, int], unit: str) -> str | None:
    low, high = span
    if value > 1.05 * high:
        return f"{_times(value / high)} more {unit}"
    return f"{_times(low / value)} fewer {unit}" if value < low / 1.05 else None


def _times(factor: float) -> str:
    return f"{factor:,.0f} times" if factor >= 10 else f"{factor:.2g} times"
