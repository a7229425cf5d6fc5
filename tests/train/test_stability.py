"""NaN, infinity and spikes in whole runs: detected before the update, located, handled, and the same after a kill.

If these break, one bad document or one flipped bit ends weeks of training, or enters every later checkpoint.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from modernbert_train.__main__ import main, read_run
from modernbert_train.checkpoints.checkpoint import Checkpoint
from modernbert_train.checkpoints.saved_state import GuardState
from modernbert_train.errors import UnstableRun
from modernbert_train.models.layers import GeGLU
from modernbert_train.train import session
from modernbert_train.train.checkpointing import Checkpoints
from tests.support.faulty import Fault, Killed, at_fault, first_document
from tests.support.runs import assert_same_state, newest, records
from tests.support.tiny_run import TinyRun

# 8 steps of 4 microbatches, each step saved
SHORT = (
    "phases.long=null",
    "phases.short.batch_warmup=null",
    "phases.short.microbatch_tokens=128",
    "phases.short.schedule.warmup_tokens=0",
    "data.validation=null",
    "checkpoint.interval_steps=1",
    "checkpoint.keep=100",
    "model.attention_out_dropout=0.1",
)
NAN = Fault("forward", steps=(4,), microbatch=2)


def checkpoint(folder: Path, step: int) -> Checkpoint:
    found = newest(folder, step)
    assert found.step == step
    return found


def guard_of(folder: Path, step: int) -> GuardState:
    training = checkpoint(folder, step).state.training
    assert training is not None
    return training.stability


def assert_same_run(one: Path, other: Path) -> None:
    assert records(one, "step") == records(other, "step")
    assert records(one, "fault") == records(other, "fault")
    last = records(one, "step")[-1]["step"]
    assert_same_state(checkpoint(one, last), checkpoint(other, last))
    assert guard_of(one, last) == guard_of(other, last)


@pytest.mark.runs
@pytest.mark.parametrize("optimizer", [pytest.param("stable_adamw", marks=pytest.mark.slow), "adamw"])
def test_skip_leaves_weights_moments_and_step_counts_as_they_were(
    tiny_run: TinyRun, tmp_path: Path, optimizer: str
) -> None:
    """Clock and data advance; the record names rank, microbatch, layer and the exact document."""
    workers = f"data.num_workers={int(optimizer == 'adamw')}"  # plans run ahead of the current batch
    words = tiny_run(*SHORT, f"optim.name={optimizer}", "stability.non_finite=skip", workers)
    with at_fault(NAN):
        assert main(["train", *words]) == 0
    run = tmp_path / "runs/tiny"
    before, after = checkpoint(run, 3), checkpoint(run, 4)
    assert_same_state(before, after)
    assert after.state.tokens > before.state.tokens
    assert not torch.equal(next(iter(checkpoint(run, 5).weights().values())), next(iter(after.weights().values())))
    assert [entry["step"] for entry in records(run, "step")] == [1, 2, 3, 5, 6, 7, 8]

    (fault,) = records(run, "fault", "faults.jsonl")
    assert (fault["fault"], fault["action"], fault["step"], fault["loss"]) == ("non_finite", "skip", 4, "nan")
    assert (fault["tokens_before"], fault["tokens"]) == (before.state.tokens, after.state.tokens)
    (found,) = fault["microbatches"]
    assert (found["rank"], found["microbatch"], found["place"]) == (0, 2, "model.layers.2.mlp, forward")
    assert found["documents"] == [first_document(words, step=4, microbatch=2)]
    skipped_updates = [
        {"step": 4, "fault": "non_finite", "action": "skip", "tokens": (fault["tokens_before"], fault["tokens"])}
    ]
    assert guard_of(run, 8)["skipped_updates"] == skipped_updates
    (line,) = records(run, "fault")
    assert line["step"] == 4 and "microbatches" not in line


@pytest.mark.runs
def test_stop_ends_the_run_before_the_update_and_skipping_continues_from_there(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gradient that is not finite although the loss is: the message locates it; the same command with another policy
    gives the same result as that policy from the start."""
    words = tiny_run(*SHORT, "compute.activation_checkpointing=true")  # layers are recomputed within the search too
    with at_fault(Fault("backward", steps=(4,), microbatch=1)):
        assert main(["train", *words]) == 70
        error = capsys.readouterr().err
        assert newest(tmp_path / "runs/tiny").step == 3
        assert main(["train", *words, "stability.non_finite=skip"]) == 0
        assert main(["train", *words, "stability.non_finite=skip", "name=whole"]) == 0
    document = first_document(words, step=4, microbatch=1)["document"]
    assert f"rank 0, microbatch 1, model.layers.2.mlp.Wo, backward, documents {document};" in error
    assert "step 4, " in error and "stability.non_finite=stop" in error and "faults.jsonl" in error
    assert "Traceback" not in error
    assert_same_run(tmp_path / "runs/tiny", tmp_path / "runs/whole")
    assert [each["action"] for each in records(tmp_path / "runs/tiny", "fault", "faults.jsonl")] == ["stop", "skip"]


@pytest.mark.runs
@pytest.mark.parametrize("action", ["skip", "stop"])
def test_a_search_that_runs_out_of_memory_is_reported_as_what_it_looked_for(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    """The step itself fitted; a NaN reported as "out of memory" would mislead the user."""

    def full(self: GeGLU, x_TD: torch.Tensor) -> torch.Tensor:
        if self.training and not torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return of_step(self, x_TD)

    words = tiny_run(*SHORT, f"stability.non_finite={action}")
    with at_fault(NAN):
        of_step = GeGLU.forward
        with patch.object(GeGLU, "forward", full):
            assert main(["train", *words]) == (0 if action == "skip" else 70)
    (fault,) = records(tmp_path / "runs/tiny", "fault", "faults.jsonl")
    assert (fault["fault"], fault["action"], fault["step"], fault["loss"]) == ("non_finite", action, 4, "nan")
    (found,) = fault["microbatches"]
    place = "layer unknown: the search for it ran out of memory after model.layers.0.mlp_norm, forward"
    assert (found["microbatch"], found["place"]) == (2, place)
    said = capsys.readouterr()
    assert place in said.err + said.out
    assert "step 4 ran out of memory" not in said.err and not (tmp_path / "runs/tiny/halved.json").exists()


@pytest.mark.slow
def test_a_killed_run_skips_again_what_it_skipped_although_the_fault_does_not_come_again(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    """A flipped bit is not in the data: only the record can make the repeated steps equal to the first."""
    words = tiny_run(*SHORT, "stability.non_finite=skip", "checkpoint.interval_steps=3")
    once = Fault("forward", steps=(4,), once=True)
    with at_fault(once):
        assert main(["train", *words, "name=whole"]) == 0
    with at_fault(once, kill_at=5), pytest.raises(Killed):
        main(["train", *words])
    assert main(["train", *words]) == 0  # from step 3
    run = tmp_path / "runs/tiny"
    assert [each["step"] for each in records(run, "resume")] == [3]
    assert_same_run(run, tmp_path / "runs/whole")
    (fault,) = records(run, "fault", "faults.jsonl")
    assert f"points to the hardware of {socket.gethostname()}" in fault["microbatches"][0]["place"]


@pytest.mark.runs
@pytest.mark.parametrize("once", [True, False])
def test_a_fault_that_does_not_come_again_blames_its_machine_and_one_of_the_data_none(
    tiny_run: TinyRun, once: bool
) -> None:
    """Slurm excludes the machine at the next start; a bad document would exclude a healthy one each time."""
    with at_fault(Fault("forward", steps=(2,), once=once)), pytest.raises(UnstableRun) as raised:
        session.train(read_run(tiny_run(*SHORT)))
    assert raised.value.at_fault == ((0, socket.gethostname()) if once else None)


@pytest.mark.runs
def test_roll_back_takes_the_weights_of_the_checkpoint_and_never_repeats_its_batches(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    """It is saved at once, so a kill before or after it makes no difference."""
    words = tiny_run(*SHORT, "stability.non_finite=roll_back", "checkpoint.interval_steps=3")
    fault = Fault("forward", steps=(5,))
    with at_fault(fault):
        assert main(["train", *words, "name=whole"]) == 0
    whole = tmp_path / "runs/whole"
    assert_same_state(checkpoint(whole, 3), checkpoint(whole, 5))
    assert [each["step"] for each in records(whole, "step")] == [1, 2, 3, 4, 6, 7, 8]
    (entry,) = records(whole, "fault", "faults.jsonl")
    assert (entry["action"], entry["to"]) == ("roll_back", "step-00000003")
    (skipped_updates,) = guard_of(whole, 8)["skipped_updates"]
    assert skipped_updates["tokens"] == (checkpoint(whole, 3).state.tokens, entry["tokens"])

    once = Fault("forward", steps=(5,), once=True)
    with at_fault(once, kill_at=5), pytest.raises(Killed):  # rolled back, not yet saved
        main(["train", *words])
    with at_fault(kill_at=7), pytest.raises(Killed):
        main(["train", *words])
    assert main(["train", *words]) == 0
    run = tmp_path / "runs/tiny"
    assert_same_state(checkpoint(run, 8), checkpoint(whole, 8))
    assert records(run, "step") == records(whole, "step")


@pytest.mark.runs
@pytest.mark.parametrize(
    ("policy", "times", "message"),
    [
        (["skip", "stability.max_skips=2"], 2, "stability.max_skips=2 is reached"),
        (["roll_back", "stability.max_roll_backs=2"], 2, "stability.max_roll_backs=2 is reached"),
        (["roll_back", "checkpoint.interval_steps=100"], 0, "no checkpoint of this phase to roll back to"),
    ],
)
def test_a_fault_that_stays_ends_the_run(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: list[str], times: int, message: str
) -> None:
    """After the configured number of times: a diverged run would skip the rest of its data at full cost."""
    with at_fault(Fault("forward", steps=tuple(range(3, 9)))):
        assert main(["train", *tiny_run(*SHORT), f"stability.non_finite={policy[0]}", *policy[1:]]) == 70
    assert message in capsys.readouterr().err
    actions = [each["action"] for each in records(tmp_path / "runs/tiny", "fault", "faults.jsonl")]
    assert actions == [policy[0]] * times + ["stop"]


@pytest.mark.runs
def test_weights_that_are_not_finite_are_never_saved_nor_skipped_over(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint with NaN would be the newest, and every restart would use it."""
    real = Checkpoints.after_step

    def damage(self: Checkpoints, state: Any, *given: Any, **named: Any) -> bool:
        if state.timestamp.batch.value == 3:
            dict(state.model.named_parameters())["model.model.layers.1.attn.Wqkv.weight"].data[0, 0] = float("nan")
        return real(self, state, *given, **named)

    monkeypatch.setattr(Checkpoints, "after_step", damage)
    assert main(["train", *tiny_run(*SHORT)]) == 70
    # the next step detects them before the pending checkpoint is found to be bad
    assert "not finite" in (error := capsys.readouterr().err) and "model.layers.1.attn.Wqkv" in error
    assert newest(tmp_path / "runs/tiny").step == 2

    words = tiny_run(*SHORT, "name=later", "checkpoint.interval_steps=2", "stability.non_finite=skip")
    assert main(["train", *words, "compute.activation_checkpointing=true"]) == 70
    error = capsys.readouterr().err
    assert "weights not finite: model.layers.1.attn.Wqkv.weight; the weights themselves are not finite" in error


LONGER = (*SHORT, "phases.short.tokens=8000", "stability.spike_window_batches=8", "checkpoint.interval_steps=5")


@pytest.mark.slow
def test_a_spike_is_skipped_by_its_window_which_survives_a_kill(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Not before the window is full; then its microbatch and document are named; and a resumed run
    compares with the same losses."""
    early, late = Fault("spike", steps=(5,)), Fault("spike", steps=(12,), microbatch=3)
    words = tiny_run(*LONGER, "stability.spike=skip")
    with at_fault(early, late):
        assert main(["train", *words, "name=whole"]) == 0
    with at_fault(early, late, kill_at=11), pytest.raises(Killed):
        main(["train", *words])
    with at_fault(early, late):
        assert main(["train", *words]) == 0
    whole = tmp_path / "runs/whole"
    assert_same_run(tmp_path / "runs/tiny", whole)
    (fault,) = records(whole, "fault", "faults.jsonl")
    assert (fault["step"], fault["fault"], fault["action"]) == (12, "spike", "skip")
    assert fault["loss"] > fault["highest_normal_loss"] > records(whole, "step")[0]["loss"]
    assert fault["microbatches"][0]["microbatch"] == 3
    assert fault["microbatches"][0]["documents"][0] == first_document(words, step=12, microbatch=3)
    losses = [each["loss"] for each in records(whole, "step") if each["step"] <= 15]
    assert guard_of(whole, 15)["losses"] == pytest.approx(losses[-8:], rel=1e-6)


@pytest.mark.slow
def test_an_ignored_spike_is_recorded_and_changes_nothing(tiny_run: TinyRun, tmp_path: Path) -> None:
    """The default must not change a run, but must report the spike."""
    late = Fault("spike", steps=(12,))
    with at_fault(late):
        assert main(["train", *tiny_run(*LONGER)]) == 0
        words = tiny_run(*LONGER, "name=blind", "stability.spike_window_batches=1000")
        assert main(["train", *words]) == 0
    run, blind = tmp_path / "runs/tiny", tmp_path / "runs/blind"
    assert [each["step"] for each in records(run, "fault")] == [12]
    assert records(run, "step") == records(blind, "step") and records(blind, "fault") == []
    assert not (run / "faults.jsonl").exists()


@pytest.mark.runs
def test_roll_back_from_a_spike_goes_back_as_far_as_configured(tiny_run: TinyRun, tmp_path: Path) -> None:
    """The cause of a spike precedes it: the newest checkpoint may already be affected."""
    words = tiny_run(*LONGER, "stability.spike=roll_back", "stability.spike_roll_back_batches=5")
    with at_fault(Fault("spike", steps=(12,))):
        assert main(["train", *words]) == 0
    run = tmp_path / "runs/tiny"
    assert_same_state(checkpoint(run, 5), checkpoint(run, 12))
