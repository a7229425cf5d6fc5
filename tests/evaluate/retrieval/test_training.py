"""`retrieval train`: it learns, as sentence-transformers' trainer does, on any ranks, and resumes to the bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from modernbert_train.checkpoints.run_folder import held
from tests.support.beir import BERT, LONGEST, flip_last_bit, make_encoder, recipe, result_of, words_about
from tests.support.front_door import Cli
from tests.support.needs import needs
from tests.support.paths import ROOT
from tests.support.runs import metrics

needs("sentence_transformers", "the extra retrieval is not installed")


def losses(run: Path) -> list[float]:
    return [entry["loss"] for entry in metrics(run, "step")]


@pytest.mark.runs
def test_mistakes_of_the_run_are_found_before_anything_is_written(
    encoder: Path, toy: Path, tmp_path: Path, cli: Cli
) -> None:
    """Pairs were prepared before a wrong key of the run was found, and a suite found it in every cell."""
    words = ["retrieval", "train", recipe(tmp_path, toy), "--model", encoder]
    assert "Did you mean optim.lr?" in cli(*words, "optim.lrr=1", "compute.device=cpu", code=78).err
    assert "compute.device=cpu" in cli(*words, "optim.fused=true", "compute.device=cpu", code=78).err
    suite = {"tasks": {"toy": {"retrieval": "toy.yaml", "keys": {"optim.lrr": 1}}}, "seeds": [1]}
    (tmp_path / "suite.yaml").write_text(json.dumps(suite))
    said = cli("eval", encoder, "--suite", tmp_path / "suite.yaml", "--out", tmp_path / "out", code=78).err
    assert "tasks.toy: optim.lrr" in said
    assert not {path.name for path in tmp_path.iterdir()} & {"runs", "out"}


@pytest.mark.runs
def test_a_run_is_not_continued_by_two_commands_or_with_other_first_weights(
    encoder: Path, toy: Path, tmp_path: Path, cli: Cli
) -> None:
    """The figures of the old weights were written as the new ones'."""
    model = shutil.copytree(encoder, tmp_path / "${model}")  # no interpolation
    words = ["retrieval", "train", recipe(tmp_path, toy, epochs=1), "--model", model, "name=mine"]
    cli(*words)
    files = [tmp_path / "runs/mine" / name for name in ("retrieval.yaml", "result.json")]
    made = [file.read_bytes() for file in files]
    with held(tmp_path / "runs/mine", ""):
        assert "runs/mine: in use by process" in cli(*words, "lr=1e-4", code=78).err
    assert [file.read_bytes() for file in files] == made
    assert "toy: measured before" in cli(*words).out
    said = cli(*words, "lr=1e-4", code=78).err
    assert f", or remove {tmp_path}/runs/mine." in said and "--fresh" not in said
    file = model / "model.safetensors"
    save_file({key: tensor + 1 for key, tensor in load_file(file).items()}, file)
    assert f"the weights that it began with, {model}, have changed since" in cli(*words, code=78).err
    assert files[1].read_bytes() == made[1]


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
    encoder: Path, toy: Path, tmp_path: Path, cli: Cli, case: str
) -> None:
    """Not with keys of the spec of `prepare` that the verb has written, which no argument changes."""
    text, fault, advice = ROWS[case]
    file = tmp_path / f"pairs.{'jsonl' if text[0] == '{' else 'tsv'}"
    file.write_bytes(text.encode("latin-1" if case == "another encoding" else "utf-8"))
    said = cli("retrieval", "train", recipe(tmp_path, toy), "--model", encoder, f"train=[{file}]", code=65).err
    assert f"error: {file}:" in said and fault in said and advice in said
    assert "sources." not in said and "on_error" not in said and ("iconv" in said) == ("iconv" in advice)


@pytest.mark.runs
def test_advice_on_changed_pairs_and_small_batches_can_be_typed(
    encoder: Path, toy: Path, tmp_path: Path, cli: Cli
) -> None:
    """`--overwrite`, out= and batch_rows are of other verbs; sixteen pairs with one answer would teach nothing."""

    def write(name: str, pairs: Sequence[str]) -> Path:
        (tmp_path / name).write_text("\n".join(["query\tpositive", *pairs]) + "\n")
        return tmp_path / name

    pairs = ["\t".join(words_about(seed, 4)) for seed in range(30)]
    file = write("pairs.tsv", pairs)
    made = recipe(tmp_path, toy, train=[str(file)], evaluate={}, epochs=1, name="mine")
    words = ["retrieval", "train", made, "--model", encoder]
    small = [f"phases.pairs.{key}" for key in ("row_tokens=24", "microbatch_tokens=24", "batch_rows=1")]
    assert "as negatives. Raise batch_size=20." in cli(*words, *small, code=65).err
    three = write("three.tsv", [*pairs[:2], "\t".join(words_about(9, 25))])
    said = cli(*words, f"train=[{three}]", "batch_size=2", "name=three", code=65).err
    assert "has 1 pair, and a positive needs other texts as negatives. Raise batch_size=2." in said
    write("pairs.tsv", pairs[1:])
    said = cli(*words, code=78).err
    assert f"Name another run with name=, or remove {tmp_path}/runs/mine." in said
    assert "--overwrite" not in said and "out=" not in said
    same = write("same.tsv", [f"question {number}\tthe one answer" for number in range(16)])
    of_one = [*words, f"train=[{same}]", "name=none"]
    said = cli(*of_one, "batch_size=8", code=65).err
    assert "train: all 16 pairs have one answer, so no query has a negative" in said
    said = cli(*of_one, "batch_size=17", code=65).err
    assert "train: 16 pairs are left, which is no batch of batch_size=17. Give more" in said


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_training_improves_the_figures_and_records_its_settings(
    encoder: Path, toy: Path, tmp_path: Path, cli: Cli
) -> None:
    from sentence_transformers import SentenceTransformer

    file = recipe(tmp_path, toy, epochs=12, mini_batch=7, query_prompt="ask ", query_max_tokens=16)
    runs = f"runs_folder={tmp_path}/runs"
    cli("retrieval", "evaluate", toy, "--model", encoder, runs)
    before = result_of(tmp_path / "runs/toy-encoder-test")
    assert before["seed"] is None and before["settings"]["pooling"] == "mean"
    train = ["retrieval", "train", file, "--model", encoder]
    assert "toy-encoder-1618: toy ndcg_at_10 " in cli(*train).out
    folder = tmp_path / "runs/toy-encoder-1618"
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
    assert "already trained to its end" in cli(*train).out
    assert result_of(folder)["figures"] == found["figures"]
    cli("retrieval", "evaluate", toy, "--model", folder / "st", runs)
    assert result_of(tmp_path / "runs/toy-toy-encoder-1618-test")["figures"] == found["figures"]
    said = cli(*train, 'query_prompt="say "', code=78).err
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
def test_losses_and_vectors_are_those_of_the_trainer_of_sentence_transformers(
    encoder: Path, tmp_path: Path, cli: Cli
) -> None:
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
    words = ["retrieval", "train", recipe(tmp_path, tmp_path, **keys), "--model", encoder, "name=ours"]
    rows_of_one = ["phases.pairs.row_tokens=32", "phases.pairs.batch_rows=8", "phases.pairs.microbatch_tokens=96"]
    cli(*words, "optim.eps=1e-4", *rows_of_one)
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
    encoder: Path, toy: Path, tmp_path: Path, cli: Cli
) -> None:
    """A flipped bit in the newest checkpoint: the one before it is taken, and the steps between are repeated."""
    made = recipe(tmp_path, toy, epochs=2, evaluate={}, save_every_steps=4, name="mine")
    words = ["retrieval", "train", made, "--model", encoder]
    cli(*words)
    newest = max((tmp_path / "runs/mine/checkpoints").iterdir())
    flip_last_bit(max(newest.rglob("*.safetensors"), key=lambda path: path.stat().st_size))
    exported = tmp_path / "runs/mine/st/model.safetensors"
    whole = load_file(exported)
    exported.unlink()
    said = cli(*words)
    assert newest.name in said.err + said.out and "step-" in said.out
    again = load_file(exported)
    assert again.keys() == whole.keys() and all(torch.equal(again[name], whole[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_two_ranks_train_what_one_does(encoder: Path, toy: Path, tmp_path: Path, cli: Cli) -> None:
    """The negatives of a query are the texts of the global batch, however many processes share it."""
    words = ["retrieval", "train", recipe(tmp_path, toy, epochs=2, evaluate={}), "--model", str(encoder)]
    cli(*words, "name=one")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*start, "modernbert_train", *words, "name=two"], env=here, check=True, timeout=250)
    one, two = tmp_path / "runs/one", tmp_path / "runs/two"
    assert losses(two) == pytest.approx(losses(one), abs=1e-5) and (two / "result.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", ["modernbert", "late-interaction"])
def test_a_published_recipe_trains(name: str, encoder: Path, tmp_path: Path, cli: Cli) -> None:
    """Its batch of 512 triplets is encoded in parts, 16 texts at a time."""
    rows = [(*words_about(seed, 6), words_about(seed + 1000, 6)[1]) for seed in range(520)]
    lines = ["query\tpositive\tnegative", *("\t".join(row) for row in rows)]
    (tmp_path / "triplets.tsv").write_text("\n".join(lines) + "\n")
    words = ["retrieval", "train", ROOT / f"yamls/retrieval/{name}.yaml", "--model", encoder, "device=cpu"]
    cli(*words, f"train=[{tmp_path}/triplets.tsv]", "max_tokens=64", f"runs_folder={tmp_path}/runs", "name=published")
    pairs = [entry["predicted"] for entry in metrics(tmp_path / "runs/published", "step")]
    assert pairs[0] == pytest.approx(512, rel=0.05)


@pytest.mark.runs
def test_a_folder_of_files_with_hard_negatives_trains_cls_of_a_bert_whose_positions_are_fewer_than_a_row(
    tokenizer: Path, tmp_path: Path, cli: Cli
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
    words = ["retrieval", "train", recipe(tmp_path, tmp_path, **keys, evaluate={}, batch_size=8, epochs=2)]
    assert "max_tokens=65: " in cli(*words, "--model", bert, "max_tokens=65", code=78).err
    cli(*words, "--model", bert, "max_tokens=24", "name=short")
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
    cli("retrieval", "train", file, "--model", run / "st", "query_column=one")
    further = SentenceTransformer(str(tmp_path / "runs/further/st"), device="cpu")
    assert further[1].pooling_mode == "cls" and further.prompts["query"] == "say "
