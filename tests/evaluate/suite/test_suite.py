"""A suite by one command: its runs, choices, chains and table.

Users who compare encoders by such a table must be able to trust each cell's settings. Runs are fake_runs.py's here,
which take no time; the last test has real ones.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.__main__ import main
from modernbert_train.checkpoints.run_folder import held
from modernbert_train.errors import ConfigError
from modernbert_train.evaluate.suite.efficiency import draw
from modernbert_train.evaluate.suite.plan import Plan, read_suite
from modernbert_train.weights.names import NamedModel
from tests.support import fake_runs
from tests.support.beir import WriteBeir, recipe
from tests.support.fake_runs import figure_of, starts
from tests.support.labelled import WriteTask

YAMLS = Path(__file__).parents[3] / "yamls"
WriteSuite = Callable[..., Path]


@pytest.fixture
def write_suite(write_task: WriteTask, tmp_path: Path) -> WriteSuite:
    """Return a function that writes a suite of tasks, each a tone.yaml in its folder, and more."""
    write_task()

    def write(tasks: dict[str, dict[str, Any]], **more: Any) -> Path:
        file = tmp_path / "suite.yaml"
        kinds = {"finetune", "retrieval", "beir", "mteb"}
        whole = {
            name: ({} if kinds & each.keys() else {"finetune": "tone.yaml"}) | each for name, each in tasks.items()
        }
        file.write_text(json.dumps({"tasks": whole, "seeds": [1, 2], **more}), encoding="utf-8")
        return file

    return write


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Return two models, with runs that take no time."""
    monkeypatch.setattr("modernbert_train.evaluate.suite.cells._command", fake_runs._command)
    monkeypatch.setattr("modernbert_train.evaluate.suite.run.look_up", lambda source: NamedModel("file", Path(source)))
    made = [tmp_path / "one", tmp_path / "two"]
    for each in made:
        each.mkdir()
    return made


def run(suite: Path, out: Path, *words: object, code: int = 0) -> dict[str, Any]:
    assert main(["eval", *map(str, words), "--suite", str(suite), "--out", str(out)]) == code
    return json.loads((out / "table.json").read_text()) if (out / "table.json").exists() else {}


@pytest.mark.runs
def test_a_rate_is_chosen_with_some_seeds_and_counts_with_all(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path
) -> None:
    """Three rates with one of two seeds, and the best of them with both: eight runs of two models."""
    suite = write_suite(
        {"tone": {"choices": {"lr": [1e-3, 2e-3, 3e-3]}, "choose_seeds": 1}},
        published={"theirs": {"source": "a paper", "figures": {"tone": 90.5}}},
    )
    table = run(suite, tmp_path / "out", *fakes)
    assert len(starts(tmp_path / "out")) == 8
    for row in table["rows"][:2]:
        (cell,) = row["cells"]
        with_first = {each["choice"]: each["value"] for each in cell["runs"] if each["seed"] == 1}
        assert len(with_first) == 3 and cell["chosen"] == max(with_first, key=lambda choice: with_first[choice])
        assert cell["n"] == 2 and cell["seeds"]["1"] == max(with_first.values())
        assert all(each["value"] == fake_runs.figure_of(each["run"]) for each in cell["runs"])
    text = (tmp_path / "out/table.md").read_text()
    assert (
        "| theirs (published) | 90.50 |" in text
        and "a paper. Not run here." in text
        and "the best of 3 with 1 of 2 seeds." in text
    )
    picture = ElementTree.parse(tmp_path / "out/table.svg").iter("{http://www.w3.org/2000/svg}circle")
    assert [dot.get("fill") == "#ffffff" for dot in picture] == [False, False, True] * 2  # names, then figures


@pytest.mark.runs
def test_choices_that_a_model_ignores_are_one_run(write_suite: WriteSuite, fakes: list[Path], tmp_path: Path) -> None:
    """A frozen encoder has no adapters: the best of equal runs was called the best rate."""
    suite = write_suite({"tone": {"choices": {"lora.lr": [1e-3, 2e-3], "batch_texts": [4, 8]}}, "plain": {}})
    table = run(suite, tmp_path / "out", fakes[0], f"frozen:{fakes[1]}")
    tuned, frozen = ({each["choice"] for each in row["cells"][0]["runs"]} for row in table["rows"])
    assert len(tuned) == 4 and frozen == {"lora.lr=0.001, batch_texts=4", "lora.lr=0.001, batch_texts=8"}
    text = (tmp_path / "out/table.md").read_text()
    assert "tone of frozen-two: 2 choices not run, since this model ignores the keys." in text
    assert "the best of 2 with" in text and "the best of 4 with" in text and len(starts(tmp_path / "out")) == 8 + 4 + 4


@pytest.mark.runs
def test_a_task_begins_with_what_was_chosen_of_another_with_the_same_seed(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path
) -> None:
    suite = write_suite(
        {"second": {"after": "first"}, "first": {"choices": {"lr": [1e-3, 2e-3]}}}, groups={"both": ["first", "second"]}
    )
    out = tmp_path / "out"
    table = run(suite, out, fakes[0])
    second, first, both = table["rows"][0]["cells"]
    best = {each["seed"]: each["run"] for each in first["runs"] if each["choice"] == first["chosen"]}
    for each in second["runs"]:
        source = json.loads((out / each["run"] / "result.json").read_text())["source"]
        assert source == str(out / best[each["seed"]])
    assert both["mean"] == pytest.approx((first["mean"] + second["mean"]) / 2)


@pytest.mark.runs
def test_more_seeds_and_other_settings_are_added_and_never_mixed(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    one = run(write_suite({"tone": {}}), out, fakes[0])["rows"][0]["cells"][0]
    more = run(write_suite({"tone": {}}), out, fakes[0], "--seeds", 1, 2, 3)["rows"][0]["cells"][0]
    assert (one["n"], more["n"]) == (2, 3) and one["seeds"].items() <= more["seeds"].items()
    assert set(starts(out).values()) == {1} and len(starts(out)) == 3
    other = run(write_suite({"tone": {"keys": {"lr": 9e-3}}}), out, fakes[0])["rows"][0]["cells"][0]
    assert len(starts(out)) == 5 and not {each["run"] for each in other["runs"]} & {
        each["run"] for each in more["runs"]
    }
    assert run(write_suite({"tone": {}}), out, fakes[0])["rows"][0]["cells"][0] == one
    assert set(starts(out).values()) == {1}


@pytest.mark.runs
def test_a_task_without_its_data_costs_one_start_and_no_other_task(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a user would wait for sixteen runs that miss the same file."""
    suite, out = write_suite({"lost": {"keys": {"max_tokens": 16}}, "tone": {}}), tmp_path / "out"
    plan = Plan(*read_suite(str(suite)), [str(fakes[0])], None, out, ())
    lost = [cell.name for cell in plan.cells(["lost"], choosing=True)]
    out.mkdir()
    (out / fake_runs.BEHAVE).write_text(json.dumps({"fail": lost}))
    table = run(suite, out, fakes[0], code=65)
    cells = table["rows"][0]["cells"]
    assert starts(out)[lost[0]] == 1 and len(starts(out)) == 3 and len(lost) == 2
    assert cells[0]["mean"] is None and "the texts are missing" in cells[0]["failed"][0] and cells[1]["n"] == 2
    assert "| one | failed |" in (out / "table.md").read_text()
    (out / fake_runs.BEHAVE).unlink()
    assert run(suite, out, fakes[0], code=65) == table and starts(out)[lost[0]] == 1
    assert "Add --retry to repeat what failed" in capsys.readouterr().err
    assert run(suite, out, fakes[0], "--retry")["rows"][0]["cells"][0]["n"] == 2
    assert "table.md" in capsys.readouterr().out


@pytest.mark.runs
def test_a_choice_whose_texts_are_missing_leaves_the_other_choices(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path
) -> None:
    """As a rate that diverges does; both rates and seeds miss the same file, and one run looks for it."""
    choices = {"label_column": ["lost", "label"], "lr": [1e-3, 2e-3]}
    suite = write_suite({"tone": {"choices": choices}})
    plan = Plan(*read_suite(str(suite)), [str(fakes[0])], None, tmp_path / "out", ())
    lost = [cell.name for cell in plan.cells(["tone"], choosing=True) if "label_column=lost" in cell.overrides]
    behave(plan, "fail", *lost)
    (cell,) = run(suite, plan.out, fakes[0], code=65)["rows"][0]["cells"]
    assert cell["chosen"].startswith("label_column=label, ") and cell["n"] == cell["of"] == 2
    assert len(lost) == 4 and len({*lost} & starts(plan.out).keys()) == 1 and len(starts(plan.out)) == 5
    (reason,) = cell["failed"]
    assert reason.count("label_column=lost") == 4 and "error: the texts are missing. Name others." in reason


def behave(plan: Plan, how: str, *names: str) -> None:
    plan.out.mkdir(exist_ok=True)
    (plan.out / fake_runs.BEHAVE).write_text(json.dumps({how: names}))


@pytest.mark.runs
@pytest.mark.parametrize("how", ["diverge", "undefined"])
def test_a_value_that_diverges_is_the_worst_of_its_choices_and_costs_no_cell(
    how: str, write_suite: WriteSuite, fakes: list[Path], tmp_path: Path
) -> None:
    """One rate of three is lost; the better of the others counts, with all seeds, and no run is repeated."""
    suite = write_suite({"tone": {"choices": {"lr": [1e-3, 2e-3, 3e-3]}, "choose_seeds": 1}})
    plan = Plan(*read_suite(str(suite)), [str(fakes[0])], None, tmp_path / "out", ())
    best = max((cell.name for cell in plan.cells(["tone"], choosing=True)), key=fake_runs.figure_of)
    behave(plan, how, best)
    table = run(suite, plan.out, fakes[0])
    (cell,) = table["rows"][0]["cells"]
    lost = next(each for each in cell["runs"] if each["run"] == best)
    assert cell["n"] == cell["of"] == 2 and lost["value"] is None and cell["chosen"] != lost["choice"]
    reason = {
        "diverge": "failed with exit code 70: error: the loss is not finite",
        "undefined": "accuracy is undefined",
    }
    assert (
        reason[how] in lost["problem"] and f"tone of one: {lost['choice']} seed 1: {reason[how]}" in table["notes"][1]
    )
    assert run(suite, plan.out, fakes[0]) == table and set(starts(plan.out).values()) == {1}
    (plan.out / fake_runs.BEHAVE).unlink()
    (again,) = run(suite, plan.out, fakes[0], "--retry")["rows"][0]["cells"]
    assert again["chosen"] == lost["choice"] and not again["failed"]


@pytest.mark.runs
def test_a_cell_says_of_how_many_seeds_it_is_and_why(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path
) -> None:
    """Also for a task that continues from the failed run; the exit code names the missing result."""
    suite = write_suite({"tone": {}, "second": {"after": "tone"}}, seeds=[1, 2, 3])
    plan = Plan(*read_suite(str(suite)), [str(fakes[0])], None, tmp_path / "out", ())
    lost = [*plan.cells(["tone"], choosing=True)][1]
    behave(plan, "diverge", lost.name)
    table = run(suite, plan.out, fakes[0], code=70)
    assert [(cell["n"], cell["of"]) for cell in table["rows"][0]["cells"]] == [(2, 3)] * 2
    text = (plan.out / "table.md").read_text()
    assert text.count("(2 of 3)") == 2
    assert "- tone of one: seed 2: failed with exit code 70: error: the loss is not finite." in text
    assert "- second of one: seed 2: tone: failed with exit code 70" in text


@pytest.mark.runs
def test_a_frozen_encoder_stays_frozen_in_a_chain(write_suite: WriteSuite, fakes: list[Path], tmp_path: Path) -> None:
    """Otherwise the row of a frozen baseline would contain figures of a fully trained model."""
    tasks: dict[str, Any] = {"first": {}, "second": {"after": "first"}, "set": {"beir": "x", "after": "first"}}
    frozen, tuned, out = f"frozen:untrained:{fakes[0]}", f"untrained:{fakes[0]}", tmp_path / "out"
    table = run(write_suite(tasks, seeds=[1]), out, frozen, tuned)
    for row, prefix in zip(table["rows"], ("frozen:", ""), strict=True):
        first, *later = (out / cell["runs"][0]["run"] for cell in row["cells"])
        sources = [json.loads((each / "result.json").read_text())["source"] for each in later]
        assert sources == [f"{prefix}{first}", str(first)]
    keys = {"train": ["x"], "evaluate": {"own": "y"}}
    pairs = write_suite({"pairs": {"retrieval": str(YAMLS / "retrieval/modernbert.yaml"), "keys": keys}, **tasks})
    (row,) = run(pairs, out, frozen, "--seeds", 1)["rows"]
    assert row["cells"][0]["failed"] == ["seed 1: not run: retrieval trains the encoder itself, so it cannot be frozen"]
    assert row["cells"][1:] == table["rows"][0]["cells"]


@pytest.mark.runs
def test_a_chain_begins_with_the_epoch_that_counts(write_suite: WriteSuite, fakes: list[Path], tmp_path: Path) -> None:
    """With `best` the newest checkpoint is of the last epoch, while the column shows the best one."""
    tasks: dict[str, Any] = {"first": {"keys": {"best": "loss"}}, "second": {"after": "first"}}
    (row,) = run(write_suite(tasks, seeds=[1]), tmp_path / "out", fakes[0])["rows"]
    first, second = (tmp_path / "out" / cell["runs"][0]["run"] for cell in row["cells"])
    assert json.loads((second / "result.json").read_text())["source"] == f"{first}/checkpoints/{fake_runs.BEST}"


@pytest.mark.runs
def test_a_stop_between_speeds_ends_the_suite_as_stopped(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the part that was stopped would count as failed, and the parts after it would still start."""
    begun = tmp_path / "begun"
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
    suite = write_suite({"tone": {}}, seeds=[1], efficiency={"lengths": [16], "tokens": 64, "repeats": 1})
    table = run(suite, tmp_path / "out", *fakes, code=75)
    assert begun.read_text().split() == [str(fakes[0])] and table["notes"] == []


@pytest.mark.runs
def test_two_commands_never_fill_one_folder(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both would start the same runs; the second is refused and the first one's runs are as they were."""
    suite, out = write_suite({"tone": {}}), tmp_path / "out"
    table = run(suite, out, fakes[0])
    with held(out, ""):
        assert run(suite, out, *fakes, code=78) == table
    assert "out: in use by process" in capsys.readouterr().err and set(starts(out).values()) == {1}


@pytest.mark.runs
def test_names_of_files_are_no_markup_and_no_paths(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model's folder, or a YAML from elsewhere, may have any name."""
    odd = tmp_path / "a|b<img src=x>[y](z)\x1b[2J"
    odd.mkdir()
    suite = write_suite({"tone": {}}, published={"*them*\n# x": {"source": "<b>", "figures": {"tone": 90}}})
    run(suite, tmp_path / "out", odd, tmp_path / "out/..")
    text, shown = (tmp_path / "out/table.md").read_text(), capsys.readouterr().out
    assert r"| a\|b&lt;img src=x>\[y\](z)\\x1b\[2J | " in text and "\x1b" not in text + shown
    assert r"| \*them\* # x (published) | 90.00 |" in text and ": &lt;b>. Not run" in text
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"table.md", "logs"}
    assert r"a\textbar{}b\textless{}img src=x\textgreater{}" in (tmp_path / "out/table.tex").read_text()
    assert "\x1b" not in (tmp_path / "out/table.csv").read_text()


@pytest.mark.parametrize(
    ("tasks", "more", "message"),
    [
        ({}, {}, "tasks: empty"),
        ({"a": {"beir": "x", "finetune": "rte"}}, {}, r"tasks\.a\.finetune, retrieval, beir, mteb: name exactly one"),
        ({"a": {"after": "b"}}, {}, r"after=b: name a trained task of the suite"),
        ({"a": {}, "b": {"after": "a"}, "c": {"after": "b"}}, {}, r"tasks\.c\.after=b"),
        ({"a": {"choices": {"lr": []}}}, {}, r"choices\.lr=\[\]: name the values"),
        (
            {"a": {"choices": {f"k{i}": [*range(10)] for i in range(12)}}},
            {},
            "values make 1,000,000,000,000 runs, at most 10,000 are tried",
        ),
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
    write_suite: WriteSuite, tasks: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_suite(str(write_suite(tasks, **more)))


@pytest.mark.parametrize(
    ("task", "words", "message"),
    [
        ({"metric": "f2"}, (), r"tasks\.tone\.metric=f2: is not measured\. Choose from accuracy"),
        ({"split": "test"}, (), r"tasks\.tone\.split=test: is not measured\. Choose from dev"),
        ({"choose_on": "test", "choices": {"lr": [1e-3, 2e-3]}}, (), r"choose_on=test: is not measured"),
        ({"beir": "some/scifact", "metric": "ndcg"}, (), r"metric=ndcg: is not measured\. Choose from ndcg_at_10"),
        (
            {"retrieval": str(YAMLS / "retrieval/modernbert.yaml"), "keys": {"train": ["x"]}},
            (),
            "nothing to measure on",
        ),
        ({"keys": {"learning_rate": 1}}, (), r"tasks\.tone: learning_rate .*: unknown key\. Here it is optim\.lr"),
        ({}, ("compute.devise=cpu",), r"tasks\.tone: compute\.devise .*Did you mean compute\.device"),
        ({"finetune": "tune.yaml"}, (), r"tasks\.tone: tune\.yaml: no such file, neither here nor in "),
    ],
)
def test_a_cell_that_would_stay_empty_is_refused_before_anything_runs(
    write_suite: WriteSuite, tmp_path: Path, task: dict[str, Any], words: tuple[str, ...], message: str
) -> None:
    """Otherwise a user would notice it after the last of a hundred runs, or after each of them."""
    suite = read_suite(str(write_suite({"tone": task})))
    with pytest.raises(ConfigError, match=message):
        Plan(*suite, [str(tmp_path)], None, tmp_path / "out", words)
    with pytest.raises(ConfigError, match="--seeds 1 1: one is named twice"):
        Plan(*suite, [str(tmp_path)], [1, 1], tmp_path / "out", ())


@pytest.mark.runs
def test_several_sets_are_a_column_each_and_their_mean_and_one_that_is_lost_costs_no_other(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path
) -> None:
    """As in a table of BEIR or MTEB; a task may also evaluate another task's model, with each of its seeds."""
    sets = {"beir": ["data/one", "nfcorpus"], "keys": {"pooling": "cls"}}
    suite = write_suite(
        {
            "b": sets,
            "m": {"mteb": ["STS12", "Touche2020Retrieval.v3"]},
            "tone": {},
            "after": {"beir": "x", "after": "tone"},
        }
    )
    plan = Plan(*read_suite(str(suite)), list(map(str, fakes)), None, tmp_path / "out", ())
    assert list(plan.suite.tasks) == ["b-one", "b-nfcorpus", "m-STS12", "m-Touche2020Retrieval-v3", "tone", "after"]
    assert plan.metric("b-one") == "ndcg_at_10" and plan.metric("m-STS12") == "main_score"
    (tmp_path / "out").mkdir()
    lost = [cell.name for cell in plan.cells(["m-STS12"], choosing=True)]
    (tmp_path / "out" / fake_runs.BEHAVE).write_text(json.dumps({"fail": lost}))
    table = run(suite, tmp_path / "out", *fakes, code=65)
    assert [column["task"] for column in table["columns"]][-2:] == ["b", "m"]
    one, nfcorpus, sts, touche, tone, after, b, m = table["rows"][0]["cells"]
    assert b["mean"] == pytest.approx((one["mean"] + nfcorpus["mean"]) / 2) and one["n"] == 1
    assert sts["mean"] is None and sts["failed"] and touche["mean"] is not None and m is None
    assert tone["n"] == after["n"] == 2
    words = {
        cell.name: (cell.task, cell.overrides, cell.seed)
        for name in ("b-one", "m-STS12")
        for cell in plan.cells([name], choosing=True)
    }
    assert {*words.values()} == {("data/one", ("pooling=cls",), None), ("mteb:STS12", (), None)}


def test_what_retrieval_has_trained_is_measured_by_other_tasks(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path
) -> None:
    """As papers evaluate MTEB: after training on MS MARCO, seed by seed; fine-tuning cannot start from it."""
    recipe = str(YAMLS / "retrieval/modernbert.yaml")
    tasks = {"pairs": {"retrieval": recipe, "keys": {"train": ["x"], "evaluate": {"own": "y"}}}}
    suite = write_suite(tasks | {"sts": {"mteb": "STS12", "after": "pairs"}})
    plan = Plan(*read_suite(str(suite)), [str(fakes[0])], [1], tmp_path / "out", ())
    assert not [*plan.cells(["sts"], choosing=True)]
    (before,) = plan.cells(["pairs"], choosing=True)
    (tmp_path / "out" / before.name).mkdir(parents=True)
    result = {"task": "pairs", "source": "a", "seed": 1, "settings": {}, "figures": {"own": {"ndcg_at_10": 0.5}}}
    (tmp_path / "out" / before.name / "result.json").write_text(json.dumps(result))
    (cell,) = plan.cells(["sts"], choosing=True)
    assert cell.model == str(tmp_path / "out" / before.name / "st") and cell.task == "mteb:STS12"
    with pytest.raises(ConfigError, match="a model of `retrieval train` is for"):
        read_suite(str(write_suite(tasks | {"tone": {"after": "pairs"}})))


def test_a_decoder_is_no_model_of_a_suite(
    write_suite: WriteSuite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its states ignore later tokens, and its figures would look comparable with encoders'."""
    (tmp_path / "decoder").mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
    }  # fmt: skip
    (tmp_path / "decoder/config.json").write_text(json.dumps(config))
    suite = write_suite({"tone": {}})
    assert main(["eval", str(tmp_path / "decoder"), "--suite", str(suite), "--out", str(tmp_path / "out")]) == 78
    assert "decoder: a decoder, whose states do not see later tokens" in capsys.readouterr().err


def test_an_unknown_suite_names_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Known: .*glue.*"):
        read_suite("blue")


@pytest.mark.runs
def test_keys_may_follow_the_options(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with every other verb."""
    words = [str(fakes[0]), "--suite", str(write_suite({"tone": {}})), "--out", str(tmp_path / "out"), "--dry-run"]
    assert main(["eval", *words, "compute.device=cpu"]) == 0
    assert "1 task, 1 model, at most 2 runs\nno data is missing\n" in capsys.readouterr().out


@pytest.mark.runs
def test_a_dry_run_names_the_data_that_is_missing_and_the_command_that_brings_it(
    write_suite: WriteSuite, fakes: list[Path], write_beir: WriteBeir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Otherwise a user would learn it one by one from the first failed run of each task, once an hour."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name in ("nyu-mll___glue/rte", "mteb___sts13-sts/default"):
        (tmp_path / "cache" / name).mkdir(parents=True)
    write_beir({"d1": "a red fox"}, {"q1": "fox"}, "beir/scifact", train=[("q1", "d1", 1)], dev=[("q1", "d1", 1)])
    keys: dict[str, Any] = {"train": ["triplets.jsonl", "scifact"], "negative_columns": []}
    keys |= {"evaluate": {"own": "my/set", "scifact": "scifact"}, "beir_folder": str(tmp_path / "beir")}
    local = {"data": str(tmp_path), "train": "train", "validation": {"dev": "dev"}}
    tasks: dict[str, Any] = {
        "tone": {"keys": {"train": "nowhere.tsv"}},
        "rte": {"finetune": "rte"},
        "cola": {"finetune": "cola", "submit": {"AX": {"split": "ax/test"}}},
        "local": {"keys": local, "submit": {"T": {"split": "hidden"}}},
        "gone": {"keys": local | {"data": "/no/such/folder"}},
        "choice": {"choices": {"train": [str(tmp_path / "train.tsv"), "other.tsv"]}},
        "nfcorpus": {"beir": "nfcorpus"},
        "sts": {"mteb": ["STS12", "STS13"]},
        "pairs": {"retrieval": str(YAMLS / "retrieval/modernbert.yaml"), "keys": keys},
    }
    words = [str(fakes[0]), "--suite", str(write_suite(tasks)), "--out", str(tmp_path / "out"), "--dry-run"]
    assert main(["eval", *words]) == 0
    said = capsys.readouterr().out
    assert "rte:" not in said and "STS13" not in said and not (tmp_path / "out").exists()
    for line in (
        "tone: train=nowhere.tsv: no such file. Correct the path.",
        "cola: data=nyu-mll/glue/cola: no such folder, nor a dataset on this machine. With a network: python -c "
        "\"import datasets; datasets.load_dataset('nyu-mll/glue', 'cola')\"",
        "cola: data=nyu-mll/glue/ax: no such folder, nor a dataset on this machine",
        f"local: {tmp_path}: has none of hidden.",
        "Put the split 'hidden' there.",
        "gone: data=/no/such/folder: no such folder. Put it there, or name another in keys.",
        "choice: train=other.tsv: no such file",
        "nfcorpus: nfcorpus: not in data/beir. With a network: curl -O https://",
        'sts-STS12: mteb:STS12: not on this machine. With a network: python -c "import mteb; ',
        "pairs: train[0]=triplets.jsonl: no such file",
        "pairs: evaluate.own=my/set: no such folder",
        f"pairs: evaluate.scifact={tmp_path}/beir/scifact: has no qrels/test.tsv; its splits are dev, train",
    ):
        assert line in said
    assert "11 data sets missing or unfit:" in said and said.count("no such folder, nor") == 2


@pytest.mark.runs
def test_a_table_for_a_paper_and_one_for_a_spreadsheet(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path
) -> None:
    """The best of a column is bold, spread and seeds are named, published rows keep their source; seed 0 is a seed."""
    odd = [tmp_path / "=50%_&#", tmp_path / "[ours]", tmp_path / "*"]
    for each in odd:
        each.mkdir()
    more = {"published": {"theirs": {"source": "arXiv 1", "figures": {"tone": 99.994}}}, "groups": {"all": ["tone"]}}
    table = run(write_suite({"tone": {}, "other": {}}, **more), tmp_path / "out", *odd, fakes[0], "--seeds", 0, 1)
    latex = (tmp_path / "out/table.tex").read_text()
    assert r"\toprule" in latex and "sample standard deviation over seeds (number of seeds)" in latex
    rows = [line for line in latex.splitlines() if line.endswith(r"\\") and line.split(" & ")[0] != "Model"]
    # {}: \midrule and \\ would take a bracket or a star after them as their own
    names = [r"{}=50\%\_\&\#", "{}[ours]", "{}*", "{}one", "{}theirs (published)"]
    assert [row.split(" & ")[0] for row in rows] == names
    for place in range(2):
        means = [row["cells"][place]["mean"] if row["cells"][place] else 0 for row in table["rows"]]
        bold = [r"\textbf" in row.split(" & ")[place + 1] for row in rows]
        assert bold == [mean == max(means) for mean in means]
    cell = table["rows"][1]["cells"][1]
    assert f"{100 * cell['mean']:.2f} $\\pm$ {100 * cell['standard_deviation']:.2f} (2)" in rows[1]
    assert "arXiv 1. Not run here." in latex
    with (tmp_path / "out/table.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 15 and lines[0]["model"] == "'=50%_&#" and lines[0]["of_seeds"] == "2"
    assert float(lines[4]["mean"]) == cell["mean"] and lines[-1]["source"] == "arXiv 1"


@pytest.mark.runs
@pytest.mark.parametrize("name", [path.stem for path in sorted((YAMLS / "suites").glob("*.yaml"))])
def test_the_suites_here_are_right(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each task and recipe is read, with every choice; data is not looked for."""
    suite, home = read_suite(name)
    Plan(suite, home, ["runs/mine"], None, tmp_path, ())


@pytest.mark.runs
def test_the_best_seed_of_what_was_chosen_is_written_for_a_test_server(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path
) -> None:
    """GLUE's form, a line for each text: names of classes, their numbers, or scores within bounds."""
    parts = {"Names": {"split": "x"}, "Numbers": {"split": "x", "labels": ["up", "down"]}}
    scores = {"Scores": {"split": "ax/y", "between": [0, 5]}, "Plain": {"split": "ax/y"}}
    choices = {"choices": {"lr": [1e-3, 2e-3]}}
    tasks = {
        "tone": {"submit": parts, **choices},
        "grade": {"submit": scores, "keys": {"kind": "regression"}, **choices},
    }
    suite, out = write_suite(tasks), tmp_path / "out"
    plan = Plan(*read_suite(str(suite)), [str(fakes[0])], None, out, ())
    for cell in plan.cells([*tasks], choosing=True):
        told = [("x", "up"), ("x", None), ("x", "down"), ("ax-y", 5.25), ("ax-y", figure_of(cell.name)), ("ax-y", None)]
        lines = [{"split": split, "prediction": each} for split, each in told]
        (out / cell.name).mkdir(parents=True)
        (out / cell.name / "submission.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cells = run(suite, out, fakes[0])["rows"][0]["cells"]
    files = {name: (out / "submission" / "one" / f"{name}.tsv").read_text() for name in parts | scores}
    assert files["Names"] == "index\tprediction\n0\tup\n1\tdown\n2\tdown\n"  # an empty text has the first class
    assert files["Numbers"] == "index\tprediction\n0\t0\n1\t1\n2\t1\n"
    best = max(each["value"] for each in cells[1]["runs"] if each["choice"] == cells[1]["chosen"])
    assert files["Scores"] == f"index\tprediction\n0\t5.000\n1\t{best:.3f}\n2\t0.000\n"
    assert files["Plain"] == f"index\tprediction\n0\t5.25\n1\t{best:g}\n2\t0\n"


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
        (
            {"kind": "question-answering", "text_columns": ["a", "b"], "overlap_tokens": 8},
            {},
            "this kind of task has neither",
        ),
    ],
)
def test_a_file_that_a_test_server_would_not_understand_is_refused(
    write_suite: WriteSuite,
    keys: dict[str, Any],
    part: dict[str, Any],
    message: str,
    fakes: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every line of it was wrong, after all runs and without a word."""
    suite = write_suite({"tone": {"keys": keys, "submit": {"x": {"split": "test", **part}}}})
    for words in (["--dry-run"], []):
        assert main(["eval", str(fakes[0]), "--suite", str(suite), "--out", str(tmp_path / "out"), *words]) == 78
        error = capsys.readouterr().err
        assert "tasks.tone.submit.x." in error and message in error


@pytest.mark.runs
def test_numbers_of_classes_that_only_the_data_names_are_compared_with_them(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path
) -> None:
    """A task without `labels` has its classes from its texts, so they are known after the run."""
    suite = write_suite({"tone": {"submit": {"x": {"split": "x", "labels": ["bad", "good"]}}}})
    table = run(suite, tmp_path / "out", fakes[0], code=78)
    assert "labels=['bad', 'good']: the classes are down, up. Name each once" in table["notes"][0]


@pytest.mark.runs
def test_another_model_under_the_same_name_has_no_files_of_the_first(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path
) -> None:
    """A test server would score, and a user would load, what another model was trained to."""
    first, second = (fakes[0] / "model", fakes[1] / "model")
    own, other = {"submit": {"Own": {"split": "x"}}}, {"submit": {"Other": {"split": "x"}}}
    out, suite = tmp_path / "out", write_suite({"tone": own, "mood": other}, seeds=[1])
    for model in (first, second):
        model.mkdir()
        plan = Plan(*read_suite(str(suite)), [str(model)], None, out, ())
        for cell in plan.cells(["tone", "mood"], choosing=True):
            line = {"split": "x", "prediction": cell.name, "scores": {cell.name: 1.0}}
            (out / cell.name / "adapter").mkdir(parents=True)
            (out / cell.name / "submission.jsonl").write_text(json.dumps(line))
            about = {"base_model_name_or_path": str(model)}
            (out / cell.name / "adapter" / "adapter_config.json").write_text(json.dumps(about))
    run(suite, out, first)
    files = {"submission/model/Own.tsv", "submission/model/Other.tsv", "adapters/model/tone", "adapters/model/mood"}
    assert all((out / file).exists() for file in files)
    lost = next(plan.cells(["tone"], choosing=True))
    behave(plan, "diverge", lost.name)
    (row,) = run(suite, out, second, code=70)["rows"]
    kept = row["cells"][1]["runs"][0]["run"]
    assert (out / "submission/model/Other.tsv").read_text() == f"index\tprediction\n0\t{kept}\n"
    assert {file for file in files if (out / file).exists()} == {"submission/model/Other.tsv", "adapters/model/mood"}
    run(write_suite({"tone": own}, seeds=[1]), out, first)  # nor what this suite does not have
    assert {file for file in files if (out / file).exists()} == {"submission/model/Own.tsv", "adapters/model/tone"}


@pytest.mark.runs
def test_figures_of_other_weights_in_the_same_folder_are_refused(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that another training has written into would otherwise have the figures of the first."""
    (fakes[0] / "config.json").write_text("{}")
    weights = fakes[0] / "model.safetensors"
    suite, out = write_suite({"tone": {}, "set": {"beir": "x"}}, seeds=[1]), tmp_path / "out"
    for content, code in ((b"first", 0), (b"other", 78), (b"first", 0)):
        weights.write_bytes(content)
        run(suite, out, fakes[0], code=code)
        assert capsys.readouterr().err.count(f"the weights in {fakes[0]} have changed since") == (2 if code else 0)
    assert set(starts(out).values()) == {1}


@pytest.mark.runs
def test_a_failed_part_of_a_suite_is_repeated_as_a_failed_cell_is(
    write_suite: WriteSuite, fakes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By --retry and not before; it is below the table each time. Here a model has no weights to measure."""
    suite = write_suite({"tone": {}}, seeds=[1], efficiency={"lengths": [16], "tokens": 64, "repeats": 1})
    out = tmp_path / "out"
    notes = run(suite, out, fakes[0], code=65)["notes"]
    assert [note.partition(": ")[0] for note in notes] == ["one, packed", "one, padded"]
    assert "Add --retry to repeat what failed" in capsys.readouterr().err

    def starts() -> int:
        return sum(file.read_text().count("$ ") for file in (out / "logs").glob("efficiency-*.log"))

    assert starts() == 2
    assert run(suite, out, fakes[0], code=65)["notes"] == notes and starts() == 2
    run(suite, out, fakes[0], "--retry", code=65)
    assert starts() == 4


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_speeds_are_measured_again_for_other_weights_or_after_a_torn_file(
    write_suite: WriteSuite, models: dict[str, Path], tmp_path: Path
) -> None:
    """And not otherwise: a full disk must not end each later command, nor a changed model keep the old one's speed."""
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(models["modernbert"], model)
    suite = write_suite({}, efficiency={"lengths": [16], "tokens": 64, "repeats": 1})

    def measured() -> dict[str, int]:
        table = run(suite, out, model)
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
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in weights.items()}, model / "model.safetensors", {"format": "pt"})
    third = measured()
    assert all(third[way] > second[way] for way in third)


@pytest.mark.weekly
@pytest.mark.runs
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_finished_run_predicts_texts_that_it_has_not_seen(
    write_suite: WriteSuite, models: dict[str, Path], tmp_path: Path
) -> None:
    """Also one longer than any before, and from another folder. Missing texts are named below the table."""
    from tests.support.finetuning import FAST

    fast = {key: value for key, _, value in (word.partition("=") for word in FAST)}
    texts = ["aki ruto", "", "kelo " * 28, "nabe domi"]
    (tmp_path / "ax").mkdir()
    for name in ("test.tsv", "ax/test.tsv"):
        (tmp_path / name).write_text("idx\ttext\n" + "".join(f"{n}\t{text}\n" for n, text in enumerate(texts)))
    keys = {**fast, "epochs": 4, "data": str(tmp_path), "train": "train", "validation": {"dev": "dev"}}
    parts = {"Tone": {"split": "test", "labels": ["down", "up"]}, "AX": {"split": "ax/test"}}
    out = tmp_path / "out"
    task: dict[str, Any] = {"keys": keys, "submit": parts}
    table = run(write_suite({"tone": task}, seeds=[1]), out, models["modernbert"])
    assert not table["notes"]
    folder = out / "submission" / "modernbert"
    files = [(folder / f"{name}.tsv").read_text().splitlines() for name in ("Tone", "AX")]
    numbers, names = ([line.split("\t")[1] for line in lines[1:]] for lines in files)
    assert [["down", "up"][int(told)] for told in numbers] == names and len(names) == 4
    (cell,) = table["rows"][0]["cells"]
    assert not (out / cell["runs"][0]["run"] / "submission").exists()
    without = write_suite({"tone": task | {"submit": {"x": {"split": "gone"}}}}, seeds=[1])
    gone = run(without, out, models["modernbert"], code=65)
    assert "submission of tone: " in gone["notes"][0] and "gone.tsv" in gone["notes"][0]
    assert run(without, out, models["modernbert"], code=65) == gone
    (tmp_path / "gone.tsv").write_text("idx\ttext\n0\taki ruto\n")
    assert not run(without, out, models["modernbert"], "--retry")["notes"] and (folder / "x.tsv").exists()
    (tmp_path / "gone.tsv").write_text("idx\ttext\n0\taki ruto\n1\tnabe domi\n")
    run(without, out, models["modernbert"])
    assert len((folder / "x.tsv").read_text().splitlines()) == 3  # the texts have changed
    assert gone["rows"] == table["rows"]


@pytest.mark.weekly
@pytest.mark.runs
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fine_tuning_retrieval_and_a_missing_text_in_one_table(
    write_suite: WriteSuite, models: dict[str, Path], toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real runs: two architectures, a choice, a chain, sets of BEIR, one reranked by another task's model, and
    tasks without their file or data of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(toy, tmp_path / "other")
    run_file = "".join(f"{query} Q0 d{query} 1 1 bm25\n" for query in range(9))
    (tmp_path / "bm25.trec").write_text(run_file, encoding="utf-8")
    from tests.support.finetuning import FAST

    fast = {key: value for key, _, value in (word.partition("=") for word in FAST)}
    suite = write_suite(
        {
            "first": {"keys": {**fast, "epochs": 2, "best": "loss"}, "choices": {"lr": [1e-3, 3e-3]}},
            "second": {"after": "first", "keys": {**fast, "steps": 4}},
            "toy": {"beir": [str(toy), str(tmp_path / "other")], "keys": {"device": "cpu"}},
            "again": {"beir": str(toy), "after": "first", "keys": {"rerank": f"{tmp_path}/bm25.trec", "device": "cpu"}},
            "hub": {"mteb": "STS12"},
            "lost": {"keys": {**fast, "train": "nowhere.tsv"}},
        },
        seeds=[1618],
        efficiency={"lengths": [16, 64, 128], "tokens": 512, "repeats": 1},
    )
    table = run(suite, tmp_path / "out", models["modernbert"], models["bert"], code=65)
    for row in table["rows"]:
        first, second, found, other, again, hub, lost, both = row["cells"]
        assert first["n"] == second["n"] == 1 and len(first["runs"]) == 2 and 0 <= found["mean"] <= 1
        assert found["mean"] == other["mean"] == pytest.approx(both["mean"])
        assert again["mean"] == pytest.approx(9 / 20)  # nine queries' only candidate is right
        assert hub["mean"] is None and "mteb:STS12: its data, mteb/sts12-sts, is not available" in hub["failed"][0]
        assert lost["mean"] is None and "nowhere.tsv" in lost["failed"][0]
        begun = json.loads((tmp_path / "out" / second["runs"][0]["run"] / "result.json").read_text())
        runs = {
            str(each.parent): json.loads(each.read_text()) for each in (tmp_path / "out").glob("first-*/result.json")
        }
        starts = {f"weights.init_from={run}/checkpoints/{each['counted']['checkpoint']}" for run, each in runs.items()}
        assert begun["weights"].partition(";")[0] in starts  # of the best epoch, as the figures are
        assert begun["settings"]["steps"] == 4
    speeds = {(row["model"], row["length"], row["kind"]): row for row in table["efficiency"]}
    assert {key[1:] for key in speeds} == {
        (16, "fixed"),
        (16, "variable"),
        (64, "fixed"),
        (64, "variable"),
    }  # they read 64
    for row in table["efficiency"]:
        assert (
            row["packed_tokens_per_second"] > 0 and row["padded_tokens_per_second"] > 0 and row["packed_memory"] > 1e7
        )
    text = (tmp_path / "out/table.md").read_text()
    assert "| modernbert | 64 | variable |" in text and "Measured on CPU, " in text
    assert "- modernbert reads 64 tokens at most: texts of 128 were not measured." in text


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_bm25_is_a_row_beside_encoders(write_suite: WriteSuite, write_beir: WriteBeir, tmp_path: Path) -> None:
    """Keys of encoders are not its own, and what is fine-tuned has no figure of it."""
    beir = write_beir({"d1": "a red fox", "d2": "a blue hen"}, {"q1": "foxes"}, test=[("q1", "d1", 1)])
    suite = write_suite({"tone": {}, "words": {"beir": str(beir), "keys": {"max_tokens": 64, "device": "cpu"}}})
    (row,) = run(suite, tmp_path / "out", "bm25")["rows"]
    tone, found = row["cells"]
    assert row["model"] == "bm25" and found["mean"] == 1
    assert "| bm25 | not run | 100.00 (1) |" in (tmp_path / "out/table.md").read_text()
    assert tone["mean"] is None and "not run: bm25 has no weights to train" in tone["failed"][0]


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_figures_of_retrieval_on_changed_files_are_refused(
    write_suite: WriteSuite,
    models: dict[str, Path],
    toy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The table would show the figures of files that are no longer there."""
    made = recipe(tmp_path, toy, epochs=1)
    keys = {"keys": {"device": "cpu", "max_tokens": 32}}
    suite = write_suite({"toy": {"beir": str(toy), **keys}, "pairs": {"retrieval": made, **keys}}, seeds=[1])
    rows = ("bm25", models["modernbert"])
    before = run(suite, tmp_path / "out", *rows)
    assert run(suite, tmp_path / "out", *rows) == before
    capsys.readouterr()
    for name, runs in (("test", 3), ("train", 1)):  # bm25 and the model on the set, and the model that was trained
        file = toy / "qrels" / f"{name}.tsv"
        there = file.read_text(encoding="utf-8")
        file.write_text(there.replace("\td", "\td1", 3), encoding="utf-8")
        run(suite, tmp_path / "out", *rows, code=78)
        error = capsys.readouterr().err
        assert error.count(f"{file} has changed since") == runs
        assert "Restore them, name another folder, or remove these." in error
        file.write_text(there, encoding="utf-8")
    assert run(suite, tmp_path / "out", *rows) == before


def test_texts_to_measure_on_are_as_long_as_they_say() -> None:
    """Their tokens are counted, and a skewed distribution would favour one side."""
    fixed, variable = (draw(512, kind, 100_000, 1000) for kind in ("fixed", "variable"))
    assert {len(ids) + 2 for ids in fixed} == {512} and 190 < len(fixed) < 200
    sizes = [len(ids) + 2 for ids in variable]
    assert max(sizes) <= 512 and abs(sum(sizes) / len(sizes) - 256) < 15 and len({*sizes}) > 100
    assert [ids.tolist() for ids in draw(512, "variable", 100_000, 1000)] == [ids.tolist() for ids in variable]
