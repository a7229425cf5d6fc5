"""Runs that continue a model with another tokenizer. If this breaks, they start with meaningless rows."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from data_prep.make_tokenizer import encode_documents
from modernbert_train.__main__ import main, read_run
from modernbert_train.config.schema import ModelConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.weights.formats.tensors import EMBEDDING
from modernbert_train.weights.source import Origin, Source
from modernbert_train.weights.token_rows import TokenRows, token_rows
from tests.support.encoders import ENCODERS, LLAMAS
from tests.support.front_door import Cli
from tests.support.make_shards import make_shards, make_texts, make_tokenizer
from tests.support.runs import launch, records, weights
from tests.support.tiny_run import TINY_YAML, TinyRun

SIZES = {"few": 320, "many": 448}  # entries; trained on one text, so the second has all tokens of the first
ONE_PHASE = ("phases.long=null", "phases.short.batch_warmup=null", "model.init_std=0.1", "data.num_workers=0")


def sentences(number: int, seed: int) -> list[str]:
    """Return texts of twelve sentences in any order, so that a word can be predicted from its neighbours."""
    words = " ".join(make_texts(1, seed=4)).split()
    known, draw = [" ".join(words[i : i + 8]) for i in range(0, 96, 8)], random.Random(seed)
    return [". ".join(draw.choices(known, k=10)) for _ in range(number)]


def prepare(folder: Path, tokenizer: Path) -> Path:
    """Write training and validation shards of the same texts with a tokenizer."""
    for name, number, seed in (("train", 80, 1), ("validation", 6, 2), ("general", 6, 3)):
        texts = sentences(number, seed) if name != "general" else make_texts(4, seed=seed)
        documents = encode_documents(Tokenizer.from_file(f"{tokenizer}/tokenizer.json"), texts)
        make_shards(folder / name, [np.array(ids) for ids in documents], tokenizer)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write data with both tokenizers, and train a run with the smaller one."""
    folder = tmp_path_factory.mktemp("made")
    for name, size in SIZES.items():
        prepare(folder / name, make_tokenizer(folder / name / "tokenizer", sentences(20, 5), size))
    long = ("phases.short.tokens=120_000", "phases.short.microbatch_tokens=512", "eval.times_per_phase=1")
    assert main(["train", *words(folder, "few", "name=first", *long)]) == 0
    return folder


def words(folder: Path, data: str, *overrides: str) -> list[str]:
    file = folder / f"{data}.yaml"
    file.write_text(TINY_YAML.format(runs=folder / "runs", data=folder / data), encoding="utf-8")
    return [str(file), *ONE_PHASE, f"model.vocab_size={SIZES[data]}", *overrides]


def go_on(folder: Path, name: str, *overrides: str) -> list[str]:
    """Return a run with the larger vocabulary that continues the one with the smaller."""
    start = (f"weights.init_from={folder}/runs/first", "phases.short.tokens=2000")
    return ["train", *words(folder, "many", f"name={name}", *start, *overrides)]


def general(folder: Path) -> str:
    return f"evals.general={{name: text, shards: {folder}/many/general}}"


@pytest.fixture(scope="module")
def extended(made: Path) -> Path:
    assert main(go_on(made, "extend", "weights.vocabulary=extend", "checkpoint.interval_steps=2", general(made))) == 0
    return made / "runs/extend"


def first_losses(folder: Path) -> tuple[float, float]:
    """Return the held-out loss and the other text's loss before the first step."""
    validation, evaluation = (records(folder, kind)[0] for kind in ("validation", "evaluation"))
    assert validation["step"] == evaluation["step"] == 0
    return validation["loss"], evaluation["figures"]["loss"]


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_the_first_loss_is_far_below_that_of_drawn_rows(
    made: Path, extended: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """Two runs on text with a third of new tokens: rows from their pieces, and random rows."""
    taken_over = TokenRows.of

    def drawn(rows: TokenRows, table: Tensor) -> Tensor:
        found = taken_over(rows, table)
        new_V = torch.from_numpy(rows.counts_V > 1)
        torch.manual_seed(1)
        found[new_V] = 0.1 * torch.randn(found[new_V].shape) if table.dim() == 2 else 0.0
        return found

    monkeypatch.setattr(TokenRows, "of", drawn)
    said = cli(*go_on(made, "drawn", "weights.vocabulary=replace", general(made))).out
    assert first_losses(extended)[0] < first_losses(made / "runs/drawn")[0] - 0.4
    assert "weights.vocabulary=replace: of 448 rows 320 are kept, 128 are the mean of" in said
    start = records(extended, "start")[0]
    effect = start["vocabulary"]["train"]
    assert "weights.vocabulary=extend" in start["from"] and effect["unknown"] == 0
    assert 0.1 < effect["averaged"] / effect["tokens"] < 0.6 and effect["tokens"] < 0.8 * effect["old_tokens"]
    assert f"train          {effect['tokens']:,}" in said
    # both sets, before and after
    table = said[said.index("measured on") : said.index("next:")]
    told = [line.split()[:2] for line in table.splitlines()[1:]]
    assert told == [
        [name, figure] for name in ("data.validation", "evals.general") for figure in ("loss", "perplexity", "accuracy")
    ]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_sharded_ranks_take_over_the_same_rows(made: Path, extended: Path) -> None:
    same = ("weights.vocabulary=extend", "checkpoint.interval_steps=2", general(made))
    launch(go_on(made, "sharded", *same, "distributed.strategy=fsdp2")[1:], ranks=2)
    assert first_losses(made / "runs/sharded") == pytest.approx(first_losses(extended), rel=1e-4)
    losses = [[step["loss"] for step in records(folder, "step")] for folder in (made / "runs/sharded", extended)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-4)


@pytest.mark.runs
def test_measuring_first_changes_nothing(made: Path, extended: Path) -> None:
    assert main(go_on(made, "unmeasured", "weights.vocabulary=extend", "data.validation=null")) == 0
    losses = [[entry["loss"] for entry in records(made / f"runs/{name}", "step")] for name in ("extend", "unmeasured")]
    assert len(losses[0]) > 3 and losses[0] == losses[1]


@pytest.mark.runs
def test_a_run_that_resumes_has_its_rows_already(made: Path, extended: Path, tmp_path: Path, cli: Cli) -> None:
    """The rows are converted once; later the original weights are not needed."""
    shutil.copytree(made, tmp_path / "made", ignore=lambda _, names: [n for n in names if n in ("first", "few")])
    folder = tmp_path / "made/runs/extend"
    expected = {name: tensor.clone() for name, tensor in weights(folder).items()}
    shutil.rmtree(max((folder / "checkpoints").iterdir()))
    again = go_on(made, "extend", "weights.vocabulary=extend", "checkpoint.interval_steps=2", general(made))
    said = cli(*again, f"runs_folder={tmp_path}/made/runs").out
    found = weights(folder)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert "measured on" in said and len(records(folder, "start")) == 1


@pytest.mark.runs
def test_an_export_has_the_new_vocabulary(extended: Path, tmp_path: Path) -> None:
    assert main(["export", str(extended), "--out", str(tmp_path / "hf")]) == 0
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert model.config.vocab_size == SIZES["many"] == len(tokenizer)
    assert model.get_input_embeddings().weight.shape[0] == SIZES["many"]
    assert model(**tokenizer(sentences(1, 9)[0][:60], return_tensors="pt")).logits.isfinite().all()


@pytest.mark.runs
@pytest.mark.parametrize(
    ("of", "to", "vocabulary", "message"),
    [
        ("few", "many", "same", "128 tokens differ, as '"),
        ("few", "many", "same", "or set weights.vocabulary=extend or replace."),
        ("many", "few", "extend", "does not have all tokens of weights.init_from="),
    ],
)
def test_another_vocabulary_is_refused_unless_requested(
    made: Path, extended: Path, cli: Cli, of: str, to: str, vocabulary: str, message: str
) -> None:
    """By `check`, before loading anything, with the key that would accept it."""
    name = {"few": "first", "many": "extend"}[of]
    start = (f"weights.init_from={made}/runs/{name}", f"weights.vocabulary={vocabulary}", "name=refused")
    assert message in cli("check", *words(made, to, *start), code=78).err
    assert not (made / "runs/refused").exists()


@pytest.mark.runs
def test_rows_of_another_number_name_the_key(made: Path, cli: Cli) -> None:
    """The same tokenizer, and a table with other padding; with the key the run is checked and reports the effect."""
    rows = (f"weights.init_from={made}/runs/first", "name=padded", "model.vocab_size=384")
    assert "model.vocab_size=384 here, 320 there" in (said := cli("train", *words(made, "few"), *rows, code=78).err)
    assert "weights.vocabulary=extend or replace" in said
    said = cli("check", *words(made, "few"), *rows, "weights.vocabulary=extend").out
    assert "of 384 rows 320 are kept, 0 are the mean of old ones, 64 the mean of all" in said
    assert "0.0%" in said and "shorter by" in said


ARCHITECTURES: dict[str, ModelConfig] = {
    **{name: ENCODERS[name] for name in ("modernbert", "bert", "distilbert", "albert", "xlnet", "deberta")},
    "llama": LLAMAS["untied"],
    "replaced": ENCODERS["modernbert"],
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    folder = tmp_path_factory.mktemp("tokenizers")
    folders = [make_tokenizer(folder / key, sentences(20, 5), size) for key, size in SIZES.items()]
    return token_rows(*folders, *SIZES.values())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_gets_its_rows(rows: TokenRows, tmp_path: Path, tiny_run: TinyRun, name: str) -> None:
    """Embedding and bias get new rows, so does an untied decoder; everything else is unchanged."""
    config = read_run(tiny_run("objective={name: rtd, sharing: gdes}" if name == "replaced" else "seed=1"))
    old, new = (replace(config, model=replace(ARCHITECTURES[name], vocab_size=size)) for size in SIZES.values())
    there, here = (build_model(each.model, each.objective, each.compute) for each in (old, new))
    initialize(there, old.model, seed=3)
    weights = {key: tensor for key, tensor in there.state_dict().items() if not key.startswith("generator.")}
    if name == "replaced":  # the model without its generator
        weights["model.embeddings.tok_embeddings.weight"] = torch.randn(320, 64)
        weights.pop("model.embeddings.tok_embeddings.delta.weight")

    class Held(Source):
        def weights(self) -> dict[str, Tensor]:
            return weights

    source = Held(tmp_path, None, old.model, "all", 64, None, None)
    Origin(source, new, drawn=("generator",) if name == "replaced" else (), rows=rows).fill(here)
    table = "generator.model.embeddings.tok_embeddings.weight" if name == "replaced" else EMBEDDING
    found = dict(here.named_parameters())
    assert torch.equal(found[table], rows.of(weights[EMBEDDING])) and found[table].shape[0] == 448
    assert torch.equal(found[table][:320], weights[EMBEDDING])
    by_token = [key for key in ("decoder.bias", "decoder.weight") if key in found]
    assert all(torch.equal(found[key], rows.of(weights[key])) for key in by_token)
    same = [key for key in found if key in weights and key not in (EMBEDDING, *by_token)]
    assert len(same) > 5 and all(torch.equal(found[key], weights[key]) for key in same)
