"""A microbatch that does not fit in the memory of a GPU: torch's own allocator says so, on the null device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_build import null

pytestmark = [pytest.mark.runs, pytest.mark.timeout(600)]


def test_a_microbatch_that_does_not_fit_is_halved_until_it_does_and_reported(tmp_path: Path) -> None:
    """Each that fails costs a line of the table. (What the device computes is not right, and that is reported, too.)"""
    found = null.run("full", str(tmp_path), NULL_DEVICE_GB="0.5")
    failed = [row for row in found["rows"] if row["outcome"] == "does not fit"]
    assert [row["settings"] for row in failed] == ["microbatch_tokens=32768", "microbatch_tokens=16384"]
    assert "OutOfMemoryError: CUDA out of memory" in failed[0]["text"]
    assert "leave room for several ranks" in failed[1]["text"], "it fits, in nine tenths of the memory it does not"
    assert found["settings"]["microbatch_tokens"] == 8192
    assert "phases.short.microbatch_tokens=16384 does not fit here: set 8192, or leave the key out." in found["advice"]
