"""A run resumes by the plan that it was trained by; only the future part of the plan may change.

If this breaks, phases that are swapped, renamed or resized in the YAML silently move a run to another place of its
plan: another learning rate, row length and RoPE base from there on.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from modernbert_train.__main__ import main, read_run
from modernbert_train.checkpoints.resume_rules import past_changes
from tests.support.runs import records
from tests.support.tiny_run import TinyRun

pytestmark = pytest.mark.runs

# phases short (4,000 tokens, no decay) and long (2,000, with decay over the last 1,000); see tests/support/tiny_run.py
IN_SHORT, AT_BORDER, IN_LONG, IN_DECAY, AT_END = (
    ("short", 2000), ("short", 4100), ("long", 4900), ("long", 5500), ("long", 6050),
)  # fmt: skip


@pytest.mark.parametrize(
    ("where", "override", "changes"),
    [
        (IN_SHORT, "phases.short.lr_ratio=0.5", ["phases.short.lr_ratio: 1.0 -> 0.5"]),
        (IN_SHORT, "phases.short.batch_warmup=null", "phases.short.batch_warmup"),
        (IN_SHORT, "phases.short.microbatch_tokens=64", []),
        (IN_SHORT, "phases.short.tokens=9000", []),
        (IN_SHORT, "phases.short.tokens=2000", []),
        (IN_SHORT, "phases.short.tokens=1999", ["phases.short.tokens: 4000 -> 1999"]),
        (IN_SHORT, "phases.short.schedule.decay_tokens=2000", []),
        (IN_SHORT, "phases.short.schedule.decay_tokens=2001", ["phases.short.schedule.decay_tokens: 0 -> 2001"]),
        (IN_SHORT, "phases.short.schedule.warmup_tokens=600", ["phases.short.schedule.warmup_tokens: 500 -> 600"]),
        (IN_SHORT, "phases.long=null", []),
        (IN_SHORT, "phases.long.row_tokens=64", []),
        (AT_BORDER, "phases.long=null", []),
        (AT_BORDER, "phases.short.tokens=4000", []),
        (AT_BORDER, "phases.short.tokens=5000", []),
        (AT_BORDER, "phases.short.tokens=3999", ["phases.short.tokens: 4000 -> 3999"]),
        (IN_LONG, "phases.short.tokens=4500", ["phases.short.tokens: 4000 -> 4500"]),
        (IN_LONG, "phases.short=null", ["phase 1: short -> long", "phase 2: long -> none"]),
        (IN_LONG, "phases.long=null", ["phase 2: long -> none"]),
        (IN_LONG, "phases.long.model.global_rope_theta=1", ["phases.long.model.global_rope_theta: 160000.0 -> 1.0"]),
        (IN_LONG, "phases.long.tokens=5000", []),
        (IN_DECAY, "phases.long.tokens=5000", ["phases.long.tokens: 2000 -> 5000"]),
        (IN_DECAY, "phases.long.schedule.final_lr_ratio=0.1", ["phases.long.schedule.final_lr_ratio: 0.0 -> 0.1"]),
        (AT_END, "phases.long.tokens=5000", ["phases.long.tokens: 2000 -> 5000"]),
    ],
)  # fmt: skip
def test_only_what_lies_ahead_may_change(
    tiny_run: TinyRun, where: tuple[str, int], override: str, changes: list[str] | str
) -> None:
    changed = past_changes(read_run(tiny_run()).phases, read_run(tiny_run(override)).phases, *where)
    found = [str(each) for each in changed]
    if isinstance(changes, str):
        assert found and all(line.startswith(changes) for line in found)
    else:
        assert found == changes


def test_phases_that_come_later_may_be_added_swapped_and_renamed(tiny_run: TinyRun, tmp_path: Path) -> None:
    words = tiny_run()
    then = read_run(words)
    tree = yaml.safe_load(Path(words[0]).read_text())
    phases = tree["phases"]
    for order, changes in (
        (["short", "more", "long"], []),
        (["long", "short"], ["phase 1: short -> long"]),
        (["brief", "long"], ["phase 1: short -> brief"]),
    ):
        tree["phases"] = {name: phases.get(name, phases["short"]) for name in order}
        (tmp_path / "other.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        found = past_changes(then.phases, read_run([str(tmp_path / "other.yaml")]).phases, *IN_SHORT)
        assert [str(each) for each in found] == changes


def test_another_future_equals_a_run_that_always_had_it(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    often = ("checkpoint.interval_steps=1", "checkpoint.keep=99")
    assert main(["train", *tiny_run(*often)]) == 0
    border, folder = records(runs / "tiny", "validation")[0]["step"], shutil.copytree(runs / "tiny", runs / "other")
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) >= border:
            shutil.rmtree(path)
    change = "phases.long={row_tokens: 64, batch_rows: 6, tokens: 900, schedule: {decay_tokens: 0}}"
    capsys.readouterr()
    assert main(["train", *tiny_run(*often, "name=other", change)]) == 0
    assert "changed since the last start:\n" in capsys.readouterr().out
    assert main(["train", *tiny_run("name=always-other", change)]) == 0
    assert records(folder) == records(runs / "always-other") != records(runs / "tiny")
