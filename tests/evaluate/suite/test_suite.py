"""A suite by one command: its runs, choices, chains and table.

Users who compare encoders by such a table must be able to trust each cell's settings. Runs are fake_runs.py's here,
which take no time, except with the fixture real_suite.
"""

from __future__ import annotations

import csv
import json
import shutil
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.errors import ConfigError
from modernbert_train.evaluate.suite.cells import LOGS
from modernbert_train.evaluate.suite.efficiency import draw
from modernbert_train.evaluate.suite.plan import Plan, read_suite
from tests.support import fake_runs
from tests.support.beir import WriteBeir, recipe
from tests.support.fake_runs import figure_of
from tests.support.paths import ROOT
from tests.support.suites import Suite

YAMLS = ROOT / "yamls"
RECIPE = str(YAMLS / "retrieval/modernbert.yaml")
PAIRS: dict[str, Any] = {"retrieval": RECIPE, "keys": {"train": ["x"], "evaluate": {"own": "y"}}}
SPEED = {"lengths": [16], "tokens": 64, "repeats": 1}
RATES = {"choices": {"lr": [1e-3, 2e-3, 3e-3]}, "choose_seeds": 1}


@pytest.mark.runs
def test_a_rate_is_chosen_with_some_seeds_and_counts_with_all(suite: Suite) -> None:
    """Three rates with one of two seeds, and the best of them with both: eight runs of two models."""
    published = {"theirs": {"source": "a paper", "figures": {"tone": 90.5}}}
    table = suite.write({"tone": RATES}, published=published).run(suite.one, suite.two)
    assert len(suite.starts()) == 8
    for row in table["rows"][:2]:
        (cell,) = row["cells"]
        with_first = {each["choice"]: each["value"] for each in cell["runs"] if each["seed"] == 1}
        assert len(with_first) == 3 and cell["chosen"] == max(with_first, key=lambda choice: with_first[choice])
        assert cell["n"] == 2 and cell["seeds"]["1"] == max(with_first.values())
        assert all(each["value"] == figure_of(each["run"]) for each in cell["runs"])
    for part in ("| theirs (published) | 90.50 |", "a paper. Not run here.", "the best of 3 with 1 of 2 seeds."):
        assert part in suite.table()
    picture = ElementTree.fromstring(suite.table("svg")).iter("{http://www.w3.org/2000/svg}circle")
    assert [dot.get("fill") == "#ffffff" for dot in picture] == [False, False, True] * 2  # names, then figures


@pytest.mark.runs
def test_choices_that_a_model_ignores_are_one_run(suite: Suite) -> None:
    """A frozen encoder has no adapters: the best of equal runs was called the best rate."""
    suite.write({"tone": {"choices": {"lora.lr": [1e-3, 2e-3], "batch_texts": [4, 8]}}, "plain": {}})
    table = suite.run(suite.one, f"frozen:{suite.two}")
    tuned, frozen = ({each["choice"] for each in row["cells"][0]["runs"]} for row in table["rows"])
    assert len(tuned) == 4 and frozen == {"lora.lr=0.001, batch_texts=4", "lora.lr=0.001, batch_texts=8"}
    assert "tone of frozen-two: 2 choices not run, since this model ignores the keys." in suite.table()
    assert "the best of 2 with" in suite.table() and "the best of 4 with" in suite.table()
    assert len(suite.starts()) == 8 + 4 + 4


@pytest.mark.runs
def test_a_task_begins_with_what_was_chosen_of_another_with_the_same_seed(suite: Suite) -> None:
    """With `best` that is the epoch that the column shows, and not the last one."""
    tasks = {"second": {"after": "first"}, "first": {"choices": {"lr": [1e-3, 2e-3]}, "keys": {"best": "loss"}}}
    (row,) = suite.write(tasks, groups={"both": ["first", "second"]}).run()["rows"]
    second, first, both = row["cells"]
    best = {each["seed"]: each["run"] for each in first["runs"] if each["choice"] == first["chosen"]}
    for each in second["runs"]:
        assert suite.source_of(each["run"]) == f"{suite.out}/{best[each['seed']]}/checkpoints/{fake_runs.BEST}"
    assert both["mean"] == pytest.approx((first["mean"] + second["mean"]) / 2)


@pytest.mark.runs
def test_more_seeds_and_other_settings_are_added_and_never_mixed(suite: Suite) -> None:
    def cell(*words: object, **task: Any) -> dict[str, Any]:
        return suite.write({"tone": task}).run(suite.one, *words)["rows"][0]["cells"][0]

    one, more = cell(), cell("--seeds", 1, 2, 3)
    assert (one["n"], more["n"]) == (2, 3) and one["seeds"].items() <= more["seeds"].items()
    assert set(suite.starts().values()) == {1} and len(suite.starts()) == 3
    other = cell(keys={"lr": 9e-3})
    assert len(suite.starts()) == 5
    assert not {each["run"] for each in other["runs"]} & {each["run"] for each in more["runs"]}
    assert cell() == one and set(suite.starts().values()) == {1}


@pytest.mark.runs
def test_a_task_without_its_data_costs_one_start_and_no_other_task(suite: Suite) -> None:
    """Otherwise a user would wait for sixteen runs that miss the same file. --retry starts the failed runs only."""
    lost = suite.write({"lost": {"keys": {"max_tokens": 16}}, "tone": {}}).names("lost")
    suite.behave("fail", *lost)
    table = suite.run(code=65)
    assert f"{', '.join(lost)}: exit code 65; {suite.out / LOGS / lost[0]}.log" in suite.said.err
    cells = table["rows"][0]["cells"]
    assert suite.starts()[lost[0]] == 1 and len(suite.starts()) == 3 and len(lost) == 2
    assert cells[0]["mean"] is None and "the texts are missing" in cells[0]["failed"][0] and cells[1]["n"] == 2
    assert "| one | failed |" in suite.table()
    suite.behave("")
    assert suite.run(code=65) == table and suite.starts()[lost[0]] == 1
    assert "Add --retry to repeat what failed" in suite.said.err and "error: the texts are missing" in suite.said.err
    assert suite.run(suite.one, "--retry")["rows"][0]["cells"][0]["n"] == 2
    found = [100 * figure_of(name) for name in lost]
    assert f"| one | {statistics.fmean(found):.2f} ± {statistics.stdev(found):.2f} (2) |" in suite.said.out
    assert "table.md" in suite.said.out
    assert suite.starts() == dict.fromkeys(suite.starts(), 1) | {lost[0]: 2}


@pytest.mark.runs
def test_a_choice_whose_texts_are_missing_leaves_the_other_choices(suite: Suite) -> None:
    """As a rate that diverges does; both rates and seeds miss the same file, and one run looks for it."""
    suite.write({"tone": {"choices": {"label_column": ["lost", "label"], "lr": [1e-3, 2e-3]}}})
    cells = suite.plan().cells(["tone"], choosing=True)
    lost = [cell.name for cell in cells if "label_column=lost" in cell.overrides]
    suite.behave("fail", *lost)
    (cell,) = suite.run(code=65)["rows"][0]["cells"]
    assert cell["chosen"].startswith("label_column=label, ") and cell["n"] == cell["of"] == 2
    assert len(lost) == 4 and len({*lost} & suite.starts().keys()) == 1 and len(suite.starts()) == 5
    (reason,) = cell["failed"]
    assert reason.count("label_column=lost") == 4 and "error: the texts are missing. Name others." in reason


@pytest.mark.runs
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("diverge", "failed with exit code 70: error: the loss is not finite"),
        ("undefined", "accuracy is undefined"),
    ],
)
def test_a_value_that_diverges_is_the_worst_of_its_choices_and_costs_no_cell(
    how: str, reason: str, suite: Suite
) -> None:
    """One rate of three is lost; the better of the others counts, with all seeds, and no run is repeated."""
    best = max(suite.write({"tone": RATES}).names("tone"), key=figure_of)
    suite.behave(how, best)
    table = suite.run()
    (cell,) = table["rows"][0]["cells"]
    lost = next(each for each in cell["runs"] if each["run"] == best)
    assert cell["n"] == cell["of"] == 2 and lost["value"] is None and cell["chosen"] != lost["choice"]
    assert reason in lost["problem"] and f"tone of one: {lost['choice']} seed 1: {reason}" in table["notes"][1]
    assert suite.run() == table and set(suite.starts().values()) == {1}
    suite.behave("")
    (again,) = suite.run(suite.one, "--retry")["rows"][0]["cells"]
    assert again["chosen"] == lost["choice"] and not again["failed"]


@pytest.mark.runs
def test_a_cell_says_of_how_many_seeds_it_is_and_why(suite: Suite) -> None:
    """Also for a task that continues from the failed run; the exit code names the missing result."""
    suite.write({"tone": {}, "second": {"after": "tone"}}, seeds=[1, 2, 3])
    suite.behave("diverge", suite.names("tone")[1])
    table = suite.run(code=70)
    assert [(cell["n"], cell["of"]) for cell in table["rows"][0]["cells"]] == [(2, 3)] * 2
    assert suite.table().count("(2 of 3)") == 2
    assert "- tone of one: seed 2: failed with exit code 70: error: the loss is not finite." in suite.table()
    assert "- second of one: seed 2: tone: failed with exit code 70" in suite.table()


@pytest.mark.runs
def test_a_frozen_encoder_stays_frozen_in_a_chain(suite: Suite) -> None:
    """Otherwise the row of a frozen baseline would contain figures of a fully trained model."""
    tasks: dict[str, Any] = {"first": {}, "second": {"after": "first"}, "set": {"beir": "x", "after": "first"}}
    frozen, tuned = f"frozen:untrained:{suite.one}", f"untrained:{suite.one}"
    table = suite.write(tasks, seeds=[1]).run(frozen, tuned)
    for row, prefix in zip(table["rows"], ("frozen:", ""), strict=True):
        first, *later = (cell["runs"][0]["run"] for cell in row["cells"])
        assert [*map(suite.source_of, later)] == [f"{prefix}{suite.out / first}", str(suite.out / first)]
    (row,) = suite.write({"pairs": PAIRS, **tasks}).run(frozen, "--seeds", 1)["rows"]
    assert row["cells"][0]["failed"] == ["seed 1: not run: retrieval trains the encoder itself, so it cannot be frozen"]
    assert row["cells"][1:] == table["rows"][0]["cells"]


@pytest.mark.runs
def test_a_stop_between_speeds_ends_the_suite_as_stopped(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the part that was stopped would count as failed, and the parts after it would still start."""
    begun = suite.folder / "begun"
    program = f"""
import os, signal, sys, time
open({str(begun)!r}, "a").write(sys.argv[1] + "\\n")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    real = subprocess.Popen

    def start(words: list[str], *args: Any, **more: Any) -> Any:
        speed = "modernbert_train.evaluate.suite.efficiency"
        model = words[words.index("--model") + 1] if speed in words else None
        return real(words if model is None else [sys.executable, "-c", program, model], *args, **more)

    monkeypatch.setattr("modernbert_train.distributed.run_jobs.subprocess.Popen", start)
    table = suite.write({"tone": {}}, seeds=[1], efficiency=SPEED).run(suite.one, suite.two, code=75)
    assert begun.read_text().split() == [str(suite.one)] and table["notes"] == []


@pytest.mark.parametrize(
    ("tasks", "more", "message"),
    [
        ({}, {}, "tasks: empty"),
        ({"a": {"beir": "x", "finetune": "rte"}}, {}, r"tasks\.a\.finetune, retrieval, beir, mteb: name exactly one"),
        ({"a": {"after": "b"}}, {}, r"after=b: name a trained task of the suite"),
        ({"a": {}, "b": {"after": "a"}, "c": {"after": "b"}}, {}, r"tasks\.c\.after=b"),
        ({"pairs": PAIRS, "tone": {"after": "pairs"}}, {}, "a model of `retrieval train` is for"),
        ({"a": {"choices": {"lr": []}}}, {}, r"choices\.lr=\[\]: name the values"),
        ({"a": {"choices": {f"k{i}": [*range(10)] for i in range(12)}}}, {}, "1,000,000,000,000 runs, at most 10,000"),
        ({"a": {"choices": {"lr": [1e-5]}, "keys": {"lr": 1e-5}}}, {}, r"no other value in keys"),
        ({"a": {"choose_seeds": 3}}, {}, "choose_seeds=3: there are 2 seeds"),
        ({"a": {}}, {"seeds": [1, 1]}, r"seeds=\[1, 1\]: name at least one, each once"),
        ({"a": {}}, {"groups": {"a": ["a"]}}, r"groups\.a=\['a'\]: must list tasks"),
        ({"a": {}}, {"published": {"x": {"source": "y", "figures": {"b": 1}}}}, r"published\.x: b is not a task"),
        ({"a": {"beir": [3]}}, {}, r"tasks\.a-3\.beir=3: name a set"),
        ({"a": {"beir": ["x/1", "y/1"]}}, {}, r"tasks\.a: a-1 or a would exist twice"),
        ({"a": {"beir": ["x"]}}, {"groups": {"a": ["a-x"]}}, r"tasks\.a: a-x or a would exist twice"),
        ({"a": {"mteb": []}}, {}, r"groups\.a=\[\]: must list tasks"),
        ({"a": {"mteb": "STS12", "choices": {"pooling": ["cls"]}}}, {}, "`mteb` measure a model as it is"),
        ({"a b": {}}, {}, "it is part of the names of folders"),
        ({"a": {"submit": {"../../x": {"split": "test"}}}}, {}, r"submit\.\.\./\.\./x: it is the name of a file"),
        ({"a": {"submit": {"x": {"split": "../test"}}}}, {}, r"submit\.x\.split=\.\./test: name a split"),
        ({"a": {"submit": {"x": {"split": "test", "between": [5]}}}}, {}, r"between=\[5\.0\]: name the lowest score"),
    ],
)
def test_mistakes_in_a_suite_are_reported_with_their_key(
    suite: Suite, tasks: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_suite(str(suite.write(tasks, **more).file))


@pytest.mark.parametrize(
    ("task", "words", "message"),
    [
        ({"metric": "f2"}, (), r"tasks\.tone\.metric=f2: is not measured\. Choose from accuracy"),
        ({"split": "test"}, (), r"tasks\.tone\.split=test: is not measured\. Choose from dev"),
        ({"choose_on": "test", "choices": {"lr": [1e-3, 2e-3]}}, (), r"choose_on=test: is not measured"),
        ({"beir": "some/scifact", "metric": "ndcg"}, (), r"metric=ndcg: is not measured\. Choose from ndcg_at_10"),
        ({"retrieval": RECIPE, "keys": {"train": ["x"]}}, (), "nothing to measure on"),
        ({"keys": {"learning_rate": 1}}, (), r"tasks\.tone: learning_rate .*: unknown key\. Here it is optim\.lr"),
        ({}, ("compute.devise=cpu",), r"tasks\.tone: compute\.devise .*Did you mean compute\.device"),
        ({"finetune": "tune.yaml"}, (), r"tasks\.tone: tune\.yaml: no such file, neither here nor in "),
    ],
)
def test_a_cell_that_would_stay_empty_is_refused_before_anything_runs(
    suite: Suite, task: dict[str, Any], words: tuple[str, ...], message: str
) -> None:
    """Otherwise a user would notice it after the last of a hundred runs, or after each of them."""
    suite.write({"tone": task})
    with pytest.raises(ConfigError, match=message):
        suite.plan(words=words)
    with pytest.raises(ConfigError, match="--seeds 1 1: one is named twice"):
        suite.plan(seeds=[1, 1])


@pytest.mark.runs
def test_several_sets_are_a_column_each_and_their_mean_and_one_that_is_lost_costs_no_other(suite: Suite) -> None:
    """As in a table of BEIR or MTEB; a task may also evaluate another task's model, with each of its seeds."""
    tasks = {
        "b": {"beir": ["data/one", "nfcorpus"], "keys": {"pooling": "cls"}},
        "m": {"mteb": ["STS12", "Touche2020Retrieval.v3"]},
        "tone": {},
        "after": {"beir": "x", "after": "tone"},
    }
    plan = suite.write(tasks).plan(suite.one, suite.two)
    assert list(plan.suite.tasks) == ["b-one", "b-nfcorpus", "m-STS12", "m-Touche2020Retrieval-v3", "tone", "after"]
    assert plan.metric("b-one") == "ndcg_at_10" and plan.metric("m-STS12") == "main_score"
    of_b, of_m = ([*plan.cells([name], choosing=True)] for name in ("b-one", "m-STS12"))
    assert {(cell.task, cell.overrides, cell.seed) for cell in of_b} == {("data/one", ("pooling=cls",), None)}
    assert {(cell.task, cell.overrides, cell.seed) for cell in of_m} == {("mteb:STS12", (), None)}
    suite.behave("fail", *(cell.name for cell in of_m))
    table = suite.run(suite.one, suite.two, code=65)
    assert [column["task"] for column in table["columns"]][-2:] == ["b", "m"]
    one, nfcorpus, sts, touche, tone, after, b, m = table["rows"][0]["cells"]
    assert b["mean"] == pytest.approx((one["mean"] + nfcorpus["mean"]) / 2) and one["n"] == 1
    assert sts["mean"] is None and sts["failed"] and touche["mean"] is not None and m is None
    assert tone["n"] == after["n"] == 2


def test_what_retrieval_has_trained_is_measured_by_other_tasks(suite: Suite) -> None:
    """As papers evaluate MTEB: after training on MS MARCO, seed by seed."""
    plan = suite.write({"pairs": PAIRS, "sts": {"mteb": "STS12", "after": "pairs"}}).plan(seeds=[1])
    assert not [*plan.cells(["sts"], choosing=True)]
    (before,) = plan.cells(["pairs"], choosing=True)
    (suite.out / before.name).mkdir(parents=True)
    result = {"task": "pairs", "source": "a", "seed": 1, "settings": {}, "figures": {"own": {"ndcg_at_10": 0.5}}}
    (suite.out / before.name / "result.json").write_text(json.dumps(result))
    (cell,) = plan.cells(["sts"], choosing=True)
    assert cell.model == str(suite.out / before.name / "st") and cell.task == "mteb:STS12"


def test_a_decoder_is_no_model_of_a_suite(real_suite: Suite) -> None:
    """Its states ignore later tokens, and its figures would look comparable with encoders'."""
    real_suite.one.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
    }  # fmt: skip
    (real_suite.one / "config.json").write_text(json.dumps(config))
    real_suite.write({"tone": {}}).run(code=78)
    assert "one: a decoder, whose states do not see later tokens" in real_suite.said.err


def test_an_unknown_suite_names_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="Known: .*glue.*"):
        read_suite("blue")


@pytest.mark.runs
def test_a_dry_run_names_the_data_that_is_missing_and_the_command_that_brings_it(
    suite: Suite, write_beir: WriteBeir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a user would learn it one by one from the first failed run of each task, once an hour."""
    folder = suite.folder
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    for name in ("nyu-mll___glue/rte", "mteb___sts13-sts/default"):
        (folder / "cache" / name).mkdir(parents=True)
    write_beir({"d1": "a red fox"}, {"q1": "fox"}, "beir/scifact", train=[("q1", "d1", 1)], dev=[("q1", "d1", 1)])
    keys: dict[str, Any] = {"train": ["triplets.jsonl", "scifact"], "negative_columns": []}
    keys |= {"evaluate": {"own": "my/set", "scifact": "scifact"}, "beir_folder": str(folder / "beir")}
    local = {"data": str(folder), "train": "train", "validation": {"dev": "dev"}}
    tasks: dict[str, Any] = {
        "tone": {"keys": {"train": "nowhere.tsv"}},
        "rte": {"finetune": "rte"},
        "cola": {"finetune": "cola", "submit": {"AX": {"split": "ax/test"}}},
        "local": {"keys": local, "submit": {"T": {"split": "hidden"}}},
        "gone": {"keys": local | {"data": "/no/such/folder"}},
        "choice": {"choices": {"train": [str(folder / "train.tsv"), "other.tsv"]}},
        "nfcorpus": {"beir": "nfcorpus"},
        "sts": {"mteb": ["STS12", "STS13"]},
        "pairs": {"retrieval": RECIPE, "keys": keys},
    }
    suite.write(tasks).run(suite.one, "--dry-run")
    said = suite.said.out
    assert "rte:" not in said and "STS13" not in said
    for line in (
        "tone: train=nowhere.tsv: no such file. Correct the path.",
        "cola: data=nyu-mll/glue/cola: no such folder, nor a dataset on this machine. With a network: python -c "
        "\"import datasets; datasets.load_dataset('nyu-mll/glue', 'cola')\"",
        "cola: data=nyu-mll/glue/ax: no such folder, nor a dataset on this machine",
        f"local: {folder}: has none of hidden.",
        "Put the split 'hidden' there.",
        "gone: data=/no/such/folder: no such folder. Put it there, or name another in keys.",
        "choice: train=other.tsv: no such file",
        "nfcorpus: nfcorpus: not in data/beir. With a network: curl -O https://",
        'sts-STS12: mteb:STS12: not on this machine. With a network: python -c "import mteb; ',
        "pairs: train[0]=triplets.jsonl: no such file",
        "pairs: evaluate.own=my/set: no such folder",
        f"pairs: evaluate.scifact={folder}/beir/scifact: has no qrels/test.tsv; its splits are dev, train",
    ):
        assert line in said
    assert "11 data sets missing or unfit:" in said and said.count("no such folder, nor") == 2
    suite.write({"tone": {}}).run(suite.one, "--dry-run")
    assert "1 task, 1 model, at most 2 runs\nno data is missing\n" in suite.said.out and not suite.out.exists()


@pytest.mark.runs
def test_a_table_for_a_paper_and_one_for_a_spreadsheet(suite: Suite) -> None:
    """The best of a column is bold, spread and seeds are named, published rows keep their source; seed 0 is a seed.
    Names of files, and a suite from elsewhere, may have any characters: they are no markup and no paths."""
    odd = [suite.folder / name for name in ("=50%_&#", "[ours]", "*", "a|b<img src=x>[y](z)\x1b[2J")]
    for each in odd:
        each.mkdir()
    published = {
        "theirs": {"source": "arXiv 1", "figures": {"tone": 99.994}},
        "*them*\n# x": {"source": "<b>", "figures": {"tone": 90}},
    }
    suite.write({"tone": {}, "other": {}}, published=published, groups={"all": ["tone"]})
    table = suite.run(*odd, suite.one, suite.out / "..", "--seeds", 0, 1)
    latex, text = suite.table("tex"), suite.table()
    assert r"\toprule" in latex and "sample standard deviation over seeds (number of seeds)" in latex
    rows = [line for line in latex.splitlines() if line.endswith(r"\\") and line.split(" & ")[0] != "Model"]
    # {}: \midrule and \\ would take a bracket or a star after them as their own
    names = [row.split(" & ")[0] for row in rows]
    assert names[:3] == [r"{}=50\%\_\&\#", "{}[ours]", "{}*"]
    assert names[3].startswith(r"{}a\textbar{}b\textless{}img src=x\textgreater{}")
    assert (names[4], names[6]) == ("{}one", "{}theirs (published)")
    for place in range(2):
        means = [row["cells"][place]["mean"] if row["cells"][place] else 0 for row in table["rows"]]
        bold = [r"\textbf" in row.split(" & ")[place + 1] for row in rows]
        assert bold == [mean == max(means) for mean in means]
    cell = table["rows"][1]["cells"][1]
    assert f"{100 * cell['mean']:.2f} $\\pm$ {100 * cell['standard_deviation']:.2f} (2)" in rows[1]
    assert "arXiv 1. Not run here." in latex
    lines = list(csv.DictReader(suite.table("csv").splitlines()))
    assert len(lines) == 24 and lines[0]["model"] == "'=50%_&#" and lines[0]["of_seeds"] == "2"
    assert float(lines[4]["mean"]) == cell["mean"] and lines[-4]["source"] == "arXiv 1"
    assert r"| a\|b&lt;img src=x>\[y\](z)\\x1b\[2J | " in text
    assert "\x1b" not in text + suite.said.out + suite.table("csv")
    assert r"| \*them\* # x (published) | 90.00 |" in text and ": &lt;b>. Not run" in text
    assert {path.name for path in suite.out.iterdir()} >= {"table.md", "logs"}


@pytest.mark.runs
@pytest.mark.parametrize("name", [path.stem for path in sorted((YAMLS / "suites").glob("*.yaml"))])
def test_the_suites_here_are_right(name: str, tmp_path: Path) -> None:
    """Each task and recipe is read, with every choice; data is not looked for."""
    Plan(*read_suite(name), ["runs/mine"], None, tmp_path, ())


@pytest.mark.runs
def test_the_best_seed_of_what_was_chosen_is_written_for_a_test_server(suite: Suite) -> None:
    """GLUE's form, a line for each text: names of classes, their numbers, or scores within bounds."""
    parts = {"Names": {"split": "x"}, "Numbers": {"split": "x", "labels": ["up", "down"]}}
    scores = {"Scores": {"split": "ax/y", "between": [0, 5]}, "Plain": {"split": "ax/y"}}
    choices = {"choices": {"lr": [1e-3, 2e-3]}}
    tasks = {
        "tone": {"submit": parts, **choices},
        "grade": {"submit": scores, "keys": {"kind": "regression"}, **choices},
    }
    suite.write(tasks)
    for name in [*suite.names("tone"), *suite.names("grade")]:
        told = [("x", "up"), ("x", None), ("x", "down"), ("ax-y", 5.25), ("ax-y", figure_of(name)), ("ax-y", None)]
        lines = [{"split": split, "prediction": each} for split, each in told]
        (suite.out / name).mkdir(parents=True)
        (suite.out / name / "submission.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cells = suite.run()["rows"][0]["cells"]
    files = {name: (suite.out / "submission" / "one" / f"{name}.tsv").read_text() for name in parts | scores}
    assert files["Names"] == "index\tprediction\n0\tup\n1\tdown\n2\tdown\n"  # an empty text has the first class
    assert files["Numbers"] == "index\tprediction\n0\t0\n1\t1\n2\t1\n"
    best = max(each["value"] for each in cells[1]["runs"] if each["choice"] == cells[1]["chosen"])
    assert files["Scores"] == f"index\tprediction\n0\t5.000\n1\t{best:.3f}\n2\t0.000\n"
    assert files["Plain"] == f"index\tprediction\n0\t5.25\n1\t{best:g}\n2\t0\n"


QUESTIONS = {"kind": "question-answering", "text_columns": ["a", "b"], "overlap_tokens": 8}


@pytest.mark.runs
@pytest.mark.parametrize(
    ("keys", "part", "message"),
    [
        ({"labels": ["neg", "pos"]}, {"labels": ["negative", "positive"]}, "the classes are neg, pos. Name each once"),
        ({"labels": ["neg", "pos"]}, {"labels": ["neg"]}, "labels=['neg']: the classes are neg, pos"),
        ({"labels": ["a\tb", "c"]}, {}, "has a tab or line break"),
        ({}, {"between": [0, 1]}, "between=[0.0, 1.0]: bounds a score, and the task has classes"),
        ({"kind": "regression"}, {"labels": ["a"]}, "labels=['a']: number classes, and the task has a score"),
        ({"kind": "multi-label", "metrics": ["micro_f1"]}, {}, "this kind of task has neither"),
        ({"kind": "tokens", "metrics": ["accuracy"]}, {}, "this kind of task has neither"),
        (QUESTIONS, {}, "this kind of task has neither"),
    ],
)
def test_a_file_that_a_test_server_would_not_understand_is_refused(
    suite: Suite, keys: dict[str, Any], part: dict[str, Any], message: str
) -> None:
    """Every line of it was wrong, after all runs and without a word."""
    suite.write({"tone": {"keys": keys, "submit": {"x": {"split": "test", **part}}}})
    for words in (["--dry-run"], []):
        suite.run(suite.one, *words, code=78)
        assert "tasks.tone.submit.x." in suite.said.err and message in suite.said.err


@pytest.mark.runs
def test_numbers_of_classes_that_only_the_data_names_are_compared_with_them(suite: Suite) -> None:
    """A task without `labels` has its classes from its texts, so they are known after the run."""
    table = suite.write({"tone": {"submit": {"x": {"split": "x", "labels": ["bad", "good"]}}}}).run(code=78)
    assert "labels=['bad', 'good']: the classes are down, up. Name each once" in table["notes"][0]


@pytest.mark.runs
def test_another_model_under_the_same_name_has_no_files_of_the_first(suite: Suite) -> None:
    """A test server would score, and a user would load, files of another model."""
    first, second, out = suite.one / "model", suite.two / "model", suite.out
    own, other = {"submit": {"Own": {"split": "x"}}}, {"submit": {"Other": {"split": "x"}}}
    suite.write({"tone": own, "mood": other}, seeds=[1])
    for model in (first, second):
        model.mkdir()
        for name in [*suite.names("tone", model), *suite.names("mood", model)]:
            line = {"split": "x", "prediction": name, "scores": {name: 1.0}}
            (out / name / "adapter").mkdir(parents=True)
            (out / name / "submission.jsonl").write_text(json.dumps(line))
            about = {"base_model_name_or_path": str(model)}
            (out / name / "adapter" / "adapter_config.json").write_text(json.dumps(about))
    suite.run(first)
    files = {"submission/model/Own.tsv", "submission/model/Other.tsv", "adapters/model/tone", "adapters/model/mood"}
    assert all((out / file).exists() for file in files)
    suite.behave("diverge", *suite.names("tone", second))
    (row,) = suite.run(second, code=70)["rows"]
    kept = row["cells"][1]["runs"][0]["run"]
    assert (out / "submission/model/Other.tsv").read_text() == f"index\tprediction\n0\t{kept}\n"
    assert {file for file in files if (out / file).exists()} == {"submission/model/Other.tsv", "adapters/model/mood"}
    suite.write({"tone": own}, seeds=[1]).run(first)  # nor what this suite does not have
    assert {file for file in files if (out / file).exists()} == {"submission/model/Own.tsv", "adapters/model/tone"}


@pytest.mark.runs
def test_figures_of_other_weights_or_texts_are_refused(suite: Suite) -> None:
    """A folder that another training has written into would otherwise have the figures of the first."""
    (suite.one / "config.json").write_text("{}")
    weights = suite.one / "model.safetensors"
    suite.write({"tone": {}, "set": {"beir": "x"}}, seeds=[1])

    def refused(message: str, number: int = 1) -> None:
        suite.run(code=78)
        assert suite.said.err.count(message) == number
        assert "Restore them, name another folder, or remove these." in suite.said.err

    for content, changed in ((b"first", False), (b"other", True), (b"first", False)):
        weights.write_bytes(content)
        if changed:
            refused(f"the weights in {suite.one} have changed since", 2)
        else:
            row = suite.run()["rows"][0]
    assert set(suite.starts().values()) == {1}
    about = {"asked": {"files": {"train": {"file": f"{suite.folder}/train.tsv", "sha256": "0"}}}}
    tone = suite.out / row["cells"][0]["runs"][0]["run"]
    (tone / "task").mkdir()
    (tone / "task/task.json").write_text(json.dumps(about))
    refused(f"train: {suite.folder}/train.tsv has changed since")
    shutil.rmtree(tone / "task")
    # a run that has trained further
    suite.one.joinpath("config.yaml").write_text("name: x")
    first = suite.one / "checkpoints/step-00000004"
    first.mkdir(parents=True)
    made = json.loads((tone / "result.json").read_text()) | {"weights": f"weights.init_from={first}; no classifier"}
    (tone / "result.json").write_text(json.dumps(made))
    suite.run()
    (suite.one / "checkpoints/step-00000012").mkdir()
    refused(f"{first}, and {suite.one}/checkpoints/step-00000012 is there now")


@pytest.mark.runs
def test_a_failed_part_of_a_suite_is_repeated_as_a_failed_cell_is(suite: Suite) -> None:
    """By --retry and not before; it is below the table each time. Here a model has no weights to measure."""
    notes = suite.write({"tone": {}}, seeds=[1], efficiency=SPEED).run(code=65)["notes"]
    assert [note.partition(": ")[0] for note in notes] == ["one, packed", "one, padded"]
    assert "Add --retry to repeat what failed" in suite.said.err

    def starts() -> int:
        return sum(file.read_text().count("$ ") for file in (suite.out / "logs").glob("efficiency-*.log"))

    assert starts() == 2
    assert suite.run(code=65)["notes"] == notes and starts() == 2
    suite.run(suite.one, "--retry", code=65)
    assert starts() == 4


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_speeds_are_measured_again_for_other_weights_or_after_a_torn_file(
    real_suite: Suite, models: dict[str, Path]
) -> None:
    """And not otherwise: a full disk must not end each later command, nor a changed model keep the old one's speed."""
    from safetensors.torch import load_file, save_file

    model, out = shutil.copytree(models["modernbert"], real_suite.one), real_suite.out
    real_suite.write({}, efficiency=SPEED)

    def measured() -> dict[str, int]:
        table = real_suite.run()
        assert not table["notes"] and [row["kind"] for row in table["efficiency"]] == ["fixed", "variable"]
        assert all(row[f"{way}_tokens_per_second"] > 0 for row in table["efficiency"] for way in ("packed", "padded"))
        files = {way: next(out.glob(f"efficiency-{way}-*/result.json")) for way in ("packed", "padded")}
        return {way: file.stat().st_mtime_ns for way, file in files.items()}

    first = measured()
    torn = next(out.glob("efficiency-packed-*/result.json"))
    torn.write_text(torn.read_text()[:100])
    second = measured()
    assert second["padded"] == first["padded"] and second["packed"] > first["packed"]
    assert measured() == second
    weights = load_file(model / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in weights.items()}, model / "model.safetensors", {"format": "pt"})
    third = measured()
    assert all(third[way] > second[way] for way in third)


FAST = {"compute.device": "cpu", "data.num_workers": 0, "logging.progress_bar": False}


@pytest.mark.weekly
@pytest.mark.runs
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_finished_run_predicts_texts_that_it_has_not_seen(real_suite: Suite, models: dict[str, Path]) -> None:
    """Also one longer than any before, and from another folder. Missing texts are named below the table."""
    texts, home, model = ["aki ruto", "", "kelo " * 28, "nabe domi"], real_suite.folder, models["modernbert"]
    (home / "ax").mkdir()
    for name in ("test.tsv", "ax/test.tsv"):
        (home / name).write_text("idx\ttext\n" + "".join(f"{n}\t{text}\n" for n, text in enumerate(texts)))
    keys = {**FAST, "epochs": 4, "data": str(home), "train": "train", "validation": {"dev": "dev"}}
    parts = {"Tone": {"split": "test", "labels": ["down", "up"]}, "AX": {"split": "ax/test"}}
    task: dict[str, Any] = {"keys": keys, "submit": parts}
    table = real_suite.write({"tone": task}, seeds=[1]).run(model)
    assert not table["notes"]
    folder = real_suite.out / "submission" / "modernbert"
    files = [(folder / f"{name}.tsv").read_text().splitlines() for name in ("Tone", "AX")]
    numbers, names = ([line.split("\t")[1] for line in lines[1:]] for lines in files)
    assert [["down", "up"][int(told)] for told in numbers] == names and len(names) == 4
    (cell,) = table["rows"][0]["cells"]
    assert not (real_suite.out / cell["runs"][0]["run"] / "submission").exists()
    gone = real_suite.write({"tone": task | {"submit": {"x": {"split": "gone"}}}}, seeds=[1]).run(model, code=65)
    assert "submission of tone: " in gone["notes"][0] and "gone.tsv" in gone["notes"][0]
    assert real_suite.run(model, code=65) == gone
    (home / "gone.tsv").write_text("idx\ttext\n0\taki ruto\n")
    assert not real_suite.run(model, "--retry")["notes"] and (folder / "x.tsv").exists()
    (home / "gone.tsv").write_text("idx\ttext\n0\taki ruto\n1\tnabe domi\n")
    real_suite.run(model)
    assert len((folder / "x.tsv").read_text().splitlines()) == 3  # the texts have changed
    assert gone["rows"] == table["rows"]


@pytest.mark.weekly
@pytest.mark.runs
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fine_tuning_retrieval_and_a_missing_text_in_one_table(
    real_suite: Suite, models: dict[str, Path], toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real runs: two architectures, a choice, a chain, sets of BEIR, one reranked by another task's model, and
    tasks without their file or data of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(toy, tmp_path / "other")
    run_file = "".join(f"{query} Q0 d{query} 1 1 bm25\n" for query in range(9))
    (tmp_path / "bm25.trec").write_text(run_file, encoding="utf-8")
    pairs = {"text_columns": ["text", "text"]}  # only a model of pairs reranks
    tasks = {
        "first": {"keys": {**FAST, **pairs, "epochs": 2, "best": "loss"}, "choices": {"lr": [1e-3, 3e-3]}},
        "second": {"after": "first", "keys": {**FAST, "steps": 4}},
        "toy": {"beir": [str(toy), str(tmp_path / "other")], "keys": {"device": "cpu"}},
        "again": {"beir": str(toy), "after": "first", "keys": {"rerank": f"{tmp_path}/bm25.trec", "device": "cpu"}},
        "hub": {"mteb": "STS12"},
        "lost": {"keys": {**FAST, "train": "nowhere.tsv"}},
    }
    real_suite.write(tasks, seeds=[1618], efficiency={"lengths": [16, 64, 128], "tokens": 512, "repeats": 1})
    table, out = real_suite.run(models["modernbert"], models["bert"], code=65), real_suite.out
    for row in table["rows"]:
        first, second, found, other, again, hub, lost, both = row["cells"]
        assert first["n"] == second["n"] == 1 and len(first["runs"]) == 2 and 0 <= found["mean"] <= 1
        assert found["mean"] == other["mean"] == pytest.approx(both["mean"])
        assert again["mean"] == pytest.approx(9 / 20)  # nine queries' only candidate is right
        assert hub["mean"] is None and "mteb:STS12: its data, mteb/sts12-sts, is not available" in hub["failed"][0]
        assert lost["mean"] is None and "nowhere.tsv" in lost["failed"][0]
        begun = json.loads((out / second["runs"][0]["run"] / "result.json").read_text())
        runs = {str(each.parent): json.loads(each.read_text()) for each in out.glob("first-*/result.json")}
        starts = {f"weights.init_from={run}/checkpoints/{each['counted']['checkpoint']}" for run, each in runs.items()}
        assert begun["weights"].partition(";")[0] in starts  # of the best epoch, as the figures are
        assert begun["settings"]["steps"] == 4
    measured = {(row["length"], row["kind"]) for row in table["efficiency"]}
    assert measured == {(16, "fixed"), (16, "variable"), (64, "fixed"), (64, "variable")}  # they read 64
    for row in table["efficiency"]:
        assert row["packed_tokens_per_second"] > 0 and row["padded_tokens_per_second"] > 0
        assert row["packed_memory"] > 1e7
    text = real_suite.table()
    assert "| modernbert | 64 | variable |" in text and "Measured on CPU, " in text
    assert "- modernbert reads 64 tokens at most: texts of 128 were not measured." in text


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_bm25_is_a_row_beside_encoders(real_suite: Suite, write_beir: WriteBeir) -> None:
    """It ignores keys of encoders, and fine-tuned tasks have no figure for it."""
    beir = write_beir({"d1": "a red fox", "d2": "a blue hen"}, {"q1": "foxes"}, test=[("q1", "d1", 1)])
    tasks = {"tone": {}, "words": {"beir": str(beir), "keys": {"max_tokens": 64, "device": "cpu"}}}
    (row,) = real_suite.write(tasks).run("bm25")["rows"]
    tone, found = row["cells"]
    assert row["model"] == "bm25" and found["mean"] == 1
    assert "| bm25 | not run | 100.00 (1) |" in real_suite.table()
    assert tone["mean"] is None and "not run: bm25 has no weights to train" in tone["failed"][0]


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_figures_of_retrieval_on_changed_files_are_refused(
    real_suite: Suite, models: dict[str, Path], toy: Path
) -> None:
    """The table would show the figures of files that are no longer there."""
    keys = {"keys": {"device": "cpu", "max_tokens": 32}}
    tasks = {
        "toy": {"beir": str(toy), **keys},
        "pairs": {"retrieval": recipe(real_suite.folder, toy, epochs=1), **keys},
    }
    rows = ("bm25", models["modernbert"])
    before = real_suite.write(tasks, seeds=[1]).run(*rows)
    assert real_suite.run(*rows) == before
    for name, runs in (("test", 3), ("train", 1)):  # bm25 and the model on the set, and the model that was trained
        file = toy / "qrels" / f"{name}.tsv"
        there = file.read_text(encoding="utf-8")
        file.write_text(there.replace("\td", "\td1", 3), encoding="utf-8")
        real_suite.run(*rows, code=78)
        assert real_suite.said.err.count(f"{file} has changed since") == runs
        file.write_text(there, encoding="utf-8")
    assert real_suite.run(*rows) == before


def test_texts_to_measure_on_are_as_long_as_they_say() -> None:
    """Their tokens are counted, and a skewed distribution would favour one side."""
    fixed, variable = (draw(512, kind, 100_000, 1000) for kind in ("fixed", "variable"))
    assert {len(ids) + 2 for ids in fixed} == {512} and 190 < len(fixed) < 200
    sizes = [len(ids) + 2 for ids in variable]
    assert max(sizes) <= 512 and abs(sum(sizes) / len(sizes) - 256) < 15 and len({*sizes}) > 100
    assert [ids.tolist() for ids in draw(512, "variable", 100_000, 1000)] == [ids.tolist() for ids in variable]
