"""The recorded tables: they show the effects of a change of torch, Triton or our own code to its author.

`MODERNBERT_RECORD=1 make test-cuda` records them again; the difference belongs in the commit that causes it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).with_name("recorded")
RECORDED_WITH = "2.13"  # tables of other torch versions are in separate folders, if they differ


def compare(name: str, found: Any, within: float = 0.0) -> None:
    """Compare with the recorded table, or record it if configured; numbers may differ by a relative tolerance."""
    version = ".".join(torch.__version__.split(".")[:2])
    file, own = FOLDER / f"{name}.json", FOLDER / f"torch-{version}" / f"{name}.json"
    if version != RECORDED_WITH and (own.exists() or os.environ.get("MODERNBERT_RECORD") == "1"):
        file = own
    if os.environ.get("MODERNBERT_RECORD") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    recorded = json.loads(file.read_text(encoding="utf-8"))
    expected = pytest.approx(recorded, rel=within) if within else recorded
    assert found == expected, f"not as in {file.relative_to(FOLDER)}; MODERNBERT_RECORD=1 records it again"
