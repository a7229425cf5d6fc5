"""Tokens a second of a training step on this device, for runs whose data need not exist.

    python -m modernbert_train.train.tune.rate SECONDS MEDIAN RUN.yaml...

One line of JSON for each run: how fast its first phase trains as the run stands, on documents of random tokens with
MEDIAN tokens each. It is measured for SECONDS, two steps at least; one step before that is not counted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.auto import filled
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.keyed_random import Keys
from modernbert_train.data.loader import StepBatch
from modernbert_train.data.microbatches import MicrobatchMaker
from modernbert_train.data.packing import Chunk
from modernbert_train.data.planner import BatchPlan, Row
from modernbert_train.distributed.compute import Compute, keep_freed_memory, use_threads
from modernbert_train.objectives import build_objective
from modernbert_train.train.tune.loop import BareLoop, fresh_model
from modernbert_train.train.tune.timing import wait
from modernbert_train.vocabulary import Vocabulary

_SPECIAL = 5  # ids before those of text
_MOST_ROWS = 4  # of a step: more take longer, and no token less


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
    """Measure the first phase of a run, one optimizer step of a few rows after the other.

    Args:
        config: the run.
        seconds: of measuring.
        median: tokens of a document; what is longer than a row is cut.
    """
    config = filled(config, {})
    compute = Compute.of(config.compute)
    use_threads(config.compute, compute.device)
    if compute.device.type == "cpu":
        keep_freed_memory()
    loop = BareLoop(fresh_model(config, compute), config, compute)
    batch = _batch(config, median)
    tokens = sum(part.num_tokens for part in batch.microbatches)
    loop.step(batch)  # allocation
    wait(compute.device)
    began, steps = time.perf_counter(), 0
    while steps < 2 or time.perf_counter() - began < seconds:
        loop.step(batch)
        wait(compute.device)
        steps += 1
    return steps * tokens / (time.perf_counter() - began)


def _batch(config: RunConfig, median: int) -> StepBatch:
    """Some rows of the first phase, in documents of equal length."""
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
    number = min(_MOST_ROWS, phase.batch_rows)
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
    """Measure each run named; see above."""
    seconds, median, *files = words
    for file in files:
        speed = tokens_per_second(load_run([Path(file)]), float(seconds), int(median))
        print(json.dumps({"run": file, "tokens_per_second": speed}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
