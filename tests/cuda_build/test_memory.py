"""Memory of GPUs that compute nothing, with a size of NULL_DEVICE_GB."""

from __future__ import annotations

import pytest

from tests.cuda_build import null

pytestmark = [pytest.mark.runs, pytest.mark.timeout(600)]


def test_torch_takes_the_expandable_segments_that_are_requested() -> None:
    """The variable has had three names, and a wrong one is ignored silently."""
    assert null.run("expandable", CUDA_VISIBLE_DEVICES="0") == ["cuMemCreate"]
