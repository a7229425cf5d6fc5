"""Learning rate and weight decay as functions of the clock: floats in, float out, no state.

A batch's rate is the rate at the number of tokens before it. So the first batch of a phase has the schedule's first
rate, and the rate at `tokens == phase.tokens` is reached just as the phase ends.
"""

from __future__ import annotations

import math

from modernbert_train.clock import Clock
from modernbert_train.config.schema import ScheduleConfig

# Start of a warmup, relative to the peak rate; the release's value. The first batch fills the moments and leaves the
# weights unchanged, as a rate of 0 would, but 0 in a log always means a mistake, and a positive lr can be a divisor.
WARMUP_START = 1e-10


def lr_ratio_at(schedule: ScheduleConfig, phase_tokens: int, tokens: int) -> float:
    """Return the rate of a batch relative to the peak rate of its phase.

    With W warmup tokens, D decay tokens, T phase tokens, f the final ratio and x = (tokens - (T - D)) / D:

        tokens < W               s + (1 - s) tokens / W, s = WARMUP_START
        W <= tokens <= T - D     p = 1, or with an inverse_sqrt plateau p = sqrt(W / tokens)
        one_minus_sqrt           f + (p - f) (1 - sqrt(x)), p the ratio at T - D
        linear                   f + (p - f) (1 - x)
        cosine                   f + (p - f) (1 + cos(pi x)) / 2

    The usual linear or cosine schedule has a decay that begins where the warmup ends.

    Args:
        schedule: warmup and decay must fit into the phase together.
        phase_tokens: length of the phase.
        tokens: tokens seen since the phase's nominal start, 0 to phase_tokens.

    Returns:
        The ratio; exactly final_lr_ratio at the end of a decay.

    Source: Hägele et al. 2024, arXiv:2405.18392 (one_minus_sqrt); Zhai et al. 2022, arXiv:2106.04560 (inverse_sqrt
    with cooldown); arXiv:2412.13663, section 2.2.
    """
    decay_start = phase_tokens - schedule.decay_tokens
    assert 0 <= tokens <= phase_tokens, f"{tokens} tokens in a phase of {phase_tokens}"
    assert schedule.warmup_tokens <= decay_start, f"{schedule} does not fit into {phase_tokens} tokens"
    if tokens < schedule.warmup_tokens:
        return WARMUP_START + (1 - WARMUP_START) * tokens / schedule.warmup_tokens
    if tokens <= decay_start:
        return _plateau(schedule, tokens)
    x = (tokens - decay_start) / schedule.decay_tokens
    final = schedule.final_lr_ratio
    height = _plateau(schedule, decay_start) - final
    match schedule.decay:
        case "one_minus_sqrt":
            return final + height * (1 - math.sqrt(x))
        case "linear":
            return final + height * (1 - x)
        case "cosine":
            return final + height * (1 + math.cos(math.pi * x)) / 2


def _plateau(schedule: ScheduleConfig, tokens: int) -> float:
    """Return the ratio between warmup and decay; config/check.py requires a warmup for an inverse_sqrt plateau."""
    return 1.0 if schedule.plateau == "constant" else math.sqrt(schedule.warmup_tokens / tokens)


def max_lr_at(clock: Clock, tokens: int) -> float:
    """Return the peak rate of the phase at a token count: optim.lr times the phase's lr_ratio."""
    now = clock.at(tokens)
    return now.optim.lr * now.phase.lr_ratio


def lr_at(clock: Clock, tokens: int) -> float:
    """Return the rate of the batch that starts after `tokens` global tokens; at or past the end, the last rate."""
    now = clock.at(tokens)
    return max_lr_at(clock, tokens) * lr_ratio_at(now.phase.schedule, now.phase.tokens, now.tokens)


def weight_decay_at(clock: Clock, tokens: int) -> float:
    """Return the decay of the decayed weights, in the optimizer's unit."""
    return clock.at(tokens).optim.weight_decay
