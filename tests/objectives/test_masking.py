"""What every masking keeps to, and `bernoulli` and `reference` against numbers worked out from the published rule.

If this breaks, an ablation against the released recipe compares something else than it says, or a batch does not fit
into its fixed shape. Bounds are five sigma of a binomial, or six of chi-square; all draws are keyed, so none flickers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from modernbert_train.config.schema import MaskedLmConfig
from modernbert_train.objectives.mlm import Masked, MaskedLM
from modernbert_train.vocabulary import Vocabulary
from tests.support.mlm_lines import (
    CLS,
    MASK,
    PAD,
    SEP,
    VOCABULARY,
    WORDS,
    Line,
    chi_square,
    five_sigma,
    keys,
    line,
)  # fmt: skip

# as the released tokenizer: special entries last, unused ones after them
LAST = Vocabulary(num_entries=110, cls_id=91, sep_id=92, pad_id=93, mask_id=94, ordinary=np.arange(90), sha256="")
EXACT, BERNOULLI, REFERENCE, NGRAM = CONFIGS = [
    MaskedLmConfig(masking=name)
    for name in ("exact", "bernoulli", "reference", "ngram")  # type: ignore[arg-type]
]
EVERY = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.masking)


def corrupt(config: MaskedLmConfig, at: Line, rate: float = 0.3, vocabulary: Vocabulary = VOCABULARY) -> Masked:
    return MaskedLM(config, vocabulary).corrupt(*at, keys(len(at[1])), rate)


def test_bernoulli_counts_are_binomial_where_exact_ones_are_all_equal() -> None:
    at = line([20] * 4000)
    counts = {}
    for name in ("exact", "bernoulli"):
        found = corrupt(MaskedLmConfig(masking=name), at)  # type: ignore[arg-type]
        counts[name] = np.bincount(found.positions_M // 22, minlength=4000)
    assert (counts["exact"] == 6).all()
    binomial = np.array([math.comb(20, k) * 0.3**k * 0.7 ** (20 - k) for k in range(21)]) * 4000
    histogram = np.bincount(counts["bernoulli"], minlength=21)
    likely = binomial > 5
    assert abs(chi_square(histogram[likely], binomial[likely])) < 6
    assert histogram[~likely].sum() < 40  # 12.6 expected


@pytest.mark.parametrize("config", [EXACT, BERNOULLI, NGRAM], ids=lambda config: config.masking)
def test_every_place_in_a_text_is_predicted_as_often(config: MaskedLmConfig) -> None:
    """Of 6,000 texts, 36 being one sigma. The first and the last words are in fewer n-grams of the paper's."""
    places = np.bincount(corrupt(config, line([20] * 6000)).positions_M % 22, minlength=22)
    assert places[[0, 21]].tolist() == [0, 0] and np.abs(places[1:21] - 1800).max() < 178
    assert abs(chi_square(places[1:21], 1800.0)) < 6


def test_bernoulli_draws_know_nothing_of_their_neighbours() -> None:
    at = line([20] * 4000)
    chosen = np.zeros((4000, 22), bool)
    chosen.flat[corrupt(BERNOULLI, at).positions_M] = True
    text = chosen[:, 1:21]
    both = (text[:, 1:] & text[:, :-1]).mean()
    assert abs(both - 0.09) < 2 * five_sigma(0.09, 4000 * 19)  # neighbouring pairs share a token


@pytest.mark.parametrize("config", [EXACT, BERNOULLI, NGRAM], ids=lambda config: config.masking)
@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
def test_special_tokens_and_padding_are_left_alone(config: MaskedLmConfig, rate: float) -> None:
    """By all but `reference`: neither predicted nor drawn."""
    at = line([1, 2, 50, 400], between=9)
    masked = corrupt(replace(config, mask_token_share=0.0, random_token_share=1.0), at, rate, WORDS)
    special = at[0] < 5
    assert (masked.input_ids_T[special] == at[0][special]).all()
    assert (masked.labels_M >= 5).all() and (masked.input_ids_T[masked.positions_M] >= 5).all()
    assert len(masked.labels_M) == 453 or rate < 1


def test_reference_predicts_special_tokens_like_any_other() -> None:
    """The facts measured 29.7 % of [CLS] at a rate of 0.3."""
    at = line([30] * 4000, between=4)
    masked = corrupt(REFERENCE, at)
    labels = masked.labels_M
    for special in (CLS, SEP):
        share = (labels == special).sum() / 4000
        assert abs(share - 0.3) < five_sigma(0.3, 4000)
    assert abs((labels >= 5).sum() / 120_000 - 0.3) < five_sigma(0.3, 120_000)
    assert (labels == at[0][masked.positions_M]).all()
    assert (np.diff(masked.positions_M) > 0).all()


def test_reference_overwrites_padding_and_never_predicts_it() -> None:
    """At a rate of 0.3: 24 % become [MASK], and 3 % a random id, which is the pad itself in one of 100."""
    at = line([3] * 1000, between=40)
    masked = corrupt(REFERENCE, at)
    pads = at[0] == PAD
    assert not (masked.labels_M == PAD).any() and not pads[masked.positions_M].any()
    changed = masked.input_ids_T[pads]
    number = len(changed)
    assert number == 40_000
    assert abs((changed == MASK).mean() - (0.24 + 0.0003)) < five_sigma(0.24, number)
    assert abs((changed != PAD).mean() - 0.2697) < five_sigma(0.27, number)


@EVERY
def test_eighty_ten_ten(config: MaskedLmConfig) -> None:
    """A random id is [MASK] or the original itself in one of 100 draws (reference) or the original in one of 95."""
    masked = corrupt(config, line([400] * 500), vocabulary=WORDS)
    inputs, number = masked.input_ids_T[masked.positions_M], len(masked.labels_M)
    hits = 0.1 / (100 if config is REFERENCE else 95)
    share = {"mask": 0.8 + (hits if config is REFERENCE else 0.0), "kept": 0.1 + hits}
    assert abs((inputs == MASK).mean() - share["mask"]) < five_sigma(share["mask"], number)
    assert abs((inputs == masked.labels_M).mean() - share["kept"]) < five_sigma(share["kept"], number)


@pytest.mark.parametrize(
    ("config", "vocabulary", "ids"),
    [
        (EXACT, VOCABULARY, VOCABULARY.ordinary),
        # any id up to the largest that occurs: special ones too, but not the unused ones of the released tokenizer
        (REFERENCE, VOCABULARY, range(100)),
        (REFERENCE, LAST, range(95)),
    ],
    ids=["exact", "first", "last"],
)
def test_random_tokens_are_drawn_evenly(config: MaskedLmConfig, vocabulary: Vocabulary, ids: Sequence[int]) -> None:
    only_random = replace(config, mask_token_share=0.0, random_token_share=1.0)
    masked = corrupt(only_random, line([200] * 500, of=vocabulary), 0.5, vocabulary)
    found, counts = np.unique(masked.input_ids_T[masked.positions_M], return_counts=True)
    assert found.tolist() == [*ids]
    assert abs(chi_square(counts, len(masked.positions_M) / len(ids))) < 6


SHORT = np.array([CLS, *range(10, 22), SEP, PAD, PAD, CLS, *range(30, 35), SEP, PAD, PAD, PAD])
LONG = np.array([CLS, *range(50, 70), SEP, PAD, CLS, *range(30, 35), SEP, PAD])


@pytest.mark.parametrize(
    ("config", "ids", "positions", "inputs"),
    [
        (EXACT, SHORT, [4, 5, 6, 12, 18], [MASK, 14, 65, MASK, MASK]),  # one kept, one random
        (BERNOULLI, SHORT, [5, 6, 18], [14, 65, MASK]),
        # 22 is a [SEP]; the pad at 24 is [MASK] as well
        (REFERENCE, SHORT, [4, 5, 12, 17, 22], [13, 55, MASK, MASK, MASK]),
        (NGRAM, LONG, [1, 3, 4, 5, 6, 7, 24], [MASK, MASK, MASK, 54, 65, MASK, MASK]),
    ],
    ids=lambda value: getattr(value, "masking", None),
)
def test_pinned_masks_never_change(
    config: MaskedLmConfig, ids: NDArray[np.int64], positions: list[int], inputs: list[int]
) -> None:
    """A change here changes the masks of every run that is under way."""
    starts = np.flatnonzero(ids == CLS) + 1
    masked = MaskedLM(config, WORDS).corrupt(ids, starts, np.flatnonzero(ids == SEP) - starts, keys(2), 0.3)
    assert masked.positions_M.tolist() == positions
    assert masked.input_ids_T[masked.positions_M].tolist() == inputs
    assert (masked.labels_M == ids[positions]).all()


def log_binomial_tail(number: int, rate: float, above: int) -> float:
    """Natural logarithm of P(X > above); the terms fall so fast beyond the mean that 2,000 of them are all."""
    count = np.arange(above + 1, min(number, above + 2000) + 1)
    if not len(count):
        return -math.inf
    lgamma = np.vectorize(math.lgamma)
    terms = lgamma(number + 1.0) - lgamma(count + 1.0) - lgamma(number - count + 1.0)
    terms = terms + count * math.log(rate) + (number - count) * math.log1p(-rate)
    return float(terms.max() + math.log(np.exp(terms - terms.max()).sum()))


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.15, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("tokens", [64, 1024, 4096, 98_304])
def test_the_bound_of_independent_draws_fails_less_than_once_in_10_to_the_19(tokens: int, rate: float) -> None:
    """By the binomial itself: the bound comes from an inequality, and neither may be wasteful nor wrong."""
    for config in (BERNOULLI, REFERENCE):
        bound = MaskedLM(config, VOCABULARY).max_predicted(rate, tokens)
        assert bound % 8 == 0
        assert log_binomial_tail(tokens, rate, bound) < -45
        assert bound < rate * tokens + 12 * math.sqrt(tokens * rate * (1 - rate)) + 48


def test_bounds_by_hand() -> None:
    """Multiples of 8: 1229 + 32; 1228.8 + 15 + sqrt(225 + 90 * 860.16); 29491.2 + 15 + sqrt(225 + 90 * 20643.84)."""
    for config in (EXACT, NGRAM):
        assert [MaskedLM(config, WORDS).max_predicted(*asked) for asked in ((0.3, 4096), (1.0, 64))] == [1264, 96]
    assert MaskedLM(BERNOULLI, VOCABULARY).max_predicted(0.3, 4096) == 1528
    assert MaskedLM(REFERENCE, VOCABULARY).max_predicted(0.3, 98_304) == 30_872


@pytest.mark.parametrize("name", ["exact", "bernoulli", "reference"])
def test_more_predictions_than_fit_are_left_out_and_counted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It never happens by chance, so the bound is lowered by hand. The remaining targets are a subset."""

    class Narrow(MaskedLM):
        def max_predicted(self, mask_rate: float, tokens: int) -> int:
            return 16

    config = MaskedLmConfig(masking=name)  # type: ignore[arg-type]
    at = line([60, 60], between=5)
    whole = corrupt(config, at)
    with caplog.at_level(logging.WARNING):
        narrow = Narrow(config, VOCABULARY).corrupt(*at, keys(2), 0.3)
    excess = len(whole.positions_M) - 16
    assert excess > 0 and f"masking: {excess} positions more" in caplog.text
    assert len(narrow.positions_M) == len(narrow.labels_M) == 16
    left = np.setdiff1d(whole.positions_M, narrow.positions_M)
    assert len(left) == excess and (narrow.input_ids_T[left] == at[0][left]).all()
    others = np.setdiff1d(np.arange(len(at[0])), left)
    assert (narrow.input_ids_T[others] == whole.input_ids_T[others]).all()
    assert (narrow.labels_M == at[0][narrow.positions_M]).all()
