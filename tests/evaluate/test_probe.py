"""The probe of the encoder. If this breaks, a run's figure is of other texts, of one rank's share, or of memorised
texts; or a mistake in a file costs a run its night."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modernbert_train.__main__ import read_run
from modernbert_train.clock import Clock
from modernbert_train.config.schema import BertConfig, ProbeConfig, RunConfig
from modernbert_train.distributed.compute import Compute
from modernbert_train.errors import DataError
from modernbert_train.evaluate.embedding_classifiers import linear, nearest
from modernbert_train.evaluate.embeddings import embed
from modernbert_train.evaluate.evaluators import build_evaluators
from modernbert_train.evaluate.finetune.examples import TRAIN
from modernbert_train.evaluate.probe_texts import ONLY_LEARNED, ProbeTexts, read_texts
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.vocabulary import read_vocabulary
from tests.support.front_door import Cli
from tests.support.gloo import run_ranks
from tests.support.labelled import json_lines
from tests.support.matrix import system
from tests.support.runs import records
from tests.support.texts import texts_of
from tests.support.tiny_run import TinyRun


def write_texts(path: Path, *, shuffled: bool = False, number: int = 120, seed: int = 1) -> Path:
    """Write texts of two vocabularies, the letters a to m and n to z; shuffled: labels are random."""
    draw = random.Random(seed)
    rows = []
    for each in range(number):
        letters = "abcdefghijklm" if each % 2 else "nopqrstuvwxyz"
        words = ["".join(draw.choices(letters, k=draw.randint(2, 6))) for _ in range(draw.randint(3, 12))]
        rows.append({"text": " ".join(words), "label": draw.randint(0, 1) if shuffled else each % 2})
    path.write_text(json_lines(rows))
    return path


def with_probe(words: list[str], **settings: Any) -> RunConfig:
    probe = {"name": "probe", **settings}
    return read_run([*words, f"evals.planted={json.dumps(probe)}"])


def fresh_model(config: RunConfig) -> Any:
    built = build_model(config.model, config.objective, config.compute)
    initialize(built, config.model, config.seed)
    return built


def measure(config: RunConfig, model: Any = None) -> dict[str, float]:
    (evaluator,) = build_evaluators(config.evals, texts_of(config)).values()
    return evaluator(model or fresh_model(config), Clock.of(config).phase("short"), Compute.of(config.compute))


def as_bert(config: RunConfig) -> RunConfig:
    model = BertConfig(vocab_size=512, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48)
    phases = {name: replace(phase, model={}) for name, phase in config.phases.items()}
    return replace(config, model=model, phases=phases)


ENCODERS = {"modernbert": lambda config: config, "bert": as_bert}


@pytest.mark.runs
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("classifier", ["linear", "nearest"])
def test_a_planted_signal_is_found_and_chance_is_not_taken_for_one(
    tiny_run: TinyRun, tmp_path: Path, classifier: str, encoder: str
) -> None:
    """Any encoder distinguishes texts of two vocabularies; random labels cannot be learned."""
    found = {}
    for shuffled in (False, True):
        file = write_texts(tmp_path / "texts.jsonl", shuffled=shuffled)
        found[shuffled] = measure(ENCODERS[encoder](with_probe(tiny_run(), train=str(file), classifier=classifier)))
    assert found[False]["accuracy"] > 0.95 and found[False]["macro_f1"] > 0.95
    assert found[False]["baseline/accuracy"] == 0.5 and found[False]["baseline/macro_f1"] == pytest.approx(1 / 3)
    assert abs(found[True]["accuracy"] - 0.5) < 0.2
    assert found[False]["num_texts"] == 120


@pytest.mark.parametrize("order", ["all", "causal"])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_an_embedding_is_the_mean_over_the_texts_own_tokens(
    tiny_run: TinyRun, tmp_path: Path, encoder: str, order: str
) -> None:
    """As if each text were alone, for any packing: [CLS] and [SEP] count, neighbours and pads do not."""
    words = tiny_run(*(["objective={name: causal}"] if order == "causal" else []))
    config = ENCODERS[encoder](with_probe(words, train=str(write_texts(tmp_path / "texts.jsonl"))))
    vocabulary, model = read_vocabulary(config.data.tokenizer), fresh_model(config)
    draw = np.random.default_rng(1)
    texts = [draw.choice(vocabulary.ordinary, size=size).astype(np.int32) for size in (1, 0, 5, 62, 80, 30, 31, 7)]
    arguments = (vocabulary, Clock.of(config).phase("short"), Compute.of(config.compute))
    model.train()
    together = embed(model, texts, *arguments)
    assert model.training
    alone = torch.cat([embed(model, [text], *arguments) for text in texts])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    cut = embed(model, [texts[4][:62]], *arguments)
    torch.testing.assert_close(together[4:5], cut, rtol=1e-5, atol=1e-6)
    assert together.isfinite().all() and together.dtype is torch.float32


@pytest.mark.parametrize("encoder", ENCODERS)
def test_after_permuted_orders_a_text_is_read_as_it_is(tiny_run: TinyRun, tmp_path: Path, encoder: str) -> None:
    """Every token sees all of its text, as with masked tokens: the same weights, the same embeddings."""
    found = []
    for name in ("mlm", "permutation"):
        words = tiny_run(f"objective={{name: {name}}}")
        config = ENCODERS[encoder](with_probe(words, train=str(write_texts(tmp_path / "texts.jsonl"))))
        vocabulary, model = read_vocabulary(config.data.tokenizer), fresh_model(config)
        texts = [vocabulary.ordinary[:size].astype(np.int32) for size in (30, 5)]
        found.append(embed(model, texts, vocabulary, Clock.of(config).phase("short"), Compute.of(config.compute)))
    assert torch.equal(*found)


def _measured_by_rank(config: RunConfig) -> tuple[dict[str, float], torch.Tensor]:
    (evaluator,) = build_evaluators(config.evals, texts_of(config)).values()
    now, compute = Clock.of(config).phase("short"), Compute.of(config.compute)
    model = fresh_model(config)
    return evaluator(model, now, compute), embed(model, evaluator._ids, evaluator._vocabulary, now, compute)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["modernbert", "bert"])
def test_two_ranks_measure_what_one_does(tiny_run: TinyRun, tmp_path: Path, encoder: str) -> None:
    """To the last bit: microbatches do not depend on the number of ranks."""
    config = ENCODERS[encoder](with_probe(tiny_run(), train=str(write_texts(tmp_path / "texts.jsonl"))))
    ((figures, embeddings),) = run_ranks(_measured_by_rank, 1, config)
    for found, same in run_ranks(_measured_by_rank, 2, config):
        assert found == figures
        assert torch.equal(same, embeddings)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [{key: line[key] for key in line if key != "time"} for line in records(folder, "evaluation")]


@pytest.mark.runs
def test_a_run_records_its_evaluations_and_resumes_as_if_never_stopped(
    tiny_run: TinyRun, tmp_path: Path, cli: Cli
) -> None:
    """The clock decides when they are due; a stopped run has the same lines as an uninterrupted one, and `eval`
    prints the last."""
    probe = {"name": "probe", "train": str(write_texts(tmp_path / "texts.jsonl")), "every_tokens": 1500}
    words = tiny_run(f"evals={{planted: {json.dumps(probe)}, ends: {json.dumps(probe | {'every_tokens': None})}}}")
    output, run = cli("train", *words).out, tmp_path / "runs/tiny"
    whole = evaluations(run)
    assert "evals.planted: 120 texts of 2 classes\n" in output
    assert f"planted at {whole[-1]['tokens']:,} tokens: accuracy " in output
    assert [line["phase"] for line in whole if line["name"] == "ends"] == ["short", "long"]
    often = [line["tokens"] for line in whole if line["name"] == "planted"]
    assert len(often) == 5 and [tokens // 1500 for tokens in often] == [1, 2, 2, 3, 4]
    measured = {"accuracy", "macro_f1"}
    assert whole[0]["figures"].keys() == measured | {f"baseline/{name}" for name in measured} | {"num_texts", "num_cut"}

    shutil.rmtree(max((run / "checkpoints").iterdir()))
    cli("train", *words)
    assert records(run, "resume")
    assert evaluations(run) == whole

    printed = cli("eval", run).out
    assert f"planted: accuracy {whole[-1]['figures']['accuracy']:.3f} (baseline 0.500)" in printed
    assert "held-out text" in printed
    printed = cli("eval", run, "data.validation=null").out
    assert "held-out text" not in printed and "ends: accuracy" in printed


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_sharded_weights_are_measured_as_whole_ones(tiny_run: TinyRun, tmp_path: Path) -> None:
    """FSDP2 gathers the weights for an evaluation, and training continues as on one rank."""
    from tests.support.runs import assert_same_run, launch

    probe = {"name": "probe", "train": str(write_texts(tmp_path / "texts.jsonl")), "every_tokens": 1500}
    words = tiny_run(f"evals.planted={json.dumps(probe)}")
    launch([*words, "name=one"], ranks=1)
    launch([*words, "name=two", "distributed.strategy=fsdp2"], ranks=2)
    assert_same_run(tmp_path / "runs/two", tmp_path / "runs/one")
    one, two = (evaluations(tmp_path / "runs" / name) for name in ("one", "two"))
    assert len(one) == len(two) == 5
    for expected, found in zip(one, two, strict=True):
        assert found["tokens"] == expected["tokens"]
        assert found["figures"] == pytest.approx(expected["figures"], abs=0.02)


@pytest.mark.runs
@pytest.mark.parametrize(
    "objective", ["sop", *(pytest.param(each, marks=pytest.mark.slow) for each in ("causal", "permutation"))]
)
def test_a_run_of_another_encoder_and_objective_is_probed(
    tiny_run: TinyRun, tmp_path: Path, cli: Cli, objective: str
) -> None:
    """BERT, whose pairs have segments and one more special token, and an order in which a token sees earlier ones."""
    probe = {"name": "probe", "train": str(write_texts(tmp_path / "texts.jsonl"))}
    words = system([*tiny_run(), f"evals.planted={json.dumps(probe)}"], "bert", objective)
    cli("train", *words)
    assert [line["figures"]["accuracy"] > 0.9 for line in evaluations(tmp_path / "runs/tiny")] == [True, True]
    cli("eval", *words)


# --- classifiers ---------------------------------------------------------------------------------------------------


@pytest.mark.runs
def test_logistic_regression_is_that_of_its_definition() -> None:
    """Compared with plain gradient descent; other scales, and a constant dimension, change nothing."""
    draw = torch.Generator().manual_seed(1)
    inputs_LD, texts_ND = torch.randn(2, 90, 4, generator=draw, dtype=torch.float64)
    labels_L = (inputs_LD[:, :3] + torch.randn(90, 3, generator=draw, dtype=torch.float64)).argmax(dim=1)
    mean_D, deviation_D = inputs_LD.mean(dim=0), inputs_LD.std(dim=0, correction=0)
    weight_CD, bias_C = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    standard_LD, one_hot_LC = (inputs_LD - mean_D) / deviation_D, torch.eye(3, dtype=torch.float64)[labels_L]
    for _ in range(3000):
        wrong_LC = (standard_LD @ weight_CD.T + bias_C).softmax(dim=1) - one_hot_LC
        weight_CD = weight_CD - 0.5 * (wrong_LC.T @ standard_LD + weight_CD) / 90
        bias_C = bias_C - 0.5 * wrong_LC.mean(dim=0)
    expected_N = ((texts_ND - mean_D) / deviation_D @ weight_CD.T + bias_C).argmax(dim=1)
    assert torch.equal(linear(inputs_LD, one_hot_LC, texts_ND, "softmax").argmax(dim=1), expected_N)
    moved = linear(inputs_LD * 1000 + 7, one_hot_LC, texts_ND * 1000 + 7, "softmax")
    assert torch.equal(moved.argmax(dim=1), expected_N)
    constant = torch.full((90, 1), 0.1, dtype=torch.float64)
    padded = [torch.cat([each, constant], dim=1) for each in (inputs_LD, texts_ND)]
    assert torch.equal(linear(padded[0], one_hot_LC, padded[1], "softmax").argmax(dim=1), expected_N)


def test_the_nearest_by_cosine_and_not_by_distance() -> None:
    learned = torch.tensor([[1.0, 0.0], [0.0, 100.0], [5.0, 5.0]])
    told = nearest(learned, torch.eye(3), torch.tensor([[50.0, 1.0], [0.001, 0.01], [1.0, 1.1]]), "softmax")
    assert told.argmax(dim=1).tolist() == [0, 1, 2]


@pytest.mark.runs
@pytest.mark.parametrize("classifier", ["linear", "nearest"])
def test_scores_and_several_classes_are_probed_as_one_class_is(
    tiny_run: TinyRun, tmp_path: Path, classifier: str
) -> None:
    """A corpus rated by people, or tagged with topics, can be probed as it is."""
    lines = [json.loads(line) for line in write_texts(tmp_path / "one.jsonl").read_text().splitlines()]
    draw = random.Random(1)
    several = [line | {"label": ["a"] * line["label"] + ["rare"] * (n % 9 == 0)} for n, line in enumerate(lines)]
    scores = [line | {"label": line["label"] + draw.random() / 4} for line in lines]

    def measured(kind: str, rows: list[dict[str, Any]]) -> dict[str, float]:
        file = write(tmp_path / f"{kind}.jsonl", json_lines(rows))
        return measure(with_probe(tiny_run(), train=file, kind=kind, classifier=classifier))

    found = measured("multi-label", several)
    assert found["micro_f1"] > 0.75 and found["baseline/micro_f1"] < 0.7 and found["num_texts"] == 120
    found = measured("regression", scores)
    assert found["pearson"] > 0.9 and set(found) == {"pearson", "spearman", "num_texts", "num_cut"}


def test_ridge_regression_is_scikit_learns() -> None:
    model = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed")
    draw = torch.Generator().manual_seed(1)
    inputs_LD, texts_ND = torch.randn(2, 50, 4, generator=draw, dtype=torch.float64)
    scores_LC = inputs_LD[:, :1] * 3 + torch.randn(50, 1, generator=draw, dtype=torch.float64)
    standard = [(each - inputs_LD.mean(dim=0)) / inputs_LD.std(dim=0, correction=0) for each in (inputs_LD, texts_ND)]
    expected = model.Ridge().fit(standard[0].numpy(), scores_LC.numpy()).predict(standard[1].numpy())
    found = linear(inputs_LD, scores_LC, texts_ND, "identity")
    assert found[:, 0].numpy() == pytest.approx(expected.reshape(-1), abs=1e-9)


def test_embeddings_that_are_no_numbers_give_figures_that_are_none(tiny_run: TinyRun, tmp_path: Path) -> None:
    """A broken model must neither end the run here nor get a figure."""
    config = with_probe(tiny_run(), train=str(write_texts(tmp_path / "texts.jsonl")))
    model = fresh_model(config)
    with torch.no_grad():
        next(iter(model.model.layers[-1].parameters())).fill_(float("nan"))
    found = measure(config, model)
    assert np.isnan(found["accuracy"]) and found["baseline/accuracy"] == 0.5


# --- the texts -----------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def texts_in(found: ProbeTexts) -> tuple[tuple[str, ...], ...]:
    return tuple(each.texts for each in found.split.examples)


def test_what_is_drawn_and_how_it_is_divided_depends_on_the_seed_alone(tmp_path: Path) -> None:
    """Folds have equally many texts of each class, up to one; a text is never classified by a model trained on it."""
    file = str(write_texts(tmp_path / "texts.jsonl", number=203))
    settings = ProbeConfig(train=file, max_examples=101, folds=4)
    found, again = read_texts("evals.x", settings), read_texts("evals.x", settings)
    assert found.split == again.split and np.array_equal(found.parts_N, again.parts_N)
    assert len(texts_in(found)) == 101 and set(found.parts_N) == {0, 1, 2, 3}
    labels_N = np.concatenate(found.labels.values[TRAIN])[:, 0]
    for label in range(2):
        sizes = np.bincount(found.parts_N[labels_N == label])
        assert sizes.max() - sizes.min() <= 1
    other = read_texts("evals.x", replace(settings, seed=1))
    assert texts_in(other) != texts_in(found)
    assert texts_in(read_texts("evals.x", replace(settings, max_examples=None)))[:3] == tuple(
        (json.loads(line)["text"],) for line in Path(file).read_text().splitlines()[:3]
    )


def test_tables_are_read_as_those_who_write_them_do(tmp_path: Path) -> None:
    """A .csv quotes; a .tsv, as in GLUE, takes quotes literally. A byte order mark is not part of the first name."""
    table = 'index,text,label\n0,"a, ""b""\nc",yes\n1,d,no\n2,"",no\n3,e,yes\n4,f,no\n'
    found = read_texts("evals.x", ProbeConfig(train=write(tmp_path / "t.csv", "\ufeff" + table)))
    assert texts_in(found) == (('a, "b"\nc',), ("d",), ("e",), ("f",)) and found.empty == 1
    assert [found.labels.names[value.item()] for value in found.labels.values[TRAIN]] == ["yes", "no", "yes", "no"]
    assert str(found) == "4 texts of 2 classes; 1 empty text left out"
    pairs = 'a\tb\tlabel\n"x\ty\t1\nz\tw"\t0\n'
    settings = ProbeConfig(
        train=write(tmp_path / "t.tsv", pairs), test=write(tmp_path / "u.tsv", pairs), text_columns=["b", "a"]
    )
    found = read_texts("evals.x", settings)
    assert texts_in(found)[:2] == (("y", '"x'), ('w"', "z")) and found.parts_N.tolist() == [ONLY_LEARNED] * 2 + [0] * 2
    assert str(found) == "4 texts of 2 classes, 2 of them to be predicted"


LINE = '{"text": "a", "label": 0}\n{"text": "b", "label": 1}\n{"text": "c", "label": 0}\n{"text": "d", "label": 1}\n'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [  # lines that no reader takes: tests/data_prep/read/test_policies.py
        ("t.jsonl", None, "cannot be read (No such file or directory). Restore it, or correct the path."),
        ("u.jsonl/", None, "cannot be read (Is a directory)"),
        ("t.jsonl", "", "all 0 texts are of one class (none)"),
        ("t.jsonl", LINE + '{"text": "e", "label": 0.5}', "line 5: label is 0.5, and not a class"),
        ("t.jsonl", LINE + '{"text": "e", "label": 2}', "1 of 3 classes have a single text among the 5 taken (2)"),
        ("t.csv", "", "line 1: no column 'text' among none. Set text_columns"),
        ("t.tsv", "text\tlabel\n" + "a" * 5_000_000 + "\t0\n", "line 2: text has 5,000,000 characters"),
        ("t.csv", "text,label,label\na,0,1\n", "line 1: two columns are called 'label'; rename one"),
    ],
    ids=lambda value: str(value)[-20:],
)
def test_a_file_that_cannot_serve_is_refused_before_the_start(
    tiny_run: TinyRun, tmp_path: Path, cli: Cli, name: str, text: str | None, message: str
) -> None:
    """By `check`, with file, place and remedy."""
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    elif name.endswith("/"):
        file.mkdir()
    error = cli("check", *tiny_run(f"evals.x={json.dumps({'name': 'probe', 'train': str(file)})}"), code=65).err
    assert f"evals.x.train={file}: " in error and message in error


def test_classes_that_were_never_seen_cannot_be_predicted(tmp_path: Path) -> None:
    train = write(tmp_path / "t.jsonl", LINE)
    test = write(tmp_path / "u.jsonl", LINE.replace("1", '"odd"'))
    with pytest.raises(DataError, match=r"evals.x.test=.*has classes \(odd\) that none of the 4 texts taken"):
        read_texts("evals.x", ProbeConfig(train=train, test=test))
    test = write(tmp_path / "u.jsonl", LINE.replace("1", "0"))
    with pytest.raises(DataError, match="evals.x.test=.*all of one class"):
        read_texts("evals.x", ProbeConfig(train=train, test=test))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evals.x={name: probe, train: a.txt}", "Name one of .jsonl, .tsv, .csv, .parquet."),
        ("evals.x={name: probe, train: a.csv, test: a.csv}", "the probe would be tested on its training texts"),
        ("evals.x={name: probe, train: a.csv, text_columns: []}", "no text to read"),
        ("evals.x={name: probe, train: a.csv, kind: tokens}", "Choose from single-label, multi-label, regression."),
        ("evals.x={name: probe, train: a.csv, text_columns: [label]}", "the text would contain its class"),
        ("evals={a/b: {name: probe, train: a.csv}}", "letters, digits"),
    ],
)
def test_a_mistake_in_the_section_is_reported_without_a_file(
    tiny_run: TinyRun, cli: Cli, override: str, message: str
) -> None:
    assert message in cli("check", *tiny_run(override), code=78).err
