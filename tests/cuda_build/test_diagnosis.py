"""A number that is not finite is looked for in a full memory. Otherwise a NaN ends as "out of memory"."""

from __future__ import annotations

import pytest

from tests.cuda_build import null

pytestmark = [pytest.mark.runs, pytest.mark.timeout(600)]


@pytest.mark.parametrize("size", ["base", "large"])
def test_the_search_needs_no_more_memory_than_a_step(size: str) -> None:
    """A compiled microbatch may fill the GPU; the search computes it eagerly, forward and then backward too."""
    found = null.run("diagnosis", size, NULL_DEVICE_TRUE="1")
    assert found["search"] <= found["step"], found
