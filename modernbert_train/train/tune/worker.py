"""The process that trains with one candidate: commands in as lines of JSON, answers out as lines of JSON.

    python -m modernbert_train.train.tune.worker CONFIG.yaml

`look` says what this machine has, `parity` holds the candidate against the plain form, `start` builds it and takes the
first steps, `steps` takes so many more and says how long each took. What does not fit in memory is answered as such;
all else that goes wrong is an answer with an error, or the end of this process, which process.py sees.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from modernbert_train.config.load import load_run
from modernbert_train.config.packages import missing_fused
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.loader import StepBatch
from modernbert_train.distributed.compute import Compute, keep_freed_memory, use_threads
from modernbert_train.errors import RunError
from modernbert_train.models.attention import by_preference
from modernbert_train.plan.card import card_of
from modernbert_train.plan.tuned import fit_of
from modernbert_train.train.tune.loop import BareLoop, batches_of, fresh_model
from modernbert_train.train.tune.process import MARK
from modernbert_train.train.tune.timing import wait

WARM_UP = 2  # steps before those that count: compilation, allocation


class Worker:
    """One candidate.

    Args:
        config: a run of one phase with nothing open.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._compute = Compute.of(config.compute)
        self._loop: BareLoop | None = None
        use_threads(config.compute, self._compute.device)
        if self._compute.device.type == "cpu":
            keep_freed_memory()

    def look(self) -> dict[str, Any]:
        """What this device is, and which settings can serve on it at all."""
        config, compute = self._config, self._compute
        (phase,) = config.phases
        now = config.in_phase[phase]
        dtype = torch.bfloat16 if compute.bf16 else torch.float32
        kernels = by_preference(compute.device, dtype, now.objective.order, now.model.score_bias, now.model.local_heads)
        if now.model.local_heads is None:
            del kernels["tiles"]  # which is varlen in global layers
        on_gpu = compute.device.type == "cuda"
        memory = torch.cuda.get_device_properties(compute.device).total_memory if on_gpu else _free_memory()
        fused = next(missing_fused(replace(now.optim, fused=True)), None) if on_gpu else "it needs a GPU"
        card = card_of(compute)
        return {
            "fit": vars(fit_of(config, phase, compute)),
            "on_gpu": on_gpu,
            "kernels": kernels,
            "fused": fused,
            "card": None if card is None else vars(card),
            "threads": torch.get_num_threads(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": memory,
        }

    def parity(self) -> dict[str, Any]:
        """Whether the candidate computes what the plain form does."""
        from modernbert_train.train.tune.parity import check_parity

        equal, text = check_parity(self._config, self._compute)
        return {"equal": equal, "text": text}

    def start(self) -> dict[str, Any]:
        """Build, and take the first steps; with the seconds of the first, which compiles, and of the last of them."""
        self._loop = BareLoop(fresh_model(self._config, self._compute), self._config, self._compute)
        self._batches = batches_of(self._config)
        seconds = [self._step()[0] for _ in range(WARM_UP)]
        on_gpu = self._compute.device.type == "cuda"
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peak = torch.cuda.max_memory_reserved() if on_gpu else rss
        return {"first_seconds": seconds[0], "seconds": seconds[-1], "peak_bytes": peak}

    def steps(self, number: int) -> dict[str, Any]:
        """Take steps; tokens a second of each, from the wait for its batch to its end."""
        return {"tokens_per_second": [tokens / seconds for seconds, tokens in (self._step() for _ in range(number))]}

    def _step(self) -> tuple[float, int]:
        assert self._loop is not None, "steps before start"
        began = time.perf_counter()
        batch: StepBatch = next(self._batches)
        self._loop.step(batch)
        wait(self._compute.device)
        return time.perf_counter() - began, sum(part.num_tokens for part in batch.microbatches)

    def close(self) -> None:
        """End the loader's workers."""
        if self._loop is not None:
            self._batches.close()  # type: ignore[attr-defined]


def answer(do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a command comes to, or why it does not."""
    try:
        return do()
    except Exception as error:  # kernels and compilers of others fail in any way, and the table says how
        text = str(error).lower()
        full = isinstance(error, torch.OutOfMemoryError | MemoryError)
        full = full or "can't allocate memory" in text or "out of memory" in text
        found = {"out_of_memory": full, "error": _first_line(error)}
    gc.collect()
    with suppress(RuntimeError):
        torch.cuda.empty_cache()
    return found


def _first_line(error: BaseException) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    return first if isinstance(error, RunError) else f"{type(error).__name__}: {first}"[:300]


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def main(file: str) -> None:
    """Serve until the commands end."""
    worker = Worker(load_run([Path(file)]))
    for line in sys.stdin:
        command = json.loads(line)
        do: Callable[..., dict[str, Any]] = getattr(worker, command.pop("do"))
        print(MARK + json.dumps(answer(partial(do, **command))), flush=True)
    worker.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
