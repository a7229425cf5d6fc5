"""The record of a run's data: figures to draw, from files that may be absent or damaged."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from modernbert_train.core.read_json import as_type
from modernbert_train.data.facts import FolderFacts
from modernbert_train.data.field_counts import Amount, FieldCounts
from modernbert_train.data.statistics import RunStatistics, _folder_statistics, length_bins
from tests.support.make_shards import write_plain_card


def facts_of(folder: Path, lengths: list[int]) -> FolderFacts:
    folder.mkdir(parents=True)
    np.save(folder / "lengths.npy", np.array(lengths, np.uint32))
    (folder / "index.json").write_text("{}")
    licences = FieldCounts({"MIT": Amount(len(lengths), sum(lengths))})
    card = write_plain_card(folder, len(lengths), sum(lengths), fields={"licence": licences})
    return FolderFacts("data.train", str(folder), folder, card)


@pytest.mark.parametrize("lengths", [[1], [31, 32, 33, 63, 64], [65535, 65536, 3_000_000_000], [7] * 1000])
def test_bins_hold_every_document_and_token(lengths: list[int]) -> None:
    """Lengths of exactly a bound belong to the bin that begins there, as numpy's histogram has it."""
    bins = length_bins(np.array(lengths, np.uint32))
    assert sum(each["documents"] for each in bins) == len(lengths)
    assert sum(each["tokens"] for each in bins) == sum(lengths)
    for each in bins:
        assert each["documents"] == sum(each["from"] <= length < each["to"] for length in lengths)


def test_figures_of_a_folder_with_and_without_its_report(tmp_path: Path) -> None:
    """A folder that came alone is drawn by its lengths; the report of another dataset says nothing of it."""
    facts = facts_of(tmp_path / "train", [10, 20, 600])
    alone = _folder_statistics(facts)
    assert (alone.documents, alone.tokens, alone.sources) == (3, 630, {})
    assert alone.lengths == length_bins(np.array([10, 20, 600]))
    report = {
        "written": {"train": {"documents": 3, "tokens": 630}},
        "lengths": {"train": [{"from": 1, "to": 1000, "documents": 3, "tokens": 630}]},
        "sources": {"web": {"documents_read": 9, "written": {"train": {"documents": 3, "tokens": 630}},
                            "dropped": {"duplicate": 4, "near_duplicate": 1, "empty": 1}, "altered": {}}},
    }  # fmt: skip
    (tmp_path / "prepare_report.json").write_text(json.dumps(report))
    both = _folder_statistics(facts)
    assert both.lengths == report["lengths"]["train"]
    assert asdict(both.sources["web"]) == {
        "read": 9, "documents": 3, "tokens": 630, "duplicates": 4, "near_duplicates": 1, "left_out": 1,
    }  # fmt: skip
    stored = json.loads(json.dumps(asdict(RunStatistics({"train": both}, None))))
    assert as_type(RunStatistics, stored) == RunStatistics({"train": both}, None)
    for damage in ("{", "[]", json.dumps(report | {"sources": {"web": 3}}), json.dumps(report | {"written": {}})):
        (tmp_path / "prepare_report.json").write_text(damage)
        assert _folder_statistics(facts) == alone
    (tmp_path / "train/lengths.npy").write_bytes(b"nothing")
    assert _folder_statistics(facts).lengths is None
