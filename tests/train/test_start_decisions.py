"""Where a run starts, case by case, up to the point of building a trainer; nothing is trained here.

Whole runs of the same: test_start.py, test_branch.py, test_same_data.py. If a case is wrong, a restart loses trained
weights, or silently continues from another state.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.__main__ import read_run
from modernbert_train.checkpoints.checkpoint import Checkpoint
from modernbert_train.checkpoints.manifest import WEIGHTS
from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.checkpoints.saved_state import Averaged
from modernbert_train.config.schema import RunConfig, StartConfig
from modernbert_train.data.facts import DataFacts, read_facts
from modernbert_train.data.fingerprint import data_fingerprint
from modernbert_train.errors import ConfigError, DataError, RunError
from modernbert_train.train import session
from modernbert_train.train.start import Start, check_same_data
from tests.support.small_checkpoint import CONFIG, state_of, write
from tests.support.tiny_run import TINY_YAML, TinyRun

pytestmark = pytest.mark.runs

SMALL = ("model.num_layers=1", "model.hidden_size=16", "model.num_heads=1", "model.intermediate_size=16")


# the tiny run has phases of 4,000 (short) and 2,000 tokens (long); step -> tokens and phase
MIDDLE, LATER, END = {2: (900, "short")}, {2: (900, "short"), 9: (4100, "long")}, {9: (6010, "long")}


def write_run(config: RunConfig, steps: dict[int, tuple[int, str]], *, average: bool = False) -> Path:
    """Write a run's folder with checkpoints; step -> tokens and phase."""
    folder = RunFolder(config)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.save_config()
    data = data_fingerprint(read_facts(config.data))
    for step, (tokens, phase) in steps.items():
        state = replace(state_of(step, tokens=tokens, phase=phase), data=data)
        if average:
            state = replace(state, training=None, average=[Averaged("step-00000001", 1, 10, 1.0)])
        write(folder.checkpoints, step, config=config, state=state)
    return folder.path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """Return another run, with checkpoints of both phases."""
    runs = tmp_path_factory.mktemp("other_runs")
    (runs / "tiny.yaml").write_text(TINY_YAML.format(runs=runs, data=tiny_data), encoding="utf-8")
    return write_run(read_run([str(runs / "tiny.yaml"), *SMALL, "name=other"]), LATER)


class Place:
    """A folder of runs, and the decision about a start of one of them."""

    def __init__(self, tiny_run: TinyRun, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._words, self.runs = tiny_run, runs
        self._found = "nothing to train"
        runs.mkdir()
        monkeypatch.setattr(session, "_build", self._note)
        monkeypatch.setattr(session, "_run", lambda *_: None)

    def has(self, *overrides: str, steps: dict[int, tuple[int, str]], average: bool = False) -> Path:
        """See `write_run`."""
        return write_run(read_run(self._words(*SMALL, *overrides)), steps, average=average)

    def start(self, *overrides: str, fresh: bool = False) -> str:
        """Return the decision about a start, in a line."""
        session.train(read_run(self._words(*SMALL, *overrides)), fresh=fresh)
        return self._found

    def _note(self, run: Any, facts: DataFacts, folder: RunFolder, compute: Any, start: Start, *_: Any) -> None:
        if start.checkpoint is None:
            origin = start.origin
            self._found = "scratch" if origin is None else f"scratch with the weights of {name(origin.source.folder)}"
            return
        how = "resume" if start.branch is None else "branch from"
        at = f"at step {start.step}, {start.tokens} tokens, in {start.phase}"
        self._found = f"{how} {name(start.checkpoint.folder)} {at}"


def name(checkpoint: Path) -> str:
    return f"{checkpoint.parents[1].name}:{int(checkpoint.name.removeprefix('step-'))}"


@pytest.fixture
def place(tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tiny_run, tmp_path / "runs", monkeypatch)


# what lies in the run's folder before a start
THERE: dict[str, Callable[[Place], object]] = {
    "no folder": lambda place: None,
    "an empty folder": lambda place: (place.runs / "tiny").mkdir(),
    "never saved": lambda place: place.has(steps={}),
    "half written": lambda place: (place.has(steps={}) / "checkpoints/step-00000002.partial-1").mkdir(parents=True),
    "in the middle": lambda place: place.has(steps=MIDDLE),
    "in its second phase": lambda place: place.has(steps=LATER),
    "finished": lambda place: place.has(steps=END),
    "an average": lambda place: place.has(steps=MIDDLE, average=True),
    "all damaged": lambda place: (place.has(steps=MIDDLE) / "checkpoints/step-00000002" / WEIGHTS).write_bytes(b"torn"),
    # it began with the weights, or at the checkpoint, of a run that is gone by now
    "warm": lambda place: place.has(f"weights.init_from={place.runs}/gone", steps=MIDDLE),
    "branched": lambda place: place.has(f"start.checkpoint={place.runs}/gone", steps=MIDDLE),
}
IN_LONG = "at step 9, 4100 tokens, in long"


@pytest.mark.parametrize(
    ("there", "overrides", "decided"),
    [
        ("no folder", [], "scratch"),
        ("never saved", [], "scratch"),
        ("half written", [], "scratch"),
        ("no folder", ["weights.init_from={other}"], "scratch with the weights of other:9"),
        ("no folder", ["weights.init_from={other}/checkpoints/step-00000002"], "scratch with the weights of other:2"),
        ("no folder", ["weights.grow_from={other}", "model.hidden_size=32", "model.num_heads=2"],
         "scratch with the weights of other:9"),
        ("an empty folder", ["start.checkpoint={other}"], "branch from other:9 at step 0, 0 tokens, in None"),
        ("no folder", ["start.checkpoint={other}", "start.clock=keep"], f"branch from other:9 {IN_LONG}"),
        ("in the middle", [], "resume tiny:2 at step 2, 900 tokens, in short"),
        ("in its second phase", [], f"resume tiny:9 {IN_LONG}"),
        ("warm", ["weights.init_from={runs}/gone"], "resume tiny:2 at step 2, 900 tokens, in short"),
        ("branched", ["start.checkpoint={runs}/gone"], "resume tiny:2 at step 2, 900 tokens, in short"),
        ("in its second phase", ["phases.long.tokens=100", "phases.long.schedule.decay_tokens=0"], "nothing to train"),
        ("in the middle", ["phases.more={{tokens: 9, row_tokens: 64, batch_rows: 2, microbatch_tokens: 64}}"],
         "resume tiny:2 at step 2, 900 tokens, in short"),
    ],
)  # fmt: skip
def test_where_a_start_starts(place: Place, other: Path, there: str, overrides: list[str], decided: str) -> None:
    THERE[there](place)
    assert place.start(*(word.format(runs=place.runs, other=other) for word in overrides)) == decided


@pytest.mark.parametrize(
    ("there", "overrides", "kind", "message"),
    [
        ("finished", ["phases.long.tokens=9000"], ConfigError,
         r"(?s)step-00000009: trained to .*\n  phases\.long\.tokens: 2000 -> 9000\n"
         ".*Only what lies ahead can still be changed.*another name= and start.checkpoint="),
        ("no folder", ["start.checkpoint={other}", "model.num_layers=4"], ConfigError, "4 here, 1 there"),
        ("no folder", ["start.checkpoint={other}", "optim={{name: adamw, lr: 1}}"], ConfigError, "has adamw"),
        ("no folder", ["start.checkpoint={other}", "start.clock=keep", "phases.long=null"], ConfigError,
         "is at 4,100 tokens, this run ends at 4,000"),
        ("no folder", ["weights.init_from={other}", "model.num_layers=4"], ConfigError, "4 here, 1 there"),
        ("no folder", ["weights.init_from={runs}-gone"], DataError, "runs-gone: no such folder"),
    ],
)  # fmt: skip
def test_what_is_refused(
    place: Place, other: Path, there: str, overrides: list[str], kind: type[RunError], message: str
) -> None:
    """The run's folder is unchanged, so the corrected start can use the same name."""
    THERE[there](place)
    folder = place.runs / "tiny"
    before = {file: file.read_bytes() for file in folder.glob("[!.]*.*")}
    with pytest.raises(RunError, match=message) as refused:
        place.start(*(word.format(runs=place.runs, other=other) for word in overrides))
    assert type(refused.value) is kind
    assert {file: file.read_bytes() for file in folder.glob("[!.]*.*")} == before
    assert there != "no folder" or not folder.exists()


@pytest.mark.parametrize("there", ["in the middle", "an average", "all damaged"])
def test_fresh_starts_from_scratch_whatever_is_there(place: Place, there: str) -> None:
    THERE[there](place)
    old = sorted(path.name for path in (place.runs / "tiny").glob("checkpoints/*"))
    assert place.start("seed=6", fresh=True) == "scratch"
    aside = [path.name for path in place.runs.glob("tiny.until-*/checkpoints/*")]
    assert sorted(aside) == old and not (place.runs / "tiny/checkpoints").exists()


def test_a_fresh_start_asks_again_for_what_a_first_start_begins_with(place: Place, other: Path) -> None:
    """A checkpoint that is moved aside must not be resumed from."""
    place.has(steps=MIDDLE)
    assert place.start(f"weights.init_from={other}", fresh=True) == "scratch with the weights of other:9"


# --- the data of a start -------------------------------------------------------------------------------------------

DATA = {"tokenizer": "t", "shards": "s", "lengths": "l", "token counts": "c", "validation shards": "v"}
OWN, KEEPING, RESTARTING = None, StartConfig(checkpoint="other"), StartConfig(checkpoint="other", data="restart")


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in DATA.items() if key != name}


@pytest.mark.parametrize(
    ("branch", "here", "saved"),
    [
        pytest.param(OWN, DATA, DATA, id="the same"),
        pytest.param(OWN, DATA | {"validation more": "w"}, DATA | {"validation more": "w"}, id="held-out text added"),
        pytest.param(OWN, without("validation shards"), DATA, id="held-out text left out stays known"),
        pytest.param(OWN, without("token counts"), DATA, id="counts left out stay known"),
        pytest.param(KEEPING, DATA, DATA, id="a branch, the same"),
        pytest.param(KEEPING, DATA | {"validation shards": "x"}, DATA | {"validation shards": "x"},
                     id="a branch has its own held-out text"),
        pytest.param(KEEPING, without("token counts"), without("token counts"), id="a branch has its own counts"),
        pytest.param(RESTARTING, {"tokenizer": "t", "shards": "x"}, {"tokenizer": "t", "shards": "x"},
                     id="a branch with text of its own"),
        pytest.param(OWN, DATA | {"shards": "x"}, "hash of shards is s, now it is x.*another name=", id="other text"),
        pytest.param(OWN, DATA | {"validation shards": "x"}, "measured on other held-out text", id="held-out text"),
        pytest.param(OWN, DATA | {"token counts": "x"}, "of token counts is c, now it is x", id="other counts"),
        pytest.param(OWN, without("shards"), "hash of shards is s, now it is absent", id="no text"),
        pytest.param(OWN, DATA | {"shards of web": "x"}, "of shards of web is absent", id="a stream more"),
        pytest.param(OWN, DATA | {"tokenizer": "x"}, "hash of tokenizer is t, now it is x", id="another tokenizer"),
        pytest.param(KEEPING, DATA | {"shards": "x"}, "start.data=restart", id="a branch that keeps other text"),
    ],
)  # fmt: skip
def test_the_data_of_a_start_are_those_of_the_run_or_named(
    branch: StartConfig | None, here: dict[str, str], saved: dict[str, str] | str
) -> None:
    start = Start(Checkpoint(Path("step"), replace(state_of(3), data=DATA), CONFIG, False), [], branch)
    with pytest.raises(DataError, match=saved) if isinstance(saved, str) else nullcontext():
        assert check_same_data(start, CONFIG, here) == saved


def test_a_start_from_scratch_takes_the_data_as_they_are() -> None:
    assert str(Start(None, [])) == "scratch", "in the banner"
    assert check_same_data(Start(None, []), CONFIG, {"tokenizer": "any"}) == {"tokenizer": "any"}
