"""`plan` as users call it: any run, quickly, without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from modernbert_train.config.load import load_run
from modernbert_train.data.loader import share_of_rank
from tests.support.paths import ROOT
from tests.support.tiny_run import TinyRun
from tests.support.verbs import Says

BERT_RUN = """\
name: bert
data: {train: absent/train, tokenizer: absent/tokenizer}
model: {name: bert}
optim: {name: normuon, lr: 1.0e-3}
phases:
  short: {tokens: 2_000_000_000, row_tokens: 128, batch_rows: 2048, microbatch_tokens: 32768}
  long: {tokens: 500_000_000, row_tokens: 512, batch_rows: 512, microbatch_tokens: 32768}
"""
YAMLS = [path for path in (ROOT / "yamls").rglob("*.yaml") if path.name != "common.yaml"]
ALIKE = ("ettin", "1-", "2-", "3-", "modernbert-large", "deberta-v3-s", "deberta-v3-x", "roberta", "mmbert", "tiny")
RUNS = [path for path in YAMLS if re.search(r"^phases:|^include:\n", path.read_text(), re.M)]


@pytest.mark.runs
@pytest.mark.parametrize(
    "path",
    [  # sizes and parts of one recipe give the same plan
        pytest.param(path, marks=[pytest.mark.slow] * path.name.startswith(ALIKE)) for path in RUNS
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_run_that_is_shipped_can_be_planned(path: Path, says: Says) -> None:
    """Also if its data does not exist."""
    streams = list(load_run([path]).data.streams)
    keys = [f"data.streams.{name}.path" for name in streams] or ["data.train"]
    out = says("plan", str(path), *(f"{key}=absent/train" for key in keys))
    assert "absent/train is not here" in out
    assert not re.search(r"\b(nan|inf)\b", out)


@pytest.mark.runs
def test_it_is_there_within_seconds_and_without_a_gpu(tiny_run: TinyRun) -> None:
    """One process as users start it: its imports and output, without a traceback or warnings."""
    done = subprocess.run(
        [sys.executable, "-m", "modernbert_train", "plan", *tiny_run(), "--ranks", "2"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    titles = [line for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert titles[:4] == ["tiny on 2 x H100 SXM", "Model", "Training", "GFLOP per token"] and "Time and cost" in titles
    assert "the run's actual batches" in done.stdout


def answered(out: str) -> tuple[str, dict[str, list[str]]]:
    """Return the title of the first paragraph, and its lines by their label."""
    title, *lines = out.split("\n\n")[0].splitlines()
    found: dict[str, list[str]] = {}
    for line in lines:
        label, text = line[2:12].strip(), line[12:].strip()
        if label:
            found.setdefault(label, []).append(text)
        else:
            found[next(reversed(found))][-1] += f" {text}"
    return title, found


def test_the_first_lines_are_the_answer(tiny_run: TinyRun, says: Says) -> None:
    """Otherwise the most wanted facts would come after 85 lines of tables."""
    options = "--ranks 2 --gpu l40s b200 --price l40s=9e6 --price b200=9e9"
    out = says("plan", *tiny_run("compute.compile=true"), *options.split())
    title, found = answered(out)
    assert title == "tiny on 2 x L40S" and 5 <= len(out.split("\n\n")[0].splitlines()) - 1 <= 8
    assert list(found) == ["model", "training", "takes", "memory", "disk", "loss"]
    share = r"\S+ % to \S+ %"
    table = re.search(rf"2 x L40S +\S+ to \S+ +{share} +(\S+ to \S+ s) +\S+ to \S+ +9000000.00 +(\S+ to \S+)", out)
    price = "9000000.00 dollars an hour for one GPU"
    assert table is not None and found["takes"] == [f"{table[1]}, predicted, and {table[2]} dollars at {price}"]
    parameters = re.search(r"parameters +([\d,]+)", out.split("\n\n")[1])
    assert parameters is not None and found["model"] == [f"{parameters[1]} parameters"]
    total = re.search(r"  all +(\S+ k) +(\d+)", out)
    assert total is not None and found["training"] == [f"{total[1]} tokens in {total[2]} steps, 2 phases"]
    disk = re.search(r"at most .*; (\S+) GB while one is written", out)
    assert disk is not None and found["disk"] == [f"{disk[1]} GB for checkpoints"]


@pytest.mark.runs
def test_the_answer_says_what_stands_in_the_way(says: Says) -> None:
    """A run that does not fit, or is cheaper elsewhere, is noticed before GPUs are rented."""
    run = [str(ROOT / "yamls/recipes/modernbert-base/1-stable.yaml"), "data.train=absent/train", "--ranks", "8"]
    _, found = answered(says("plan", *run, "--gpu", "rtx4090", "b200"))
    assert found["memory"][0].startswith("does NOT fit, 37.1 GB too much: 59.3 of 22.2 usable GB in phase stable")
    assert re.match(
        r"phases.stable.microbatch_tokens=98304: needs 59.3 GB of a GPU by `plan`, and RTX 4090 has 22.2 GB usable. "
        r"Set phases.stable.microbatch_tokens=\d+ or ",
        found["note"][0],
    )
    assert found["note"][1].startswith("Documents are assumed, since absent/train is not here")
    assert found["cheapest"][0].startswith("8 x B200: ")  # although it costs more: the run does not fit the other
    eager = ("compute.compile=false", "optim.fused=false")
    _, found = answered(says("plan", *run, *eager, "--gpu", "h100", "b200", "--price", "b200=1"))
    assert found["memory"][0].startswith("fits, 7.69 GB to spare: 69.5 of 77.2 usable GB")
    assert found["cheapest"][0].startswith("8 x B200: ") and len(found["note"]) == 2
    assert re.match(r"compute.compile=true: .+ instead of .+, predicted", found["note"][1])


@pytest.mark.runs
@pytest.mark.parametrize(
    ("recipe", "takes", "rate"),
    [
        ("modernbert-base", "8.2 to 13 d, predicted, and 3,900 to 6,300 dollars at 2.50", "220,000 to 360,000"),
        ("ettin-17m", "23 to 90 h, predicted, and 470 to 1,800 dollars at 2.50", "780,000 to 3,000,000"),
    ],
)
def test_time_cost_and_speed_are_ranges_and_nothing_is_called_measured(
    says: Says, recipe: str, takes: str, rate: str
) -> None:
    """Another program's speed is not this one's, and a prediction that may be four times off is no promise."""
    run = [str(ROOT / f"yamls/recipes/{recipe}.yaml"), "data.train=absent/train", "--ranks", "8", "--gpu", "h100"]
    out = " ".join(says("plan", *run).split())
    assert "measured" not in out and f"takes {takes}" in out and f"8 x H100 SXM {rate} " in out
    assert "took 1.11 times as long and 0.72 us a token more" in out
    if recipe == "modernbert-base":
        assert re.search(r"stable ddp 98,304 130,048 6 59.3 1.5 to 2.4 s ", out)
        assert re.search(r" 8 4,608 ddp 98,304 .* 1.9\d M to 3.2\d M ", out)


@pytest.mark.parametrize("objective", ["sop", "permutation", "rtd"])
def test_another_encoder_is_planned_without_memory(tmp_path: Path, says: Says, objective: str) -> None:
    """Steps, FLOPs, time, cost and traffic; for memory a sentence on how to measure it, and no number."""
    file = tmp_path / "bert.yaml"
    file.write_text(BERT_RUN, encoding="utf-8")
    out = says("plan", str(file), f"objective.name={objective}", "--ranks", "8")
    _, found = answered(out)
    total = {"sop": "110,106,428", "rtd": "119,386,427"}.get(objective, "109,514,298")
    assert found["model"] == [f"{total} parameters"] and "cheapest" not in found
    (memory,) = found["memory"]
    assert memory.startswith(
        "predicted for ModernBERT and ESM-2 only, without a generator. Measure it: start the run under"
    )
    assert "12 layers of width 768, all of them global." in out
    assert ("the encoder reads 1.1" in out) is (objective == "permutation")
    titles = [paragraph.split("\n")[0] for paragraph in out.split("\n\n")[1:]]
    assert titles[:4] == ["Model", "Training", "GFLOP per token", "Memory of one H100 SXM"]
    assert not any(title.startswith("Largest microbatch") for title in titles)
    (costs,) = [each for each in out.split("\n\n") if each.startswith("Time and cost")]
    assert "fits" not in costs and "For bert nothing was" in costs
    (scaling,) = [each for each in out.split("\n\n") if each.startswith("Scaling of phase")]
    assert re.search(r"  64 +2,048 +hsdp +4,096 ", scaling) and "Microbatches have at most the" in scaling
    assert not re.search(r"\b(nan|inf|None)\b", out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "h300"], "h300: an unknown GPU. Did you mean h200? Known: b200, h200, h100"),
        (["--gpu", "4090"], "4090: an unknown GPU. Did you mean rtx4090?"),
        (["--price", "h100"], "h100: write NAME=DOLLARS"),
        (["--ranks", "0"], "a whole number above 0"),
        (["--html", "plan.html"], "--html was removed: the text has all of it; plan RUN.yaml > plan.txt keeps it."),
    ],
)
def test_wrong_options_end_with_64(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "run.yaml", *words])
    assert ended.value.code == 64 and message in capsys.readouterr().err


@pytest.mark.runs
def test_mistakes_are_reported_before_anything_is_planned(tiny_run: TinyRun, says: Says) -> None:
    assert "cannot be divided evenly among 3 ranks" in says("plan", *tiny_run(), "--ranks", "3", code=78)
    # the data exists and does not match
    assert "Set model.vocab_size=512." in says("plan", *tiny_run("model.vocab_size=448"), code=78)


@pytest.mark.runs
def test_dropout_that_depends_on_the_ranks_is_reported(tiny_run: TinyRun, says: Says) -> None:
    """A user who changes the number of GPUs must know which runs will not be repeated exactly: rows of a batch of 4 are
    whole microbatches of 2 on 2 ranks, but not on 4."""
    dropout = ("model.attention_out_dropout=0.1", "phases.short.microbatch_tokens=128", "phases.long=null")
    assert "dropout differs" not in says("plan", *tiny_run(*dropout), "--ranks", "2")
    said = says("plan", *tiny_run(*dropout), "--ranks", "4")
    assert "Phase short: a batch of 4 rows does not divide into microbatches of 2 rows on each of 4 ranks" in said
    assert "dropout differs" not in says("plan", *tiny_run("phases.long=null"), "--ranks", "4")
    rows = tuple(range(4))
    alone = share_of_rank(rows, 0, 1, 2)  # type: ignore[arg-type]
    cut = [tuple(alone[i : i + 2]) for i in (0, 2)]
    assert [share_of_rank(rows, rank, 2, 2) for rank in range(2)] == cut  # type: ignore[arg-type]
    assert [share_of_rank(rows, rank, 4, 2) for rank in range(4)] == [(0,), (1,), (2,), (3,)]  # type: ignore[arg-type]
