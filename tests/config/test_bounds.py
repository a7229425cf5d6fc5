"""Small configurations that would expand to huge ones: each is refused, with file, limit and remedy.

If this breaks, a file from the internet hangs `check` on a login node, fills its memory, or ends in a traceback.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from data_prep import prepare
from modernbert_train.__main__ import main
from modernbert_train.config.bounded_yaml import MAX_BYTES, MAX_DEPTH
from modernbert_train.config.check import check
from modernbert_train.config.load import load_run, load_typed
from modernbert_train.config.schema import RunConfig
from modernbert_train.config.tools.sweep import SweepConfig
from modernbert_train.errors import ConfigError
from tests.support.configurations import BASE, Load, Refused

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
MERGES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{new}: [&{new} {{<<: [{', '.join([f'*{old}'] * 10)}]}}]\n"
    for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (LAUGHS, "more than 20,000 keys and values"),
        (MERGES, "more than 20,000 keys and values"),
        ("".join(f"k{i}: 1\n" for i in range(10_001)), "more than 20,000 keys"),
        ("name: " + "[" * 20_000, f"{MAX_DEPTH} nested sections or lists"),
        ("".join(f"{' ' * i}a:\n" for i in range(60)), f"{MAX_DEPTH} nested sections"),
        ("model: &loop\n  inner: *loop", "an alias contains itself"),
        ("seed: 1" + ":10" * 9000, "a number or date of 27,001 characters"),
        ("name: x\n# " + "x" * MAX_BYTES, "larger than 1,000,000 bytes"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_a_small_file_that_stands_for_a_huge_one_is_refused(refused: Refused, text: str, limit: str) -> None:
    (said,) = refused(text)
    assert said.startswith("extra.yaml: ") and limit in said and len(said) < 500


@pytest.mark.parametrize("name", ["plain", "run folder", "sweep", "prepare", "init from", "include"])
def test_every_way_in_has_the_bounds(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run files, saved configurations, sweeps, specs of `prepare`, and files of other projects."""
    file = tmp_path / "config.yaml"
    file.write_text(LAUGHS)
    first = tmp_path / "first.yaml"
    first.write_text("include: config.yaml")
    if name == "sweep":
        with pytest.raises(ConfigError, match="keys and values"):
            load_typed(SweepConfig, [file])
        return
    verbs = {
        "plain": lambda: main(["check", str(file)]),
        "run folder": lambda: main(["eval", str(tmp_path)]),
        "prepare": lambda: prepare.main([str(file)]),
        "init from": lambda: main(["init", "from", str(file)]),
        "include": lambda: main(["check", str(first)]),
    }
    assert verbs[name]() == 78
    assert f"{file}: not valid YAML. more than 20,000 keys and values" in capsys.readouterr().err


@pytest.mark.runs
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("callbacks=" + "[" * 3000, "nested sections or lists"),
        (".".join("a" * 3000) + "=1", f"a key of 3000 parts, the longest of 1 characters; the limits are {MAX_DEPTH}"),
    ],
    ids=lambda value: value[:12],
)
def test_an_override_has_the_same_bounds_and_is_not_printed_whole(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_run([], [override])
    first = str(error.value).splitlines()[0]
    assert message in first and len(first) < 500


@pytest.mark.runs
def test_thousands_of_mistakes_are_counted_and_the_first_hundred_reported(refused: Refused) -> None:
    lines = refused("".join(f"k{i}: 1\n" for i in range(3000)))
    assert lines[0].startswith("k0 (") and len(lines) == 101
    assert lines[-1] == "and 2,900 more mistakes. Fix these first."


def test_a_pipe_that_a_file_includes_is_not_waited_for(refused: Refused, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "pipe.yaml: cannot be read (not a regular file)" in refused("include: pipe.yaml")[0]


def test_files_that_include_one_another_without_end_are_refused(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number}.yaml").write_text(f"include: {number + 1}.yaml")
    with pytest.raises(ConfigError, match="more than 50 files include one another"):
        load_typed(RunConfig, [tmp_path / "0.yaml"])


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.num_layers", "above 0 and at most 1,000"),
        ("data.num_workers", "at least 0 and at most 1,024, since each is a process"),
        ("compute.threads", "above 0 and at most 4,096, since no machine"),
        ("phases.stable.row_tokens", "at least 8 and at most 16,777,216"),
    ],
)
@pytest.mark.parametrize("count", [10**9, 1 << 62])
def test_a_count_beyond_any_use_is_refused_at_once(load: Load, key: str, words: str, count: int) -> None:
    """One digit too many, or an untrusted file: `check`, `plan` or `eval` would build layers until memory is full."""
    with pytest.raises(ConfigError) as error:
        check(load("", f"{key}={count}", "phases.stable.batch_warmup={start_rows: 1, step_rows: 1, tokens: 1}"))
    assert str(error.value).startswith(f"{key}={count}: must be {words}")


@pytest.mark.parametrize(
    "name", ["modernbert", "bert", "distilbert", "albert", "xlnet", "deberta", "llama", "gemma", "neobert", "esm"]
)
def test_a_model_beyond_any_use_is_refused_where_no_rule_is_asked(tmp_path: Path, name: str) -> None:
    """For a checkpoint: verify, eval, export and plan derive its shapes from its config.yaml only."""
    file = tmp_path / "config.yaml"
    file.write_text(BASE + f"model: {{name: {name}, num_layers: 1000000000}}\n")
    with pytest.raises(ConfigError, match=r"model.num_layers=1000000000: must be above 0 and at most 1,000"):
        load_run([file])


def test_every_count_has_a_bound(load: Load) -> None:
    """Fields without a bound are limited to exact numbers: beyond these, schedules and a run's page are wrong."""
    for key in (
        "phases.decay.tokens",
        "checkpoint.keep",
        "profile.skip",
        "eval.max_tokens",
        "checkpoint.interval_steps",
    ):
        with pytest.raises(ConfigError, match=rf"{key}={1 << 62}: must be at most 9,007,199,254,740,992"):
            check(load("", f"{key}={1 << 62}"))
