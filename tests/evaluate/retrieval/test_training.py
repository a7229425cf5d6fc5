"""`retrieval train`: it learns, as sentence-transformers' trainer does, on any ranks, and resumes to the bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from modernbert_train.__main__ import main
from modernbert_train.checkpoints.run_folder import held
from tests.support.beir import BERT, LONGEST, make_encoder, recipe, result_of, words_about
from tests.support.needs import needs
from tests.support.paths import ROOT

needs("sentence_transformers", "the extra retrieval is not installed")


def losses(run: Path) -> list[float]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in entries if entry["kind"] == "step"]


def same_weights(one: Path, other: Path) -> bool:
    first, second = (load_file(each / "st/model.safetensors") for each in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.runs
def test_mistakes_of_the_run_are_found_before_anything_is_written(
    encoder: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pairs were prepared before a wrong key of the run was found, and a suite found it in every cell."""
    words = ["retrieval", "train", recipe(tmp_path, toy), "--model", str(encoder)]
    for word, message in (
        ("optim.lrr=1", "Did you mean optim.lr?"),
        ("optim.fused=true", "compute.device=cpu"),
    ):
        assert main([*words, word, "compute.device=cpu"]) == 78
        assert message in capsys.readouterr().err
    suite = {"tasks": {"toy": {"retrieval": "toy.yaml", "keys": {"optim.lrr": 1}}}, "seeds": [1]}
    (tmp_path / "suite.yaml").write_text(json.dumps(suite))
    assert main(["eval", str(encoder), "--suite", str(tmp_path / "suite.yaml"), "--out", str(tmp_path / "out")]) == 78
    assert "tasks.toy: optim.lrr" in capsys.readouterr().err
    assert not {path.name for path in tmp_path.iterdir()} & {"runs", "out"}


@pytest.mark.runs
def test_a_run_that_another_command_trains_keeps_its_files(
    encoder: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["retrieval", "train", recipe(tmp_path, toy, epochs=1), "--model", str(encoder), "name=mine"]
    assert main(words) == 0
    files = [tmp_path / "runs/mine" / name for name in ("retrieval.yaml", "result.json")]
    made = [file.read_bytes() for file in files]
    with held(tmp_path / "runs/mine", ""):
        assert main([*words, "lr=1e-4"]) == 78
    assert "runs/mine: in use by process" in capsys.readouterr().err
    assert [file.read_bytes() for file in files] == made


@pytest.mark.runs
def test_a_run_is_not_continued_with_other_first_weights(
    encoder: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures of the old weights were written as the new ones'."""
    model = shutil.copytree(encoder, tmp_path / "${model}")  # no interpolation
    words = ["retrieval", "train", recipe(tmp_path, toy, epochs=1), "--model", str(model), "name=mine"]
    assert main(words) == 0
    made = (tmp_path / "runs/mine/result.json").read_bytes()
    capsys.readouterr()
    assert main(words) == 0 and "toy: measured before" in capsys.readouterr().out
    assert main([*words, "lr=1e-4"]) == 78
    said = capsys.readouterr().err
    assert f", or remove {tmp_path}/runs/mine." in said and "--fresh" not in said
    file = model / "model.safetensors"
    save_file({key: tensor + 1 for key, tensor in load_file(file).items()}, file)
    assert main(words) == 78
    assert f"the weights that it began with, {model}, have changed since" in capsys.readouterr().err
    assert (tmp_path / "runs/mine/result.json").read_bytes() == made


ROWS = {
    "another column": ("question\tpositive\na\tb\n", "no column 'query'", "Set query_column"),
    "another field": ('{"question": "a", "positive": "b"}\n', "no field 'query'", "Set query_column"),
    "no text": (
        "query\tpositive\n" + "\tb\n" * 20,
        "none of its 20 documents is left",
        "Correct the path, or the files",
    ),
    "another encoding": ("query\tpositive\né\tè\n", "not UTF-8", "iconv -f ENCODING -t UTF-8"),
}


@pytest.mark.runs
@pytest.mark.parametrize("case", ROWS)
def test_pairs_that_cannot_be_read_are_refused_with_what_the_recipe_can_change(
    encoder: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """Not with keys of the spec of `prepare` that the verb has written, which no argument changes."""
    text, fault, advice = ROWS[case]
    file = tmp_path / f"pairs.{'jsonl' if text[0] == '{' else 'tsv'}"
    file.write_bytes(text.encode("latin-1" if case == "another encoding" else "utf-8"))
    assert main(["retrieval", "train", recipe(tmp_path, toy), "--model", str(encoder), f"train=[{file}]"]) == 65
    said = capsys.readouterr().err
    assert f"error: {file}:" in said and fault in said and advice in said
    assert "sources." not in said and "on_error" not in said and ("iconv" in said) == ("iconv" in advice)


@pytest.mark.runs
def test_advice_on_changed_pairs_and_small_batches_can_be_typed(
    encoder: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--overwrite`, out= and batch_rows are of other verbs."""
    file = tmp_path / "pairs.tsv"
    pairs = ["\t".join(words_about(seed, 4)) for seed in range(30)]
    file.write_text("\n".join(["query\tpositive", *pairs]) + "\n")
    made = recipe(tmp_path, toy, train=[str(file)], evaluate={}, epochs=1, name="mine")
    words = ["retrieval", "train", made, "--model", str(encoder)]
    small = [f"phases.pairs.{key}" for key in ("row_tokens=24", "microbatch_tokens=24", "batch_rows=1")]
    assert main([*words, *small]) == 65
    assert "as negatives. Raise batch_size=20." in capsys.readouterr().err
    three = tmp_path / "three.tsv"
    three.write_text("\n".join(["query\tpositive", *pairs[:2], "\t".join(words_about(9, 25))]) + "\n")
    assert main([*words, f"train=[{three}]", "batch_size=2", "name=three"]) == 65
    assert "has 1 pair, and a positive needs other texts as negatives. Raise batch_size=2." in capsys.readouterr().err
    file.write_text("\n".join(["query\tpositive", *pairs[1:]]) + "\n")
    assert main(words) == 78
    error = capsys.readouterr().err
    assert f"Name another run with name=, or remove {tmp_path}/runs/mine." in error
    assert "--overwrite" not in error and "out=" not in error


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_training_improves_the_figures_and_records_its_settings(
    encoder: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sentence_transformers import SentenceTransformer

    file = recipe(tmp_path, toy, epochs=12, mini_batch=7, query_prompt="ask ", query_max_tokens=16)
    runs = f"runs_folder={tmp_path}/runs"
    assert main(["retrieval", "evaluate", str(toy), "--model", str(encoder), runs]) == 0
    before = result_of(tmp_path / "runs/toy-encoder-test")
    assert before["seed"] is None and before["settings"]["pooling"] == "mean"
    assert main(["retrieval", "train", file, "--model", str(encoder)]) == 0
    folder = tmp_path / "runs/toy-encoder-1618"
    assert "toy-encoder-1618: toy ndcg_at_10 " in capsys.readouterr().out
    found, steps = result_of(folder), losses(folder)
    assert steps[-1] < 0.5 * steps[0] and found["training"]["steps"] == len(steps) > 50
    assert found["figures"]["toy"]["ndcg_at_10"] > before["figures"]["toy"]["ndcg_at_10"] + 0.15
    assert {key: found[key] for key in ("task", "source", "seed", "run")} == {
        "task": "toy", "source": str(encoder), "seed": 1618, "run": "toy-encoder-1618",
    }  # fmt: skip
    assert found["counts"]["train"]["pairs"] == 100 and found["counts"]["toy"]["queries"] == 20
    assert found["settings"]["max_tokens"] == LONGEST

    model = SentenceTransformer(str(folder / "st"), device="cpu")
    assert model.max_seq_length == LONGEST and model[0].query_length == 16 and model.prompts["query"] == "ask "
    assert model[1].pooling_mode == "mean"
    assert np.allclose(np.linalg.norm(model.encode_query(["aba " * 100, "ase"]), axis=1), 1, atol=1e-5)

    # the same command trains nothing and keeps the figures; `retrieval evaluate` computes the same
    assert main(["retrieval", "train", file, "--model", str(encoder)]) == 0
    assert "already trained to its end" in capsys.readouterr().out
    assert result_of(folder)["figures"] == found["figures"]
    assert main(["retrieval", "evaluate", str(toy), "--model", str(folder / "st"), runs]) == 0
    assert result_of(tmp_path / "runs/toy-toy-encoder-1618-test")["figures"] == found["figures"]
    assert main(["retrieval", "train", file, "--model", str(encoder), 'query_prompt="say "']) == 78
    said = capsys.readouterr().err
    assert "pairs.query_prefix: " in said and " -> say " in said and "Name another run with name=" in said


def theirs(encoder: Path, rows: list[tuple[str, ...]], steps: int, out: Path) -> tuple[list[float], Any]:
    """Train by sentence-transformers, each step on all rows; return the losses and the model."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses as library
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    body = Transformer(str(encoder), max_seq_length=10, model_kwargs={"dtype": "float32"})
    model = SentenceTransformer(modules=[body, Pooling(32, "mean"), Normalize()], device="cpu")
    found: list[float] = []

    class Noted(library.CachedMultipleNegativesRankingLoss):
        def forward(self, *args: Any, **more: Any) -> Any:
            loss = super().forward(*args, **more)
            found.append(loss.item())
            return loss

    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(out), per_device_train_batch_size=len(rows), max_steps=steps, learning_rate=1e-3, warmup_steps=2,
        lr_scheduler_type="linear", weight_decay=0.01, adam_epsilon=1e-4, use_cpu=True, save_strategy="no",
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    columns = dict(zip(("anchor", "positive", "negative"), map(list, zip(*rows, strict=True)), strict=True))
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict(columns), loss=Noted(model, mini_batch_size=3)
    )
    trainer.train()
    return found, model.eval()


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_losses_and_vectors_are_those_of_the_trainer_of_sentence_transformers(encoder: Path, tmp_path: Path) -> None:
    """A recipe reproduced from that library trains the same model here: all eight triplets in each of 8 steps.

    Every text is cut at ten tokens, and an epoch is a batch; both have warmup, decay and clipping.
    """
    from sentence_transformers import SentenceTransformer

    rows = [(*words_about(seed, 9), words_about(seed + 100, 9)[1]) for seed in range(8)]
    lines = ["query\tpositive\twrong", *("\t".join(row) for row in rows)]
    (tmp_path / "mine.tsv").write_text("\n".join(lines) + "\n")
    keys: dict[str, Any] = {"train": [f"{tmp_path}/mine.tsv"], "negative_columns": ["wrong"], "evaluate": {}}
    keys |= {"batch_size": 8, "epochs": 8, "lr": 1e-3, "warmup": 0.25, "weight_decay": 0.01, "max_tokens": 10}
    keys |= {"precision": "fp32", "mini_batch": 6}
    words = ["retrieval", "train", recipe(tmp_path, tmp_path, **keys), "--model", str(encoder), "name=ours"]
    rows_of_one = ["phases.pairs.row_tokens=32", "phases.pairs.batch_rows=8", "phases.pairs.microbatch_tokens=96"]
    assert main([*words, "optim.eps=1e-4", *rows_of_one]) == 0
    expected, model = theirs(encoder, rows, 8, tmp_path / "theirs")
    assert losses(tmp_path / "runs/ours") == pytest.approx(expected, abs=1e-5)
    texts = [text for row in rows for text in row]
    vectors: NDArray[Any] = SentenceTransformer(str(tmp_path / "runs/ours/st"), device="cpu").encode(texts)
    before = SentenceTransformer(str(encoder), device="cpu").encode(texts, normalize_embeddings=True)
    assert np.allclose(vectors, model.encode(texts), atol=1e-5)
    assert np.abs(vectors - before).max() > 1e-2


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_with_the_same_bits(
    encoder: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped bit in the newest checkpoint: the one before it is taken, and the steps between are repeated."""
    words = ["retrieval", "train", "", "--model", str(encoder)]
    words[2] = recipe(tmp_path, toy, epochs=2, evaluate={}, save_every_steps=4, name="whole")
    assert main(words) == 0
    words += ["name=stopped"]
    assert main(words) == 0
    stopped = tmp_path / "runs/stopped"
    newest = max((stopped / "checkpoints").iterdir())
    file = max(newest.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    saved = file.read_bytes()
    file.write_bytes(saved[:-1] + bytes([saved[-1] ^ 1]))
    (stopped / "st/model.safetensors").unlink()
    capsys.readouterr()
    assert main(words) == 0
    said = capsys.readouterr()
    assert newest.name in said.err + said.out and "step-" in said.out
    assert same_weights(stopped, tmp_path / "runs/whole")
    assert main([*words, "lr=1e-3"]) == 78


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_two_ranks_train_what_one_does(encoder: Path, toy: Path, tmp_path: Path) -> None:
    """The negatives of a query are the texts of the global batch, however many processes share it."""
    words = ["retrieval", "train", recipe(tmp_path, toy, epochs=2, evaluate={}), "--model", str(encoder)]
    assert main([*words, "name=one"]) == 0
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*start, "modernbert_train", *words, "name=two"], env=here, check=True, timeout=250)
    one, two = tmp_path / "runs/one", tmp_path / "runs/two"
    assert losses(two) == pytest.approx(losses(one), abs=1e-5) and (two / "result.json").is_file()


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_late_interaction_is_learned_and_opens_in_the_library(encoder: Path, toy: Path, tmp_path: Path) -> None:
    from sentence_transformers import MultiVectorEncoder

    keys = {"loss": "multi_vector", "vector_width": 8, "mini_batch": 7, "query_prompt": "ask "}
    assert main(["retrieval", "train", recipe(tmp_path, toy, **keys), "--model", str(encoder)]) == 0
    folder = tmp_path / "runs/toy-encoder-1618"
    steps, found = losses(folder), result_of(folder)
    assert steps[-1] < 0.8 * steps[0] and "each token" in found["settings"]["pooling"]
    model = MultiVectorEncoder(str(folder / "st"), device="cpu")
    assert {matrix.shape[1] for matrix in model.encode_query(["aba ibd", "xyz"])} == {8}


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", ["modernbert", "late-interaction"])
def test_a_published_recipe_trains(name: str, encoder: Path, tmp_path: Path) -> None:
    """Its batch of 512 triplets is encoded in parts, 16 texts at a time."""
    rows = [(*words_about(seed, 6), words_about(seed + 1000, 6)[1]) for seed in range(520)]
    lines = ["query\tpositive\tnegative", *("\t".join(row) for row in rows)]
    (tmp_path / "triplets.tsv").write_text("\n".join(lines) + "\n")
    words = ["retrieval", "train", str(ROOT / f"yamls/retrieval/{name}.yaml"), "--model", str(encoder)]
    words += [f"train=[{tmp_path}/triplets.tsv]", "max_tokens=64", f"runs_folder={tmp_path}/runs", "name=published"]
    assert main([*words, "device=cpu"]) == 0
    entries = [json.loads(line) for line in (tmp_path / "runs/published/metrics.jsonl").read_text().splitlines()]
    pairs = [entry["predicted"] for entry in entries if entry["kind"] == "step"]
    assert pairs[0] == pytest.approx(512, rel=0.05)


@pytest.mark.runs
def test_training_without_a_negative_or_a_batch_is_an_error(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sixteen pairs that share an answer teach nothing; "trained" would be untrue."""
    lines = "".join(f"question {number}\tthe one answer\n" for number in range(16))
    (tmp_path / "same.tsv").write_text(f"query\tpositive\n{lines}")
    file = recipe(tmp_path, tmp_path, train=[str(tmp_path / "same.tsv")], evaluate={}, name="none", batch_size=8)
    assert main(["retrieval", "train", file, "--model", str(encoder)]) == 65
    assert "train: all 16 pairs have one answer, so no query has a negative" in capsys.readouterr().err
    assert main(["retrieval", "train", file, "--model", str(encoder), "batch_size=17"]) == 65
    assert "train: 16 pairs are left, which is no batch of batch_size=17. Give more" in capsys.readouterr().err
    assert main(["retrieval", "train", file, "--model", str(encoder), "name=b", "positive_column=answer"]) == 65
    assert "no column 'answer' among 'query', 'positive'" in capsys.readouterr().err


@pytest.mark.runs
def test_a_folder_of_files_with_hard_negatives_trains_cls_of_a_bert_whose_positions_are_fewer_than_a_row(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exported BERT, several negatives a row, and a longest text that the model cannot read is refused."""
    from sentence_transformers import SentenceTransformer

    bert = make_encoder(tmp_path / "bert", tokenizer, BERT, init_std=0.1)
    assert SentenceTransformer(str(bert), device="cpu").max_seq_length == LONGEST  # the export alone says it
    rows = [f"ask {n}\tanswer {n}\twrong {n}\tfalse {n}\n" for n in range(8)]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a.tsv").write_text("query\tpositive\tone\ttwo\n" + "".join(rows))
    (tmp_path / "mine/b.tsv").write_text(f"query\tpositive\tone\ttwo\n{'ask ' * 99}\ta\tb\tc\n\tx\ty\tz\n")
    keys = {"train": [f"{tmp_path}/mine"], "negative_columns": ["one", "two"], "pooling": "cls"}
    keys |= {"query_prompt": "say "}
    file = recipe(tmp_path, tmp_path, **keys, evaluate={}, batch_size=8, epochs=2)
    assert main(["retrieval", "train", file, "--model", str(bert), "max_tokens=65"]) == 78
    assert "max_tokens=65: " in capsys.readouterr().err
    assert main(["retrieval", "train", file, "--model", str(bert), "max_tokens=24", "name=short"]) == 0
    run = tmp_path / "runs/short"
    model = SentenceTransformer(str(run / "st"), device="cpu")
    assert model.max_seq_length == 24 and model[1].pooling_mode == "cls"
    about = result_of(run)
    assert about["training"]["row_tokens"] > 64
    counts = about["counts"]["train"]
    assert [counts[key] for key in ("pairs", "truncated", "empty", "negatives")] == [9, 1, 1, 18]
    assert about["settings"]["pooling"] == "cls" and about["figures"] == {}

    # trained further, a folder of sentence-transformers keeps its pooling and prompts
    file = recipe(tmp_path, tmp_path, train=keys["train"], evaluate={}, batch_size=8, epochs=1, name="further")
    assert main(["retrieval", "train", file, "--model", str(run / "st"), "query_column=one"]) == 0
    further = SentenceTransformer(str(tmp_path / "runs/further/st"), device="cpu")
    assert further[1].pooling_mode == "cls" and further.prompts["query"] == "say "
