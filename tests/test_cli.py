"""The command line before any training: exit codes that schedulers act on, whole messages, and no torch.

If this breaks, a typo is found only on the GPU machine, or a cluster restarts for ever what can never work.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modernbert_train import __version__
from modernbert_train.__main__ import main, parse
from modernbert_train.cli.verbs import BY_NAME, EXIT_CODES, REMOVED, VERBS, Verb, make_parser
from modernbert_train.data.dataset_card import read_card, write_card
from tests.support.paths import ROOT
from tests.support.probed import call_probed
from tests.support.tiny_run import TinyRun


@pytest.mark.runs
@pytest.mark.parametrize("verb", ["check", "train"])
def test_a_broken_configuration_ends_with_78_and_every_mistake_without_torch(
    tiny_run: TinyRun, tmp_path: Path, verb: str
) -> None:
    extra = tmp_path / "extra.yaml"
    extra.write_text("model:\n  hiden_size: 32\noptim:\n  lr: fast\n", encoding="utf-8")
    done = call_probed(verb, *tiny_run(), str(extra), "phases.short.row_tokenz=3")
    assert (done.returncode, done.stdout) == (78, "loaded:\n")
    assert done.stderr.splitlines() == [
        f"error: model.hiden_size ({tmp_path}/extra.yaml:2): unknown key. Did you mean model.hidden_size?",
        f"optim.lr='fast' ({tmp_path}/extra.yaml:4): expected a number.",
        "phases.short.row_tokenz (command line): unknown key. Did you mean phases.short.row_tokens?",
    ]


@pytest.mark.runs
def test_mistakes_of_all_stages_are_reported_at_once(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One more start for each kind of mistake is one more wait in a queue."""
    words = tiny_run("optim.lrate=3", "seed=x", "phases.long.microbatch_tokens=100", f"data.train={tmp_path}/absent")
    assert main(["check", *words]) == main(["train", *words]) == 78
    said = capsys.readouterr().err
    said = said[: len(said) // 2]
    assert "optim.lrate (command line): unknown key. " in said and "seed='x'" in said  # keys and values
    assert "phases.long.microbatch_tokens=100 is not a multiple" in said  # rules
    assert f"{tmp_path}/absent" in said  # the data
    assert main(["check", *tiny_run("model.hiden_size=1", "model.num_heads=3")]) == 78
    said = capsys.readouterr().err
    assert "num_heads" not in said, "what might follow from the other mistake is none yet"
    assert main(["check", *tiny_run("optim.lr=fast", "phases.long.microbatch_tokens=100")]) == 78
    assert "is not a multiple" in capsys.readouterr().err, "a value that is needed and wrong hides no other mistake"


@pytest.mark.runs
def test_a_good_run_is_described_without_torch(tiny_run: TinyRun) -> None:
    """Seconds on a login node, where torch may not even be installed."""
    done = call_probed("check", *tiny_run())
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tiny: good. 6,000 tokens into ") and lines[-1] == "loaded:"
    assert [line.split()[0] for line in lines[1 : lines.index("")]] == ["phase", "short", "long", "warning:"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "arguments are required: RUN"),
        (["prepare"], "arguments are required: SPEC"),
        (["tokenizer", "fertility", "x", "y", "--js"], "unrecognized arguments: --js"),
        (["retrieval", "trane"], "invalid choice: 'trane'"),
        (["check", "x.yaml", "--ranks", "0"], "argument --ranks: 0: a whole number above 0 is expected"),
        (["check", "x.yaml", "--ranks", "two"], "argument --ranks: two: a whole number above 0 is expected"),
        (["train", "x.yaml", "--frsh"], "unrecognized arguments: --frsh"),
    ],
)
def test_wrong_arguments_end_with_64(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 64
    said = capsys.readouterr().err
    assert said.startswith("usage: ") and "\nerror: " in said and message in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tran"], "error: tran: no such verb. Did you mean train?"),
        (["qqq"], "Known: prepare, tokenizer, adopt"),
        ([], "before training"),
    ],
)
def test_a_word_that_is_no_verb_is_answered_with_the_nearest(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 64
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("word", [word for word, old in REMOVED.items() if not old.words])
def test_a_verb_that_was_removed_is_answered_with_what_replaces_it(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user with it in a script must learn the replacement from the error alone."""
    assert word not in BY_NAME
    assert main([word, "train", "recipe.yaml"]) == 64
    said = capsys.readouterr().err
    assert f"error: {word}: this verb was removed. {REMOVED[word].now}" in said
    assert all((ROOT / name).is_file() for name in re.findall(r"[a-z_]+/[a-z_/-]+\.(?:py|md)", REMOVED[word].now))


@pytest.mark.runs
def test_help_has_every_verb_by_task_and_is_there_without_torch() -> None:
    done = call_probed("--help")
    assert done.returncode == 0 and done.stdout.endswith("loaded:\n")
    lines = done.stdout.splitlines()
    for verb in VERBS:
        (line,) = [number for number, line in enumerate(lines) if line.startswith(f"  {verb.name} ")]
        heading = [each for each in lines[:line] if each and not each.startswith(" ")][-1]
        assert heading == verb.group and lines[line].endswith(verb.summary) and len(lines[line]) <= 120
    assert "75             stopped by a signal" in done.stdout
    assert call_probed("help").stdout == done.stdout


def test_help_has_the_exit_codes_of_the_documentation() -> None:
    """Scheduler rules written by one page must hold on the other."""
    page = (ROOT / "docs/faults.md").read_text(encoding="utf-8").partition("## Exit codes")[2].partition("##")[0]
    assert re.findall(r"^\| (\d[\d, ]*) \|", page, re.MULTILINE) == [*EXIT_CODES]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_verb_explains_itself(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([verb.name, "--help"], ["help", verb.name]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        said = capsys.readouterr().out
        assert ended.value.code == 0 and said.startswith("usage: ") and f" {verb.name} " in said.splitlines()[0]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_the_example_of_a_verb_is_one(verb: Verb) -> None:
    name, *words = shlex.split(verb.example)
    assert name == verb.name
    parser = make_parser(verb)
    assert parser.parse_intermixed_args(words) if verb.name == "launch" else parse(parser, words)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_rows_of_the_embedding_that_nothing_reads_are_named(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """A third of the parameters of a small model, trained towards nothing; the tokenizer has 512 entries."""
    assert main(["check", *tiny_run("model.vocab_size=2048")]) == 0
    said = capsys.readouterr().out
    assert "warning: model.vocab_size=2,048: the tokenizer" in said and "75% of the embedding are never read" in said
    assert "Set model.vocab_size=512" in said
    assert main(["check", *tiny_run("model.vocab_size=576")]) == 0
    assert "never read" not in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["eval", "export", "report", "checkpoints", "fill"])
def test_a_run_that_is_not_there_is_answered_with_those_that_are(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [verb, "runs/nope", *(["a [MASK]"] if verb == "fill" else [])]
    assert main(words) in (65, 78)
    assert "runs/nope: no such" in (said := capsys.readouterr().err) and "No runs are in runs" in said
    for name in ("base", "low-rate"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    assert main(words) in (65, 78)
    assert "Here are runs/base, runs/low-rate." in capsys.readouterr().err


@pytest.mark.runs
def test_a_run_of_a_gpu_is_measured_on_a_cpu(tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Its configuration has the kernels of its updates, which eval and export compute none of."""
    for verb in ("eval", "export"):
        main([verb, *tiny_run("optim.fused=true", "compute.compile=true")])
        said = capsys.readouterr().err
        assert "optim.fused" not in said and "checkpoint" in said, said


def test_ranks_that_cannot_share_the_batch_end_with_78(tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *tiny_run(), "--ranks", "4"]) == 0
    assert main(["check", *tiny_run(), "--ranks", "3"]) == 78
    assert "cannot be divided evenly among 3 ranks" in capsys.readouterr().err


def test_a_missing_file_ends_with_78(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "absent.yaml")]) == 78
    assert f"{tmp_path}/absent.yaml: no such file." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "folder", "message"),
    [
        ("train", "absent", "/absent"),
        ("validation", "absent", "/absent"),
        ("tokenizer", "absent", "/absent"),
        ("train", "empty", "the shards hold no tokens"),  # packing would look for a chunk for ever
    ],
)
def test_data_that_is_missing_or_empty_ends_with_65(
    tiny_run: TinyRun, tiny_data: Path, tmp_path: Path, key: str, folder: str, message: str, capsys: Any
) -> None:
    shutil.copytree(tiny_data / "train", tmp_path / "empty")
    write_card(tmp_path / "empty", replace(read_card(tmp_path / "empty"), tokens=0))
    assert main(["check", *tiny_run(f"data.{key}={tmp_path}/{folder}")]) == 65
    said = capsys.readouterr().err
    assert str(tmp_path / folder) in said and message in said


@pytest.mark.runs
def test_a_handful_of_held_out_tokens_is_reported_with_what_it_means(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else differences that are chance are taken for a better run; 583 tokens hold out some 87 predictions."""
    assert main(["check", *tiny_run()]) == 0
    said = capsys.readouterr().out
    assert "warning: data.validation=" in said
    assert "583 tokens, of which about 87 are predicted" in said and "a standard error of about 0.32 nats" in said
    assert main(["check", *tiny_run("eval.max_tokens=100")]) == 0
    assert "warning: eval.max_tokens=100 leaves 100 tokens, of which about 15" in capsys.readouterr().out
    assert main(["check", *tiny_run("objective.eval_mask_rate=1.0", "eval.max_tokens=null")]) == 0
    assert "583 tokens, of which about 583 are predicted" in capsys.readouterr().out
    assert main(["check", *tiny_run("data.validation=null")]) == 0
    assert "warning" not in capsys.readouterr().out


@pytest.mark.runs
@pytest.mark.parametrize(
    ("own", "turns"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "30000000000")]
)
def test_waiting_threads_spin_briefly(own: dict[str, str], turns: str) -> None:
    """Else a run on a laptop in use is many times as slow. libgomp prints its settings when torch loads it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_WAIT", "GOMP_"))}
    program = "from modernbert_train.__main__ import main; main(['check', 'none.yaml']); import torch"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, **own, "OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    found = re.findall(r"GOMP_SPINCOUNT = '(\w+)'", done.stderr)
    if not found:
        pytest.skip("this torch does not use libgomp")
    assert set(found) == {turns}


def test_a_folder_without_a_dataset_is_named(tmp_path: Path, tiny_data: Path, tiny_run: TinyRun, capsys: Any) -> None:
    """It is named, and a run's words are not taken for a dataset's."""
    assert main(["inspect", str(tmp_path)]) == 65
    assert f"{tmp_path}: neither a run nor a dataset written by `prepare`" in capsys.readouterr().err
    for words in ([str(tiny_data / "train"), "--rows", "1"], [str(tiny_data / "train"), *tiny_run()]):
        assert main(["inspect", *words]) == 78
        assert "is a folder of data" in capsys.readouterr().err
    assert main(["inspect", *tiny_run(), "--json"]) == 78
    assert "--json is for datasets" in capsys.readouterr().err
