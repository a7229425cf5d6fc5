"""Choose the next stream: shares as integers, and a fair queue that keeps them. Exact, and without any library.

Weighted fair queueing as for network packets (WF2Q, Bennett and Zhang 1996): imagine all streams read at once, each
at its share of the speed. A chunk is eligible once its imagined reading has begun; the eligible chunk whose reading
would end first is next. With a longest chunk of s tokens, after any number of chunks

    share * total - s  <=  given  <=  share * total + (1 - share) * s

for each stream and any number of streams. So in any range of the run a stream is less than two chunks from its share.
The simpler rule of choosing the stream with the largest deficit lets streams fall behind further the more there are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from math import gcd, lcm

from modernbert_train.config.schema import DataConfig, PhaseConfig

_PARTS = 1_000_000_000  # sum of the weights computed from alpha


def phase_weights(data: DataConfig, phase: PhaseConfig, own: Mapping[str, int]) -> dict[str, int]:
    """Return the weights of the streams in a phase: coprime integers; 0 for an unused stream.

    Args:
        data: of a run that passed config/check.py.
        phase: one of its phases.
        own: tokens of each stream, or its documents with data.mix_by=documents.

    Returns:
        Stream name -> weight, in the order of `own`. A stream's share is its weight over their sum.
    """
    settings = data.all_streams
    if phase.alpha is not None or (data.alpha is not None and not _has_proportions(phase)):
        alpha = data.alpha if phase.alpha is None else phase.alpha
        return _by_size({name: size if name in (phase.streams or own) else 0 for name, size in own.items()}, alpha)
    weights: dict[str, Fraction] = {}
    for name, size in own.items():
        stream = settings[name]
        if phase.streams:
            weights[name] = _exact(phase.streams[name].proportion or 0.0) if name in phase.streams else Fraction(0)
        elif stream.proportion is not None:
            weights[name] = _exact(stream.proportion)
        elif stream.tokens is not None:
            weights[name] = Fraction(stream.tokens)
        else:
            weights[name] = _exact(1.0 if stream.repeat is None else stream.repeat) * size
    denominator = lcm(*(weight.denominator for weight in weights.values()))
    numbers = {name: int(weight * denominator) for name, weight in weights.items()}
    divisor = gcd(*numbers.values()) or 1
    return {name: number // divisor for name, number in numbers.items()}


def _has_proportions(phase: PhaseConfig) -> bool:
    return any(stream.proportion is not None for stream in phase.streams.values())


def _by_size(own: Mapping[str, int], alpha: float | None) -> dict[str, int]:
    """Return weights as size ** alpha with a sum of about `_PARTS`; in decimals, whose powers agree on all machines."""
    with localcontext(Context(prec=40)):
        powers = {name: Decimal(size) ** Decimal(repr(alpha)) if size else Decimal(0) for name, size in own.items()}
        total = sum(powers.values())
        return {name: max(1, int(power / total * _PARTS)) if power else 0 for name, power in powers.items()}


def token_shares(
    data: DataConfig, phases: Collection[PhaseConfig], tokens: Mapping[str, int], documents: Mapping[str, int]
) -> dict[str, float]:
    """Return each stream's intended share of the tokens of the whole run.

    Args:
        data, phases: of the run.
        tokens, documents: of each stream.
    """
    by_documents, total = data.mix_by == "documents", sum(phase.tokens for phase in phases)
    shares = dict.fromkeys(tokens, 0.0)
    for phase in phases:
        weights = phase_weights(data, phase, documents if by_documents else tokens)
        amounts = {n: w * tokens[n] / documents[n] if by_documents else float(w) for n, w in weights.items()}
        for name, amount in amounts.items():
            shares[name] += amount / sum(amounts.values()) * phase.tokens / total
    return shares


def _exact(number: float) -> Fraction:
    """Return the number as written: 0.1 is a tenth, not the nearest binary fraction."""
    return Fraction(repr(number))


class FairQueue:
    """Chooses among streams so that each keeps its share.

    Args:
        weights: of each stream; at least one is positive.

    Attributes:
        weights: as passed.
        lag: for each stream, weight * total given out - sum of weights * given out to it; positive if it lags behind.
            The queue's whole state: integers that do not grow with the total.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = list(weights)
        self.lag = [0] * len(self.weights)
        self._sum = sum(self.weights)
        self._active = [(index, weight) for index, weight in enumerate(self.weights) if weight > 0]

    def give(self, sizes: Sequence[int]) -> int:
        """Choose the stream of the next chunk, and count it.

        Args:
            sizes: of the next chunk of each stream; may be 0; ignored for streams of weight 0.

        Returns:
            The stream's index; the lower one on a tie.
        """
        chosen = self.next(sizes)
        self.count(chosen, sizes[chosen])
        return chosen

    def next(self, sizes: Sequence[int]) -> int:
        """Return the stream that `give` would choose, without counting."""
        lags, total = self.lag, self._sum
        chosen, end, scale = -1, 0, 1
        for index, weight in self._active:
            lag = lags[index]
            if lag >= 0:  # eligible; at least one stream is, because the lags sum to 0
                finish = total * sizes[index] - lag  # times 1 / weight: when its imagined reading would end
                if chosen < 0 or finish * scale < end * weight:
                    chosen, end, scale = index, finish, weight
        return chosen

    def count(self, chosen: int, size: int) -> None:
        """Count a stream's chunk."""
        for index, weight in self._active:
            self.lag[index] += weight * size
        self.lag[chosen] -= self._sum * size
