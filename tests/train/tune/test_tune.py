"""A tune whose workers train nothing and fail in every way. If this breaks, a bad candidate ends the tune, or wins."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.config.load import load_run
from modernbert_train.errors import ConfigError, RunError
from modernbert_train.plan.tuned import SETTINGS, read_tuned
from modernbert_train.train.tune import pool, session
from modernbert_train.train.tune.findings import MARKDOWN, TABLE
from modernbert_train.train.tune.journal import JOURNAL
from tests.conftest import TinyRun
from tests.train.tune.test_candidates import CPU, GPU

FAKE = Path(__file__).with_name("fake_worker.py")
FIT = {
    "device": "a device", "precision": "fp32", "torch": "9.9", "model": {"name": "modernbert"}, "objective": "mlm",
    "optimizer": "stable_adamw", "row_tokens": 64,
}  # fmt: skip
pytestmark = pytest.mark.runs


class Fake:
    """Tunes of the tiny run on a device that is told what to do."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder, self.words = folder, words
        self.what: dict[str, Any] = {"rules": []}
        self.facts(CPU)

    def facts(self, device: dict[str, Any]) -> None:
        self.what["facts"] = device | {"fit": FIT, "memory_bytes": 10_000}

    def rule(self, of: dict[str, Any], **does: Any) -> None:
        self.what["rules"].append({"of": of, **does})

    def tune(self, *overrides: str, **options: Any) -> Path:
        what = self.folder / "what.json"
        what.write_text(json.dumps(self.what))
        config = load_run([self.words[0]], [*self.words[1:], *overrides])
        return session.tune(config, command=lambda file: [sys.executable, str(FAKE), str(file), str(what)], **options)

    @property
    def asked(self) -> list[str]:
        return (self.folder / "asked.txt").read_text().splitlines()


@pytest.fixture
def fake(tmp_path: Path, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return Fake(tmp_path, [*tiny_run(), "phases.short.microbatch_tokens=128", f"runs_folder={tmp_path}/runs"])


def rows(folder: Path) -> dict[str, tuple[str, str]]:
    """Settings -> outcome and reason, of what did not stay as it was."""
    found = json.loads((folder / TABLE).read_text())["rows"]
    return {row["settings"]: (row["outcome"], row["text"]) for row in found if row["settings"] != "as it was"}


def test_the_fastest_that_is_right_is_written_and_the_others_are_named(fake: Fake) -> None:
    fake.rule({"compute.compile": True}, rate=9.0, wrong=True)
    fake.rule({"compute.threads": 2}, rate=1.5)
    fake.rule({"compute.threads": 1}, steps="crash")
    fake.rule({"compute.query_block": 32}, start="RuntimeError: No compiler")
    fake.rule({"compute.query_block": 128}, rate=1.01)
    folder = fake.tune()
    found = read_tuned(folder / SETTINGS)
    assert found.settings == {
        "compute.attention": "sdpa", "compute.global_attention": None, "compute.query_block": None,
        "compute.logit_chunk": None, "compute.compile": False, "compute.threads": 2, "optim.fused": False,
        "microbatch_tokens": 128,
    }  # fmt: skip
    assert found.tokens_per_second == (1000.0, 1500.0)
    outcomes = rows(folder)
    assert outcomes["compute.compile=true"] == ("wrong", "states off by 4.0e-01")
    assert outcomes["compute.threads=2"] == ("taken", "")
    assert outcomes["compute.threads=1"] == ("failed", "its process was ended by SIGSEGV")
    assert outcomes["compute.query_block=32"] == ("failed", "RuntimeError: No compiler")
    assert outcomes["compute.query_block=128"][0] == "slower", "a per cent is no reason to change anything"
    text = (folder / MARKDOWN).read_text()
    assert "1.50 x, the median over turns" in text and "off by 4.0e-01" in text


def test_what_compilation_costs_at_each_start_is_said_and_not_counted(fake: Fake) -> None:
    """A run of minutes is slower with it; and what later starts find compiled is not what the first one costs."""
    fake.rule({"compute.compile": True}, rate=2.0, first_seconds=91.0)
    text = (fake.tune("compute.threads=1", "compute.query_block=64") / MARKDOWN).read_text()
    assert re.search(r"\| `compute.compile=true` +\| taken +\| 2,000 +\| 2.00 +\| 91.0 +\|", text)
    assert "90 s more than with today's settings, at each start: a run of less than 3 minutes wins nothing" in text


@pytest.mark.slow
def test_what_is_no_faster_in_turns_is_not_written(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """It won its question while the others were disturbed; the last comparison is what counts."""
    fake.rule({"compute.threads": 2}, rate=1.5)
    monkeypatch.setattr(session, "gain", lambda pair: 0.97)
    folder = fake.tune("phases.short.microbatch_tokens=null")
    found = read_tuned(folder / SETTINGS)
    assert found.settings["compute.threads"] is None and found.settings["microbatch_tokens"] == 64
    assert found.tokens_per_second[0] == found.tokens_per_second[1]
    assert "compute.threads=2 was no faster, so today's settings stay" in (folder / MARKDOWN).read_text()


def test_a_killed_tune_goes_on_where_it_was(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("compute.compile=false", "compute.query_block=64")
    fake.rule({"compute.threads": 2}, rate=1.5)
    folder = fake.tune(*few)
    whole, asked = (folder / SETTINGS).read_text(), len(fake.asked)
    journal = (folder / JOURNAL).read_text().splitlines(keepends=True)
    (folder / JOURNAL).write_text("".join(journal[: len(journal) // 2]) + journal[len(journal) // 2][:20])
    fake.tune(*few)
    assert re.search(r"\d+ measurements of an earlier start remembered", capsys.readouterr().out)
    assert (folder / SETTINGS).read_text() == whole
    again = len(fake.asked) - asked
    assert again < asked
    fake.tune(*few)
    assert len(fake.asked) == asked + again + 2, "nothing but a look at the device"


def test_what_was_measured_of_another_run_is_put_aside(fake: Fake) -> None:
    folder = fake.tune(minutes=0)
    assert "Out of time before: attention kernel" in (folder / MARKDOWN).read_text()
    fake.tune("phases.short.batch_rows=16", minutes=0)
    assert len(list(folder.glob(f"{JOURNAL}.until-*"))) == 1


def test_a_microbatch_that_does_not_fit_is_halved_and_reported(fake: Fake) -> None:
    """The tune survives it, and the run's own is halved until it fits."""
    fake.what["most_tokens"] = 64
    folder = fake.tune("compute.compile=false", "compute.query_block=64")
    assert read_tuned(folder / SETTINGS).settings["microbatch_tokens"] == 64
    outcome, reason = rows(folder)["microbatch_tokens=128"]
    assert outcome == "does not fit" and "out of memory" in reason
    assert "phases.short.microbatch_tokens=128 does not fit here: set 64" in (folder / MARKDOWN).read_text()


def test_not_even_a_row_fits(fake: Fake) -> None:
    fake.what["most_tokens"] = 1
    with pytest.raises(RunError, match=r"not even one row of 64 tokens fits.*row_tokens.*activation_checkpointing"):
        fake.tune()


def test_a_candidate_that_hangs_is_ended(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "START_SECONDS", 3.0)
    fake.rule({"compute.threads": 2}, start="hang")
    folder = fake.tune("compute.compile=false", "compute.query_block=64")
    assert rows(folder)["compute.threads=2"] == ("failed", "it gave no answer within 3 s")


@pytest.mark.slow
def test_on_a_gpu_there_is_one_process_at_a_time_and_room_is_left(fake: Fake) -> None:
    """Two models beside each other would say that neither fits."""
    fake.facts(GPU)
    fake.rule({"optim.fused": True}, rate=1.2)
    fake.rule({"compute.attention": "flex"}, parity="full")
    folder = fake.tune()
    found = rows(folder)
    assert found["optim.fused=true"][0] == "taken" and found["compute.attention=flash"][0] == "left out"
    assert found["compute.attention=flex"][0] == "does not fit"
    fake.what["peak_bytes"] = 9_500
    with pytest.raises(RunError, match="leave room for several ranks"):
        fake.tune(fresh=True)


def test_a_kernel_that_is_wrong_is_not_kept_because_it_is_fast(fake: Fake) -> None:
    """What a run takes today fails parity: it is said, and something that is right takes its place."""
    fake.facts(GPU)
    fake.rule({"compute.attention": "varlen"}, wrong=True, rate=3.0)
    fake.rule({"compute.attention": "flex"}, wrong=True)
    folder = fake.tune()
    assert read_tuned(folder / SETTINGS).settings["compute.attention"] == "sdpa"
    assert "WRONG: today's settings, compute.attention=varlen" in (folder / MARKDOWN).read_text()


def test_two_tunes_at_once_are_refused(fake: Fake) -> None:
    folder = fake.tune(minutes=0)
    with session.take_lock(folder, "wait"), pytest.raises(ConfigError, match=r"in use by process \d+.*Two tunes"):
        fake.tune(minutes=0)


def test_what_cannot_be_tuned_is_refused(fake: Fake) -> None:
    with pytest.raises(ConfigError, match="--phase other: the run has short, long"):
        fake.tune(phase="other")
    with pytest.raises(ConfigError, match="compute.tuned=none"):
        fake.tune("compute.tuned=none")
    fake.rule({}, look="ConfigError: compute.device=cuda: torch sees no GPU here")
    with pytest.raises(ConfigError, match=r"this device cannot be used: .*no GPU here"):
        fake.tune()
