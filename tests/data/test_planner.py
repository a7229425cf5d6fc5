"""The sequence of global batches: nothing lost, nothing twice, and the same again from any point.

If this breaks, a run that was stopped is another run, or a change of phase drops the text that was waiting. Several
streams are in test_mixture.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modernbert_train.clock import Clock
from modernbert_train.config.schema import MaskedLmConfig, RunConfig, StreamConfig
from modernbert_train.core.keyed_random import hash64
from modernbert_train.data.mixing import FairQueue
from modernbert_train.data.packing import Chunk, GreedyPacker
from modernbert_train.data.planner import BatchPlanner
from modernbert_train.data.shuffle import ShuffledChunks
from tests.support.planned import chunks_of, run, waiting

Shards = st.lists(st.lists(st.integers(1, 150), min_size=1, max_size=8), min_size=1, max_size=6)


def planner(config: RunConfig, shards: Sequence[Sequence[int]]) -> BatchPlanner:
    lengths = np.array([length for shard in shards for length in shard], np.uint32)
    sizes = [len(shard) for shard in shards]
    chunks = ShuffledChunks(sizes, lengths, config.data.shuffle_block_shards, config.seed)
    return BatchPlanner(config.data, Clock.of(config), {"train": chunks})


def later_phase(config: RunConfig, **keys: Any) -> RunConfig:
    """The same run with other keys in its second phase."""
    return replace(config, phases={**config.phases, "p1": replace(config.phases["p1"], **keys)})


def test_longer_rows_begin_with_what_waited_for_the_shorter_ones() -> None:
    """It was drawn first, and text that waits must not wait for the end of the run."""
    plan = planner(run(64, 256, packing_window=40, max_wait_rows=99), [[37] * 50, [20] * 50])
    before = next(each for each in plan if plan.tokens >= 1500)
    waited = waiting(plan.state_dict())
    assert before.row_tokens == 64 and len(waited) > 20
    after = next(plan)
    assert after.row_tokens == 256 and len(set(chunks_of([after])) & set(waited)) > 20


def test_shorter_rows_cut_what_was_meant_for_longer_ones() -> None:
    plans = list(planner(run(256, 64), [[400] * 30]))
    short = [chunk for chunk in chunks_of(plans) if chunk.length <= 62 and chunk.start % 254]
    assert {chunk.start % 254 for chunk in short} <= {62, 124, 186, 248}
    assert all(len(row) == 1 or sum(chunk.length + 2 for chunk in row) <= 64 for p in plans[-3:] for row in p.rows)


@pytest.mark.runs
@settings(max_examples=50, deadline=None)
@given(Shards, st.sampled_from([(64,), (32, 32), (16,)]))
def test_text_waits_for_a_bounded_number_of_rows(shards: list[list[int]], row_tokens: tuple[int, ...]) -> None:
    """From the batch that draws a chunk, at most max_wait_rows + packing_window + batch_rows rows go before it."""
    config = run(*row_tokens)
    bound = config.data.max_wait_rows + config.data.packing_window + 4
    plan = planner(config, shards)
    drawn: dict[Chunk, int] = {}  # chunk -> rows given out before the batch that drew it
    rows = 0
    for batch in plan:
        for chunk in [*chunks_of([batch]), *waiting(plan.state_dict())]:
            drawn.setdefault(chunk, rows)
        for index, row in enumerate(batch.rows):
            assert all(rows + index - drawn[chunk] <= bound for chunk in row)
        rows += batch.num_rows


def test_a_phase_may_start_a_new_pass() -> None:
    """restart_data: the rest of the earlier pass is skipped, as configured; drawn chunks are not."""
    config = run(64, 64)
    restarted = later_phase(config, restart_data=True)
    shards = [[62] * 100]
    whole, (first, second) = planner(config, shards), ([], [])
    assert {chunk.epoch for chunk in chunks_of(whole)} == {0}
    for plan in planner(restarted, shards):
        (first if plan.phase == "p0" else second).append(plan)
    assert {chunk.epoch for chunk in chunks_of(first)} == {0}
    assert {chunk.epoch for chunk in chunks_of(second)} == {1}
    state = (saved := planner(restarted, shards)).state_dict()
    for each in saved:
        state = json.loads(json.dumps(saved.state_dict()))
        if each.phase == "p1":
            break
    resumed = planner(restarted, shards)
    resumed.load_state_dict(state)
    assert list(resumed) == second[1:]  # a phase is entered once, also when the run is stopped in it


def test_the_batch_grows_by_the_clock() -> None:
    """Sizes 1 and 3 share 750 tokens as 1 to 3; rows are full, so the boundaries lie at 187.5 and 750 tokens."""
    plans = list(planner(run(64), [[62] * 40]))
    assert all(plan.tokens == 64 * plan.num_rows for plan in plans)
    assert [plan.num_rows for plan in plans][:7] == [1, 1, 1, 3, 3, 3, 4]
    assert [plan.tokens_before for plan in plans][:7] == [0, 64, 128, 192, 384, 576, 768]


def test_a_later_phase_warms_up_by_its_own_tokens() -> None:
    config = run(64, 64)
    config = later_phase(config, batch_warmup=config.phases["p0"].batch_warmup)
    rows = [plan.num_rows for plan in planner(config, [[62] * 40]) if plan.phase == "p1"]
    assert rows == sorted(rows) and rows[0] < 4 and rows[-1] == 4


def test_a_phase_may_have_a_mask_rate_of_its_own() -> None:
    config = replace(run(64, 64), objective=MaskedLmConfig(mask_rate=0.4))
    config = later_phase(config, objective={"mask_rate": 0.15})
    rates = {plan.phase: plan.objective.mask_rate for plan in planner(config, [[30] * 40])}
    assert rates == {"p0": 0.4, "p1": 0.15}


@pytest.mark.parametrize("batches", [1, 40, 200])
def test_the_state_does_not_grow_with_the_position(batches: int) -> None:
    """It is written with every checkpoint, also after a trillion tokens."""
    draw = np.random.default_rng(2)
    shards = [draw.integers(1, 150, 20).tolist() for _ in range(5)]
    plan = planner(run(64, tokens=10**6), shards)
    for _ in range(batches):
        next(plan)
    assert len(json.dumps(plan.state_dict())) < 2000


@pytest.mark.parametrize(
    ("streams", "mix_by", "expected"),
    [
        (1, "tokens", "ba33f424d0e02a83"),
        (3, "tokens", "db69a9c8a475d720"),
        (3, "documents", "89f0a78c493d5a04"),
        (10, "tokens", "77834984cbb0b244"),
    ],
)
def test_plans_are_those_of_earlier_versions(streams: int, mix_by: str, expected: str) -> None:
    """A run that began under an earlier version continues with the same batches: rows of 64, 256, 64."""
    names = [f"s{number}" for number in range(streams)]
    shares = {name: StreamConfig(path="", proportion=1 / (1 + number)) for number, name in enumerate(names)}
    config = run(64, 256, 64, tokens=20_000, streams=shares, mix_by=mix_by)
    order = {}
    for number, name in enumerate(names):
        draws = hash64(np.asarray(np.uint64(number)), np.arange(60 + 20 * number, dtype=np.uint64))
        lengths = (1 + draws % np.uint64(500)).astype(np.uint32)
        order[name] = ShuffledChunks([20] * (3 + number), lengths, 2, number)
    digest = hashlib.sha256()
    for plan in BatchPlanner(config.data, Clock.of(config), order):
        rows = [[list(chunk) for chunk in row] for row in plan.rows]
        counts = [[stream.name, stream.epoch, stream.tokens, stream.documents] for stream in plan.streams]
        digest.update(json.dumps([plan.phase, plan.tokens, rows, counts]).encode())
    assert digest.hexdigest()[:16] == expected


@pytest.mark.runs
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 10**13), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_the_compiled_queue_is_the_queue(weights: list[int], draw: Random) -> None:
    """Also where shares are counts of tokens of a corpus, whose products have more than 64 bits."""
    chunks = [[[number, 0, draw.randint(1, 1000)] for number in range(40)] for _ in weights]
    queue, at = FairQueue(weights), [0] * len(weights)
    expected = []
    while max(at) < 40:
        chosen = queue.give([chunks[stream][at[stream]][2] for stream in range(len(weights))])
        expected.append((chosen, at[chosen]))
        at[chosen] += 1
    packer = GreedyPacker(row_tokens=4096, window=1 << 10, max_wait=1 << 20)
    firsts, zeros = np.arange(len(weights)) * 40, np.zeros(len(weights), dtype=np.int64)
    lag = zeros.copy()
    columns = (firsts.copy(), firsts + 40, np.arange(len(weights)), zeros, False, np.array(weights), lag)
    packer.mix_many(np.array(chunks).reshape(-1, 3), columns, num_rows=1 << 20)
    assert [(chunk.epoch, chunk.document) for chunk in packer.waiting()] == expected
    assert lag.tolist() == queue.lag


def test_shares_of_many_digits_outlive_a_phase_of_shorter_rows() -> None:
    """A share of 16 digits is a weight of as many; the queue's lag from longer rows exceeds 64 bits."""
    proportions = {"a": 0.6171234567890123, "b": 0.3828765432109877}
    shares = {name: StreamConfig(path="", proportion=share) for name, share in proportions.items()}
    config = later_phase(run(8192, 16, tokens=90_000, streams=shares, packing_window=4), restart_data=True)
    order = {name: ShuffledChunks([9], np.full(9, 8000 + seed, np.uint32), 1, seed) for seed, name in enumerate("ab")}
    plans = list(BatchPlanner(config.data, Clock.of(config), order))
    tokens = [sum(each.tokens for plan in plans for each in plan.streams if each.name == name) for name in "ab"]
    assert tokens[0] / sum(tokens) == pytest.approx(0.617, abs=0.1)


PLACES_THAT_CANNOT_BE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a block beyond the last": (lambda at: at["streams"]["a"].update(block=10**9), r"streams\.a\.block: .* 1000000000"),
    "more chunks than the block has": (lambda at: at["streams"]["a"].update(taken=10**6), r"streams\.a\.taken: "),
    "an offset beyond the chunk": (lambda at: at["streams"]["a"].update(offset=10**9), r"streams\.a\.offset: "),
    "chunks longer than a row": (lambda at: at["streams"]["a"].update(laid_out_for=61), r"streams\.a\.laid_out_for: "),
    "taken of no layout": (lambda at: at["streams"]["a"].update(laid_out_for=0), r"streams\.a\.laid_out_for: "),
    "an epoch that no run reaches": (lambda at: at["streams"]["a"].update(epoch=10**12), r"streams\.a\.epoch: "),
    "an epoch beyond the trained tokens": (lambda at: at["streams"]["a"].update(epoch=1), r"streams\.a\.epoch: "),
    "fewer chunks than were given out": (
        lambda at: at["streams"]["a"].update(taken=at["streams"]["a"]["taken"] - 1), r"streams\.a: epoch 0, .* tokens",
    ),
    "another block": (lambda at: at["streams"]["a"].update(block=2), r"streams\.a: epoch 0, block 2, "),
    "another stream": (lambda at: at["streams"].update(b=at["streams"].pop("a")), r"streams: expected a, found b"),
    "rows of another phase": (lambda at: at["packer"].update(row_tokens=128), r"packer\.row_tokens: "),
    "a phase that no run has": (lambda at: at.update(phase="p2"), "phase: expected one of p0, p1, found p2"),
    "rows of another length": (lambda at: at["packer"].update(row_tokens=10**9), r"packer\.row_tokens: "),
    "a document beyond the last": (lambda at: _waiting(at).__setitem__(1, 48), r"packer\.waiting\[0\]: there are 48"),
    "a part beyond its document": (lambda at: _waiting(at).__setitem__(2, 149), r"packer\.waiting\[0\]: expected 1 to"),
    "a part longer than a row": (lambda at: _waiting(at).__setitem__(3, 63), r"packer\.waiting\[0\]: expected 1 to"),
    "a part of no tokens": (lambda at: _waiting(at).__setitem__(3, 0), r"packer\.waiting\[0\]: expected 1 to"),
    "a part of a later epoch": (lambda at: _waiting(at).__setitem__(0, 99), r"packer\.waiting\[0\]: stream a is in"),
    "a row that is too full": (
        lambda at: at["packer"]["ready"].append([list(_waiting(at))] * 9), r"packer\.ready\[\d\]: expected 1 to",
    ),
    "an empty row": (lambda at: at["packer"]["ready"].append([]), r"packer\.ready\[\d\]: expected 1 to"),
    "text that would be read again": (
        lambda at: at["streams"]["a"].update(block=0, taken=0, offset=0, given=0, laid_out_for=0),
        r"packer\.waiting\[0\]: \d+ tokens from \d+ of document \d+ lie beyond what stream a has given out",
    ),
    "text that was read already": (
        lambda at: (at.update(tokens=40_000), at["packer"].update(waiting=[])), "streams: .* 0 of them wait; the other",
    ),
    "text that would be left out": (
        lambda at: at["packer"]["waiting"].clear(), "streams: .* 0 of them wait; the other",
    ),
    "the same chunk twice": (
        lambda at: at["packer"]["waiting"].append(at["packer"]["waiting"][0]),
        r"packer\.waiting\[\d\]: \d+ tokens from \d+ of document \d+ are in another chunk too",
    ),
    "a part from within a chunk": (
        lambda at: _waiting(at).__setitem__(slice(2, 4), [_waiting(at)[2] + 1, _waiting(at)[3] - 1]),
        r"packer\.waiting\[0\]: rows cut documents into chunks of 62, 126 tokens, found 25 from 125",
    ),
    "a part of a chunk": (
        lambda at: _waiting(at).__setitem__(3, 3), r"packer\.waiting\[0\]: rows cut documents .* found 3 from",
    ),
    "more rows than tokens": (
        lambda at: at["packer"]["waiting"][0].__setitem__(0, 10**15), r"packer\.waiting\[0\]: expected at most a row",
    ),
    "shares of two streams": (lambda at: at.update(weights=[1, 1]), "weights: expected a number for each of 1"),
    "a share below 0": (lambda at: at.update(weights=[-1]), "weights: expected shares from 0 up"),
    "a queue that has lost count": (lambda at: at.update(lag=[7]), "lag: expected numbers that add up to 0"),
}  # fmt: skip


def _waiting(at: Any) -> Any:
    return at["packer"]["waiting"][0][1]


@pytest.mark.parametrize("case", PLACES_THAT_CANNOT_BE)
def test_a_place_that_planning_could_not_have_made_is_refused_by_its_field(case: str) -> None:
    """Beyond an array the compiled loops would crash; within it the run would train on other text without a word."""
    change, message = PLACES_THAT_CANNOT_BE[case]
    config = run(64, 128, tokens=40_000, streams={"a": StreamConfig(path="")})
    order = {"a": ShuffledChunks([8] * 6, np.full(48, 150, np.uint32), 2, 5)}
    at = BatchPlanner(config.data, Clock.of(config), order)
    state: Any = {}
    while not state or not state["packer"]["waiting"] or not state["streams"]["a"]["taken"]:
        next(at)
        state = json.loads(json.dumps(at.state_dict()))
    BatchPlanner(config.data, Clock.of(config), order).load_state_dict(state)
    change(state)
    with pytest.raises(ValueError, match=f"^{message}"):
        BatchPlanner(config.data, Clock.of(config), order).load_state_dict(state)


def test_a_place_after_text_that_was_dropped_is_accepted() -> None:
    """Many passes over a small stream wait for a row when pairs of texts are compared next, and none of it is used."""
    config = run(64, 64, streams={"a": StreamConfig(path="")}, packing_window=200, max_wait_rows=999)
    config = later_phase(config, objective={"name": "contrastive"})
    order = {"a": ShuffledChunks([2], np.array([20, 30], np.uint32), 1, 5)}
    at, unused = BatchPlanner(config.data, Clock.of(config), order), 0
    for plan in at:
        unused += plan.unused
        BatchPlanner(config.data, Clock.of(config), order).load_state_dict(json.loads(json.dumps(at.state_dict())))
    assert unused > 60 * 50, "of some sixty passes"


def test_a_block_that_is_given_out_is_left_for_the_next() -> None:
    """The queue reads the next chunk of every stream when it chooses one, so the next block is laid out for the current
    rows. If it were laid out later, for the rows of a later phase, a run would continue with other batches than under
    earlier versions."""
    lengths = np.array([60, 40, 100, 150, 20, 31, 7, 90, 64], np.uint32)
    streams = {name: StreamConfig(path="", proportion=0.5) for name in "ab"}
    config = run(64, 256, 32, streams=streams, shuffle_block_shards=1)
    chunks = {name: ShuffledChunks([3, 2, 4], lengths, 1, seed) for seed, name in enumerate("ab")}
    planner, begun = BatchPlanner(config.data, Clock.of(config), chunks), 0
    for _ in planner:
        for name, place in planner.state_dict()["streams"].items():
            block = chunks[name].block(place["epoch"], place["block"], place["laid_out_for"])
            assert place["laid_out_for"] and place["taken"] < len(block), place
            begun += place["taken"] == 0 == place["offset"]
    assert begun > 3  # batches that ended with a block, so that there was something to see
