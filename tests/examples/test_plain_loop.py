"""The witness: examples/plain_loop.py, without Composer, trains exactly what `train` trains.

If this breaks, either `train` no longer does what its step says, or Composer does something unrequested.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import plain_loop
from modernbert_train.__main__ import main
from tests.support.faulty import Killed
from tests.support.gloo import run_ranks
from tests.support.paths import ROOT
from tests.support.ranks import train_each
from tests.support.runs import records
from tests.support.tiny_run import TinyRun

FILE = ROOT / "examples/plain_loop.py"
DECAY = (
    "phases.decay={tokens: 1500, row_tokens: 128, batch_rows: 4, microbatch_tokens: 128, reset_moments: true, "
    "schedule: {decay_tokens: 1500}}"
)
MASKED = ("model.attention_out_dropout=0.1", "phases.long.schedule.decay_tokens=0", "phases.long.tokens=1500", DECAY)
REPLACED = ("objective={name: rtd}", "model.attention_out_dropout=0.1")
CLIPPED = ("optim={name: adamw, lr: 5e-3, max_grad_norm: 0.3}", "phases.long=null")


def of_steps(folder: Path, keys: tuple[str, ...] = ("step", "phase", "tokens", "lr", "loss", "grad_norm")) -> list[Any]:
    found = [tuple(line[key] for key in keys) for line in records(folder)]
    assert found, f"no step was recorded in {folder}"
    return found


def test_the_whole_thing_is_at_most_three_hundred_lines_without_composer() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    imported = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert not [line for line in imported if "composer" in line or "modernbert_train.train" in line]


@pytest.mark.runs
@pytest.mark.parametrize(
    "words",
    [MASKED, *(pytest.param(words, marks=pytest.mark.slow) for words in (REPLACED, CLIPPED))],
    ids=["masked-three-phases", "replaced", "clipped"],
)
def test_one_process_trains_to_the_bit_what_train_trains(
    tiny_run: TinyRun, tmp_path: Path, words: tuple[str, ...]
) -> None:
    main(["train", *tiny_run(*words)])
    plain_loop.main(tiny_run(*words))
    plain, whole = tmp_path / "runs/tiny-plain", tmp_path / "runs/tiny"
    assert of_steps(plain) == of_steps(whole)
    held_out = [[(line["tokens"], line["loss"]) for line in records(run, "validation")] for run in (plain, whole)]
    assert held_out[0] == held_out[1] != []


@pytest.mark.runs
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_two_processes_train_it_within_float_error(tiny_run: TinyRun, tmp_path: Path, strategy: str) -> None:
    words = tiny_run("model.attention_out_dropout=0.1", f"distributed.strategy={strategy}")
    run_ranks(train_each, 2, [words], False)
    run_ranks(plain_loop.main, 2, words)
    keys, runs = ("tokens", "loss", "grad_norm"), tmp_path / "runs"
    plain, whole = (of_steps(runs / name, keys) for name in ("tiny-plain", "tiny"))
    np.testing.assert_allclose(plain, whole, rtol=1e-6)


@pytest.mark.runs
def test_the_documented_command_ends_on_two_ranks(tiny_run: TinyRun, tmp_path: Path) -> None:
    """From another folder, under torchrun, with DDP and the last checkpoint of the run; and started once more."""
    command = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2", str(FILE)]
    words = tiny_run("phases.long=null", "phases.short.tokens=1200", "phases.short.schedule.decay_tokens=0")
    for _ in range(2):
        ended = subprocess.run(
            [*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert ended.stdout.count("2 ranks") == 1, "the first rank alone says where it starts"
    steps = [line["step"] for line in records(tmp_path / "runs/tiny-plain")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 2


@pytest.mark.slow
def test_a_killed_loop_continues_to_the_bit(tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = tiny_run("model.attention_out_dropout=0.1", "checkpoint.interval_steps=5")
    plain_loop.main([*words, "name=whole"])
    record = plain_loop.record

    def until_seven(config: Any, line: dict[str, Any]) -> None:
        if line["step"] == 7:
            raise Killed
        record(config, line)

    with monkeypatch.context() as patch:
        patch.setattr(plain_loop, "record", until_seven)
        with pytest.raises(Killed):
            plain_loop.main([*words, "name=killed"])
    plain_loop.main([*words, "name=killed"])
    killed = {step: rest for step, *rest in of_steps(tmp_path / "runs/killed-plain")}
    assert killed == {step: rest for step, *rest in of_steps(tmp_path / "runs/whole-plain")}
