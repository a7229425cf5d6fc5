"""Growth of the batch: sizes and boundaries worked by hand from the published recipe.

If this breaks, the learning rate meets a batch it was not tuned for, and a reproduction is none.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modernbert_train.config.schema import BatchWarmupConfig, PhaseConfig
from modernbert_train.data.batch_warmup import batch_rows_at


def phase(start: int, step: int, rows: int, tokens: int) -> PhaseConfig:
    warmup = BatchWarmupConfig(start_rows=start, step_rows=step, tokens=tokens)
    return PhaseConfig(tokens=10 * tokens, row_tokens=64, batch_rows=rows, microbatch_tokens=64, batch_warmup=warmup)


BASE = phase(start=768, step=768, rows=4608, tokens=50_000_000_000)  # ModernBERT-base, arXiv 2412.13663 and its release


@pytest.mark.parametrize(
    ("billions", "before", "after"),
    [(50 / 15, 768, 1536), (10, 1536, 2304), (20, 2304, 3072), (500 / 15, 3072, 3840), (50, 3840, 4608)],
)
def test_the_base_recipe_grows_at_these_tokens(billions: float, before: int, after: int) -> None:
    """Equal steps at 1, 2, 3, 4 and 5 times 768 rows: shares of 1, 2, 3, 4 and 5 fifteenths of 50 billion tokens."""
    border = billions * 1e9
    assert batch_rows_at(BASE, int(border) - 1) == before
    assert batch_rows_at(BASE, int(border) + 1) == after


def test_a_last_step_may_be_shorter() -> None:
    """4, 9, then 10 rows: 4 of 13 parts of 1,300 tokens, then 9."""
    uneven = phase(start=4, step=5, rows=10, tokens=1300)
    assert [batch_rows_at(uneven, tokens) for tokens in (0, 399, 400, 1299, 1300)] == [4, 4, 9, 9, 10]


@pytest.mark.runs
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(2, 40), st.integers(1, 10**12), st.data())
def test_the_batch_never_shrinks_and_keeps_to_its_sizes(
    start: int, step: int, more: int, tokens: int, data: st.DataObject
) -> None:
    growing = phase(start, step, start + more, tokens)
    places = sorted(data.draw(st.lists(st.integers(0, 2 * tokens), min_size=2, max_size=10)))
    sizes = [batch_rows_at(growing, place) for place in places]
    assert sizes == sorted(sizes)
    assert all(size == start + more or ((size - start) % step == 0 and size < start + more) for size in sizes)
