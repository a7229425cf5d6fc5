"""The saver's copies from a GPU. Without its guards a checkpoint has wrong numbers, or rank 0 runs out of memory."""

from __future__ import annotations

import pytest

from tests.cuda_build import null

pytestmark = [pytest.mark.runs, pytest.mark.cuda_quick, pytest.mark.timeout(300)]


def test_copies_keep_their_memory_their_pages_and_their_gpu() -> None:
    found = null.run("copies", NULL_DEVICES="2", CUDA_VISIBLE_DEVICES="0,1", LOCAL_RANK="1")
    assert found["device"] == "cuda:1" and found["gpu 1"]
    assert found["current"] == 1, "computations before the model is built would be on the GPU of rank 0"
    assert found["pending"] > 10, "moments dropped during their copy would be overwritten (record_stream)"
    assert "dc" in found["flags"], "forking a data worker would separate the pages from the GPU's (MADV_DONTFORK)"
    assert not found["gpu 0"], "each rank would use half a gigabyte of GPU 0 (the saver's thread)"
