"""A model's predictions in text samples: the right word at the right place, and always the same places."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modernbert_train.__main__ import main
from modernbert_train.batch import IGNORED_LABEL, Batch, Packed
from modernbert_train.evaluate.samples import PLACES, WINDOW, Samples, word_of
from modernbert_train.report.read_samples import read_samples

IDS = {"[PAD]": 0, "[MASK]": 1, "[CLS]": 2, "[SEP]": 3} | {f"Ġw{i}": i for i in range(4, 40)}
PREDICTS = torch.eye(40) * 9


class Model(nn.Module):
    """Predicts a fixed token at each place with certainty."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(40, 40, bias=False)
        self.decoder.weight = nn.Parameter(PREDICTS.clone())

    def forward(self, batch: Batch, tokens_M: list[int]) -> Tensor:
        hidden: Tensor = self.decoder(torch.nn.functional.one_hot(torch.tensor(tokens_M), 40).float())
        return hidden


def batch(order: str = "all") -> Batch:
    """Return a row of two texts and a pad, and another row."""
    ids = torch.tensor([2, 4, 1, 6, 3, 2, 1, 8, 3, 0, 2, 1, 5, 3, 0, 0, 0, 0, 0, 0])
    boundaries = torch.tensor([0, 5, 9, 10, 14, 20, 20], dtype=torch.int32)
    packed = Packed(ids, torch.zeros_like(ids), boundaries, 10, order=order)  # type: ignore[arg-type]
    targets = {"positions_M": torch.tensor([2, 6, 11, 0]), "labels_M": torch.tensor([5, 7, 9, IGNORED_LABEL])}
    return Batch(packed, targets, {"mlm": 3})


def test_the_words_stand_where_they_belong() -> None:
    model = Model()
    with Samples(4, IDS, pad_id=0).watching(model, batch(), row_tokens=10) as found:
        model(batch(), [5, 20, 9, 0])
    assert [text["words"] for text in found] == [
        ["[CLS]", " w4", "[MASK]", " w6", "[SEP]"],
        ["[CLS]", "[MASK]", " w8", "[SEP]"],
    ]
    first, second = (text["predicted"] for text in found)
    assert [(each["at"], each["is"]) for each in first + second] == [(2, " w5"), (1, " w7")]
    assert first[0]["guesses"][0][0] == " w5" and second[0]["guesses"][0][0] == " w20"
    assert len(first[0]["guesses"]) == 3 and first[0]["guesses"][0][1] > 0.9
    assert not model.decoder._forward_hooks


def test_the_next_token_is_predicted_at_its_place() -> None:
    model, causal = Model(), batch("causal")
    with Samples(1, IDS, pad_id=0).watching(model, causal, row_tokens=10) as found:
        model(causal, [5, 20, 9, 0])
    assert [(each["at"], each["is"]) for each in found[0]["predicted"]] == [(3, " w5")]


def test_words_of_every_kind_of_vocabulary() -> None:
    assert [word_of({"Ġthe": 0, "Ã©": 1, "[MASK]": 2})(i) for i in range(4)] == [" the", "é", "[MASK]", ""]
    assert [word_of({"play": 0, "##ing": 1})(i) for i in range(2)] == [" play", "ing"]
    assert word_of({"▁the": 0})(0) == " the"


@pytest.mark.runs
def test_a_run_keeps_the_same_places_and_trains_the_same(tiny_run: Callable[..., list[str]], tmp_path: Path) -> None:
    """For any number of texts, also 0; the report reads the file."""
    records = []
    for number in (0, 2):
        name = f"samples-{number}"
        assert main(["train", *tiny_run(f"name={name}", f"eval.samples={number}")]) == 0
        folder = tmp_path / "runs" / name
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        trained = [line for line in lines if line["kind"] != "checkpoint"]  # written when it is on the disk
        records.append([(line["kind"], line.get("loss"), line.get("accuracy")) for line in trained])
        assert (folder / "samples.jsonl").exists() == bool(number)
    assert records[0] == records[1]
    found = read_samples(folder)
    assert len(found) == sum(kind == "validation" for kind, _, _ in records[1])
    assert all(1 <= len(each["texts"]) <= 2 for each in found)
    for phase in {each["phase"] for each in found}:
        of_phase = [each["texts"] for each in found if each["phase"] == phase]
        kept = [[(text["words"], [p["at"] for p in text["predicted"]]) for text in texts] for texts in of_phase]
        assert all(each == kept[0] for each in kept)
    assert all(len(t["words"]) <= WINDOW and 0 < len(t["predicted"]) <= PLACES for e in found for t in e["texts"])
