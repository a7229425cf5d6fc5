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
from modernbert_train.data.shuffle import ShuffledPieces

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
    sizes = [len(shard) for shard in shards]
    return BatchPlanner(config, ShuffledPieces(sizes, lengths, config.data.shuffle_block_shards, config.seed))


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
@given(Shards, st.sampled_from([(64,), (16,), (32, 32)]), st.integers(0, 2**31 - 1))
def test_epochs_follow_each_other_without_a_seam(
    shards: list[list[int]], row_tokens: tuple[int, ...], seed: int
) -> None:
    """Given out and waiting, together: every token of the finished epochs once, and the begun one up to its place.

    This holds across a change of phase that keeps the row length.
    """
    config = RunConfig(**{**vars(run(*row_tokens)), "seed": seed})
    lengths = np.array([length for shard in shards for length in shard])
    plan = planner(config, shards)
    given_out = pieces_of(plan)
    state = plan.state_dict()
    pieces = ShuffledPieces([len(shard) for shard in shards], lengths, config.data.shuffle_block_shards, seed)
    expected: list[Piece] = []
    for epoch in range(state["epoch"] + 1):
        for block in range(pieces.num_blocks):
            layout = [Piece(epoch, *piece) for piece in pieces.block(epoch, block, row_tokens[0] - 2).tolist()]
            at_end = (epoch, block) == (state["epoch"], state["block"])
            expected += layout[: state["taken"]] if at_end else layout
            if at_end:
                break
    assert Counter(given_out + waiting(state)) == Counter(expected)
    every_token = Counter((d, t) for d, length in enumerate(lengths) for t in range(length))
    for epoch in range(state["epoch"]):
        mine = [piece for piece in given_out + waiting(state) if piece.epoch == epoch]
        assert Counter((p.document, t) for p in mine for t in range(p.start, p.start + p.length)) == every_token
    assert state["left_out"] == 0


@settings(max_examples=50, deadline=None)
@given(Shards, st.sampled_from([(32, 64), (64, 16), (16, 64, 32), (32, 64, 64)]))
def test_another_row_length_begins_an_epoch_and_counts_what_it_leaves_out(
    shards: list[list[int]], row_tokens: tuple[int, ...]
) -> None:
    """No token twice in an epoch; and given out, waiting and left out are together all that the epochs held."""
    config = run(*row_tokens)
    plan = planner(config, shards)
    plans = list(plan)
    state = plan.state_dict()
    pieces = pieces_of(plans) + waiting(state)
    assert max(tokens_in(pieces).values()) == 1
    num_tokens = sum(length for shard in shards for length in shard)
    assert sum(piece.length for piece in pieces) + state["left_out"] == num_tokens * state["epoch"] + state["placed"]
    by_rows: dict[int, set[int]] = {}
    for each in plans:
        by_rows.setdefault(each.row_tokens, set()).update(piece.epoch for row in each.rows for piece in row)
    assert sum(map(len, by_rows.values())) == len(set.union(*by_rows.values()))  # no epoch is cut in two ways


def test_what_is_left_out_by_hand() -> None:
    """Ten documents of 30 tokens, of which a row of 32 holds one: what an epoch has left is whole documents."""
    plans = list(planner(run(32, 64), [[30] * 10]))
    before = [plan for plan in plans if plan.row_tokens == 32]
    rows = sum(plan.num_rows for plan in before)
    after = plans[len(before)]
    assert before[-1].left_out == 0
    assert after.left_out == 30 * (-rows % 10)
    assert {piece.epoch for piece in pieces_of(before)} == set(range(-(-rows // 10)))
    assert min(piece.epoch for piece in pieces_of([after])) == -(-rows // 10)


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
        assert all(piece.epoch <= plan.epoch for row in plan.rows for piece in row)
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


def test_a_later_phase_warms_up_by_its_own_tokens() -> None:
    config = run(64, 64)
    growing = PhaseConfig(**{**vars(config.phases["p1"]), "batch_warmup": config.phases["p0"].batch_warmup})
    config = RunConfig(**{**vars(config), "phases": {**config.phases, "p1": growing}})
    rows = [plan.num_rows for plan in planner(config, [[62] * 40]) if plan.phase == "p1"]
    assert rows == sorted(rows) and rows[0] < 4 and rows[-1] == 4


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
