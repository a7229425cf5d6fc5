"""Several streams: each in its own order with its own masks, mixed by the clock, whole over its own epochs.

If this breaks, adding a stream changes the others' text, a small stream is read unevenly, or a mixture depends on the
machines it is trained on.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modernbert_train.__main__ import main, read_run
from modernbert_train.clock import Clock
from modernbert_train.config.schema import ContrastiveConfig, MaskedLmConfig, RunConfig, StreamConfig
from modernbert_train.core.keyed_random import derive
from modernbert_train.data.check_shards import check_data, describe_streams
from modernbert_train.data.facts import read_facts
from modernbert_train.data.mds import TokenShards
from modernbert_train.data.mixing import phase_weights
from modernbert_train.data.mixture import Stream, TokenStreams, stream_seed
from modernbert_train.data.open_shards import open_streams
from modernbert_train.data.packing import SPECIAL_TOKENS, Chunk
from modernbert_train.data.path import plan_path
from modernbert_train.data.planner import BatchPlanner
from modernbert_train.data.shuffle import ChunkCursor
from modernbert_train.errors import DataError
from tests.support import planned
from tests.support.make_shards import make_documents, make_shards, make_texts, make_tokenizer
from tests.support.planned import chunks_of, waiting
from tests.support.tiny_run import TinyRun

# shards of each stream, as the lengths of their documents
Sizes = st.lists(st.lists(st.integers(1, 150), min_size=1, max_size=6), min_size=1, max_size=4)
Mixture = dict[str, list[list[int]]]
Mixtures = st.dictionaries(st.sampled_from("abcd"), Sizes, min_size=2, max_size=4)
MIXTURES_OR_ONE = st.dictionaries(st.sampled_from("abcd"), Sizes, min_size=1, max_size=4)


def run(
    mixture: Mapping[str, Any],
    shares: Sequence[Mapping[str, int]],
    row_tokens: Sequence[int] = (64,),
    tokens: int = 1000,
    **data: Any,
) -> RunConfig:
    streams = {name: StreamConfig(path="") for name in mixture}
    return planned.run(*row_tokens, tokens=tokens, shares=shares, **{"streams": streams} | data)


class Memory:
    """Shards without files and tokens, which are only planned."""

    def __init__(self, shards: list[list[int]]) -> None:
        self.shard_documents = [len(shard) for shard in shards]
        self.labels = None
        self.lengths = np.array([length for shard in shards for length in shard])
        self.tokens = int(self.lengths.sum())


def streams_of(config: RunConfig, mixture: Mixture) -> TokenStreams:
    return TokenStreams(
        [
            Stream(name, stream_seed(config.data, config.seed, name), cast(TokenShards, Memory(mixture[name])))
            for name in config.data.all_streams
        ]
    )


def planner(config: RunConfig, mixture: Mixture, *, is_branch: bool = False) -> BatchPlanner:
    shards = streams_of(config, mixture).shards
    return plan_path(config.data, config.seed, Clock.of(config), shards, is_branch=is_branch).planner


def draw_shares(data: st.DataObject, mixture: Mixture) -> dict[str, int]:
    weights = {name: data.draw(st.integers(0, 5), label=f"weight of {name}") for name in sorted(mixture)}
    return weights if any(weights.values()) else dict.fromkeys(mixture, 1)


# --- the mixture ---------------------------------------------------------------------------------------------------


@pytest.mark.runs
@settings(max_examples=30, deadline=None)
@given(Mixtures, st.sampled_from(["tokens", "documents"]), st.data())
def test_what_is_drawn_keeps_to_the_shares_after_every_batch(mixture: Mixture, by: str, data: st.DataObject) -> None:
    """By tokens as well as by documents: within one chunk or document of the configured share; the packer holds back
    no more than its window.
    """
    asked = draw_shares(data, mixture)
    config = run(mixture, [asked], mix_by=by)
    own = {name: 1 for name in sorted(mixture)}
    weights = phase_weights(config.data, config.phases["p0"], own)
    streams, plan = streams_of(config, mixture), planner(config, mixture)
    most = 1 if by == "documents" else 62
    given_out: list[Chunk] = []
    for batch in plan:
        given_out += chunks_of([batch])
        held = waiting(plan.state_dict())
        drawn = Counter(dict.fromkeys(weights, 0))
        for chunk in given_out + held:
            drawn[streams.stream_of(chunk.document)] += chunk.length if by == "tokens" else chunk.start == 0
        for name, weight in weights.items():
            excess = drawn[name] - weight * drawn.total() / sum(weights.values())
            assert -most - 1e-9 <= excess <= most + 1e-9
        assert len(plan.state_dict()["packer"]["waiting"]) <= config.data.packing_window


@pytest.mark.runs
@settings(max_examples=80, deadline=None)
@given(
    MIXTURES_OR_ONE,
    st.sampled_from([(64,), (64, 256), (32, 64), (64, 16)]),
    st.sampled_from(["tokens", "documents"]),
    st.data(),
)
def test_the_clock_and_the_counts_of_a_batch_say_what_its_rows_hold(
    mixture: Mixture, row_tokens: tuple[int, ...], by: str, data: st.DataObject
) -> None:
    """They record the training data of a model, stream by stream; a batch belongs to the phase in which it starts."""
    config = run(mixture, [draw_shares(data, mixture) for _ in row_tokens], row_tokens, mix_by=by)
    streams, clock = streams_of(config, mixture), 0
    for batch in planner(config, mixture):
        phase, chunks = config.phases[batch.phase], chunks_of([batch])
        assert batch.tokens_before == clock < config.total_tokens and batch.phase == f"p{clock // 1000}"
        assert (batch.row_tokens, batch.microbatch_rows) == (phase.row_tokens, phase.microbatch_rows)
        used = [sum(chunk.length + SPECIAL_TOKENS for chunk in row) for row in batch.rows]
        assert len(used) == batch.num_rows and sum(used) == batch.tokens
        assert all(0 < tokens <= batch.row_tokens for tokens in used)
        clock += batch.tokens
        assert [stream.name for stream in batch.streams] == sorted(mixture)
        for stream in batch.streams:
            mine = [chunk for chunk in chunks if streams.stream_of(chunk.document) == stream.name]
            assert (stream.tokens, stream.documents) == (
                sum(chunk.length for chunk in mine),
                sum(chunk.start == 0 for chunk in mine),
            )
            assert all(chunk.epoch <= stream.epoch for chunk in mine)
    assert clock >= config.total_tokens


@pytest.mark.runs
@settings(max_examples=30, deadline=None)
@given(MIXTURES_OR_ONE, st.sampled_from([(64,), (16,), (64, 256, 64), (256, 16), (16, 64)]), st.data())
def test_every_token_of_each_streams_epochs_once(
    mixture: Mixture, row_tokens: tuple[int, ...], data: st.DataObject
) -> None:
    """Given out, waiting, and still to be drawn. Streams end their epochs at different times, rows change their length
    in the middle of a document, shares change with the phase."""
    config = run(mixture, [draw_shares(data, mixture) for _ in row_tokens], row_tokens)
    plan = planner(config, mixture)
    plans = list(plan)
    found = chunks_of(plans)
    state = plan.state_dict()
    assert plans[-1].unused == sum(chunk.length for chunk in waiting(state))
    assert not any(each.unused for each in plans[:-1])
    found += waiting(state)
    first = 0
    for name, chunks in plan_path(
        config.data, config.seed, Clock.of(config), streams_of(config, mixture).shards
    ).chunks.items():
        cursor = ChunkCursor(chunks, first)
        cursor.load_state_dict(state["streams"][name])
        cursor.allow(40)
        last = first + chunks.num_documents
        mine = [chunk for chunk in found if first <= chunk.document < last]
        epoch = cursor.epoch
        while (chunk := cursor.take()).epoch == epoch:
            mine.append(chunk)
        lengths = enumerate(chain(*mixture[name]), start=first)
        every = [(document, token) for document, length in lengths for token in range(length)]
        counted = Counter((p.epoch, p.document, t) for p in mine for t in range(p.start, p.start + p.length))
        assert counted == Counter((e, *token) for e in range(epoch + 1) for token in every)
        first = last


@pytest.mark.runs
@settings(max_examples=45, deadline=None)
@given(
    Mixtures,
    st.sampled_from([(64,), (64, 256, 64), (64, 16)]),
    st.sampled_from(["tokens", "documents"]),
    st.sampled_from([MaskedLmConfig(), ContrastiveConfig(one_source=True)]),
    st.data(),
)
def test_stopping_anywhere_leaves_the_same_plans(
    mixture: Mixture, row_tokens: tuple[int, ...], by: str, objective: Any, data: st.DataObject
) -> None:
    """Also where each batch is of one stream, of which finished rows may wait for its turn."""
    config = run(mixture, [draw_shares(data, mixture) for _ in row_tokens], row_tokens, mix_by=by)
    config = replace(config, objective=objective)
    whole = list(planner(config, mixture))
    stop = data.draw(st.integers(0, len(whole)))
    first = planner(config, mixture)
    begun = [next(first) for _ in range(stop)]
    state = json.loads(json.dumps(first.state_dict()))
    second = planner(config, mixture)
    next(second)
    second.load_state_dict(state)
    assert second.state_dict() == first.state_dict()
    assert begun + list(second) == whole


@pytest.mark.runs
@settings(max_examples=15, deadline=None)
@given(Mixtures, Sizes)
def test_another_stream_does_not_change_the_order_of_the_others(mixture: Mixture, more: list[list[int]]) -> None:
    """Experiments with mixtures compare only if their common streams are the same."""

    def order(config: RunConfig, mixture: Mixture, name: str) -> list[tuple[int, ...]]:
        streams = streams_of(config, mixture)
        first = sum(sum(map(len, mixture[other])) for other in sorted(mixture) if other < name)
        cursor = ChunkCursor(plan_path(config.data, config.seed, Clock.of(config), streams.shards).chunks[name], first)
        cursor.allow(62)
        chunks = [cursor.take() for _ in range(40)]
        keys = streams.mask_keys(chunks)
        return [(p.epoch, p.document - first, *p[2:], int(k)) for p, k in zip(chunks, keys, strict=True)]

    larger = {"0": more, **mixture}
    for name in mixture:
        alone, among = run(mixture, [{"a": 1}]), run(larger, [{"a": 1}])
        assert order(alone, mixture, name) == order(among, larger, name)


def test_streams_of_the_same_shards_have_orders_and_masks_of_their_own() -> None:
    """Two streams with the same text and different names: two passes must not be the same twice."""
    same = [[30] * 10] * 3
    config = run({"a": 0, "b": 0}, [{"a": 1, "b": 1}])
    streams = streams_of(config, {"a": same, "b": same})
    one, other = (
        chunks.block(0, 0, 62)[:, 0].tolist()
        for chunks in plan_path(config.data, config.seed, Clock.of(config), streams.shards).chunks.values()
    )
    assert one != other
    keys = streams.mask_keys([Chunk(0, 5, 0, 30), Chunk(0, 30 + 5, 0, 30), Chunk(1, 5, 0, 30), Chunk(0, 5, 3, 27)])
    assert len(set(keys.tolist())) == 4


def test_the_order_in_the_yaml_means_nothing() -> None:
    mixture: Mixture = {"b": [[30] * 20], "a": [[40] * 20]}
    shares = {"b": 1, "a": 2}
    assert list(planner(run(mixture, [shares]), mixture)) == list(
        planner(run(dict(sorted(mixture.items())), [dict(sorted(shares.items()))]), mixture)
    )


def test_repeat_is_the_number_of_passes() -> None:
    """A run as long as once over a and twice over b ends at the ends of both."""
    mixture: Mixture = {"a": [[62] * 48], "b": [[62] * 8]}
    config = run(mixture, [{}], tokens=64 * 64, streams={"a": StreamConfig(path=""), "b": StreamConfig(repeat=2.0)})
    counts = Counter(
        (streams_of(config, mixture).stream_of(p.document), p.epoch) for p in chunks_of(planner(config, mixture))
    )
    assert counts == {("a", 0): 48, ("b", 0): 8, ("b", 1): 8}


def test_a_later_phase_reads_what_the_first_left_aside() -> None:
    mixture: Mixture = {"a": [[62] * 40], "b": [[62] * 40]}
    config = run(mixture, [{"a": 1}, {"a": 1, "b": 3}], (64, 64), tokens=32 * 64)
    plans = list(planner(config, mixture))
    shares = {
        phase: Counter({s.name: 0 for s in plans[0].streams})
        + Counter({n: sum(s.tokens for p in plans if p.phase == phase for s in p.streams if s.name == n) for n in "ab"})
        for phase in ("p0", "p1")
    }
    assert shares == {"p0": {"a": 32 * 62}, "p1": {"a": 8 * 62, "b": 24 * 62}}


# --- folders of shards ---------------------------------------------------------------------------------------------


@pytest.fixture
def config(tiny_run: TinyRun, three_streams: list[str]) -> RunConfig:
    return read_run(tiny_run(*three_streams))


def opened(config: RunConfig) -> TokenStreams:
    return open_streams(config.data, config.seed, read_facts(config.data))


def with_stream(config: RunConfig, name: str, folder: Path) -> RunConfig:
    stream = replace(config.data.streams[name], path=str(folder))
    return replace(config, data=replace(config.data, streams={**config.data.streams, name: stream}))


def test_documents_are_numbered_through_the_streams(config: RunConfig) -> None:
    streams = opened(config)
    assert streams.names == ("books", "mails", "web")
    names = [streams.stream_of(document) for document in (0, 1, 2, 41, 42, 71)]
    assert names == ["books", "books", "mails", "mails", "web", "web"]
    assert len(streams.lengths) == 72 and streams.lengths[:2].tolist() == [700, 900]
    assert all(len(streams.read(document)) == streams.lengths[document] for document in range(72))
    assert streams.describe(43) == "web, document 1 of 30"


def test_one_folder_is_numbered_and_masked_as_it_always_was(tiny_run: TinyRun) -> None:
    """Runs of one folder continue as before streams existed; the keys are pinned."""
    streams = opened(read_run(tiny_run()))
    assert streams.names == ("train",)
    masks, epoch, document, start = 3, 1, 7, 2
    assert streams.mask_keys([Chunk(epoch, document, start, 5)]).tolist() == [derive(5, masks, epoch, document, start)]


def test_a_broken_shard_is_reported_with_its_stream(config: RunConfig, tmp_path: Path) -> None:
    books = tmp_path / "books"
    shutil.copytree(config.data.streams["books"].path, books)
    (books / "shard.00001.mds.zstd").write_bytes(b"")
    broken = with_stream(config, "books", books)
    with pytest.raises(DataError, match=rf"^stream books: {books}/shard.00001.mds.zstd"):
        opened(broken).read(0)
    shutil.rmtree(books)
    with pytest.raises(DataError, match=rf"{books}: no such folder"):
        check_data(broken)


def test_a_stream_of_another_tokenizer_is_named(config: RunConfig, tmp_path: Path) -> None:
    """Its ids would be other words; the loss would look normal for a while."""
    other = make_tokenizer(tmp_path / "tokenizer", make_texts(40, seed=12))
    make_shards(tmp_path / "shards", make_documents(other, [30, 40]), other)
    with pytest.raises(DataError) as error:
        check_data(with_stream(config, "mails", tmp_path / "shards"))
    assert str(error.value).startswith(f"data.streams.mails.path={tmp_path}/shards: made with another tokenizer")
    assert len(str(error.value).splitlines()) == 1


def test_check_tells_the_shares_and_the_passes(
    config: RunConfig, tiny_run: TinyRun, three_streams: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """4,000 tokens at 20 % and 2,000 at 90 % of books, which are 1,600: 1.6 passes."""
    assert main(["check", *tiny_run(*three_streams)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    at = next(number for number, line in enumerate(lines) if line[:3] == ["stream", "tokens", "documents"])
    assert lines[at + 1] == ["books", "1,600", "2", "20.00%", "90.00%", "about", "1.62"]
    assert describe_streams(config, read_facts(config.data)).splitlines()[-1] == "Shares are of tokens."


@pytest.mark.runs
@settings(max_examples=15, deadline=None)
@given(Mixtures, st.data())
def test_a_batch_of_one_source_keeps_to_the_shares(mixture: Mixture, data: st.DataObject) -> None:
    """No stream is more than two batches from its share."""
    asked = draw_shares(data, mixture)
    config = replace(run(mixture, [asked], (64, 128)), objective=ContrastiveConfig(one_source=True))
    given_out, most = Counter(dict.fromkeys(asked, 0)), 128 * 4
    for batch in planner(config, mixture):
        used = {each.name: each.tokens for each in batch.streams if each.tokens}
        assert len(used) == 1
        given_out.update(used)
        for name, weight in asked.items():
            assert abs(given_out[name] - weight * given_out.total() / sum(asked.values())) <= 2 * most


def test_a_batch_of_one_source_counts_documents_where_the_shares_are_of_documents() -> None:
    """Ten short documents weigh as ten long ones, not as one."""
    mixture = {"a": [[10] * 60] * 3, "b": [[100] * 60] * 3}
    config = run(mixture, [{"a": 1, "b": 1}], (128,), tokens=60_000, mix_by="documents")
    config = replace(config, objective=ContrastiveConfig(one_source=True))
    documents: Counter[str] = Counter()
    for batch in planner(config, mixture):
        documents.update({each.name: each.documents for each in batch.streams})
    assert documents["a"] == pytest.approx(documents["b"], rel=0.2)


def test_rows_that_were_ready_stay_with_their_stream_through_a_checkpoint() -> None:
    """A stop may happen with more finished rows than a batch takes; each stream has separate rows."""
    mixture = {"a": [[60] * 8] * 2, "b": [[61] * 8] * 2}
    config = run(mixture, [{"a": 1, "b": 1}], (128,), tokens=8000)
    config = replace(config, objective=ContrastiveConfig(one_source=True))
    at = planner(config, mixture)
    next(at)
    state: Any = json.loads(json.dumps(at.state_dict()))
    epochs = {name: cursor["epoch"] for name, cursor in state["streams"].items()}
    ready = [[[epochs["a"], n, 0, 60]] for n in range(6)] + [[[epochs["b"], 16 + n, 0, 61]] for n in range(6)]
    state["packer"]["ready"] = ready
    again = planner(config, mixture, is_branch=True)  # whose chunks may be of another run
    again.load_state_dict(state)
    assert json.loads(json.dumps(again.state_dict())) == state
    batch = next(again)
    (used,) = (each.name for each in batch.streams if each.tokens)
    own = [row for row in ready if (row[0][1] < 16) == (used == "a")]
    assert [list(map(list, row)) for row in batch.rows][:6] == own[: len(batch.rows)]
