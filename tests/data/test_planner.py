"""The sequence of global batches: nothing lost, nothing twice, and the same again from any point.

If this breaks, a run that was stopped is another run, or a change of phase drops the text that was waiting.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modernbert_train.config.schema import (
    BatchWarmupConfig,
    DataConfig,
    ObjectiveConfig,
    PhaseConfig,
    RunConfig,
    StableAdamWConfig,
)
from modernbert_train.data.packing import SPECIAL_TOKENS, Piece
from modernbert_train.data.planner import BatchPlan, BatchPlanner
from modernbert_train.data.shuffle import DocumentOrder

Shards = st.lists(st.lists(st.integers(1, 150), min_size=1, max_size=8), min_size=1, max_size=6)


def run(*row_tokens: int, tokens: int = 1500, **data: int) -> RunConfig:
    """A run with one phase for each row length; the first has a growing batch."""
    phases = {}
    for index, row in enumerate(row_tokens):
        warmup = BatchWarmupConfig(start_rows=1, step_rows=2, tokens=tokens // 2) if index == 0 else None
        phases[f"p{index}"] = PhaseConfig(
            tokens=tokens, row_tokens=row, batch_rows=4, microbatch_tokens=2 * row, batch_warmup=warmup
        )
    settings = {"open_rows": 3, "max_open_rows_age": 6, "shuffle_block_shards": 2, **data}
    return RunConfig(
        name="t",
        data=DataConfig(train="train", tokenizer="tokenizer", **settings),
        optim=StableAdamWConfig(lr=1e-3),
        phases=phases,
    )


def planner(config: RunConfig, shards: Sequence[Sequence[int]]) -> BatchPlanner:
    lengths = np.array([length for shard in shards for length in shard], np.uint32)
    order = DocumentOrder([len(shard) for shard in shards], config.data.shuffle_block_shards, config.seed)
    return BatchPlanner(config, lengths, order)


def tokens_in(pieces: Iterable[Piece]) -> Counter[tuple[int, int, int]]:
    """How often each (epoch, document, token) occurs."""
    return Counter((p.epoch, p.document, token) for p in pieces for token in range(p.start, p.start + p.length))


def waiting(state: dict[str, Any]) -> list[Piece]:
    """Pieces that the packer holds but has not given out."""
    packer = state["packer"]
    rows = [*packer["ready"], *(row for _, row in packer["open"])]
    return [Piece(*piece) for row in rows for piece in row]


def pieces_of(plans: Iterable[BatchPlan]) -> list[Piece]:
    return [piece for plan in plans for row in plan.rows for piece in row]


@settings(max_examples=50, deadline=None)
@given(Shards, st.sampled_from([(64,), (32, 64), (64, 16), (32, 64, 64)]), st.data())
def test_stopping_anywhere_leaves_the_same_plans(
    shards: list[list[int]], row_tokens: tuple[int, ...], data: st.DataObject
) -> None:
    config = run(*row_tokens)
    whole = list(planner(config, shards))
    stop = data.draw(st.integers(0, len(whole)))
    first = planner(config, shards)
    begun = [next(first) for _ in range(stop)]
    state = json.loads(json.dumps(first.state_dict()))
    second = planner(config, shards)
    next(second)  # a state is taken over whole, whatever was there before
    second.load_state_dict(state)
    assert second.state_dict() == first.state_dict()
    assert begun + list(second) == whole


@settings(max_examples=50, deadline=None)
@given(Shards, st.sampled_from([(64,), (32, 64), (64, 16), (16, 64, 32)]), st.integers(0, 2**31 - 1))
def test_every_document_once_an_epoch_and_the_epochs_in_order(
    shards: list[list[int]], row_tokens: tuple[int, ...], seed: int
) -> None:
    """What was given out and what waits, together: all of the finished epochs, and the begun one up to its index.

    This holds across changes of the phase, to longer rows and to shorter ones.
    """
    config = RunConfig(**{**vars(run(*row_tokens)), "seed": seed})
    lengths = [length for shard in shards for length in shard]
    plan = planner(config, shards)
    order = DocumentOrder([len(shard) for shard in shards], config.data.shuffle_block_shards, seed)
    given_out = pieces_of(plan)
    state = plan.state_dict()
    begun: list[int] = []
    while len(begun) < state["index"]:
        begun += order.documents_from(state["epoch"], len(begun)).tolist()
    expected = [(epoch, document) for epoch in range(state["epoch"]) for document in range(len(lengths))]
    expected += [(state["epoch"], document) for document in begun[: state["index"]]]
    assert tokens_in(given_out + waiting(state)) == Counter(
        (epoch, document, token) for epoch, document in expected for token in range(lengths[document])
    )


@settings(max_examples=50, deadline=None)
@given(Shards, st.sampled_from([(64,), (32, 64), (64, 16)]))
def test_the_clock_counts_what_the_rows_hold(shards: list[list[int]], row_tokens: tuple[int, ...]) -> None:
    config = run(*row_tokens)
    clock = 0
    plans = list(planner(config, shards))
    for plan in plans:
        phase = config.phases[plan.phase]
        assert plan.tokens_before == clock < config.total_tokens
        assert plan.phase == f"p{clock // 1500}"  # a batch belongs to the phase in which it starts
        assert (plan.row_tokens, plan.microbatch_rows) == (phase.row_tokens, phase.microbatch_rows)
        assert len(plan.rows) == plan.num_rows
        used = [sum(piece.length + SPECIAL_TOKENS for piece in row) for row in plan.rows]
        assert all(0 < tokens <= plan.row_tokens for tokens in used) and sum(used) == plan.tokens
        clock += plan.tokens
    assert clock >= config.total_tokens


def test_the_batch_grows_by_the_clock() -> None:
    """Sizes 1 and 3 share 750 tokens as 1 to 3; rows are full, so the borders lie at 187.5 and 750 tokens."""
    plans = list(planner(run(64), [[62] * 40]))
    assert all(plan.tokens == 64 * plan.num_rows for plan in plans)
    assert [plan.num_rows for plan in plans][:7] == [1, 1, 1, 3, 3, 3, 4]
    assert [plan.tokens_before for plan in plans][:7] == [0, 64, 128, 192, 384, 576, 768]


def test_a_phase_may_have_a_mask_rate_of_its_own() -> None:
    config = run(64, 64)
    changed = PhaseConfig(**{**vars(config.phases["p1"]), "mask_rate": 0.15})
    config = RunConfig(
        **{**vars(config), "objective": ObjectiveConfig(mask_rate=0.4), "phases": {**config.phases, "p1": changed}}
    )
    rates = {plan.phase: plan.mask_rate for plan in planner(config, [[30] * 40])}
    assert rates == {"p0": 0.4, "p1": 0.15}


def test_a_single_short_document_fills_a_run_by_its_epochs() -> None:
    plans = list(planner(run(64), [[5]]))
    epochs = [piece.epoch for piece in pieces_of(plans)]
    assert sorted(epochs) == list(range(len(epochs))) and sum(plan.tokens for plan in plans) >= 1500


@pytest.mark.parametrize("batches", [1, 40, 200])
def test_the_state_does_not_grow_with_the_position(batches: int) -> None:
    """It is written with every checkpoint, also after a trillion tokens."""
    draw = np.random.default_rng(2)
    shards = [draw.integers(1, 150, 20).tolist() for _ in range(5)]
    plan = planner(run(64, tokens=10**6), shards)
    for _ in range(batches):
        next(plan)
    assert len(json.dumps(plan.state_dict())) < 2000
