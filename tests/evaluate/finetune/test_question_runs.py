"""Questions from the command to the result: learned, measured, and predicted equally by the exported model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modernbert_train.__main__ import main
from tests.support.finetuning import finetune, predictions
from tests.support.labelled import WriteTask, write_choices, write_questions

pytestmark = pytest.mark.runs


def test_answers_are_learned_and_served(write_task: WriteTask, models: dict[str, Path], tmp_path: Path) -> None:
    """The figures equal SQuAD 2's of predictions.jsonl, and transformers' model predicts the same spans."""
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer
    from transformers.data.metrics.squad_metrics import squad_evaluate

    measured = ["f1", "exact", "has_answer_f1", "no_answer_exact"]
    hidden = {"test": f"{tmp_path}/test.json"}
    task = write_questions(tmp_path, write_task, epochs=8, metrics=measured, best="f1", max_tokens=64, predict=hidden)
    asked = json.loads((tmp_path / "dev.json").read_text())["data"][0]["paragraphs"]
    unknown = [each | {"qas": [{key: each["qas"][0][key] for key in ("id", "question")}]} for each in asked]
    (tmp_path / "test.json").write_text(json.dumps({"data": [{"paragraphs": unknown}]}))
    result = finetune(task, models["modernbert"], tmp_path / "runs")
    figures, folder = result["figures"]["dev"], tmp_path / "runs" / "tone"
    assert figures["f1"] > 0.6 and figures["num_texts"] == 40
    said, alike = (predictions(folder, split) for split in ("dev", "test"))
    assert alike == [{key: value for key, value in line.items() if key != "label"} for line in said]

    class Asked:
        def __init__(self, line: dict[str, Any]) -> None:
            self.qas_id, self.answers = line["id"], [{"text": text} for text in line["label"]]

    theirs = squad_evaluate([Asked(line) for line in said], {line["id"]: line["prediction"] for line in said})
    names = {"f1": "f1", "exact": "exact", "has_answer_f1": "HasAns_f1", "no_answer_exact": "NoAns_exact"}
    assert {name: pytest.approx(theirs[key] / 100) for name, key in names.items()} == {n: figures[n] for n in names}

    served = AutoModelForQuestionAnswering.from_pretrained(folder / "hf").eval()
    reader = AutoTokenizer.from_pretrained(folder / "hf")
    for line, each in zip(said, asked, strict=True):
        given = reader("ruto?", each["context"], return_tensors="pt", return_offsets_mapping=True)
        offsets = given.pop("offset_mapping")[0].tolist()
        with torch.no_grad():
            told = served(**given)
        start, end = told.start_logits[0], told.end_logits[0]
        own = [n for n, sequence in enumerate(given.sequence_ids(0)) if sequence == 1]
        best = max(((float(start[i] + end[j]), i, j) for i in own for j in own if i <= j), key=lambda span: span[0])
        none = float(start[0] + end[0]) - best[0]
        assert line["scores"]["null"] - line["scores"]["answer"] == pytest.approx(none, abs=1e-4)
        text = each["context"][offsets[best[1]][0] : offsets[best[2]][1]].strip()
        assert line["prediction"] == ("" if none > 0 else text)


def test_choices_are_learned_and_served(write_task: WriteTask, models: dict[str, Path], tmp_path: Path) -> None:
    """With a BERT, whose positions are too few for a document of all choices; the exported model chooses the same."""
    from transformers import AutoModelForMultipleChoice, AutoTokenizer

    result = finetune(write_choices(tmp_path, write_task, epochs=6), models["bert"], tmp_path / "runs")
    figures, folder = result["figures"]["dev"], tmp_path / "runs" / "tone"
    assert figures["accuracy"] > 0.7
    said = predictions(folder, "dev")
    assert figures["accuracy"] == pytest.approx(sum(each["label"] == each["prediction"] for each in said) / 40)
    served = AutoModelForMultipleChoice.from_pretrained(folder / "hf").eval()
    reader = AutoTokenizer.from_pretrained(folder / "hf")
    rows = [json.loads(line) for line in (tmp_path / "dev.jsonl").read_text().splitlines()]
    for line, row in zip(said, rows, strict=True):
        pairs = [row["ctx"]] * len(row["endings"]), row["endings"]
        given = {key: value[None] for key, value in reader(*pairs, padding=True, return_tensors="pt").items()}
        with torch.no_grad():
            shares = served(**given).logits[0].softmax(dim=0).tolist()
        assert line["scores"] == {str(n): pytest.approx(share, abs=1e-4) for n, share in enumerate(shares)}
    for verb in ("eval", "plan", "report"):
        assert main([verb, str(folder)]) == 0
