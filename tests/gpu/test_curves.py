"""Sixty steps of training in bf16 and in fp32: the gate that a kernel or a compile mode passes before it is a default.

The text is a Markov chain, masked by the real objective, and StableAdamW trains on it. All runs see the same documents
under the same masks. bf16 alone moves a curve, and so does the order of summation; so the fast run is compared with a
band, and with the distance of two plain bf16 runs from fp32, one of them with its documents in reverse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch

from benchmarks.batches import lay_out, mean_loss, mlm_batch
from modernbert_train.batch import IGNORED_LABEL, Batch
from tests.support.gpu_parts import DEVICE, GPU_TEST, ON_GPU, PAD, build, precision, small

pytestmark = GPU_TEST

from modernbert_train.config.schema import MaskedLmConfig
from modernbert_train.core.keyed_random import derive
from modernbert_train.objectives.mlm import MaskedLM
from modernbert_train.optim.stable_adamw import StableAdamW
from modernbert_train.vocabulary import Vocabulary

STEPS, WARMUP = 60, 10
VOCAB, ORDINARY = 512, 5
LINE = 8192 if ON_GPU else 512  # tokens of a step
BAND = 0.02  # largest relative distance of a bf16 loss, smoothed over five steps, from the fp32 one

Lines = tuple[list[np.ndarray], list[int]]


@cache
def draw_lines() -> list[Lines]:
    """Documents of each step with their keys: every token has four likely successors, frequent ones as words are."""
    rng = np.random.default_rng(7)
    frequency = 1 / np.arange(1, VOCAB - ORDINARY + 1)
    successors = ORDINARY + rng.choice(VOCAB - ORDINARY, (VOCAB, 4), p=frequency / frequency.sum())
    lines: list[Lines] = []
    for step in range(STEPS):
        documents: list[np.ndarray] = []
        room = LINE
        while room > 8:
            length = int(min(room, np.clip(rng.lognormal(5.0, 0.8), 8, 512)))
            ids = [int(rng.integers(ORDINARY, VOCAB))]
            for choice, jump in zip(rng.integers(0, 4, length - 3), rng.random(length - 3) < 0.05, strict=True):
                ids.append(int(rng.integers(ORDINARY, VOCAB)) if jump else int(successors[ids[-1], choice]))
            documents.append(np.array([2, *ids, 3]))
            room -= length
        lines.append((documents, [derive(1, step, index) for index in range(len(documents))]))
    return lines


def masked(line: Lines, reverse: bool) -> Batch:
    """A line as the objective masks it; masks belong to documents, not to their order."""
    documents, keys = line
    if reverse:
        documents, keys = documents[::-1], keys[::-1]
    vocabulary = Vocabulary(VOCAB, cls_id=2, sep_id=3, pad_id=PAD, mask_id=4, ordinary=np.arange(5, VOCAB), sha256="")
    objective = MaskedLM(MaskedLmConfig(), vocabulary)
    lengths = [len(document) for document in documents]
    boundaries = np.cumsum([0, *lengths])
    used = int(boundaries[-1])
    ids_T = np.full(LINE, PAD)
    ids_T[:used] = np.concatenate(documents)
    found = objective.corrupt(
        ids_T, boundaries[:-1] + 1, np.array(lengths) - 2, np.array(keys, dtype=np.uint64), mask_rate=0.3
    )
    most, count = objective.max_predicted(0.3, LINE), len(found.labels_M)
    tail = [LINE] if used < LINE else []
    cu_seqlens = np.full(LINE // 8 + 2, LINE)
    cu_seqlens[: len(boundaries) + len(tail)] = [*boundaries, *tail]
    return mlm_batch(
        lay_out(torch.from_numpy(found.input_ids_T), torch.from_numpy(cu_seqlens), 512),
        torch.from_numpy(np.pad(found.positions_M, (0, most - count))),
        torch.from_numpy(np.pad(found.labels_M, (0, most - count), constant_values=IGNORED_LABEL)),
        num_tokens=used,
    ).to(DEVICE)


@cache
def curve(attention: str, *, bf16: bool, compiled: bool = False, reverse: bool = False) -> list[float]:
    """The loss of every step."""
    torch._dynamo.reset()
    model = build(small(vocab_size=VOCAB, init_std=0.02), attention=attention)
    if compiled:
        model.compile_layers()
    optimizer = StableAdamW(model.parameters(), 1e-3, weight_decay=1e-5)
    losses = []
    for step, line in enumerate(draw_lines()):
        for group in optimizer.param_groups:
            group["lr"] = group["max_lr"] * min(1.0, (step + 1) / WARMUP)
        with precision(bf16):
            loss = mean_loss(model, masked(line, reverse))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def distance(found: Sequence[float], exact: Sequence[float]) -> list[float]:
    """Relative distance of two curves, each the mean of five steps."""
    smooth = [np.convolve(each, np.ones(5) / 5, "valid") for each in (found, exact)]
    return (np.abs(smooth[0] - smooth[1]) / smooth[1]).tolist()


def test_training_in_bf16_follows_fp32() -> None:
    """Mixed precision must train what fp32 trains, in any order of sums; and there must be something to learn."""
    exact = curve("sdpa", bf16=False)
    assert exact[0] == pytest.approx(math.log(VOCAB), rel=0.02)
    assert np.mean(exact[-10:]) < exact[0] - 0.25, "the model learns nothing: any two curves would agree"
    for reverse in (False, True):
        assert max(distance(curve("sdpa", bf16=True, reverse=reverse), exact)) < BAND


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_fast_path_follows_fp32_as_plain_bf16_does(compiled: bool) -> None:
    """The default of training, `auto` in bf16 with compiled layers, compared with plain attention in fp32: within the
    band, and on average at most three times as far off as rounding alone."""
    exact = curve("sdpa", bf16=False)
    rounding = max(np.mean(distance(curve("sdpa", bf16=True, reverse=reverse), exact)) for reverse in (False, True))
    found = distance(curve("auto", bf16=True, compiled=compiled), exact)
    assert max(found) < BAND
    assert np.mean(found) < 3 * rounding + 2e-4
