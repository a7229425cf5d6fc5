"""A sweep from its YAML to its best run, with a fake run instead of training; and two trials of a real one.

If this breaks, a team searches other values than configured, loses its results, or pays for points that could have been
rejected.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from optuna import create_study
from optuna.storages import RDBStorage, fail_stale_trials
from optuna.storages._heartbeat import HeartbeatThread
from optuna.trial import TrialState, create_trial

from launch.sweep import main
from launch.sweeps.heartbeats import heartbeats
from launch.sweeps.places import shares
from launch.sweeps.space import make_space
from launch.sweeps.sweep_results import show_results
from launch.sweeps.trial_rows import TrialRow, best_row, make_rows, ranked
from launch.sweeps.trial_store import REASON, Store
from modernbert_train.__main__ import read_run
from modernbert_train.config.load import differences
from modernbert_train.distributed import run_jobs
from modernbert_train.errors import ConfigError, StorageError
from tests.launch.fake_run import STEPS, loss
from tests.support.jobs import environment
from tests.support.sweeps import log, run_fake, spec
from tests.support.tiny_run import TinyRun


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake runs take a tenth of a second, so they are polled proportionally often."""
    for name in ("_POLL_SECONDS", "_LOOK_SECONDS"):
        monkeypatch.setattr(run_jobs, name, 0.02)


@pytest.mark.runs
def test_from_the_spec_to_the_best_yaml(tiny_run: TinyRun, tmp_path: Path) -> None:
    sweep = spec(tiny_run(), tmp_path, "trials=9", "overrides=[seed=6]")
    found = run_fake(sweep)
    space = make_space(sweep)
    text = show_results(space)
    folder = Path(sweep.folder)

    rates = {slot: attempts[-1].params["optim.lr"] for slot, attempts in found.items()}
    assert len(set(rates.values())) == 9 and all(1e-4 <= rate <= 1e-2 for rate in rates.values())
    best = min(rates, key=lambda slot: rates[slot])
    assert text.splitlines()[1].split()[:4] == [str(best), f"{loss(rates[best], STEPS):.5g}", "complete", "1,000"]
    assert "optim.lr  100%" in text  # the only key that matters
    own, trial = read_run([str(folder / "best.yaml")]), read_run([str(folder / f"trial-000{best}/trial.yaml")])
    assert own.optim.lr == rates[best] and own.seed == 6
    assert {key for key, _, _ in differences(own, trial)} <= {"name", "runs_folder"}
    assert (own.folder, trial.folder) == (f"{tmp_path}/home/sweep-best", f"{folder}/trial-000{best}")
    page = (folder / "results.html").read_text()
    assert all(f'"name":"trial-000{slot}"' in page for slot in rates)

    assert run_fake(sweep) and log(sweep, "start") == sorted(log(sweep, "start"))  # over: no trial starts again
    assert len(log(sweep, "start")) == 9


@pytest.mark.runs
def test_what_becomes_of_trials_that_do_not_finish(tiny_run: TinyRun, tmp_path: Path) -> None:
    """A crash is tried again, a wrong input never, and neither counts as a figure."""
    plays = ("0 exit 65", "1 exit 70", "2 diverge", "3 silent", "5 nan")
    sweep = spec(tiny_run(), tmp_path, "trials=6", "attempts=2")
    found = run_fake(sweep, *plays)
    ends = {slot: (len(tries), tries[-1].state, tries[-1].user_attrs.get(REASON)) for slot, tries in found.items()}
    assert ends == {
        0: (1, TrialState.FAIL, "exit code 65: Error: as told"),
        # the second attempt resumes after the fifth step, where the first one crashed
        1: (2, TrialState.COMPLETE, None),
        2: (1, TrialState.PRUNED, "diverged: non_finite at 500 tokens"),
        3: (1, TrialState.FAIL, "finished without recording validation.loss"),
        4: (1, TrialState.COMPLETE, None),
        5: (1, TrialState.PRUNED, "undefined: validation.loss is not a number"),
    }
    assert [row.state for row in make_rows(Store(make_space(sweep)), Path(sweep.folder))] == [
        "failed", "complete", "diverged", "failed", "complete", "undefined",
    ]  # fmt: skip


@pytest.mark.runs
def test_failed_trials_end_the_command_with_their_code_and_are_repeated_on_request(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipeline would take a sweep of failures for a success; and with its values a repeated trial is comparable."""
    sweep, shown = spec(tiny_run(), tmp_path, "attempts=1"), [str(tmp_path / "sweep.yaml"), "--results"]
    first = run_fake(sweep, "0 exit 65", "1 exit 70")
    assert main(shown) == 65
    said = capsys.readouterr().err
    assert "2 of 3 trials failed; all others are kept. Add --retry to repeat what failed" in said
    assert f"trial 0: exit code 65; {sweep.folder}/trial-0000/output.txt" in said and "trial 1: exit code 70;" in said
    assert len(log(sweep, "start")) == 3

    assert run_fake(sweep) == run_fake(sweep) and len(log(sweep, "start")) == 3  # only on request
    again = run_fake(sweep, retry=True)
    assert [[each.state for each in tries] for tries in again.values()] == [[TrialState.COMPLETE]] * 3
    assert [tries[-1].params for tries in again.values()] == [tries[-1].params for tries in first.values()]
    assert log(sweep, "start").count("trial-0002") == 1 and main(shown) == 0


@pytest.mark.runs
def test_a_mistake_of_every_point_is_reported_once_and_leaves_the_name_free(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A night of trials that all end at the same key; after its correction the sweep could not have its name."""
    file = str(tmp_path / "sweep.yaml")
    sweep = spec(tiny_run(), tmp_path)
    for words, code, message in (
        ("[phases.long.microbatch_tokens=200]", 78, "phases.long.microbatch_tokens=200 is not a multiple"),
        ("[weights.init_from=nobody]", 65, "nobody: no such folder"),
        (f"[data.train={tmp_path}/gone]", 65, "gone"),
    ):
        assert main([file, f"overrides={words}"]) == code
        assert message in capsys.readouterr().err
    assert not Path(sweep.folder, "sweep.db").exists()
    assert all(tries[-1].state == TrialState.COMPLETE for tries in run_fake(sweep).values())


@pytest.mark.runs
def test_a_full_disk_ends_the_worker_and_no_trial(tiny_run: TinyRun, tmp_path: Path) -> None:
    """The parallel trial finishes, no new one begins, and the next start continues all of them."""
    sweep = spec(tiny_run(), tmp_path, "trials=3", "workers=2")
    with pytest.raises(StorageError, match="as told"):
        run_fake(sweep, "0 exit 74", "1 slow")
    assert sorted(log(sweep, "start")) == ["trial-0000", "trial-0001"] and log(sweep, "end") == ["trial-0001"]
    states = [[each.state for each in tries] for tries in run_fake(sweep).values()]
    assert states == [[TrialState.FAIL, TrialState.COMPLETE], [TrialState.COMPLETE], [TrialState.COMPLETE]]


@pytest.mark.runs
def test_bad_points_are_refused_before_they_start(tiny_run: TinyRun, tmp_path: Path) -> None:
    """They are reported to the sampler as bad, with `check`'s reason."""
    space = "{model.num_layers: {choices: [5, 4]}}"  # the first point too, if another is good
    sweep = spec(tiny_run(), tmp_path, "sampler=grid", "trials=null", space=space)
    found = run_fake(sweep)
    assert found[1][0].state == TrialState.COMPLETE
    assert found[0][0].state == TrialState.PRUNED and "ends in a local layer" in found[0][0].user_attrs[REASON]
    assert log(sweep, "start") == ["trial-0001"] and len(found[0]) == 1


@pytest.mark.runs
def test_lagging_trials_end_early(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Compared with other trials at the same number of tokens."""
    sweep = spec(
        tiny_run(), tmp_path, "sampler=grid", "trials=null", "startup_trials=3",
        "prune={name: median, interval_tokens: 200, min_tokens: 400}",
        space="{optim.lr: {choices: [1e-4, 2e-4, 3e-4, 9e-3]}}",
    )  # fmt: skip
    last = run_fake(sweep, "3 slow")[3][-1]
    assert last.state == TrialState.PRUNED and last.user_attrs[REASON].startswith("pruned at")
    assert set(last.intermediate_values) >= {200, 400} and len(log(sweep, "step")) < 4 * STEPS
    assert "eval" in (Path(sweep.folder) / "trial-0003/trial.yaml").read_text()
    assert read_run([f"{sweep.folder}/trial-0003/trial.yaml"]).eval.interval_tokens == 200


@pytest.mark.runs
def test_a_sweep_grows_but_never_changes(tiny_run: TinyRun, tmp_path: Path) -> None:
    """One table must not mix figures of two different searches."""
    run = tiny_run()
    first = run_fake(spec(run, tmp_path, "trials=1"))
    more = run_fake(spec(run, tmp_path, "trials=2"))
    assert more[0][0].params == first[0][0].params and len(more) == 2
    with pytest.raises(ConfigError, match=r"space\.optim\.lr\.high: 0\.01 -> 0\.1"):
        run_fake(spec(run, tmp_path, space="{optim.lr: {low: 1e-4, high: 1e-1, log: true}}"))
    with pytest.raises(ConfigError, match="run: seed: 5 -> 8"):
        run_fake(spec(run, tmp_path, "overrides=[seed=8]"))


@pytest.mark.runs
def test_two_workers_that_fill_a_trial_at_the_same_moment_run_it_once(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Both check before either writes. If both ran it, one would overwrite the other."""
    store = Store(make_space(spec(tiny_run(), tmp_path, "trials=1")))
    store._fill()
    [first] = store.attempts()
    store.study.add_trial(create_trial(state=TrialState.WAITING, user_attrs=dict(first.user_attrs)))
    claimed = store.claim()
    assert claimed is not None and (claimed[0], claimed[1].number) == (0, first.number)
    assert store.claim() is None, "the second attempt runs at the same time as the first"
    assert [each.state for each in store.attempts()] == [TrialState.RUNNING, TrialState.FAIL]


def test_the_best_is_the_highest_if_configured() -> None:
    """direction=maximize, for an accuracy or a speed: best.yaml must not hold the worst."""
    rows = [TrialRow(slot, "complete", value, 0, {}, None, ()) for slot, value in enumerate((0.2, 0.9, 0.9, 0.1))]
    rows.append(TrialRow(4, "failed", None, 0, {}, "exit code 70", ()))
    for direction, order in (("minimize", [3, 0, 1, 2, 4]), ("maximize", [1, 2, 0, 3, 4])):
        best = best_row(rows, direction)
        assert best is not None and best.slot == order[0]
        assert [row.slot for row in ranked(rows, direction)] == order


@pytest.mark.runs
def test_the_database_cannot_be_reached(tiny_run: TinyRun, tmp_path: Path) -> None:
    sweep = spec(tiny_run(), tmp_path, f"storage=sqlite:///{tmp_path}/nowhere/sweep.db")
    with pytest.raises(StorageError, match="unable to open database file"):
        run_fake(sweep)


@pytest.mark.runs
@pytest.mark.filterwarnings("ignore:.*experimental", "ignore:Heartbeat of storage")
def test_a_database_that_is_locked_for_a_moment_costs_no_live_trial(tmp_path: Path) -> None:
    """Optuna's own heartbeat ends at the first error; once it does not, launch/sweeps/heartbeats.py can go."""
    url, short = f"sqlite:///{tmp_path}/sweep.db", {"connect_args": {"timeout": 0.1}}
    storage = RDBStorage(url, engine_kwargs=short, heartbeat_interval=1, grace_period=3)
    study = create_study(storage=storage)
    ours, theirs = study.ask(), study.ask()
    thread = HeartbeatThread(theirs._trial_id, storage)
    storage.record_heartbeat(ours._trial_id)
    thread.start()
    with heartbeats(storage, ours._trial_id, 0.2):
        time.sleep(0.3)
        with closing(sqlite3.connect(tmp_path / "sweep.db", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            time.sleep(1.5)
            other.execute("ROLLBACK")
        time.sleep(4.5)  # beyond the grace period
        fail_stale_trials(study)
    thread.join()
    assert [trial.state for trial in study.trials] == [TrialState.RUNNING, TrialState.FAIL]


def test_workers_share_gpus_and_cores(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Two trials on one GPU would be slower, or run out of memory."""
    run = tiny_run()
    found = shares(spec(run, tmp_path), 2, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, gpus=4, cores=16)
    assert found == [{"CUDA_VISIBLE_DEVICES": ids, "OMP_NUM_THREADS": "4"} for ids in ("4,5", "6,7")]
    found = shares(spec(run, tmp_path, "ranks=2"), 4, {}, gpus=0, cores=16)
    assert found == [{"OMP_NUM_THREADS": "2"}] * 4
    with pytest.raises(ConfigError, match="4 GPUs are here"):
        shares(spec(run, tmp_path, "ranks=2"), 3, {}, gpus=4, cores=16)


@pytest.mark.weekly
@pytest.mark.slow
def test_two_real_trials_by_the_command(tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through launch/run.py, two workers at a time; each trial's YAML then runs by itself."""
    run = tiny_run()
    overrides = "overrides=[phases.short.tokens=800, phases.short.batch_warmup=null, phases.long.tokens=600]"
    spec(run, tmp_path, space="{phases.long.schedule: {choices: [{decay_tokens: 0}, {decay_tokens: 500}]}}")
    words = [str(tmp_path / "sweep.yaml"), overrides, "sampler=grid", "trials=null", "workers=2"]
    command = [sys.executable, "-m", "modernbert_train", "sweep", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trial 0: validation.loss" in done.stdout and "its YAML:" in done.stdout
    folder = tmp_path / "home/sweep"
    trials = [read_run([str(folder / f"trial-000{slot}/trial.yaml")]) for slot in range(2)]
    assert {key for key, _, _ in differences(*trials)} == {"name", "phases.long.schedule.decay_tokens"}
    assert all(Path(trial.folder, "checkpoints").is_dir() for trial in trials)
    assert main([*words, "--results"]) == 0
    told = capsys.readouterr().out
    assert done.stdout.endswith(told) and told.count("complete  1,") == 2
