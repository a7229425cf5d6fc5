"""Keyed randomness, pinned to the bit.

If this breaks, a resumed or upgraded run continues with other documents and other masks.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modernbert_train.core.keyed_random import derive, derive_each, hash64, permutation, uniform

MASK = (1 << 64) - 1


def splitmix64(key: int, counter: int) -> int:
    """The same draw in plain integers: Steele, Lea and Flood 2014, figure 5, with the published constants."""
    z = (key + (counter + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def draws(key: int, number: int) -> np.ndarray:
    return hash64(np.asarray(np.uint64(key)), np.arange(number, dtype=np.uint64))


def test_the_stream_of_key_zero_is_the_published_one() -> None:
    """First outputs of SplitMix64 seeded with 0, as every implementation lists them."""
    assert [hex(draw) for draw in draws(0, 3)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


@settings(max_examples=50)
@given(st.integers(0, MASK), st.integers(0, MASK - 1))
def test_a_draw_equals_plain_integer_arithmetic(key: int, counter: int) -> None:
    found = hash64(np.array([key], np.uint64), np.array([counter], np.uint64))
    assert int(found[0]) == splitmix64(key, counter)


def test_pinned_values_never_change() -> None:
    """A change here changes the documents and masks of every run that is under way."""
    assert derive(17, 3) == 15043727697827203136
    assert derive(1, 2, 3) == 2869315087210772132
    assert permutation(10, derive(17, 1, 0)).tolist() == [3, 1, 9, 0, 7, 2, 6, 4, 8, 5]
    assert uniform(draws(0, 2)).tolist() == [0.8833108082136426, 0.43152799704850997]


def test_a_key_depends_on_every_part_and_on_their_order() -> None:
    keys = [derive(), derive(0), derive(0, 0), derive(1, 2), derive(2, 1), derive(1, 2, 0), derive(3)]
    assert len(set(keys)) == len(keys)


@pytest.mark.runs
@settings(max_examples=50)
@given(
    st.lists(st.integers(0, MASK), max_size=3),
    st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**62), st.integers(0, 2**62)), min_size=1, max_size=5),
)
def test_deriving_for_many_rows_equals_deriving_for_each(parts: list[int], rows: list[tuple[int, int, int]]) -> None:
    columns = np.array(rows, np.int64).T
    assert derive_each(derive(*parts), *columns).tolist() == [derive(*parts, *row) for row in rows]


@pytest.mark.parametrize("size", [0, 1, 2, 7, 1000])
def test_a_permutation_holds_every_index_once(size: int) -> None:
    assert sorted(permutation(size, 9).tolist()) == list(range(size))
