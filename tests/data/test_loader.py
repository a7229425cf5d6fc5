"""Batches: the same for any number of ranks and workers and from any point on; each knows the documents in its rows.

If this breaks, a run depends on the machine it ran on, or resuming repeats or skips text.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from modernbert_train.__main__ import read_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.microbatches import share_of_rank
from modernbert_train.data.planner import BatchPlanner
from tests.support.batches import Row, make_loader, make_path, rows_of
from tests.support.tiny_run import TinyRun

pytestmark = [
    pytest.mark.runs,
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than this machine has cores
]


def global_batches(
    config: RunConfig, num_ranks: int, num_workers: int, state: dict[str, Any] | None = None
) -> Iterator[tuple[list[Row], dict[str, Any]]]:
    """The rows of each global batch in their order, out of every rank's own loader, and the state after it."""
    loaders = [make_loader(config, rank, num_ranks, num_workers) for rank in range(num_ranks)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    for steps in zip(*loaders, strict=True):
        assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
        assert all(step.plan == steps[0].plan for step in steps)
        plan = steps[0].plan
        numbers = tuple(range(plan.num_rows))
        shares = [share_of_rank(numbers, rank, num_ranks, plan.microbatch_rows) for rank in range(num_ranks)]
        assert len({len(share) for share in shares}) == 1
        found = {
            number: row
            for share, step in zip(shares, steps, strict=True)
            for number, row in zip(share, rows_of(step), strict=True)
        }
        yield [found[number] for number in numbers], loaders[0].state_dict()


@pytest.fixture
def whole(config: RunConfig) -> list[tuple[list[Row], dict[str, Any]]]:
    """Every global batch of the run on one rank without workers, with the state after it."""
    return list(global_batches(config, 1, 0))


def test_the_small_run_shows_everything(config: RunConfig, whole: list[Any]) -> None:
    """The other tests mean little if it had one batch size, one phase or one epoch."""
    plans = [step.plan for step in make_loader(config)]
    assert [(plan.phase, plan.num_rows) for plan in plans if plan.phase == "short"][0::6] == [
        ("short", 4),
        ("short", 8),
    ]
    assert plans[-1].phase == "long" and plans[-1].num_rows == 4
    assert max(stream.epoch for plan in plans for stream in plan.streams if plan.phase == "short") >= 1
    assert plans[-1].unused > 0
    assert len(whole[0][1]["streams"]) == len(config.data.all_streams)
    blocks = [stream["block"] for _, state in whole for stream in state["streams"].values()]
    assert max(blocks) >= 1
    used = {tuple(stream.tokens > 0 for stream in plan.streams) for plan in plans}
    assert (True,) in used or {(True, True, True), (True, True, False)} <= used


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 3), (2, 1)])
def test_ranks_and_workers_do_not_change_the_global_batches(
    config: RunConfig, whole: list[Any], num_ranks: int, num_workers: int
) -> None:
    assert list(global_batches(config, num_ranks, num_workers)) == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_says_what_its_rows_are_made_of(config: RunConfig, num_workers: int) -> None:
    """Errors name the documents of this list; workers have it already and do not send it back."""
    loader = make_loader(config, 1, 2, num_workers)
    steps = list(zip(make_path(config).planned.planner, loader, strict=True))
    assert len(steps) > 10
    for plan, step in steps:
        assert step.rows == share_of_rank(plan.rows, 1, 2, plan.microbatch_rows)
        assert len(step.rows) == sum(batch.num_rows for batch in step.microbatches)
    assert pickle.loads(pickle.dumps(step)).rows == ()  # as a worker sends it


@pytest.mark.parametrize(("num_ranks", "every"), [(1, 1), (4, 5)])
def test_resuming_at_any_batch_on_any_number_of_ranks_continues_equally(
    config: RunConfig, whole: list[Any], num_ranks: int, every: int
) -> None:
    for taken in range(1, len(whole) + 1, every):
        _, state = whole[taken - 1]
        saved = json.loads(json.dumps(state))
        assert list(global_batches(config, num_ranks, 0, saved)) == whole[taken:]


@pytest.mark.parametrize(("taken", "before", "after"), [(5, 3, 1), (9, 0, 2)])
def test_what_workers_had_prefetched_is_neither_lost_nor_repeated(
    config: RunConfig, whole: list[Any], taken: int, before: int, after: int
) -> None:
    loader = make_loader(config, num_workers=before)
    batches = iter(loader)
    for number in range(taken):
        assert rows_of(next(batches)) == whole[number][0]
    state = loader.state_dict()
    assert state == whole[taken - 1][1]
    del batches
    assert list(global_batches(config, 1, after, state)) == whole[taken:]
    again = [(rows_of(step), loader.state_dict()) for step in loader]  # the same loader, started again
    assert again == whole[taken:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_was_planned_ahead_is_the_next_batch_and_asks_for_no_plan(
    config: RunConfig, whole: list[Any], num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned ahead or on demand: the same batches and states, to the end. Planning twice would make a GPU wait."""
    plan = BatchPlanner.__next__
    busy = True  # the device, as far as the test is concerned
    late = 0

    def counted(planner: BatchPlanner) -> Any:
        nonlocal late
        late += not busy
        return plan(planner)

    monkeypatch.setattr(BatchPlanner, "__next__", counted)
    loader = make_loader(config, num_workers=num_workers)
    batches, found = iter(loader), []
    while True:
        loader.plan_ahead()
        loader.plan_ahead()  # one batch, for any number of calls
        busy = not found  # the first fills the workers
        step = next(batches, None)
        busy = True
        if step is None:
            break
        found.append((rows_of(step), loader.state_dict()))
    assert found == whole
    # the plan that comes after the last one says that it was the last
    assert late <= 1


def test_nothing_is_drawn_from_the_global_generator(config: RunConfig) -> None:
    """Dropout is drawn from it; starting to iterate once more, after a resumption, must not shift it."""
    before = torch.get_rng_state()
    list(make_loader(config))
    next(iter(make_loader(config, num_workers=1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_on_the_cpu_of_a_machine_with_gpus_takes_nothing_of_them(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned memory belongs to a GPU's context: half a gigabyte of GPU 0 for each process, which may be another's."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*pin_memory")  # torch warns if it is set without a GPU
        assert next(iter(make_loader(read_run(tiny_run()), 0, 1, 0))).microbatches
