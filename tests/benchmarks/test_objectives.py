"""The comparison of objectives: what its tables say is what was measured, and nothing is measured twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import objectives
from benchmarks.objectives import SYSTEMS, cell, main, spearman


def test_ranks_are_correlated_and_equal_values_share_one() -> None:
    first = torch.tensor([10.0, 20.0, 30.0, 1000.0])
    assert spearman(first, torch.tensor([1.0, 2.0, 3.0, 4.0])) == pytest.approx(1.0)
    assert spearman(first, torch.tensor([4.0, 3.0, 2.0, 1.0])) == pytest.approx(-1.0)
    # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5)
    assert spearman(first, torch.tensor([0.0, 1.0, 1.0, 2.0])) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_only_what_seeds_tell_apart_is_marked() -> None:
    assert cell([0.5, 0.52], [0.1, 0.12]) == "0.510 ± 0.014 *"
    assert cell([0.5, 0.52], [0.4, 0.6]) == "0.510 ± 0.014"
    assert cell([0.5], [0.1]) == "0.500"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_is_measured_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each with its own encoder or objective; a second call prints the same table out of the file of results."""
    ending = "It goes on for quite a while in this place. And then on. In the end it ends as all of them do."
    words = [f"Document {number} tells of word{number % 7}. {ending}" for number in range(400)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": " ".join([text] * 4)}) for text in words))
    monkeypatch.setattr(objectives, "VOCABULARY", 512)
    folder = tmp_path / "tasks/other_tasks"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        lines = [f"this is word{number % 2},class{number % 2}" for number in range(40)]
        (folder / f"banking77_{part}.csv").write_text("\n".join(["text,category", *lines, ""]))
    options = [
        "--text",
        str(tmp_path / "text.jsonl"),
        "--tasks",
        str(tmp_path / "tasks"),
        "--out",
        str(tmp_path / "out"),
    ]
    options += ["--tokens", "6000", "--seeds", "1", "--only", name]
    main(options)
    first = capsys.readouterr().out
    monkeypatch.setattr(objectives, "train", None)
    main(options)
    tables = [
        text[text.index("|  | seeds") : text.index(" minutes")].rsplit("\n", 1)[0]
        for text in (first, capsys.readouterr().out)
    ]
    assert tables[0] == tables[1] and f"| {name} | 1 |" in tables[0] and "tuned banking77" in tables[0]
