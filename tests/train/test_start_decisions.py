"""Where a run starts, case by case, up to the point of building a trainer; nothing is trained here.

Whole runs of the same: test_start.py, test_branch.py, test_same_data.py. If a case is wrong, a restart loses trained
weights, or silently continues from another state.
"""

from __future__ import annotations

from collections.abc import Callable
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


def no_folder(place: Place) -> None:
    pass


def empty_folder(place: Place) -> None:
    (place.runs / "tiny").mkdir(parents=True)


def never_saved(place: Place) -> None:
    """The run died before its first checkpoint."""
    place.has(steps={})


def in_the_middle(place: Place) -> None:
    place.has(steps=MIDDLE)


def in_its_second_phase(place: Place) -> None:
    place.has(steps=LATER)


def finished(place: Place) -> None:
    place.has(steps=END)


def an_average(place: Place) -> None:
    place.has(steps=MIDDLE, average=True)


def all_damaged(place: Place) -> None:
    (place.has(steps=MIDDLE) / "checkpoints/step-00000002" / WEIGHTS).write_bytes(b"torn")


def half_written(place: Place) -> None:
    (place.has(steps={}) / "checkpoints/step-00000002.partial-1").mkdir(parents=True)


def warm(place: Place) -> None:
    """The run began with weights of a run that is gone by now."""
    place.has(f"weights.init_from={place.runs}/gone", steps=MIDDLE)


def branched(place: Place) -> None:
    """The run began at the checkpoint of a run that is gone by now."""
    place.has(f"start.checkpoint={place.runs}/gone", steps=MIDDLE)


IN_LONG = "at step 9, 4100 tokens, in long"


@pytest.mark.parametrize(
    ("there", "overrides", "decided"),
    [
        (no_folder, [], "scratch"),
        (never_saved, [], "scratch"),
        (half_written, [], "scratch"),
        (no_folder, ["weights.init_from={other}"], "scratch with the weights of other:9"),
        (no_folder, ["weights.init_from={other}/checkpoints/step-00000002"], "scratch with the weights of other:2"),
        (no_folder, ["weights.grow_from={other}", "model.hidden_size=32", "model.num_heads=2"],
         "scratch with the weights of other:9"),
        (empty_folder, ["start.checkpoint={other}"], "branch from other:9 at step 0, 0 tokens, in None"),
        (no_folder, ["start.checkpoint={other}", "start.clock=keep"], f"branch from other:9 {IN_LONG}"),
        (in_the_middle, [], "resume tiny:2 at step 2, 900 tokens, in short"),
        (in_its_second_phase, [], f"resume tiny:9 {IN_LONG}"),
        (warm, ["weights.init_from={runs}/gone"], "resume tiny:2 at step 2, 900 tokens, in short"),
        (branched, ["start.checkpoint={runs}/gone"], "resume tiny:2 at step 2, 900 tokens, in short"),
        (in_its_second_phase, ["phases.long.tokens=100", "phases.long.schedule.decay_tokens=0"], "nothing to train"),
        (in_the_middle, ["phases.more={{tokens: 9, row_tokens: 64, batch_rows: 2, microbatch_tokens: 64}}"],
         "resume tiny:2 at step 2, 900 tokens, in short"),
    ],
)  # fmt: skip
def test_where_a_start_starts(
    place: Place, other: Path, there: Callable[[Place], None], overrides: list[str], decided: str
) -> None:
    there(place)
    assert place.start(*(word.format(runs=place.runs, other=other) for word in overrides)) == decided


@pytest.mark.parametrize(
    ("there", "overrides", "kind", "message"),
    [
        (finished, ["phases.long.tokens=9000"], ConfigError, "phases.long.tokens: 2000 -> 9000"),
        (no_folder, ["start.checkpoint={other}", "model.num_layers=4"], ConfigError, "4 here, 1 there"),
        (no_folder, ["start.checkpoint={other}", "optim={{name: adamw, lr: 1}}"], ConfigError, "has adamw"),
        (no_folder, ["start.checkpoint={other}", "start.clock=keep", "phases.long=null"], ConfigError,
         "is at 4,100 tokens, this run ends at 4,000"),
        (no_folder, ["weights.init_from={other}", "model.num_layers=4"], ConfigError, "4 here, 1 there"),
    ],
)  # fmt: skip
def test_what_is_refused(
    place: Place, other: Path, there: Callable[[Place], None], overrides: list[str], kind: type[RunError], message: str
) -> None:
    """The run's folder is unchanged, so the corrected start can use the same name."""
    there(place)
    config = place.runs / "tiny/config.yaml"
    before = config.read_text() if config.exists() else None
    with pytest.raises(RunError, match=message) as refused:
        place.start(*(word.format(runs=place.runs, other=other) for word in overrides))
    assert type(refused.value) is kind
    assert (config.read_text() if config.exists() else None) == before
    assert there is not no_folder or not config.parent.exists()


@pytest.mark.parametrize("there", [in_the_middle, an_average, all_damaged])
def test_fresh_starts_from_scratch_whatever_is_there(place: Place, there: Callable[[Place], None]) -> None:
    there(place)
    old = sorted(path.name for path in (place.runs / "tiny").glob("checkpoints/*"))
    assert place.start("seed=6", fresh=True) == "scratch"
    aside = [path.name for path in place.runs.glob("tiny.until-*/checkpoints/*")]
    assert sorted(aside) == old and not (place.runs / "tiny/checkpoints").exists()


def test_a_fresh_start_asks_again_for_what_a_first_start_begins_with(place: Place, other: Path) -> None:
    """A checkpoint that is moved aside must not be resumed from."""
    place.has(steps=MIDDLE)
    assert place.start(f"weights.init_from={other}", fresh=True) == "scratch with the weights of other:9"


# --- the data of a start -------------------------------------------------------------------------------------------

THERE = {"tokenizer": "t", "shards": "s", "lengths": "l", "token counts": "c", "validation shards": "v"}
OWN, KEEPING, RESTARTING = None, StartConfig(checkpoint="other"), StartConfig(checkpoint="other", data="restart")


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in THERE.items() if key != name}


@pytest.mark.parametrize(
    ("branch", "here", "saved"),
    [
        pytest.param(OWN, THERE, THERE, id="the same"),
        pytest.param(OWN, THERE | {"validation more": "w"}, THERE | {"validation more": "w"}, id="held-out text added"),
        pytest.param(OWN, without("token counts"), THERE, id="counts left out stay known"),
        pytest.param(KEEPING, THERE, THERE, id="a branch, the same"),
        pytest.param(KEEPING, THERE | {"validation shards": "x"}, THERE | {"validation shards": "x"},
                     id="a branch has its own held-out text"),
        pytest.param(KEEPING, without("token counts"), without("token counts"), id="a branch has its own counts"),
        pytest.param(RESTARTING, {"tokenizer": "t", "shards": "x"}, {"tokenizer": "t", "shards": "x"},
                     id="a branch with text of its own"),
    ],
)  # fmt: skip
def test_data_that_a_start_can_continue_with(
    branch: StartConfig | None, here: dict[str, str], saved: dict[str, str]
) -> None:
    state = replace(state_of(3), data=THERE)
    assert check_same_data(Start(Checkpoint(Path("step"), state, CONFIG, False), [], branch), CONFIG, here) == saved


@pytest.mark.parametrize(
    ("branch", "here", "message"),
    [
        pytest.param(OWN, THERE | {"shards": "x"}, "hash of shards is s, now it is x.*another name=", id="other text"),
        pytest.param(OWN, without("shards"), "hash of shards is s, now it is absent", id="no text"),
        pytest.param(OWN, THERE | {"shards of web": "x"}, "of shards of web is absent", id="a stream more"),
        pytest.param(OWN, THERE | {"tokenizer": "x"}, "hash of tokenizer is t, now it is x", id="another tokenizer"),
        pytest.param(KEEPING, THERE | {"shards": "x"}, "start.data=restart", id="a branch that keeps other text"),
    ],
)  # fmt: skip
def test_data_exchanged_are_named(branch: StartConfig | None, here: dict[str, str], message: str) -> None:
    state = replace(state_of(3), data=THERE)
    with pytest.raises(DataError, match=message):
        check_same_data(Start(Checkpoint(Path("step"), state, CONFIG, False), [], branch), CONFIG, here)


def test_a_start_from_scratch_takes_the_data_as_they_are() -> None:
    assert check_same_data(Start(None, []), CONFIG, {"tokenizer": "any"}) == {"tokenizer": "any"}
