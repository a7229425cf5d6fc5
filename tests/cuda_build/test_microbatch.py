"""GPU work of a microbatch of base and of large, the input of `benchmarks.roofline`."""

from __future__ import annotations

import pytest

from tests.cuda_build import null
from tests.cuda_build.tables import compare

pytestmark = [pytest.mark.runs, pytest.mark.timeout(1200)]


def test_what_a_microbatch_asks_for_is_on_record() -> None:
    """Launches, bytes and products, compiled and eager: the roofline uses them."""
    compare("microbatch", null.run("microbatch"))
