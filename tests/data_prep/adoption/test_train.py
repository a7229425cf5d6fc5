"""Training on adopted shards: the same losses as with documents prepared here, to the last bit.

If this breaks, published corpora cannot be trained on, or are misread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_prep.adopt import adopt
from data_prep.write.merging import merge_split
from modernbert_train.__main__ import main
from modernbert_train.vocabulary import read_vocabulary
from tests.support import layouts
from tests.support.adopted import opened
from tests.support.make_shards import make_documents, make_shards
from tests.support.runs import records
from tests.support.tiny_run import TinyRun

pytestmark = [pytest.mark.timeout(300), pytest.mark.runs, pytest.mark.filterwarnings("ignore::ResourceWarning")]


def test_layouts_of_others_train_as_prepared_shards_do(
    tiny_data: Path, tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same documents in as many shards give the same batches, and so the same losses and gradients."""
    monkeypatch.setattr(layouts, "SHARD_BYTES", 1 << 20)
    tokenizer = tiny_data / "tokenizer"
    documents = make_documents(tokenizer, [20 + 7 * i % 90 for i in range(40)], seed=8)
    prepared: dict[tuple[int, ...], list[dict[str, Any]]] = {}

    def train(name: str, folder: Path) -> list[dict[str, Any]]:
        words = (f"name={name}", f"data.train={folder}", "phases.short.tokens=2000", "phases.long=null")
        assert main(["train", *tiny_run(*words, "data.validation=null")]) == 0
        return records(tmp_path / "runs" / name)

    for number, layout in enumerate(("ettin", "raw bytes")):
        theirs, out = tmp_path / f"theirs{number}", tmp_path / f"adopted{number}"
        layouts.LAYOUTS[layout](theirs, documents, read_vocabulary(tokenizer))
        adopt(str(theirs), str(tokenizer), out=str(out), dtype="int64" if layout == "raw bytes" else None)
        shards = tuple(opened(out, str(tokenizer)).shard_documents)
        if shards not in prepared:
            parts, at = [], 0
            for part, size in enumerate(shards):
                parts.append(tmp_path / f"part{number}-{part}")
                make_shards(parts[-1], documents[at : at + size], tokenizer, shard_bytes=1 << 20)
                at += size
            merge_split(parts, tmp_path / f"prepared{number}")
            prepared[shards] = train(f"prepared{number}", tmp_path / f"prepared{number}")
        found = train(f"adopted{number}", out)
        assert len(found) > 5 and found == prepared[shards], layout
