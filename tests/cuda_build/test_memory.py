"""Memory of GPUs that compute nothing, which have as much as NULL_DEVICE_GB says."""

from __future__ import annotations

import pytest

from tests.cuda_build import null

pytestmark = [pytest.mark.runs, pytest.mark.timeout(600)]


def test_torch_takes_the_expandable_segments_that_are_asked_for() -> None:
    """The variable has had three names, and a wrong one is ignored in silence."""
    assert null.run("expandable", CUDA_VISIBLE_DEVICES="0") == ["cuMemCreate"]
