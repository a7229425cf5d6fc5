"""Microbatches: laid out and masked as the model expects, for any combination of documents in a row.

If this breaks, documents see each other, padding is trained on, or a mask depends on the machine.
"""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from modernbert_train.__main__ import read_run
from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.schema import VARIANTS, MaskedLmConfig, RunConfig
from modernbert_train.data.loader import StepBatch
from modernbert_train.data.microbatches import KEPT_OBJECTIVES, MicrobatchMaker
from modernbert_train.data.packing import Chunk
from modernbert_train.data.planner import BatchPlan
from modernbert_train.objectives import build_objective
from modernbert_train.objectives.mlm import MaskedLM
from modernbert_train.vocabulary import Vocabulary, read_vocabulary
from tests.support.batches import make_loader, make_path, rows_of, same
from tests.support.tiny_run import TinyRun

pytestmark = pytest.mark.timeout(60)


@pytest.mark.runs
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
def test_rows_are_laid_out_as_the_model_expects(config: RunConfig) -> None:
    """[CLS] text [SEP] for each chunk, positions from 0 in each, the tail a separate sequence of pads."""
    vocabulary, path = read_vocabulary(config.data.tokenizer), make_path(config)
    tails = 0
    for plan, step in zip(path.planned.planner, make_loader(config), strict=True):
        for chunks, row in zip(plan.rows, rows_of(step), strict=True):
            ids: list[int] = []
            boundaries = [0]
            for chunk in chunks:
                text = path.streams.read(chunk.document)[chunk.start : chunk.start + chunk.length]
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


@pytest.mark.runs
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
            packed = batch.packed
            positions_M, labels_M = batch.targets["positions_M"], batch.targets["labels_M"]
            assert len(packed.input_ids_T) == len(packed.position_ids_T) == tokens
            assert packed.max_seqlen == plan.row_tokens
            boundaries = packed.cu_seqlens_S
            assert boundaries.dtype == torch.int32 and boundaries[0] == 0 and boundaries[-1] == tokens
            assert (boundaries.diff() >= 0).all()
            needed = int((boundaries < tokens).sum()) + 1
            assert needed <= len(boundaries) <= min(needed + 63, 2 * (needed - 1))
            longest = int(boundaries.diff().max())
            assert packed.longest is not None and longest <= packed.longest <= min(longest + 127, plan.row_tokens)
            padding, predicted = labels_M == IGNORED_LABEL, batch.counts["mlm"]
            assert predicted == int((~padding).sum()) > 0
            assert (positions_M[padding] == 0).all() and not padding[:predicted].any()
            objective = plan.objective
            assert isinstance(objective, MaskedLmConfig)
            assert len(labels_M) == MaskedLM(objective, vocabulary).max_predicted(objective.mask_rate, tokens)


VOCABULARY = Vocabulary(200, 1, 2, 0, 3, np.arange(10, 200), "")
BUILD = partial(build_objective, vocabulary=VOCABULARY)


def maker_of(document: Any, keys: Any, labels: Any = None, build: Any = BUILD, **more: Any) -> MicrobatchMaker:
    """Return the maker of texts that all are the same document, or its beginning."""
    texts = SimpleNamespace(
        read=lambda number: document,
        labels=lambda chunks: labels,
        mask_keys=lambda chunks: np.fromiter(keys(chunks), np.uint64),
        **more,
    )
    return MicrobatchMaker(texts, build, VOCABULARY)


def test_words_of_a_segmenter_lie_where_their_tokens_do() -> None:
    """For any cut of a document and any text before it in its row: a long one is masked from its middle too."""
    document, inside = np.arange(10, 110), np.arange(100) % 3 > 0  # words of three tokens
    config = MaskedLmConfig(masking="ngram", words="segmenter", mask_token_share=1.0, random_token_share=0.0)
    maker = maker_of(document, lambda chunks: [chunk.start for chunk in chunks], inside_words=lambda number: inside)
    predicted: dict[int, set[int]] = {}
    for rows in ([[(0, 50), (50, 70), (70, 100)]], [[(50, 70), (0, 50)], [(70, 100)]]):
        chunks = tuple(tuple(Chunk(0, 0, first, end - first) for first, end in row) for row in rows)
        plan = BatchPlan("p", 0, 0, chunks, len(rows), 128, len(rows), config)
        (batch,) = maker.microbatches(chunks, plan)
        labels = batch.targets["labels_M"].numpy()
        found = set((labels[labels >= 0] - 10).tolist())
        predicted[len(rows)] = found
        for first, end in ((0, 50), (50, 70), (70, 100)):
            for word in range(first // 3, (end - 1) // 3 + 1):
                places = set(range(max(first, 3 * word), min(end, 3 * word + 3)))
                assert places <= found or not places & found
    assert predicted[1] == predicted[2] and 24 <= len(predicted[1]) <= 30


def test_attention_launches_few_blocks_without_work() -> None:
    """In rows of 8,192 with texts of some 300 tokens it launched 196,608 of which 10,384 worked, at about 1 us each."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(300), 0.8, 160), 8, 4096).astype(int).tolist()
    rows, room = [[]], 0
    for document, length in enumerate(lengths):
        if room + length + 2 > 8192:
            rows.append([])
            room = 0
        rows[-1].append(Chunk(0, document, 0, length))
        room += length + 2
    maker = maker_of(np.full(max(lengths), 11), lambda chunks: range(len(chunks)))
    plan = BatchPlan("one", 0, 0, (), len(rows) - 1, 8192, len(rows), MaskedLmConfig())
    (batch,) = maker.microbatches(rows[:-1], plan)  # without the last, which is not full
    packed, heads = batch.packed, 12
    assert packed.longest is not None and packed.longest >= int(packed.cu_seqlens_S.diff().max())
    launched = -(-packed.longest // 128) * (len(packed.cu_seqlens_S) - 1) * heads
    working = int((-(-packed.cu_seqlens_S.diff() // 128)).sum()) * heads
    assert working < launched < 4 * working < 30_000


def masks_by_chunk(config: RunConfig) -> dict[Chunk, tuple[list[int], list[int]]]:
    """Return the input ids and the predicted positions of each chunk of the run."""
    found = {}
    path = make_path(config)
    for plan in path.planned.planner:
        rows = rows_of(StepBatch(tuple(path.maker.microbatches(plan.rows, plan)), plan))
        for chunks, row in zip(plan.rows, rows, strict=True):
            for chunk, start in zip(chunks, row.boundaries, strict=False):
                end = start + chunk.length + 2
                predicted = [at - start for at in row.predicted if start <= at < end]
                found[chunk] = (row.input_ids[start:end], predicted)
    return found


@pytest.mark.runs
def test_masks_of_a_document_depend_on_neither_row_nor_company(tiny_run: TinyRun) -> None:
    one = masks_by_chunk(read_run(tiny_run()))
    other = masks_by_chunk(
        read_run(tiny_run("data.packing_window=1", "data.shuffle_block_shards=5", "phases.short.batch_rows=12"))
    )
    both = one.keys() & other.keys()
    assert len(both) > 50
    assert {chunk: one[chunk] for chunk in both} == {chunk: other[chunk] for chunk in both}


@pytest.mark.runs
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
    path = make_path(config)
    (batch,) = path.maker.microbatches(((), ()), next(path.planned.planner))
    assert (batch.packed.input_ids_T == read_vocabulary(config.data.tokenizer).pad_id).all()
    assert (batch.num_tokens, batch.counts["mlm"], batch.num_rows) == (0, 0, 2)
    assert batch.packed.cu_seqlens_S.unique().tolist() == [0, 64, 128]


# the settings of each objective that change in every batch, and the labels of a text
MOVES = {"mask_rate_end": 0.1, "mask_curve": "cosine"}
GROWTH: dict[str, tuple[dict[str, Any], list[int] | None]] = {
    "mlm": (MOVES, None),
    "tlm": (MOVES, None),
    "causal": ({}, None),
    "sop": (MOVES, None),
    "rtd": (MOVES, None),
    "permutation": ({}, None),
    "distill": (MOVES, None),
    "classify": ({"labels": ("a", "b")}, [1]),
    "tag": ({"labels": ("a", "b")}, [1] * 25),
    "answer": ({}, [3, 4]),
    "choose": ({"labels": ("0", "1", "2")}, [1]),
    "contrastive": ({"pooling": "sparse", "flops_warmup": 1.0, "score_weight": 1.0}, [11, 0, 12, 5, 13, 7]),
}


@pytest.mark.parametrize("name", VARIANTS["objective"])
def test_two_thousand_batches_leave_nothing_in_memory(name: str) -> None:
    """An objective for each rate was 5 GB a rank after 100,000 steps with a vocabulary of 50,000."""
    changes, labels = GROWTH[name]
    settings = VARIANTS["objective"][name](**changes)
    built: list[weakref.ref[Any]] = []

    def build(settings: Any) -> Any:
        objective = build_objective(settings, VOCABULARY)
        built.append(weakref.ref(objective))
        return objective

    text = np.arange(10, 35)
    if name in ("choose", "contrastive", "tlm"):  # texts of a document lie between [SEP] and [CLS]
        text[[8, 16]], text[[9, 17]] = VOCABULARY.sep_id, VOCABULARY.cls_id
    of_texts = None if labels is None else np.array([labels] if name != "tag" else labels, np.int64)
    maker = maker_of(text, lambda chunks: range(1, len(chunks) + 1), of_texts, build=build)
    row = (Chunk(0, 0, 0, 25),)

    def run(first: int, end: int) -> tuple[int, int]:
        for step in range(first, end):
            plan = BatchPlan("p", 0, 0, (row,), 1, 32, 1, settings.at(step / 2000))
            (batch,) = maker.microbatches([row], plan)
            assert batch.counts
        del batch
        gc.collect()
        return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        objects, held = run(0, 200)
        later, held_later = run(200, 2000)
    finally:
        tracemalloc.stop()
    moves = settings.at(0.1) != settings.at(0.2)
    assert len(built) > (1900 if moves else 0)
    assert sum(each() is not None for each in built) <= KEPT_OBJECTIVES
    growth = later - objects - moves * 1800  # less the references of `built`
    assert growth < 180, "less than one object in ten batches"
    assert held_later - held - moves * 1800 * 100 < 180_000, "and 100 bytes a batch"
