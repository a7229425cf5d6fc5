"""What a microbatch of base and of large asks of a GPU, from which `benchmarks.roofline` says where its time goes."""

from __future__ import annotations

import pytest

from tests.cuda_build import null
from tests.cuda_build.tables import compare

pytestmark = [pytest.mark.runs, pytest.mark.timeout(1200)]


def test_what_a_microbatch_asks_for_is_on_record() -> None:
    """Launches, bytes and products, compiled and eager: the roofline stands on them."""
    compare("microbatch", null.run("microbatch"))
