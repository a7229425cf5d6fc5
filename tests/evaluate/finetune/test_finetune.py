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
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from modernbert_train.__main__ import main
from modernbert_train.api import load_model
from modernbert_train.checkpoints.results import read_results
from modernbert_train.checkpoints.run_folder import held
from modernbert_train.config.load import load_run
from modernbert_train.core.files import lock_now
from modernbert_train.distributed import bf16
from modernbert_train.weights.names import weights_hash
from tests.support import forked
from tests.support.finetuning import FAST, finetune, metrics, predictions, write_tags
from tests.support.labelled import PLAIN, WriteTask, sentences, write_choices, write_questions, write_tsv
from tests.support.paths import ROOT
from tests.support.runs import weights

pytestmark = pytest.mark.runs


def test_a_task_is_learned_measured_and_served(
    write_task: WriteTask, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """result.json's figure equals the result of transformers' pipeline with the export, text by text."""
    from transformers import pipeline

    result = finetune(
        write_task(epochs=8, metrics=["accuracy", "f1"], labels=["down", "up"]),
        models["modernbert"],
        tmp_path / "runs",
    )
    figures = result["figures"]["dev"]
    assert figures["accuracy"] > 0.9
    assert figures["num_texts"] == 40
    assert result["counts"]["train"] == {
        "texts": 96, "truncated": 0, "empty": 0, "unseen": 0, "loose_tags": 0, "in_train": 0,
        "many_labels": 0, "lost_words": 0, "misplaced": 0,
    }  # fmt: skip
    said = capsys.readouterr().out
    assert f"tone: dev accuracy {figures['accuracy']:.4f}" in said.splitlines()[-1]
    assert "no classifier there, drawn at random; decoder there is left out" in said
    folder = tmp_path / "runs" / "tone"
    serve = pipeline("text-classification", str(folder / "hf"), device="cpu")
    told = [each["label"] for each in serve([text for text, _ in sentences(40, 2)])]
    assert sum(a == b for a, (_, b) in zip(told, sentences(40, 2), strict=True)) / 40 == pytest.approx(
        figures["accuracy"]
    )
    assert "text-classification" in (folder / "hf" / "README.md").read_text()
    evaluations = [entry for entry in metrics(folder) if entry["kind"] == "evaluation"]
    assert len(evaluations) == 8
    assert main(["eval", str(folder)]) == 0
    assert f"accuracy {figures['accuracy']:.3f}" in capsys.readouterr().out
    assert main(["report", str(folder)]) == 0
    assert main(["plan", str(folder)]) == 0

    # a second time: trained already, the same result; and another task from it: fresh classes, other weights are kept
    assert (
        finetune(
            write_task(epochs=8, metrics=["accuracy", "f1"], labels=["down", "up"]),
            models["modernbert"],
            tmp_path / "runs",
        )
        == result
    )
    # the export accepts texts as long as its encoder did, though this task's were short: for serving or continuing
    longest = load_run([folder / "config.yaml"]).phases["finetune"].row_tokens
    assert longest < 40 < 64 == load_model(folder).max_tokens
    limits = {"config.json": "max_position_embeddings", "tokenizer_config.json": "model_max_length"}
    assert [json.loads((folder / "hf" / file).read_text())[key] for file, key in limits.items()] == [64, 64]
    rows = [(text, {"up": 0, "down": 3.5}[label]) for text, label in sentences(96, 5)]
    rows.append((" ".join(PLAIN * 6), 3.5))
    for name in ("train", "dev"):
        write_tsv(tmp_path / f"{name}.tsv", ("text", "label"), rows)
    capsys.readouterr()
    task = write_task(kind="regression", metrics=["pearson", "spearman"], max_tokens=256)
    for name in ("train", "dev"):
        write_tsv(tmp_path / f"{name}.tsv", ("text", "label"), rows)
    second = finetune(task, folder, tmp_path / "second")
    assert "classifier there has other classes and is drawn again" in capsys.readouterr().out
    assert second["figures"]["dev"]["pearson"] > 0.9
    assert longest < second["training"]["row_tokens"] and second["counts"]["train"]["truncated"] == 0
    from_export = finetune(task, folder / "hf", tmp_path / "third")
    assert from_export["figures"] == second["figures"]
    # of the run, and not of its export
    kept = [each for each in read_results(folder) if each.name.startswith("finetune")]
    expected = [(f"finetune {second['task']}, dev", second["figures"]["dev"]["pearson"], second["seed"])]
    assert [(each.name, each.figures["pearson"], each.seed) for each in kept] == expected, (
        "of the run, not of its export"
    )


def killed(words: list[str], steps: int) -> int:
    """Run the verb in a separate process, killed after this many steps; return its exit code."""
    code = f"""
import os, signal
from modernbert_train.train import checkpointing
after_step, steps = checkpointing.Checkpoints.after_step, []
def dies(self, *given, **named):
    stops = after_step(self, *given, **named)
    steps.append(1)
    if len(steps) == {steps}:
        self.settle(60.0)  # wait for the pending write, so that the next start is predictable
        os.kill(os.getpid(), signal.SIGKILL)
    return stops
checkpointing.Checkpoints.after_step = dies
from modernbert_train.__main__ import program
program()
"""
    path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return forked.run([sys.executable, "-c", code, *words], env=os.environ | path).returncode


@pytest.mark.slow
def test_a_run_killed_in_its_middle(write_task: WriteTask, models: dict[str, Path], tmp_path: Path) -> None:
    """kill -9 between two checkpoints: the same command resumes, with the same result as an undisturbed one."""
    task, keys = write_task(epochs=1), ["checkpoint.interval_steps=2", "batch_texts=8"]
    words = ["finetune", str(task), "--model", str(models["bert"]), *FAST, *keys, f"runs_folder={tmp_path}/cut"]
    words += ["--seeds", "8"]
    whole = finetune(task, models["bert"], tmp_path / "whole", *keys, "seed=8")
    alone = tmp_path / "whole/tone"
    steps = len([entry for entry in metrics(alone) if entry["kind"] == "step"])
    assert steps > 3
    assert killed(words, 3) == -signal.SIGKILL
    cut = tmp_path / "cut" / "tone-bert-8"
    assert not (cut / "result.json").exists()
    assert [path.name for path in (cut / "checkpoints").iterdir()] == ["step-00000002"]
    assert main(words) == 0
    assert json.loads((cut / "result.json").read_text())["figures"] == whole["figures"]
    assert metrics(cut) == metrics(alone)
    ours, theirs = weights(cut), weights(alone)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "precision"),
    [("tokens", "bf16"), ("question-answering", "auto"), ("multiple-choice", "auto")],
)
def test_a_killed_run_resumes_to_the_same_bits(
    kind: str,
    precision: str,
    write_task: WriteTask,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Labels, dropout and the fresh head depend on keys only: a restart must not act like another seed."""
    monkeypatch.setattr(bf16, "cpu_has_bf16", lambda: True)  # otherwise it is emulated
    written = {"tokens": write_tags, "question-answering": write_questions, "multiple-choice": write_choices}
    task = written[kind](tmp_path, write_task)
    keys = ["checkpoint.interval_steps=4", "model.dropout=0.1", "objective.dropout=0.2"]
    keys.append(f"compute.precision={precision}")
    whole = finetune(task, models["bert"], tmp_path / "whole", *keys)
    words = ["finetune", str(task), "--model", str(models["bert"]), "name=tone", *FAST, *keys]
    words.append(f"runs_folder={tmp_path / 'killed'}")
    from modernbert_train.train import checkpointing

    saved = checkpointing.Checkpoints.after_step
    after = []

    def dies(self: Any, *given: Any, **named: Any) -> bool:
        after.append(saved(self, *given, **named))
        if len(after) == 6:
            raise KeyboardInterrupt  # between two checkpoints, like a kill
        return after[-1]

    with monkeypatch.context() as patched:
        patched.setattr(checkpointing.Checkpoints, "after_step", dies)
        with pytest.raises(KeyboardInterrupt):
            main(words)
    assert not (tmp_path / "killed" / "tone" / "result.json").exists()
    resumed = finetune(task, models["bert"], tmp_path / "killed", *keys)
    assert resumed["figures"] == whole["figures"]
    assert metrics(tmp_path / "killed" / "tone") == metrics(tmp_path / "whole" / "tone")
    ours, theirs = (weights(tmp_path / name / "tone") for name in ("killed", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_words_are_tagged_and_served(write_task: WriteTask, models: dict[str, Path], tmp_path: Path) -> None:
    """Entity F1 on exact spans, a tag for each word, and the same by transformers' pipeline on the plain text."""
    from transformers import pipeline

    task, sentence = write_tags(tmp_path, write_task), ["nabe", "aki", "ruto"]
    asked = [json.dumps({"tokens": words}) + "\n" for words in (sentence, sentence * 20)]
    (tmp_path / "more.jsonl").write_text("".join(asked))
    words = ["epochs=9", f"predict.more={tmp_path}/more.jsonl"]
    result = finetune(task, models["modernbert"], tmp_path / "runs", *words)
    assert result["figures"]["dev"]["entity_f1"] > 0.9
    told = predictions(tmp_path / "runs" / "tone", "dev")
    pairs = [pair for each in told for pair in zip(each["prediction"], each["label"], strict=True)]
    assert sum(mine == its for mine, its in pairs) > 0.95 * len(pairs)
    first, long = predictions(tmp_path / "runs" / "tone", "more")
    assert first["prediction"] == ["O", "B-up", "O"] and min(first["scores"]) > 0.5
    assert len(long["prediction"]) == 60 and long["prediction"][-1] is None, "no prediction beyond the context"
    assert result["labels"] == ["O", "B-down", "B-up"]
    serve = pipeline(
        "token-classification", str(tmp_path / "runs" / "tone" / "hf"), device="cpu", aggregation_strategy="first"
    )
    right = 0
    for text, label in sentences(40, 2):
        (word,) = [each for each in text.split() if each not in PLAIN]
        right += [(each["entity_group"], each["word"].strip()) for each in serve(text)] == [(label, word)]
    assert right >= 0.85 * 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("ddp", "single-label"), ("fsdp2", "single-label"), ("ddp", "question-answering"), ("fsdp2", "multiple-choice")],
)
def test_two_ranks_give_what_one_gives(
    strategy: str, kind: str, write_task: WriteTask, models: dict[str, Path], tmp_path: Path
) -> None:
    written = {"question-answering": write_questions, "multiple-choice": write_choices}
    task = written[kind](tmp_path, write_task, epochs=2) if kind in written else write_task(epochs=2)
    keys = ["phases.finetune.batch_rows=8", "phases.finetune.row_tokens=64", "phases.finetune.microbatch_tokens=256"]
    one = finetune(task, models["modernbert"], tmp_path / "one", *keys)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29517"]
    words = ["finetune", str(task), "--model", str(models["modernbert"]), f"runs_folder={tmp_path}/two", "name=tone"]
    words += [*FAST, *keys, f"distributed.strategy={strategy}"]
    path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, "-m", "modernbert_train", *words], env=os.environ | path, check=True, timeout=300)
    two = json.loads((tmp_path / "two" / "tone" / "result.json").read_text())
    for figure, value in one["figures"]["dev"].items():
        assert two["figures"]["dev"][figure] == pytest.approx(value, abs=1e-4), figure
    ours, theirs = (weights(tmp_path / name / "tone") for name in ("two", "one"))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=1e-4)


def test_a_folder_is_held_to_the_last_file_and_several_seeds_need_one_for_all(
    write_task: WriteTask, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two commands on one folder mixed one's YAML with the other's checkpoints."""
    task, runs = write_task(epochs=1), tmp_path / "runs"
    first = runs / "tone-bert-1"
    free_early = []

    def watch() -> None:
        while not ((starts := first / "starts.jsonl").exists() and "finished" in starts.read_text()):
            time.sleep(0.01)
        while not (first / "result.json").exists():
            with (first / ".lock").open("a") as lock:
                free_early.append(lock_now(lock))
            time.sleep(0.01)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    words = ["finetune", str(task), "--model", str(models["bert"]), f"runs_folder={runs}", *FAST]
    assert main([*words, "--seeds", "1"]) == 0
    watching.join(10)
    assert free_early and not any(free_early)

    made = (first / "finetune.yaml").read_text()
    capsys.readouterr()
    with held(first, ""):
        assert main([*words, "optim.lr=1e-4", "--seeds", "1"]) == 78
    assert f"{first}: in use by process" in capsys.readouterr().err
    assert (first / "finetune.yaml").read_text() == made
    assert main([*words, "--seeds", "1", "2"]) == 78
    assert "and seeds 1 2: several runs need a folder for their table. Add --out" in capsys.readouterr().err


def test_a_run_is_not_continued_with_other_first_weights_or_settings(
    write_task: WriteTask, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures of the old weights were written as the new ones'."""
    model = shutil.copytree(models["bert"], tmp_path / "${model}")  # no interpolation
    task, folder = write_task(epochs=1), tmp_path / "runs/tone"
    words = ["finetune", str(task), "--model", str(model), f"runs_folder={tmp_path}/runs", "name=tone", *FAST]
    result = finetune(task, model, tmp_path / "runs")
    assert result["source_weights"] == weights_hash(str(model))
    for key in ("lr=0.5", "epochs=2"):
        assert main([*words, key]) == 78
        said = capsys.readouterr().err
        assert f", or remove {folder}." in said and "--fresh" not in said and "start.checkpoint" not in said
    file = model / "model.safetensors"
    save_file({key: tensor + 1 for key, tensor in load_file(file).items()}, file)
    assert main(words) == 78
    said = capsys.readouterr().err
    assert f"{folder}: the weights that it began with, {model}, have changed since. Restore them, give" in said
    assert json.loads((folder / "result.json").read_text()) == result
    # a run of an earlier version has no record to compare with
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kept = ({key: value for key, value in line.items() if key != "source_weights"} for line in lines)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert main(words) == 0


def test_a_model_of_another_vocabulary_is_refused(
    write_task: WriteTask, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every token would have another meaning, and the figures would just be bad."""
    from tests.support.make_shards import make_tokenizer

    other = make_tokenizer(tmp_path / "other")
    words = ["finetune", str(write_task()), "--model", str(models["bert"]), f"runs_folder={tmp_path}/runs", *FAST]
    assert main([*words, f"data.tokenizer={other}"]) in (65, 78)
    assert "with another tokenizer" in capsys.readouterr().err


def test_the_run_is_the_papers(write_task: WriteTask, models: dict[str, Path], tmp_path: Path) -> None:
    """Decoupled decay with the paper's value, linear decay to 0, epochs as tokens of the clock."""
    finetune(write_task(lr=1e-3, weight_decay=1e-5, epochs=1, warmup=0.1), models["bert"], tmp_path / "runs")
    config = load_run([tmp_path / "runs" / "tone" / "config.yaml"])
    assert (config.optim.name, config.optim.weight_decay) == ("adamw", pytest.approx(1e-5 / 1e-3))
    assert config.optim.max_grad_norm == 1.0, "as the Trainer clips"  # type: ignore[attr-defined]
    phase = config.phases["finetune"]
    about = json.loads((tmp_path / "runs" / "tone" / "task" / "train" / "dataset.json").read_text())
    assert phase.tokens == about["tokens"] + 2 * 96
    assert phase.schedule.decay_tokens + phase.schedule.warmup_tokens == phase.tokens
    assert phase.schedule.warmup_tokens == pytest.approx(0.1 * phase.tokens, abs=1)
    assert yaml.safe_load((tmp_path / "runs" / "tone" / "finetune.yaml").read_text())["weights"]["init_from"]
    assert config.objective.pooling == "cls"  # type: ignore[attr-defined]
