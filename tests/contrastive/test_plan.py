"""A plan's numbers and a step's record for two passes over texts, compared with torch's counts and allocations.

If this breaks, a run is planned at three quarters of its cost, or on a GPU that it does not fit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from modernbert_train.__main__ import read_run
from modernbert_train.batch import Batch, Sums
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import ContrastiveConfig
from modernbert_train.data.dataset_card import read_card
from modernbert_train.errors import DataError
from modernbert_train.models.build import build_model
from modernbert_train.models.contrastive import FIRSTS, GRADIENT, HIGH, LOSS, LOW, ROLES, SCALE_GRADIENT, text_lengths
from modernbert_train.models.init import initialize
from modernbert_train.plan.census import census
from modernbert_train.plan.flops import mean_spans
from modernbert_train.plan.gpus import GPUS
from modernbert_train.plan.make import make_plan
from modernbert_train.plan.memory import compared_bytes, layers_bytes, vectors_bytes
from modernbert_train.plan.memory_fit import phase_memory
from modernbert_train.plan.parameters import count_parameters
from modernbert_train.report.throughput import training_flops
from modernbert_train.train.first_pass import first_pass
from modernbert_train.train.gradients import gradients
from tests.support.contrastive_models import CPU, batch_of
from tests.support.kept_memory import PLAIN, SMALL, Attend, autocast, kept_bytes, running_total, use_kernel
from tests.support.pairs import MODEL, ContrastiveRun
from tests.support.plan_batches import make_batch

GLOBAL: dict[str, Any] = MODEL | {"global_attn_every_n_layers": 1}  # the kernel then computes the very keys that count


@pytest.mark.slow
def test_the_flops_of_a_step_are_those_that_torch_counts(contrastive_run: ContrastiveRun) -> None:
    """Each text by its own length, twice forward and once backward; besides them there are the cosines alone, of 40
    queries with 80 texts, which are no part of the model."""
    config, objective = read_run(contrastive_run(model=GLOBAL)), ContrastiveConfig()
    batch = batch_of(config, objective, 6)
    model = build_model(config.model, objective)
    initialize(model, config.model, 5)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        gradients(model.train(), batch, CPU, 1, 0)
    parts, cosines = batch.microbatches, 3 * 2 * 40 * 80 * config.model.hidden_size
    lengths = [each for part in parts for each in text_lengths(part).tolist()]
    assert len(lengths) == 3 * 40 and sum(lengths) == sum(part.num_tokens for part in parts)
    computed = [each for part in parts for each in part.packed.cu_seqlens_S.diff().tolist() if each]  # with the tails

    def told(of: list[int]) -> float:
        return training_flops((), {"contrastive": 40}, config.model, objective, of)

    assert counted.get_total_flops() - cosines == pytest.approx(told(computed), rel=0.001)
    assert told(lengths) < told(computed)


@pytest.mark.runs
def test_a_plan_counts_each_text_as_a_sequence(contrastive_run: ContrastiveRun, pairs: Path) -> None:
    """Four thirds of the encoder's FLOPs, with the keys that a text sees, by the card of the pairs."""
    config = read_run(contrastive_run("data.validation=null"))
    (phase,) = make_plan(config, 1).phases
    assert phase.flops.head == 0 and phase.flops.training == 4 * phase.flops.forward
    lengths = read_card(pairs / "shards/train").text_lengths
    documents = np.load(pairs / "shards/train/lengths.npy")
    assert lengths is not None and len(lengths) == 3 * len(documents) and sum(lengths) == (documents + 2).sum()
    assert phase.text.spans == mean_spans(lengths, census(config.model, config.objective))
    assert phase.text.sequence_tokens == pytest.approx(np.mean(lengths))
    assert phase.text.fill > 0.8, "rows are filled with whole examples"


def texts_of(tokens: int, each: int) -> Batch:
    """Return a microbatch of alternating queries and positives of this many tokens, all different."""
    batch, number = make_batch([each] * (tokens // each), 1), tokens // each
    spare = tokens // 3 - number
    columns = {
        FIRSTS: torch.arange(0, tokens, each),
        ROLES: torch.arange(number) // (number // 2),
        LOW: torch.arange(number),
        HIGH: torch.zeros(number, dtype=torch.int64),
    }
    padded = {name: torch.nn.functional.pad(column, (0, spare)) for name, column in columns.items()}
    padded[ROLES][number:] = -100
    return replace(batch, targets=padded, counts={"contrastive": number // 2})


@pytest.mark.runs
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_the_second_pass_keeps_the_predicted_bytes(monkeypatch: pytest.MonkeyPatch, bf16: bool) -> None:
    """The layers and, instead of a head, the memory of a mean of states; no logits, and no gradient of a decoder."""
    use_kernel(monkeypatch, lambda q, k, v, layout, window: Attend.apply(q, k, v))
    objective, tokens, width = ContrastiveConfig(), 1536, SMALL.hidden_size
    model, batch = build_model(SMALL, objective).train(), texts_of(tokens, 32)
    found = {GRADIENT: torch.ones(tokens // 3, width), LOSS: torch.zeros(()), SCALE_GRADIENT: torch.zeros(())}
    with kept_bytes(model) as kept, autocast(bf16):
        model(batch.with_targets(found))
    told = layers_bytes(SMALL, PLAIN, bf16, tokens) + vectors_bytes(SMALL, bf16, tokens, tokens, 0)
    weights = count_parameters(SMALL, objective).matrices * 2 * bf16
    assert told + weights == pytest.approx(sum(kept.values()), rel=0.02)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("pairs", "width", "at_once", "symmetric"),
    [(512, 192, 1 << 12, False), (1024, 32, 1 << 25, False), (1024, 32, 1 << 25, True), (1024, 64, 1 << 18, True)],
    ids=["vectors", "cosines", "both directions", "both"],
)
def test_comparing_takes_the_predicted_bytes(
    monkeypatch: pytest.MonkeyPatch, pairs: int, width: int, at_once: int, symmetric: bool
) -> None:
    """By the allocator's record, for many vectors and few cosines, and the other way round."""
    for module in ("models.contrastive._COSINES", "plan.memory.COSINES"):
        monkeypatch.setattr(f"modernbert_train.{module}", at_once)
    objective, batch = ContrastiveConfig(symmetric=symmetric), texts_of(2 * pairs * 8, 8)
    made_PD = torch.randn(len(batch.targets[FIRSTS]), width)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        first_pass(lambda number, part: Sums({}, {}, made_PD), [batch], objective, CPU.device)
    found = max(running_total(record))
    told = compared_bytes(width, 2 * pairs, pairs, pairs, symmetric=symmetric)
    assert 0.97 * found < told < 1.35 * found


def test_a_plan_has_no_decoder_where_texts_are_compared(contrastive_run: ContrastiveRun) -> None:
    """And its texts are compared when the layers of the first pass are gone: the two do not add up."""
    plan = make_plan(load_run([contrastive_run("data.validation=null")[0]]), 1)
    found = plan.memory(plan.phases[0], "h100")
    assert found.head < 4 * 512 * 32 * 8 and found.compared > 0
    lasting = found.weights + found.gradients + found.moments
    assert found.peak == lasting + max(found.copies + max(found.layers + found.head, found.compared), found.step)


def test_a_batch_of_one_pair_teaches_nothing_and_ends_the_run() -> None:
    """Where `check` could not tell: the mean example is shorter than this one."""
    batch = texts_of(16, 8)
    with pytest.raises(DataError, match=r"the global batch has 1 pair, .* Raise batch_rows or row_tokens"):
        first_pass(lambda number, part: Sums({}, {}, torch.randn(5, 4)), [batch], ContrastiveConfig(), CPU.device)


@pytest.mark.runs
def test_plan_counts_the_matrix_and_the_vectors_of_a_batch(contrastive_run: ContrastiveRun) -> None:
    """The matrix for every token, in both passes; vectors of the global batch in memory, for any microbatch."""
    config = read_run(contrastive_run("objective.pooling=late"))
    (phase,) = make_plan(config, 1).phases
    assert phase.flops.head == 2 * 32 * 128 and phase.flops.training == 4 * phase.flops.forward
    parts = phase_memory(config, "main", GPUS["h100"], "ddp", 1, 2).parts()
    assert parts["compared"] > 4 * 8 * 128 * 8 * 256
    mean = read_run(contrastive_run())
    assert phase_memory(mean, "main", GPUS["h100"], "ddp", 1, 2).parts()["compared"] < parts["compared"] / 64


@pytest.mark.runs
def test_a_plan_counts_logits_of_all_tokens_and_vectors_as_wide_as_the_vocabulary(
    contrastive_run: ContrastiveRun,
) -> None:
    sparse, mean = (read_run(contrastive_run(f"objective.pooling={pooling}")) for pooling in ("sparse", "mean"))
    (phase,) = make_plan(sparse, 1).phases
    assert phase.flops.head == 2 * (32 * 32 + 32 * 512) and phase.flops.training == 4 * phase.flops.forward
    wide, narrow = (phase_memory(each, "main", GPUS["h100"], "ddp", 1, 2) for each in (sparse, mean))
    assert wide.compared > 4 * narrow.compared and wide.head > narrow.head + 512 * 4 * 512
