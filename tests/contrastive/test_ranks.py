"""The same run on one rank and on several, by DDP and FSDP2, and after masked tokens in one run, within float error.

If this breaks, the texts that a query is compared with depend on the number of GPUs.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.pairs import text_hash
from modernbert_train.checkpoints.checkpoint import verify
from modernbert_train.config.schema import ContrastiveConfig
from modernbert_train.data.loader import StepBatch
from modernbert_train.models.contrastive import Texts
from tests.support.gloo import run_ranks
from tests.support.pairs import (
    SPARSE_RUN,
    ContrastiveRun,
    as_source,
    make_rows,
    masked_first,
    prepare_pairs,
    with_streams,
    write_rows,
)
from tests.support.ranks import assert_same_weights, train_each
from tests.support.runs import assert_same_run, records

LONGER = (
    "phases.main.tokens=12000", "phases.main.batch_rows=4", "objective.symmetric=true", "objective.margin=0.2",
    "objective.matryoshka=[16]", "objective.learn_temperature=true",
)  # fmt: skip
DROPOUT = "model.attention_out_dropout=0.1"


FEW_STEPS = (*LONGER, DROPOUT, "phases.main.tokens=6500", "data.validation=null")
LATE = (
    "objective.pooling=late", "objective.token_vectors=16", "objective.matryoshka=[8]", "phases.main.tokens=12000",
    "phases.main.batch_rows=4",
)  # fmt: skip
SPARSE = (*SPARSE_RUN, "phases.main.tokens=6500", "model.init_std=0.1", "optim.lr=2e-3")
SLOW = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.runs
@pytest.mark.timeout(290)
@pytest.mark.parametrize(
    ("words", "ranks", "strategy"),
    [
        (FEW_STEPS, 2, "ddp"),  # the whole run is in the slow tests
        (LATE, 2, "ddp"),
        SLOW(LATE, 2, "fsdp2"),
        (SPARSE, 2, "ddp"),
        SLOW(SPARSE, 2, "fsdp2"),
        SLOW(SPARSE, 4, "ddp"),
        SLOW(SPARSE, 4, "fsdp2"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_ranks_train_as_one_does(
    contrastive_run: ContrastiveRun, tmp_path: Path, words: tuple[str, ...], ranks: int, strategy: str
) -> None:
    """Vectors come from all ranks, gradients go back to all, and microbatches have the same dropout; the ranks of late
    interaction have different numbers of tokens; the mean vector of sparse ones is of the global batch. Sparse weights
    move by up to 0.01, and float error may choose another token among those with almost the largest logit."""
    runs = tmp_path / "runs"
    run_ranks(train_each, 1, [contrastive_run("name=one", *words)], False)
    run_ranks(train_each, ranks, [contrastive_run("name=more", f"distributed.strategy={strategy}", *words)], False)
    assert_same_run(runs / "more", runs / "one")
    assert_same_weights(runs / "more", runs / "one", atol=1e-4 if words == SPARSE else 2e-5)


def sources_of_steps(words: list[str]) -> list[list[int]]:
    """On every rank: train, and tell of each step the hashes of the texts that this rank has read."""
    from modernbert_train.train.step import Loop

    seen, step = [], Loop.step

    def watched(self: Loop, batch: StepBatch, times: Any) -> None:
        known = [Texts.of(part, ContrastiveConfig()).hashes_N for part in batch.microbatches]
        seen.append(torch.cat(known).tolist())
        step(self, batch, times)

    Loop.step = watched  # type: ignore[method-assign]  # this process ends with the run
    train_each([words], False)
    return seen


@pytest.mark.runs
@pytest.mark.timeout(290)
def test_both_ranks_read_the_same_stream_in_each_batch(
    contrastive_run: ContrastiveRun, pairs: Path, tmp_path: Path
) -> None:
    """Two streams that alternate: all ranks read from the same one."""
    rows, texts = make_rows(160), {}
    for name, part in (("first", rows[:80]), ("second", rows[80:])):
        file = write_rows(tmp_path / f"{name}.jsonl", part)
        asked = (tmp_path / name, as_source(file), pairs / "tokenizer", "validation_share=0")
        assert prepare_pairs(*asked, max_tokens=64) == 0
        texts[name] = {text_hash(row[text]) for row in part for text in ("query", "positive")}
    words = contrastive_run("objective.one_source=true", "data.validation=null", "phases.main.tokens=16000")
    with_streams(words, **{name: tmp_path / name / "train" for name in texts})
    one, two = run_ranks(sources_of_steps, 2, words)
    assert len(one) == len(two) >= 8
    turns = []
    for of_one, of_two in zip(one, two, strict=True):
        assert of_one and of_two
        turns.append([name for name, known in texts.items() if known & {*of_one, *of_two}])
        assert {*of_one, *of_two} <= texts[turns[-1][0]]
    assert 0 < turns.count(["first"]) < len(turns) == turns.count(["first"]) + turns.count(["second"])


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_four_ranks_and_other_cuts_compare_as_one_does(contrastive_run: ContrastiveRun, tmp_path: Path) -> None:
    """Also where a run continues with another number of ranks than it began with."""
    runs = tmp_path / "runs"
    cut = contrastive_run("name=cut", "phases.main.microbatch_tokens=2048", *LONGER)
    run_ranks(train_each, 1, [contrastive_run("name=one", *LONGER), cut], False)
    words = [contrastive_run(f"name={name}", f"distributed.strategy={name}", *LONGER) for name in ("ddp", "fsdp2")]
    run_ranks(train_each, 4, words, False)
    for name in ("cut", "ddp", "fsdp2"):
        assert_same_run(runs / name, runs / "one")
        assert_same_weights(runs / name, runs / "one")


@pytest.mark.slow
@pytest.mark.timeout(290)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_it_follows_masked_tokens_in_one_run_on_any_ranks(
    contrastive_run: ContrastiveRun, text: Path, tmp_path: Path, strategy: str
) -> None:
    """Text that still waited for a row is not read where texts are compared; the idle head stays as it is."""
    runs, short = tmp_path / "runs", "phases.main.tokens=10000"
    run_ranks(
        train_each, 1, [masked_first(contrastive_run("name=one", "checkpoint.interval_steps=1", short), text)], False
    )
    words = masked_first(contrastive_run("name=two", f"distributed.strategy={strategy}", short), text)
    run_ranks(train_each, 2, [words], False)
    for one, other in zip(records(runs / "two"), records(runs / "one"), strict=True):
        assert (one["tokens"], one["predicted"]) == (other["tokens"], other["predicted"])
        assert (one["loss"], one["grad_norm"]) == pytest.approx((other["loss"], other["grad_norm"]), rel=2e-4)
    assert_same_weights(runs / "two", runs / "one")
    kept = [*(runs / "one/checkpoints").iterdir()]
    steps = records(runs / "one")
    others = [step for step in steps if step["phase"] == "main"]
    assert min(step["predicted"] for step in others) > 50
    assert others[-1]["loss"] < others[0]["loss"]
    oldest, newest = (verify(each).weights() for each in (min(kept), max(kept)))
    assert not torch.equal(oldest["model.final_norm.weight"], newest["model.final_norm.weight"])
    assert all(torch.equal(oldest[name], newest[name]) for name in oldest if name.startswith(("head.", "decoder.bias")))
