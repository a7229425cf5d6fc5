"""`inspect` of a dataset: figures from the small files in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modernbert_train.__main__ import main
from modernbert_train.data.statistics import length_bins
from tests.support.corpora import Command
from tests.support.tiny_run import TinyRun


@pytest.mark.runs
def test_table_and_json_agree_with_the_shards(
    command: Command, corpus: Path, texts: list[str], tmp_path: Path, capsys: Any
) -> None:
    """Users who mix sources by these numbers must be able to trust them."""
    (corpus / "copy.txt").write_text(texts[0])
    (corpus / "empty.txt").write_text(" ")
    assert command() == 0
    capsys.readouterr()
    out = tmp_path / "out"
    assert main(["inspect", str(out), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out).values()
    lengths = np.load(out / "train/lengths.npy")
    train = facts["splits"]["train"]
    assert (train["documents"], train["tokens"], train["longest"]) == (len(lengths), lengths.sum(), lengths.max())
    assert train["percentiles"]["50"] == int(np.percentile(lengths, 50))
    assert train["histogram"] == length_bins(lengths)
    assert facts["sources"]["mine"]["dropped"] == {"duplicate": 1, "empty": 1}

    assert main(["inspect", str(out), str(out / "train")]) == 0
    table = capsys.readouterr().out
    total = sum(split["tokens"] for split in facts["splits"].values())
    assert [row.split() for row in table.splitlines() if row.startswith("  mine")] == [
        ["mine", "62", "60", f"{total:,}", "1", "0", "1", "0"]
    ]
    assert f"train: {len(lengths)} documents, {lengths.sum():,} tokens" in table
    # every text except the duplicate is in one of the two, so the bytes of both add up
    assert sum(split["text_bytes"] for split in facts["splits"].values()) == sum(len(t.encode()) for t in texts)
    folder, split, _, ratio, beside = table.splitlines()[-1].split()
    found = train["text_bytes"] / train["tokens"]
    assert (folder, split, ratio, beside) == (str(out / "train"), "train", f"{found:.2f}", "1.00")


def test_folder_without_a_dataset(tmp_path: Path, tiny_data: Path, tiny_run: TinyRun, capsys: Any) -> None:
    """It is named, and a run's words are not taken for a dataset's."""
    assert main(["inspect", str(tmp_path)]) == 65
    assert f"{tmp_path}: neither a run nor a dataset written by `prepare`" in capsys.readouterr().err
    for words in ([str(tiny_data / "train"), "--rows", "1"], [str(tiny_data / "train"), *tiny_run()]):
        assert main(["inspect", *words]) == 78
        assert "is a folder of data" in capsys.readouterr().err
    assert main(["inspect", *tiny_run(), "--json"]) == 78
    assert "--json is for datasets" in capsys.readouterr().err
