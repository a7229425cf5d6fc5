"""What the guard of train/stability.py costs a training step in which nothing is wrong.

    python -m benchmarks.stability                      # the quickstart's size
    python -m benchmarks.stability --preset cpu-base    # ModernBERT-base, some minutes

Steps of 2,048 tokens in one microbatch, forward, backward and StableAdamW, are taken with and without the guard in
turns on the same batches, on one thread; the time is the processor's, so that other work on the machine disturbs less.
On a CPU nothing is asynchronous, so the time spent inside the guard is also its whole cost; it is measured directly,
because a difference below 1 % drowns in the noise of the steps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.documents import draw_rows, pack
from benchmarks.train_step import BASE, SMALL
from modernbert_train.config.schema import PhaseConfig, RunConfig
from modernbert_train.models.init import initialize
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.optim.stable_adamw import StableAdamW
from modernbert_train.ranks.save_requests import Requests
from modernbert_train.run.progress import Progress
from modernbert_train.run.run_folder import RunFolder
from modernbert_train.train.stability import Guard
from modernbert_train.train.step_numbers import CurrentStep

ROWS = 2
STEPS = {"cpu": 30, "cpu-base": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=STEPS, default="cpu")
    preset = parser.parse_args().preset
    torch.set_num_threads(1)
    shape = {"cpu": SMALL, "cpu-base": BASE}[preset]
    phase = PhaseConfig(tokens=1 << 40, row_tokens=1024, batch_rows=ROWS, microbatch_tokens=1024 * ROWS)
    config = RunConfig(name="none", runs_folder=tempfile.gettempdir(), model=shape, phases={"only": phase})
    model = ModernBertForMaskedLM(shape)
    initialize(model, shape, seed=17)
    optimizer = StableAdamW(model.parameters(), 1e-4, weight_decay=1e-5)
    progress = Progress(config, visible=False)
    full_window = [9.0 + 0.01 * n for n in range(config.stability.spike_window_batches)]
    step_now = CurrentStep(Requests(None))
    guard = Guard(config, None, RunFolder(config), progress, lambda steps: None, step_now, lambda: None)  # type: ignore[arg-type]
    guard.memory["phase"], guard.memory["losses"] = "only", full_window
    plan = SimpleNamespace(phase="only", tokens_before=0, tokens=1, objective=config.objective)
    state: Any = SimpleNamespace(model=model, optimizers=[optimizer], timestamp=SimpleNamespace())
    logger: Any = None
    rng = np.random.default_rng(0)
    whole: dict[bool, list[float]] = {True: [], False: []}
    inside: list[float] = []
    for step in range(-1, STEPS[preset]):
        batch = pack(draw_rows(rng, ROWS, shape.vocab_size))
        state.timestamp.batch = SimpleNamespace(value=step)
        for guarded in (True, False) if step % 2 else (False, True):
            optimizer.zero_grad()
            spent, begin = 0.0, time.process_time()
            state.batch = SimpleNamespace(plan=plan)
            if guarded:
                step_now.batch_start(state, logger)
                guard.batch_start(state, logger)
            state.outputs, state.batch = model(batch), batch
            state.loss = state.outputs.losses["mlm"] / batch.counts["mlm"]
            if guarded:
                at = time.process_time()
                step_now.after_loss(state, logger)
                spent += time.process_time() - at
            state.loss.backward()
            state.batch = SimpleNamespace(plan=plan)
            if guarded:
                at = time.process_time()
                step_now.after_train_batch(state, logger)
                guard.after_train_batch(state, logger)
                spent += time.process_time() - at
            optimizer.step()
            if step >= 0:
                whole[guarded].append(time.process_time() - begin)
                if guarded:
                    inside.append(spent)
    took, without = median(whole[True]), median(whole[False])
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{preset}: {size:,} parameters, {STEPS[preset]} steps each, torch {torch.__version__}")
    print(f"step with the guard     {1e3 * took:9.2f} ms   without {1e3 * without:9.2f} ms")
    print(f"inside the guard        {1e3 * median(inside):9.2f} ms   {median(inside) / took:.2%} of the step")
    print(f"inside, slowest of ten  {1e3 * float(np.quantile(inside, 0.9)):9.2f} ms")


if __name__ == "__main__":
    main()
