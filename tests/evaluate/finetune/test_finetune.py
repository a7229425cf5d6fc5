"""Fine-tuning from the command to its result: trained, killed, resumed, on two ranks, exported, served."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from modernbert_train.api import load_model
from modernbert_train.checkpoints.evaluations import read_results
from modernbert_train.checkpoints.run_folder import held
from modernbert_train.config.load import load_run
from modernbert_train.core.files import lock_now
from modernbert_train.distributed import bf16
from modernbert_train.weights.names import weights_hash
from tests.support import forked
from tests.support.finetuning import FAST, Tuning, metrics, predictions, write_tags
from tests.support.labelled import (
    PLAIN,
    json_lines,
    sentences,
    squad2,
    write_choices,
    write_questions,
    write_tsv,
)
from tests.support.make_shards import make_tokenizer
from tests.support.paths import ROOT
from tests.support.runs import weights

pytestmark = pytest.mark.runs
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_a_task_is_learned_measured_and_served(tuning: Tuning) -> None:
    """result.json's figure equals the result of transformers' pipeline with the export, text by text."""
    from transformers import pipeline

    task = tuning.write(epochs=8, metrics=["accuracy", "f1"], labels=["down", "up"])
    result = tuning.run(task, "modernbert")
    figures = result["figures"]["dev"]
    assert figures["accuracy"] > 0.9
    assert figures["num_texts"] == 40
    assert result["counts"]["train"] == {
        "texts": 96, "truncated": 0, "empty": 0, "unseen": 0, "loose_tags": 0, "in_train": 0,
        "many_labels": 0, "lost_words": 0, "misplaced": 0,
    }  # fmt: skip
    said = tuning.said
    assert f"tone: dev accuracy {figures['accuracy']:.4f}" in said.splitlines()[-1]
    assert "no classifier there, drawn at random; decoder there is left out" in said
    folder = tuning.tone
    serve = pipeline("text-classification", str(folder / "hf"), device="cpu")
    told = [each["label"] for each in serve([text for text, _ in sentences(40, 2)])]
    right = sum(a == b for a, (_, b) in zip(told, sentences(40, 2), strict=True))
    assert right / 40 == pytest.approx(figures["accuracy"])
    assert "text-classification" in (folder / "hf" / "README.md").read_text()
    evaluations = [entry for entry in metrics(folder) if entry["kind"] == "evaluation"]
    assert len(evaluations) == 8
    assert f"accuracy {figures['accuracy']:.3f}" in tuning.cli("eval", folder).out
    tuning.cli("report", folder)
    tuning.cli("plan", folder)

    # a second time: trained already, the same result; and another task from it: fresh classes, other weights are kept
    assert tuning.run(task, "modernbert") == result
    # the export accepts texts as long as its encoder did, though this task's were short: for serving or continuing
    longest = load_run([folder / "config.yaml"]).phases["finetune"].row_tokens
    assert longest < 40 < 64 == load_model(folder).max_tokens
    limits = {"config.json": "max_position_embeddings", "tokenizer_config.json": "model_max_length"}
    assert [json.loads((folder / "hf" / file).read_text())[key] for file, key in limits.items()] == [64, 64]
    rows = [(text, {"up": 0, "down": 3.5}[label]) for text, label in sentences(96, 5)]
    rows.append((" ".join(PLAIN * 6), 3.5))
    for name in ("train", "dev"):
        write_tsv(tuning.folder / f"{name}.tsv", ("text", "label"), rows)
    task = tuning.write(kind="regression", metrics=["pearson", "spearman"], max_tokens=256)
    second = tuning.run(task, folder, into="second")
    assert "classifier there has other classes and is drawn again" in tuning.said
    assert second["figures"]["dev"]["pearson"] > 0.9
    assert longest < second["training"]["row_tokens"] and second["counts"]["train"]["truncated"] == 0
    from_export = tuning.run(task, folder / "hf", into="third")
    assert from_export["figures"] == second["figures"]
    # of the run, not of its export
    kept = [each for each in read_results(folder) if each.name.startswith("finetune")]
    expected = [(f"finetune {second['task']}, dev", second["figures"]["dev"]["pearson"], second["seed"])]
    assert [(each.name, each.figures["pearson"], each.seed) for each in kept] == expected


KILLED = """
import os, signal
from modernbert_train.distributed import bf16
from modernbert_train.train import checkpointing
bf16.cpu_has_bf16 = lambda: True  # otherwise it is emulated
after_step, steps = checkpointing.Checkpoints.after_step, []
def dies(self, *given, **named):
    stops = after_step(self, *given, **named)
    steps.append(1)
    if len(steps) == 6:
        self.settle(60.0)  # wait for the pending write, so that the next start is predictable
        os.kill(os.getpid(), signal.SIGKILL)
    return stops
checkpointing.Checkpoints.after_step = dies
from modernbert_train.__main__ import program
program()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "precision"),
    [("single-label", "auto"), ("tokens", "bf16"), ("question-answering", "auto"), ("multiple-choice", "auto")],
)
def test_a_killed_run_resumes_to_the_same_bits(
    kind: str, precision: str, monkeypatch: pytest.MonkeyPatch, tuning: Tuning
) -> None:
    """kill -9 between two checkpoints: labels, dropout and the fresh head depend on keys only, and a restart must not
    act like another seed."""
    monkeypatch.setattr(bf16, "cpu_has_bf16", lambda: True)
    written = {"tokens": write_tags, "question-answering": write_questions, "multiple-choice": write_choices}
    task = written[kind](tuning.folder, tuning.write) if kind in written else tuning.write(epochs=2)
    keys = ["checkpoint.interval_steps=4", "model.dropout=0.1", "objective.dropout=0.2"]
    keys.append(f"compute.precision={precision}")
    expected, cut = tuning.run(task, "bert", *keys), tuning.folder / "cut/tone"
    words = tuning.words(task, "bert", *keys, into="cut")
    done = forked.run([sys.executable, "-c", KILLED, *words], env=os.environ | ENVIRONMENT)
    assert done.returncode == -signal.SIGKILL and not (cut / "result.json").exists()
    assert [path.name for path in (cut / "checkpoints").iterdir()] == ["step-00000004"]
    assert tuning.run(task, "bert", *keys, into="cut")["figures"] == expected["figures"]
    assert metrics(cut) == metrics(tuning.tone)
    ours, theirs = weights(cut), weights(tuning.tone)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_words_are_tagged_and_served(tuning: Tuning) -> None:
    """Entity F1 on exact spans, a tag for each word, and the same by transformers' pipeline on the plain text."""
    from transformers import pipeline

    task, sentence = write_tags(tuning.folder, tuning.write), ["nabe", "aki", "ruto"]
    asked = [json.dumps({"tokens": words}) + "\n" for words in (sentence, sentence * 20)]
    (tuning.folder / "more.jsonl").write_text("".join(asked))
    words = ["epochs=9", f"predict.more={tuning.folder}/more.jsonl"]
    result = tuning.run(task, "modernbert", *words)
    assert result["figures"]["dev"]["entity_f1"] > 0.9
    told = predictions(tuning.tone, "dev")
    pairs = [pair for each in told for pair in zip(each["prediction"], each["label"], strict=True)]
    assert sum(mine == its for mine, its in pairs) > 0.95 * len(pairs)
    first, long = predictions(tuning.tone, "more")
    assert first["prediction"] == ["O", "B-up", "O"] and min(first["scores"]) > 0.5
    assert len(long["prediction"]) == 60 and long["prediction"][-1] is None, "no prediction beyond the context"
    assert result["labels"] == ["O", "B-down", "B-up"]
    served = str(tuning.tone / "hf")
    serve = pipeline("token-classification", served, device="cpu", aggregation_strategy="first")
    right = 0
    for text, label in sentences(40, 2):
        (word,) = [each for each in text.split() if each not in PLAIN]
        right += [(each["entity_group"], each["word"].strip()) for each in serve(text)] == [(label, word)]
    assert right >= 0.85 * 40


def test_answers_are_learned_and_served(tuning: Tuning) -> None:
    """The figures equal SQuAD 2's of predictions.jsonl, and transformers' model predicts the same spans."""
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    measured = ["f1", "exact", "has_answer_f1", "no_answer_exact"]
    keys = {"metrics": measured, "best": "f1", "max_tokens": 64, "predict": {"test": f"{tuning.folder}/test.json"}}
    task = write_questions(tuning.folder, tuning.write, epochs=8, **keys)
    asked = json.loads((tuning.folder / "dev.json").read_text())["data"][0]["paragraphs"]
    unknown = [each | {"qas": [{key: each["qas"][0][key] for key in ("id", "question")}]} for each in asked]
    (tuning.folder / "test.json").write_text(json.dumps({"data": [{"paragraphs": unknown}]}))
    result = tuning.run(task, "modernbert")
    figures, folder = result["figures"]["dev"], tuning.tone
    assert figures["f1"] > 0.6 and figures["num_texts"] == 40
    said, alike = (predictions(folder, split) for split in ("dev", "test"))
    assert alike == [{key: value for key, value in line.items() if key != "label"} for line in said]

    theirs = squad2(*([line[key] for line in said] for key in ("prediction", "label")))
    assert {name: figures[name] for name in measured} == pytest.approx({name: theirs[name] for name in measured})

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


def test_choices_are_learned_and_served(tuning: Tuning) -> None:
    """With a BERT, whose positions are too few for a document of all choices; the exported model chooses the same."""
    from transformers import AutoModelForMultipleChoice, AutoTokenizer

    result = tuning.run(write_choices(tuning.folder, tuning.write, epochs=6), "bert")
    figures, folder = result["figures"]["dev"], tuning.tone
    assert figures["accuracy"] > 0.7
    said = predictions(folder, "dev")
    assert figures["accuracy"] == pytest.approx(sum(each["label"] == each["prediction"] for each in said) / 40)
    served = AutoModelForMultipleChoice.from_pretrained(folder / "hf").eval()
    reader = AutoTokenizer.from_pretrained(folder / "hf")
    rows = [json.loads(line) for line in (tuning.folder / "dev.jsonl").read_text().splitlines()]
    for line, row in zip(said, rows, strict=True):
        pairs = [row["ctx"]] * len(row["endings"]), row["endings"]
        given = {key: value[None] for key, value in reader(*pairs, padding=True, return_tensors="pt").items()}
        with torch.no_grad():
            shares = served(**given).logits[0].softmax(dim=0).tolist()
        assert line["scores"] == {str(n): pytest.approx(share, abs=1e-4) for n, share in enumerate(shares)}
    for verb in ("eval", "plan", "report"):
        tuning.cli(verb, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("ddp", "single-label"), ("fsdp2", "single-label"), ("ddp", "question-answering"), ("fsdp2", "multiple-choice")],
)
def test_two_ranks_give_what_one_gives(strategy: str, kind: str, tuning: Tuning) -> None:
    written = {"question-answering": write_questions, "multiple-choice": write_choices}
    task = written[kind](tuning.folder, tuning.write, epochs=2) if kind in written else tuning.write(epochs=2)
    keys = ["phases.finetune.batch_rows=8", "phases.finetune.row_tokens=64", "phases.finetune.microbatch_tokens=256"]
    one = tuning.run(task, "modernbert", *keys, into="one")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29517"]
    words = tuning.words(task, "modernbert", *keys, f"distributed.strategy={strategy}", into="two")
    env = os.environ | ENVIRONMENT
    subprocess.run([*launcher, "-m", "modernbert_train", *words], env=env, check=True, timeout=300)
    two = json.loads((tuning.folder / "two" / "tone" / "result.json").read_text())
    assert two["figures"]["dev"] == pytest.approx(one["figures"]["dev"], abs=1e-4)
    ours, theirs = (weights(tuning.folder / name / "tone") for name in ("two", "one"))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=1e-4)


def test_a_folder_is_held_to_the_last_file_and_several_seeds_need_one_for_all(tuning: Tuning) -> None:
    """Two commands on one folder mixed one's YAML with the other's checkpoints."""
    runs = tuning.folder / "runs"
    first, free_early = runs / "tone-bert-1", []

    def watch() -> None:
        while not ((starts := first / "starts.jsonl").exists() and "finished" in starts.read_text()):
            time.sleep(0.01)
        while not (first / "result.json").exists():
            with (first / ".lock").open("a") as lock:
                free_early.append(lock_now(lock))
            time.sleep(0.01)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    words = ["finetune", tuning.write(epochs=1), "--model", tuning.models["bert"], f"runs_folder={runs}", *FAST]
    tuning.cli(*words, "--seeds", "1")
    watching.join(10)
    assert free_early and not any(free_early)

    made = (first / "finetune.yaml").read_text()
    with held(first, ""):
        said = tuning.cli(*words, "optim.lr=1e-4", "--seeds", "1", code=78).err
    assert f"{first}: in use by process" in said and (first / "finetune.yaml").read_text() == made
    said = tuning.cli(*words, "--seeds", "1", "2", code=78).err
    assert "and seeds 1 2: several runs need a folder for their table. Add --out" in said


def test_a_run_is_not_continued_with_other_first_weights_or_settings(tuning: Tuning) -> None:
    """The figures of the old weights were written as the new ones'."""
    model = shutil.copytree(tuning.models["bert"], tuning.folder / "${model}")  # no interpolation
    task, folder = tuning.write(epochs=1), tuning.tone
    result = tuning.run(task, model)
    assert result["source_weights"] == weights_hash(str(model))
    for key in ("lr=0.5", "epochs=2"):
        said = tuning.refused(task, model, key)
        assert f", or remove {folder}." in said and "--fresh" not in said and "start.checkpoint" not in said
    file = model / "model.safetensors"
    save_file({key: tensor + 1 for key, tensor in load_file(file).items()}, file)
    changed = f"{folder}: the weights that it began with, {model}, have changed since. Restore them, give"
    assert changed in tuning.refused(task, model)
    assert json.loads((folder / "result.json").read_text()) == result
    # a run of an earlier version has no record to compare with
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kept = ({key: value for key, value in line.items() if key != "source_weights"} for line in lines)
    (folder / "metrics.jsonl").write_text(json_lines(kept))
    tuning.run(task, model)


def test_a_model_of_another_vocabulary_is_refused(tuning: Tuning) -> None:
    """Every token would have another meaning, and the figures would just be bad."""
    other = make_tokenizer(tuning.folder / "other")
    assert "with another tokenizer" in tuning.refused(tuning.write(), "bert", f"data.tokenizer={other}")


def test_the_run_is_the_papers(tuning: Tuning) -> None:
    """Decoupled decay with the paper's value, linear decay to 0, epochs as tokens of the clock."""
    tuning.run(tuning.write(lr=1e-3, weight_decay=1e-5, epochs=1, warmup=0.1), "bert")
    config = load_run([tuning.tone / "config.yaml"])
    assert (config.optim.name, config.optim.weight_decay) == ("adamw", pytest.approx(1e-5 / 1e-3))
    assert config.optim.max_grad_norm == 1.0, "as the Trainer clips"  # type: ignore[attr-defined]
    phase = config.phases["finetune"]
    about = json.loads((tuning.tone / "task" / "train" / "dataset.json").read_text())
    assert phase.tokens == about["tokens"] + 2 * 96
    assert phase.schedule.decay_tokens + phase.schedule.warmup_tokens == phase.tokens
    assert phase.schedule.warmup_tokens == pytest.approx(0.1 * phase.tokens, abs=1)
    assert yaml.safe_load((tuning.tone / "finetune.yaml").read_text())["weights"]["init_from"]
    assert config.objective.pooling == "cls"  # type: ignore[attr-defined]
