"""Batches: the same for any number of ranks and workers and from any point on, and laid out as the model expects.

If this breaks, a run depends on the machine it ran on, or resuming repeats or skips text.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from modernbert_train.__main__ import read_run
from modernbert_train.batch import IGNORED_LABEL, Batch
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.dataset_card import file_sha256
from modernbert_train.data.loader import MicrobatchMaker, PackedLoader, StepBatch, share_of_rank
from modernbert_train.data.mixture import TokenStreams, open_streams
from modernbert_train.data.packing import Chunk
from modernbert_train.data.planner import BatchPlanner
from modernbert_train.errors import DataError
from modernbert_train.objectives.mlm import MaskedLM
from modernbert_train.vocabulary import read_vocabulary
from tests.conftest import TinyRun
from tests.data.make_shards import make_documents, make_shards

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than this machine has cores
]


class Row(NamedTuple):
    """One row out of a microbatch, so that rows can be compared however they were grouped."""

    input_ids: list[int]
    positions: list[int]
    boundaries: list[int]
    predicted: list[int]
    labels: list[int]


def make_streams(config: RunConfig) -> TokenStreams:
    return open_streams(config, read_vocabulary(config.data.tokenizer))


def make_planner(config: RunConfig) -> BatchPlanner:
    return BatchPlanner(config, make_streams(config).shuffled(config.data))


def make_maker(config: RunConfig) -> MicrobatchMaker:
    vocabulary = read_vocabulary(config.data.tokenizer)
    return MicrobatchMaker(make_streams(config), MaskedLM(config.objective, vocabulary), vocabulary)


def make_loader(config: RunConfig, rank: int = 0, num_ranks: int = 1, num_workers: int = 0) -> PackedLoader:
    return PackedLoader(
        make_planner(config),
        make_maker(config),
        rank=rank,
        num_ranks=num_ranks,
        num_workers=num_workers,
        prefetch_batches=2,
    )


def rows_of(step: StepBatch) -> list[Row]:
    rows = []
    for batch in step.microbatches:
        width = len(batch.input_ids_T) // batch.num_rows
        real = batch.labels_M != IGNORED_LABEL
        positions_M, labels_M = batch.positions_M[real], batch.labels_M[real]
        for first in range(0, len(batch.input_ids_T), width):
            mine = (positions_M >= first) & (positions_M < first + width)
            boundaries = {int(b) - first for b in batch.cu_seqlens_S if first <= b <= first + width}
            rows.append(
                Row(
                    batch.input_ids_T[first : first + width].tolist(),
                    batch.position_ids_T[first : first + width].tolist(),
                    sorted(boundaries),
                    (positions_M[mine] - first).tolist(),
                    labels_M[mine].tolist(),
                )
            )
    return rows


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


def same(one: Batch, other: Batch) -> bool:
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(Batch)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.fixture(params=["one stream", "three streams"])
def config(request: pytest.FixtureRequest, tiny_run: TinyRun, three_streams: list[str]) -> RunConfig:
    return read_run(tiny_run(*(three_streams if request.param == "three streams" else [])))


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


@pytest.mark.runs
@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 1), (1, 3), (2, 0), (2, 3), (4, 0), (4, 1)])
def test_ranks_and_workers_do_not_change_the_global_batches(
    config: RunConfig, whole: list[Any], num_ranks: int, num_workers: int
) -> None:
    assert list(global_batches(config, num_ranks, num_workers)) == whole


def test_microbatches_are_the_same_for_any_number_of_ranks(config: RunConfig) -> None:
    """Dropout is keyed by the microbatch's number in the global batch, so it must be the same text."""
    compared = 0
    for one, *two in zip(make_loader(config), make_loader(config, 0, 2), make_loader(config, 1, 2), strict=True):
        if one.plan.num_rows % (2 * one.plan.microbatch_rows) == 0:
            together = [batch for pair in zip(*(step.microbatches for step in two), strict=True) for batch in pair]
            assert all(same(here, there) for here, there in zip(one.microbatches, together, strict=True))
            compared += 1
    assert compared > 10


@pytest.mark.runs
def test_workers_give_the_very_same_tensors(config: RunConfig) -> None:
    for here, there in zip(make_loader(config), make_loader(config, num_workers=3), strict=True):
        assert here.plan == there.plan
        assert len(here.microbatches) == len(there.microbatches)
        assert all(same(one, other) for one, other in zip(here.microbatches, there.microbatches, strict=True))


@pytest.mark.runs
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_resuming_at_any_batch_on_any_number_of_ranks_goes_on_equally(
    config: RunConfig, whole: list[Any], num_ranks: int
) -> None:
    for taken, (_, state) in enumerate(whole, start=1):
        saved = json.loads(json.dumps(state))
        assert list(global_batches(config, num_ranks, 0, saved)) == whole[taken:]


@pytest.mark.runs
@pytest.mark.parametrize(("taken", "before", "after"), [(2, 3, 1), (5, 1, 0), (9, 0, 3)])
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


@pytest.mark.runs
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_was_planned_ahead_is_the_next_batch_and_asks_for_no_plan(
    config: RunConfig, whole: list[Any], num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned while the device computes, or when the batch is asked for: the same batches and states, to the end. If it
    were planned twice, a GPU would wait for it all the same."""
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
        loader.plan_ahead()  # one batch, however often it is said
        busy = not found  # the first fills the workers
        step = next(batches, None)
        busy = True
        if step is None:
            break
        found.append((rows_of(step), loader.state_dict()))
    assert found == whole
    # the plan that comes after the last one says that it was the last
    assert late <= 1


@pytest.mark.runs
def test_nothing_is_drawn_from_the_global_generator(config: RunConfig) -> None:
    """Dropout is drawn from it; starting to iterate once more, after a resumption, must not shift it."""
    before = torch.get_rng_state()
    list(make_loader(config))
    next(iter(make_loader(config, num_workers=1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_are_laid_out_as_the_model_expects(config: RunConfig) -> None:
    """[CLS] text [SEP] for each chunk, positions from 0 in each, the tail a sequence of pads of its own."""
    vocabulary, streams = read_vocabulary(config.data.tokenizer), make_streams(config)
    tails = 0
    for plan, step in zip(make_planner(config), make_loader(config), strict=True):
        for chunks, row in zip(plan.rows, rows_of(step), strict=True):
            ids: list[int] = []
            boundaries = [0]
            for chunk in chunks:
                text = streams.read(chunk.document)[chunk.start : chunk.start + chunk.length]
                ids += [vocabulary.cls_id, *text.tolist(), vocabulary.sep_id]
                boundaries.append(len(ids))
            if len(ids) < plan.row_tokens:
                tails += 1
                ids += [vocabulary.pad_id] * (plan.row_tokens - len(ids))
                boundaries.append(len(ids))
            assert row.boundaries == boundaries
            assert row.positions == [place for start, end in pairwise(boundaries) for place in range(end - start)]
            assert row.labels == [ids[at] for at in row.predicted]
            kept = set(range(plan.row_tokens)) - set(row.predicted)
            assert [row.input_ids[at] for at in kept] == [ids[at] for at in kept]
            assert not {ids[at] for at in row.predicted} & {vocabulary.cls_id, vocabulary.sep_id, vocabulary.pad_id}
    assert tails > 10


def test_composers_copy_of_a_microbatch_costs_nothing(config: RunConfig) -> None:
    """It asks for a deep copy of each one, on the device, in every step."""
    (batch, *_) = next(iter(make_loader(config))).microbatches
    assert copy.deepcopy(batch) is batch


def test_the_numbers_of_a_batch_say_what_it_holds(config: RunConfig) -> None:
    vocabulary = read_vocabulary(config.data.tokenizer)
    for steps in zip(make_loader(config, 0, 2), make_loader(config, 1, 2), strict=True):
        plan = steps[0].plan
        batches = [batch for step in steps for batch in step.microbatches]
        assert sum(batch.num_tokens for batch in batches) == plan.tokens
        assert sum(batch.num_rows for batch in batches) == plan.num_rows and plan.rows == ()
        for batch in batches:
            tokens = batch.num_rows * plan.row_tokens
            assert tokens <= config.phases[plan.phase].microbatch_tokens
            assert len(batch.input_ids_T) == len(batch.position_ids_T) == tokens
            assert batch.max_seqlen == plan.row_tokens
            boundaries = batch.cu_seqlens_S
            assert boundaries.dtype == torch.int32 and boundaries[0] == 0 and boundaries[-1] == tokens
            assert (boundaries.diff() >= 0).all() and len(boundaries).bit_count() == 1
            padding = batch.labels_M == IGNORED_LABEL
            assert batch.num_predicted == int((~padding).sum()) > 0
            assert (batch.positions_M[padding] == 0).all() and not padding[: batch.num_predicted].any()
            assert len(batch.labels_M) == MaskedLM(config.objective, vocabulary).max_predicted(plan.mask_rate, tokens)


def masks_by_chunk(config: RunConfig) -> dict[Chunk, tuple[list[int], list[int]]]:
    """What became of each chunk of the run: its input ids and its predicted places."""
    found = {}
    maker = make_maker(config)
    for plan in make_planner(config):
        rows = rows_of(StepBatch(tuple(maker.microbatches(plan.rows, plan)), plan))
        for chunks, row in zip(plan.rows, rows, strict=True):
            for chunk, start in zip(chunks, row.boundaries, strict=False):
                end = start + chunk.length + 2
                predicted = [at - start for at in row.predicted if start <= at < end]
                found[chunk] = (row.input_ids[start:end], predicted)
    return found


def test_masks_of_a_document_depend_on_neither_row_nor_company(tiny_run: TinyRun) -> None:
    one = masks_by_chunk(read_run(tiny_run()))
    other = masks_by_chunk(
        read_run(tiny_run("data.packing_window=1", "data.shuffle_block_shards=5", "phases.short.batch_rows=12"))
    )
    both = one.keys() & other.keys()
    assert len(both) > 50
    assert {chunk: one[chunk] for chunk in both} == {chunk: other[chunk] for chunk in both}


def test_masks_change_with_the_epoch_and_with_the_seed(tiny_run: TinyRun) -> None:
    found = masks_by_chunk(read_run(tiny_run()))
    seeded = masks_by_chunk(read_run(tiny_run("seed=6")))
    long = [chunk for chunk in found if chunk.length >= 30]
    again = [chunk for chunk in long if chunk.epoch == 0 and chunk._replace(epoch=1) in found]
    assert again and all(found[chunk] != found[chunk._replace(epoch=1)] for chunk in again)
    both = [chunk for chunk in long if chunk in seeded]
    assert both and all(found[chunk] != seeded[chunk] for chunk in both)


def test_an_empty_row_is_a_row_of_pads(config: RunConfig) -> None:
    """Validation gives some ranks one, so that all make the same number of microbatches."""
    plan = next(make_planner(config))
    (batch,) = make_maker(config).microbatches(((), ()), plan)
    assert (batch.input_ids_T == read_vocabulary(config.data.tokenizer).pad_id).all()
    assert (batch.num_tokens, batch.num_predicted, batch.num_rows) == (0, 0, 2)
    assert batch.cu_seqlens_S.unique().tolist() == [0, 64, 128]


def broken_copy(tiny_data: Path, folder: Path, fault: str) -> list[str]:
    """A copy of the training shards with one fault; returns overrides that name it."""
    if fault == "foreign":  # shards of a tokenizer with more entries
        documents = make_documents(tiny_data / "tokenizer", [50] * 20)
        documents[7] = np.full(50, 511)
        make_shards(folder, documents, tiny_data / "tokenizer")
        content = json.loads((tiny_data / "tokenizer/tokenizer.json").read_text())
        vocab = content["model"]["vocab"]
        last = max(vocab, key=vocab.get)
        del vocab[last]
        content["model"]["merges"] = []
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer/tokenizer.json").write_text(json.dumps(content))
        card = json.loads((folder / "dataset.json").read_text())  # that does not tell: only the text itself does
        card["tokenizer_sha256"] = hashlib.sha256((folder / "tokenizer/tokenizer.json").read_bytes()).hexdigest()
        (folder / "dataset.json").write_text(json.dumps(card))
        return [f"data.train={folder}", f"data.tokenizer={folder}/tokenizer"]
    shutil.copytree(tiny_data / "train", folder)
    file = sorted(folder.glob("shard.*"))[2]
    content = bytearray(file.read_bytes())
    if fault == "missing":
        file.unlink()
    elif fault == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif fault == "damaged":
        content[50] ^= 255
        file.write_bytes(content)
    elif fault == "swapped":
        file.write_bytes((tiny_data / "validation/shard.00000.mds.zstd").read_bytes())
    elif fault == "lengths":
        lengths = np.load(folder / "lengths.npy")
        np.save(folder / "lengths.npy", lengths[::-1])
        card = json.loads((folder / "dataset.json").read_text())
        card["lengths_sha256"] = file_sha256(folder / "lengths.npy")
        (folder / "dataset.json").write_text(json.dumps(card))
    return [f"data.train={folder}"]


@pytest.mark.runs
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "shard.00002.mds.zstd: cannot be read"),
        ("truncated", "shard.00002.mds.zstd: has "),
        ("damaged", "shard.00002.mds.zstd: is damaged"),
        ("swapped", "shard.00002.mds.zstd: has "),
        ("lengths", "tokens, lengths.npy says"),
        ("foreign", "holds token id 511, the tokenizer has 511 entries"),
    ],
)
def test_bad_shards_end_a_run_with_their_name_and_never_hang_it(
    tiny_run: TinyRun, tiny_data: Path, tmp_path: Path, fault: str, message: str, num_workers: int
) -> None:
    config = read_run(tiny_run(*broken_copy(tiny_data, tmp_path / "broken", fault)))
    with pytest.raises(DataError) as error:
        list(make_loader(config, num_workers=num_workers))
    assert message in str(error.value) and str(tmp_path / "broken") in str(error.value)
    assert len(str(error.value).splitlines()) == 1  # what a worker met is told without its traceback
