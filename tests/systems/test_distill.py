"""Runs with a teacher: resumed as if never stopped, equal on two ranks, refused if the teacher does not fit.

If this breaks, a student is resumed under another teacher, or its loss depends on its ranks.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from modernbert_train.__main__ import main
from tests.support.faulty import Killed, at_fault
from tests.support.make_shards import make_documents, make_shards, make_texts
from tests.support.runs import assert_equal_runs, launch, records, weights
from tests.support.tiny_run import TinyRun
from tests.support.verbs import Says

TEACHER = ("name=teacher", "phases.long=null", "phases.short.tokens=2000", "model.num_layers=4")
WIDER = (*TEACHER, "model.hidden_size=64", "model.num_heads=4")
STUDENT = ("model.num_layers=1", "weights.shrink_from={teacher}", "checkpoint.interval_steps=3")
ALL = "objective={name: distill, teacher: {teacher}, mse_weight: 0.5}"


@pytest.fixture
def teacher(tiny_run: TinyRun, tmp_path: Path) -> Path:
    assert main(["train", *tiny_run(*TEACHER)]) == 0
    return tmp_path / "runs/teacher"


def student(tiny_run: TinyRun, teacher: Path, *overrides: str) -> list[str]:
    return tiny_run(*(each.replace("{teacher}", str(teacher)) for each in (*STUDENT, ALL, *overrides)))


@pytest.mark.runs
@pytest.mark.timeout(600)
def test_a_killed_student_resumes_under_its_teacher_and_under_no_other(
    tiny_run: TinyRun, teacher: Path, tmp_path: Path, says: Says
) -> None:
    """To the bit, also where the teacher has moved; another one is refused, and so is none. Nothing of it is saved."""
    short = ("phases.long=null", "phases.short.tokens=2500")
    said = says("train", *student(tiny_run, teacher, *short, "name=whole"))
    assert f"  teacher {teacher}/checkpoints/" in said and ", modernbert of 4 layers of width 32, hash " in said
    steps = records(tmp_path / "runs/whole")
    assert {f"loss/{term}" for term in ("mlm", "kl", "cosine", "mse")} <= steps[-1].keys()
    assert weights(tmp_path / "runs/whole").keys() == {
        name for name in weights(teacher) if not name.startswith(("model.layers.1", "model.layers.2", "model.layers.3"))
    }
    killed = ("name=killed", *short)
    with at_fault(kill_at=5), pytest.raises(Killed):
        main(["train", *student(tiny_run, teacher, *killed)])
    assert main(["eval", *student(tiny_run, tmp_path / "gone", *killed)]) == 0, "no figure asks the teacher"

    assert main(["export", str(teacher)]) == 0
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.move(teacher / "hf", moved)  # in another format, at another place, and the same to the bit
    shutil.copytree(moved, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.final_norm.weight"][0] += 1e-3
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    said = says("train", *student(tiny_run, teacher, *killed, f"objective.teacher={other}"), code=65)
    assert f"trained by another teacher than objective.teacher={other} holds now: its hash of teacher is" in said
    turned = tmp_path / "turned"  # equal tensors, of another RoPE base
    shutil.copytree(moved, turned)
    about = json.loads((turned / "config.json").read_text(encoding="utf-8"))
    rope = about.get("rope_parameters") or about
    assert json.dumps(rope).count("10000.0") == 2
    (turned / "config.json").write_text(json.dumps(about).replace("10000.0", "10001.0"), encoding="utf-8")
    said = says("train", *student(tiny_run, teacher, *killed, f"objective.teacher={turned}"), code=65)
    assert "its hash of teacher's configuration is" in said
    assert main(["train", *student(tiny_run, teacher, *killed, f"objective.teacher={tmp_path / 'runs/none'}")]) == 78
    assert main(["train", *student(tiny_run, teacher, *killed, f"objective.teacher={moved}")]) == 0
    assert_equal_runs(tmp_path / "runs/killed", tmp_path / "runs/whole", least=6)


@pytest.mark.runs
@pytest.mark.timeout(600)
def test_masked_tokens_first_and_a_teacher_after_them(tiny_run: TinyRun, tmp_path: Path) -> None:
    """In one run: the first phase is masked-language modelling to the bit, also with a matrix for a wider teacher."""
    assert main(["train", *tiny_run(*WIDER)]) == 0
    short = "phases.short.tokens=2500"
    assert main(["train", *tiny_run("name=plain", "phases.long=null", "model.num_layers=1", short)]) == 0
    asked = (
        short,
        "phases.long.tokens=1200",
        f"objective={{name: distill, teacher: {tmp_path / 'runs/teacher'}, teacher_width: 64, mask_rate: 0.3, "
        "pooled_weight: 1.0}",
        "phases.short.objective={name: mlm}",
        "model.num_layers=1",
    )
    assert main(["train", *tiny_run(*asked, "name=one")]) == 0
    launch(tiny_run(*asked, "name=two"), 2)
    one, two, plain = (records(tmp_path / "runs" / name) for name in ("one", "two", "plain"))
    first = [step for step in one if step["phase"] == "short"]
    assert [step["loss"] for step in first] == [step["loss"] for step in plain]
    assert not any("loss/kl" in step for step in first) and len(first) > 5
    terms = {"mlm", "kl", "cosine", "pooled"}
    assert {key.removeprefix("loss/") for key in one[-1] if key.startswith("loss/")} == terms
    assert one[-1]["loss/pooled"] < one[len(first)]["loss/pooled"], "it comes near its teacher"
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-4)


@pytest.mark.runs
@pytest.mark.timeout(600)
def test_a_teacher_that_does_not_fit_is_refused_before_the_first_batch(
    tiny_run: TinyRun, teacher: Path, tmp_path: Path, says: Says
) -> None:
    narrow = "model={hidden_size: 16, num_heads: 1}"
    cases = {
        ("weights.shrink_from=null", narrow): "its hidden states are 32 wide, and the model compares 16 with them",
        ("weights.shrink_from=null", "model.vocab_size=576"): "predicts 512 tokens, and model.vocab_size=576",
        (f"objective.teacher={tmp_path / 'runs/none'}",): "runs/none: no such run.",
    }
    for overrides, message in cases.items():
        assert message in says("train", *student(tiny_run, teacher, *overrides), code=78)
    assert main(["check", *student(tiny_run, teacher, f"objective.teacher={tmp_path / 'runs/none'}")]) == 78

    export = teacher / "hf"
    assert main(["export", str(teacher)]) == 0
    tokenizer = json.loads((export / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = list(vocabulary)[40:42]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (export / "tokenizer.json").write_text(json.dumps(tokenizer))
    words = student(tiny_run, teacher, f"objective.teacher={export}", "weights.shrink_from=null")
    assert f"objective.teacher={export}: trained with another tokenizer" in says("train", *words, code=78)
    assert not (tmp_path / "runs/tiny/checkpoints").exists() or not any((tmp_path / "runs/tiny/checkpoints").iterdir())


@pytest.mark.runs
@pytest.mark.timeout(600)
def test_the_price_of_each_choice_is_reported_before_any_training(
    tiny_run: TinyRun, tiny_data: Path, tmp_path: Path, says: Says
) -> None:
    """`eval` of a student before training: the larger model's own loss, the loss with each choice alone, and with all.

    The last is the run's first loss, and words are fewer with a trimmed tokenizer, whose rows are the teacher's.
    """
    assert main(["train", *tiny_run(*WIDER)]) == 0
    large = records(tmp_path / "runs/teacher", "validation")[-1]["loss"]
    few = tmp_path / "few"
    (tmp_path / "texts.txt").write_text("\n".join(make_texts(20)), encoding="utf-8")
    trim = ["tokenizer", "trim", str(few / "tokenizer"), str(tiny_data / "tokenizer"), str(tmp_path / "texts.txt")]
    assert main([*trim, "--entries", "384"]) == 0
    for name, seed in (("train", 21), ("validation", 22)):
        make_shards(few / name, make_documents(few / "tokenizer", [90, 150, 300, 400], seed), few / "tokenizer")
    narrow = (
        f"weights.shrink_from={tmp_path / 'runs/teacher'}",
        "model={num_layers: 1, hidden_size: 32, num_heads: 2, intermediate_size: 32}",
        "phases.long=null",
        "phases.short.tokens=1200",
        "optim.lr=1e-12",  # so that the last loss is the first
    )
    words = (*narrow, "weights.vocabulary=replace", "model.vocab_size=384", "name=fewer")
    words += tuple(f"data.{key}={few / key}" for key in ("train", "validation", "tokenizer"))
    for name, asked, first in (("same", (*narrow, "name=same"), "as it is"), ("fewer", words, "vocab_size 384 of 512")):
        lines = [line.strip() for line in says("eval", *tiny_run(*asked)).splitlines()]
        said = {line.split("  ")[0]: line.split() for line in lines}
        names = (first, "num_layers 1 of 4", "hidden_size 32 of 64, num_heads 2 of 4", "intermediate_size 32 of 48")
        assert {*names, "all of them"} <= said.keys()
        losses = {name: float(said[name][-3]) for name in (*names, "all of them")}
        assert name == "fewer" or losses[first] == pytest.approx(large, abs=5e-4)
        begins = says("train", *tiny_run(*asked))
        assert "layers 0 of 4, hidden_size 32 of 64, heads 2 of 4, intermediate_size 32 of 48" in begins
        assert ("of 384 rows 384 are kept" in begins) is (name == "fewer")
        first_loss = records(tmp_path / "runs" / name, "validation")[0]["loss"]
        assert first_loss == pytest.approx(losses["all of them"], abs=5e-4)
