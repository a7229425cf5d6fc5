"""Hard negatives by a model. If this breaks, hours of embedding are lost, or a text is taught to be wrong and right."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from modernbert_train.config.schema import ContrastiveConfig
from modernbert_train.config.tools.retrieval import EncodeConfig
from modernbert_train.evaluate.retrieval.sentence_model import open_sentence_model
from modernbert_train.weights.formats import export_format
from modernbert_train.weights.formats.sentence_encoder import SentenceEncoder
from tests.support import forked
from tests.support.beir import MODERNBERT, words_about, write_lines
from tests.support.front_door import Cli
from tests.support.pairs import as_source, prepare_pairs


def write_pairs(file: Path, number: int) -> Path:
    pairs = (words_about(seed, 4) for seed in range(number))
    return write_lines(file, ({"query": query, "positive": text} for query, text in pairs))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.runs
@pytest.mark.parametrize("sampling", ["top", "random"])
def test_negatives_are_those_of_sentence_transformers(encoder: Path, tmp_path: Path, cli: Cli, sampling: str) -> None:
    """With its range, margins and scores; a query with two answers has neither as a negative."""
    import random

    from datasets import Dataset
    from sentence_transformers.util import mine_hard_negatives

    file = write_pairs(tmp_path / "pairs.jsonl", 60)
    rows = rows_of(file)
    rows.append({"query": rows[0]["query"], "positive": rows[1]["positive"]})
    write_lines(file, rows)
    limits: dict[str, Any] = {"num_negatives": 3, "range_min": 1, "range_max": 20, "max_score": 0.99}
    words = [f"{key}={value}" for key, value in limits.items()]
    line = ["retrieval", "mine", file, "--model", encoder, f"out={tmp_path / 'out.jsonl'}"]
    said = cli(*line, *words, f"sampling={sampling}", "absolute_margin=0.001", "seed=5").out
    random.seed(5)
    expected = mine_hard_negatives(
        Dataset.from_list(rows), open_sentence_model(str(encoder), EncodeConfig(device="cpu")), **limits,
        absolute_margin=0.001, sampling_strategy=sampling, output_scores=True, verbose=False,
    )  # fmt: skip
    mined = rows_of(tmp_path / "out.jsonl")
    assert [(row["query"], row["positive"]) for row in mined] == [(row["query"], row["positive"]) for row in rows]
    triplets = {(row["query"], row["positive"], text): (row["positive_score"], score) for row in mined
                for text, score in zip(row["negatives"], row["negative_scores"], strict=True)}  # fmt: skip
    theirs = {(row["query"], row["positive"], row["negative"]): row["scores"] for row in expected}
    assert triplets.keys() == theirs.keys() and len(theirs) > 60
    np.testing.assert_allclose([triplets[key] for key in theirs], [theirs[key] for key in theirs], atol=2e-6)
    assert not {rows[0]["positive"], rows[1]["positive"]} & {*mined[0]["negatives"], *mined[-1]["negatives"]}
    without = sum(not row["negatives"] for row in mined)
    assert f"61 pairs, {len(triplets)} negatives, {without} pairs without negatives" in said


@pytest.mark.runs
def test_a_killed_command_resumes_and_prepare_reads_the_same_bytes(
    encoder: Path, tokenizer: Path, tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys that it prints are those with which `prepare` reads it, with scores for distillation."""
    file, number = write_pairs(tmp_path / "pairs.jsonl", 1200), 1200
    usual = ["retrieval", "mine", str(file), "--model", str(encoder), "num_negatives=2"]
    assert "document: 512 of 1,200" in cli(*usual, f"out={tmp_path / 'whole.jsonl'}").out
    out = tmp_path / "killed.jsonl"
    process = forked.Popen([sys.executable, "-m", "modernbert_train", *usual, f"out={out}"], stdout=subprocess.DEVNULL)
    kept, begun = tmp_path / "killed.jsonl.work/document", time.monotonic()
    while not any(kept.glob("*.sha256")):
        assert process.poll() is None and time.monotonic() < begun + 120
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert len([*kept.glob("*.sha256")]) < 3 and not out.exists()
    resumed = cli(*usual, f"out={out}").out
    assert "document: 512 of" not in resumed and "query: 1,200 of 1,200" in resumed
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not (tmp_path / "killed.jsonl.work").exists()
    assert "already complete" in cli(*usual, f"out={out}").out
    keys = [word.rstrip(";") for word in resumed.split() if word.startswith("pairs.")]
    assert prepare_pairs(tmp_path / "shards", as_source(out), tokenizer, *keys) == 0
    assert f"{2 * number:,} negatives" in capsys.readouterr().out
    assert "num_negatives: 2 -> 3" in cli(*usual, f"out={out}", "num_negatives=3", code=78).err


@pytest.mark.runs
def test_what_cannot_be_mined_is_refused(encoder: Path, tmp_path: Path, cli: Cli) -> None:
    file = write_pairs(tmp_path / "pairs.jsonl", 20)

    def error(*words: str, model: object = encoder, of: Path = file, code: int = 78) -> str:
        out = [] if any(word.startswith("out=") for word in words) else [f"out={tmp_path / 'out.jsonl'}"]
        return str(cli("retrieval", "mine", of, "--model", model, *out, *words, code=code).err)

    said = error("absolute_margin=3", code=65)
    assert "absolute_margin=3.0: no text is far enough from its query's positive" in said
    assert "leave no 5 negatives. Set range_max=7 or more" in error("range_min=2", "range_max=6")
    assert "min_score=0.5 is not below max_score=0.4" in error("min_score=0.5", "max_score=0.4")
    assert "does not end in .jsonl" in error(f"out={tmp_path / 'a.csv'}")
    assert "num_negatives=0" in error("num_negatives=0")
    (tmp_path / "mine.jsonl").write_text("{}\n")
    assert "`retrieval mine` did not write it" in error(f"out={tmp_path / 'mine.jsonl'}")
    assert "1 pairs are left" in error(of=write_pairs(tmp_path / "one.jsonl", 1), code=65)
    assert "no column 'answer' among" in error("positive_column=answer", code=65)
    late = shutil.copytree(encoder, tmp_path / "late")
    settings = ContrastiveConfig(pooling="late", token_vectors=8)
    for name, content in SentenceEncoder(export_format(MODERNBERT, "all"), settings).files(32, 64).items():
        (late / name).parent.mkdir(exist_ok=True)
        (late / name).write_text(json.dumps(content))
    save_file({"linear.weight": torch.ones(8, 32)}, late / "1_Dense/model.safetensors")
    assert "a vector for each token, and mining needs one dense vector a text" in error(model=late)
    assert "has sparse vectors, and mining needs one dense vector a text" in error("pooling=sparse")
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in error(model=tmp_path / "empty", code=65)
    assert not (tmp_path / "out.jsonl").exists()
