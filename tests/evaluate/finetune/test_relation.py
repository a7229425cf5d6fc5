"""Relations of two marked spans: a kind of task in one file, from the verb to its figures."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from tests.support.finetuning import FAST, finetune, predictions
from tests.support.labelled import BAD, GOOD, PLAIN, WriteTask, write_tsv

pytestmark = pytest.mark.runs


def marked(number: int, seed: int) -> list[tuple[str, str]]:
    """Return texts of three classes, determined by the words of both marked spans."""
    draw, found = random.Random(seed), []
    for _ in range(number):
        label = draw.choice(("Other", "up(e1,e2)", "down(e1,e2)"))
        words = {"Other": PLAIN, "up(e1,e2)": GOOD, "down(e1,e2)": BAD}[label]
        first, second = (f"<e{n}>{draw.choice(words)}</e{n}>" for n in (1, 2))
        rest = [" ".join(draw.choices(PLAIN, k=draw.randint(1, 4))) for _ in range(3)]
        found.append((f"{rest[0]} {first} {rest[1]} {second}{rest[2]}", label))
    return found


def test_a_relation_is_learned_and_measured_without_the_class_that_is_none(
    write_task: WriteTask, models: dict[str, Path], tmp_path: Path
) -> None:
    """Also for a text far longer than the model reads: it is cut around the spans, or it could not be learned."""
    for name, number in (("train", 240), ("dev", 60)):
        write_tsv(tmp_path / f"{name}.tsv", ("text", "label"), marked(number, number))
    long = f"{'nabe ' * 90}<e1>aki</e1> ruto <e2>beru</e2> {'mosa ' * 90}"
    with (tmp_path / "dev.tsv").open("a") as file:
        file.write(f"{long}\tup(e1,e2)\n")
    task = write_task(kind="relation", epochs=8, metrics=["relation_f1", "macro_f1"], max_tokens=40)
    result = finetune(task, models["modernbert"], tmp_path / "runs")
    assert result["labels"] == ["Other", "down(e1,e2)", "up(e1,e2)"]
    assert result["figures"]["dev"]["relation_f1"] > 0.8 and result["counts"]["dev"]["truncated"] == 1
    lines = predictions(tmp_path / "runs/tone", "dev")
    told, so = ([each[key] for each in lines] for key in ("prediction", "label"))
    right = sum(a == b != "Other" for a, b in zip(told, so, strict=True))
    some = sum(each != "Other" for each in (*told, *so))
    assert result["figures"]["dev"]["relation_f1"] == pytest.approx(2 * right / some)
    assert told[-1] == "up(e1,e2)"  # the first 40 tokens are irrelevant
    assert json.loads((tmp_path / "runs/tone/hf/config.json").read_text())["id2label"]["0"] == "Other"


@pytest.mark.parametrize(
    ("text", "label", "message"),
    [
        ("aki <e1>beru</e1> domi", "Other", "line 2: the spans are not marked. Write <e1>...</e1>"),
        ("<e1>aki</e1> <e2> </e2>", "Other", "line 2: the spans are not marked"),
        ("<e1>aki</e1> <e1>ruto</e1> <e2>beru</e2>", "Other", "line 2: the spans are not marked"),
        ("<e1>aki</e1> <e2>ruto</e2>", "x", "relation_f1 leaves out the class without a relation, and none is called"),
    ],
)
def test_spans_that_are_not_marked_are_refused_with_their_line(
    text: str, label: str, message: str, write_task: WriteTask, models: dict[str, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    rows = [(text, label), ("<e1>aki</e1> <e2>ruto</e2>", "y")]
    task = write_task(kind="relation")
    for name, each in (("train", rows), ("dev", rows[1:])):
        write_tsv(tmp_path / f"{name}.tsv", ("text", "label"), each)
    words = ["finetune", str(task), "--model", str(models["bert"]), *FAST]
    assert main([*words, f"runs_folder={tmp_path}/runs"]) == 65
    assert message in capsys.readouterr().err


def test_its_metric_is_of_no_other_kind(write_task: WriteTask, capsys: pytest.CaptureFixture[str]) -> None:
    """Of classes in the order of the alphabet it would leave out one that means something."""
    assert main(["finetune", str(write_task(metrics=["relation_f1"])), "--model", "x"]) == 78
    assert "metrics: relation_f1 is not one of kind=single-label." in capsys.readouterr().err


def test_a_kind_that_there_is_not_is_refused_with_the_nearest(
    write_task: WriteTask, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["finetune", str(write_task(kind="relations")), "--model", "x"]) == 78
    said = capsys.readouterr().err
    assert "kind='relations'" in said and "expected one of single-label" in said and "Did you mean relation?" in said
