"""Training on adopted shards: the same losses as with documents prepared here, to the last bit.

If this breaks, published corpora cannot be trained on, or are misread.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from data_prep.adopt import adopt
from data_prep.write.merging import merge_split
from modernbert_train.__main__ import main
from modernbert_train.data.dataset_card import read_card
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


@pytest.mark.slow
def test_a_killed_command_resumes(tiny_data: Path, tmp_path: Path) -> None:
    """With two processes, killed in the middle: no output looks complete, no process stays, the result is the same."""
    documents = make_documents(tiny_data / "tokenizer", [30] * 400, seed=9)
    layouts.mmbert(tmp_path / "theirs", documents, read_vocabulary(tiny_data / "tokenizer"))
    script = tmp_path / "slow.py"
    script.write_text(
        "import sys, time\n"
        "from data_prep import adopt\n"
        "from data_prep.adoption import survey\n"
        "survey.PART_BYTES = 1 << 11\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(adopt.main(sys.argv[1:]))\n"
    )
    root = str(Path(__file__).parents[3])
    words = [str(tmp_path / "theirs"), "--tokenizer", str(tiny_data / "tokenizer"), "--workers", "2"]

    def start(out: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(script), *words, "--out", str(tmp_path / out)]
        return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": root}, stderr=subprocess.PIPE)

    whole = start("whole")
    killed = start("killed")
    until = time.monotonic() + 200
    while not list((tmp_path / "killed").glob(".adopt/*.json")) and killed.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    _, said = whole.communicate(timeout=200)
    assert whole.returncode == 0, said
    if not (tmp_path / "killed/dataset.json").exists():  # unless it finished before the kill
        _, said = (again := start("killed")).communicate(timeout=200)
        assert again.returncode == 0, said
    assert read_card(tmp_path / "killed") == read_card(tmp_path / "whole")
    assert not (tmp_path / "killed/.adopt").exists()
