"""Tokens a second of a training step on this device, for runs whose data need not exist.

    python -m modernbert_train.train.measure_speed SECONDS MEDIAN RUN.yaml...

Print one line of JSON for each run: the speed of its first phase as configured, on random documents of MEDIAN tokens,
measured for SECONDS and at least two steps, after one warmup step. The loop has only the run's model, loss and
optimizer; the benchmarks time its parts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modernbert_train.batch import Batch, weighted
from modernbert_train.clock import Clock
from modernbert_train.config.auto import filled
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.keyed_random import Keys
from modernbert_train.data.loader import StepBatch
from modernbert_train.data.microbatches import MicrobatchMaker
from modernbert_train.data.packing import Chunk
from modernbert_train.data.planner import BatchPlan, Row
from modernbert_train.distributed.compute import Compute, keep_freed_memory, use_threads
from modernbert_train.models import build as models
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.models.init import initialize
from modernbert_train.objectives import build_objective
from modernbert_train.optim.optimizers import apply_clock, build_optimizer
from modernbert_train.train.gradients import count_terms, counts_per_rank, gradients
from modernbert_train.vocabulary import Vocabulary

_SPECIAL = 5  # ids below this are special tokens
_MAX_ROWS = 4  # rows of a step; more rows take longer at the same tokens a second


class BareLoop:
    """Training steps of a run of one phase, at its initial learning rate: gradients as in `train`, and the update.

    Args:
        model: on its device, in training mode.
        config: the run.
        compute: device and precision.
    """

    def __init__(self, model: OnEncoder, config: RunConfig, compute: Compute) -> None:
        self.model, self.config, self.compute = model, config, compute
        self.optimizer = build_optimizer(config.optim, model)
        apply_clock(self.optimizer, Clock.of(config), 0)
        self._steps = 0

    def gradients(self, batch: StepBatch, mark: Callable[[str], None] | None = None) -> Tensor:
        """Run forward and backward of every microbatch; return the loss of the step, still on the device.

        Args:
            batch: the step's batch.
            mark: called with the name of each part once it is launched: forward, backward.
        """

        def passed(event: str, microbatch: Batch, value: Any, last: bool) -> None:
            part = {"after_loss": "forward", "after_backward": "backward"}.get(event)
            if mark is not None and part is not None:
                mark(part)

        microbatches = gradients(self.model, batch, self.compute, self.config.seed, self._steps, passed)
        terms = batch.plan.objective.terms
        sums = {term: torch.stack([part.sums[term] for part in microbatches]).sum() for term in terms}
        return weighted(sums, terms, counts_per_rank(count_terms(batch.microbatches, terms), self.compute.device))

    def step(self, batch: StepBatch, mark: Callable[[str], None] | None = None) -> Tensor:
        """Run a whole step, whose last part is "optimizer"; return its loss. See `gradients`."""
        loss = self.gradients(batch, mark)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._steps += 1
        if mark is not None:
            mark("optimizer")
        return loss


class _Noise:
    """Documents of random tokens."""

    def __init__(self, entries: int, tokens: int) -> None:
        self._ids = np.random.default_rng(0).integers(_SPECIAL, entries, tokens)

    def read(self, document: int) -> NDArray[Any]:
        return self._ids

    def inside_words(self, document: int) -> NDArray[Any]:
        return np.zeros(len(self._ids), dtype=bool)

    def mask_keys(self, chunks: Sequence[Chunk]) -> Keys:
        return np.arange(len(chunks), dtype=np.uint64)

    def labels(self, chunks: Sequence[Chunk]) -> None:
        return None


def tokens_per_second(config: RunConfig, seconds: float, median: int) -> float:
    """Measure the speed of a run's first phase, with optimizer steps of a few rows.

    Args:
        config: the run.
        seconds: duration of the measurement.
        median: tokens of a document; longer than a row, it is cut.
    """
    config = filled(config, {})
    compute = Compute.of(config.compute)
    use_threads(config.compute, compute.device)
    if compute.device.type == "cpu":
        keep_freed_memory()
    loop = BareLoop(_fresh_model(config, compute), config, compute)
    batch = _batch(config, median)
    tokens = sum(part.num_tokens for part in batch.microbatches)
    loop.step(batch)  # warmup: allocates memory
    _wait(compute.device)
    began, steps = time.perf_counter(), 0
    while steps < 2 or time.perf_counter() - began < seconds:
        loop.step(batch)
        _wait(compute.device)
        steps += 1
    return steps * tokens / (time.perf_counter() - began)


def _fresh_model(config: RunConfig, compute: Compute) -> OnEncoder:
    """Build the run's model with fresh weights, on its device, in training mode."""
    model = models.build_model(config.model, config.objective, config.compute)
    if config.compute.compile:
        model.compile_layers()
    initialize(model, config.model, config.seed)
    model.set_phase(Clock.of(config).phases[0].model)
    return model.to(compute.device).train()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _batch(config: RunConfig, median: int) -> StepBatch:
    """Build some rows of the first phase, from documents of equal length."""
    name, phase = next(iter(config.phases.items()))
    objective = config.in_phase[name].objective
    vocabulary = Vocabulary(
        num_entries=config.model.vocab_size,
        pad_id=0,
        cls_id=2,
        sep_id=3,
        mask_id=4,
        ordinary=np.arange(_SPECIAL, config.model.vocab_size),
        sha256="",
    )
    length = max(1, min(median, phase.row_tokens - objective.special_tokens))
    number = min(_MAX_ROWS, phase.batch_rows)
    per_row = phase.row_tokens // (length + objective.special_tokens)
    rows: list[Row] = [tuple(Chunk(0, 0, 0, length) for _ in range(per_row)) for _ in range(number)]
    plan = BatchPlan(
        phase=name,
        tokens_before=0,
        tokens=number * phase.row_tokens,
        rows=rows,
        num_rows=number,
        row_tokens=phase.row_tokens,
        microbatch_rows=phase.microbatch_rows,
        objective=objective,
    )
    maker = MicrobatchMaker(
        _Noise(config.model.vocab_size, length), lambda settings: build_objective(settings, vocabulary), vocabulary
    )
    return StepBatch(tuple(maker.microbatches(rows, plan)), plan)


def main(words: Sequence[str]) -> None:
    """Measure each given run; see the module's docstring."""
    seconds, median, *files = words
    for file in files:
        speed = tokens_per_second(load_run([Path(file)]), float(seconds), int(median))
        print(json.dumps({"run": file, "tokens_per_second": speed}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
