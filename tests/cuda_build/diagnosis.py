"""Peak memory of a step and of the search for a number that is not finite: python -m tests.cuda_build.diagnosis SIZE

The size's layers are compiled and go through the null device with one microbatch. Prints both peaks in bytes as JSON.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

from modernbert_train.config.load import load_run
from modernbert_train.config.schema import ComputeConfig, MaskedLmConfig
from modernbert_train.distributed.compute import Compute
from modernbert_train.train.adapters import ComposerObjective
from modernbert_train.train.diagnosis import find_non_finite
from modernbert_train.train.gradients import gradients
from tests.cuda_build.layers import on_device
from tests.support.gpu_parts import make_batch
from tests.support.paths import ROOT

ROW, ROWS, LAYERS = 1024, 16, 8


def main() -> None:
    config = load_run([ROOT / f"yamls/recipes/modernbert-{sys.argv[1]}.yaml"], [f"model.num_layers={LAYERS}"]).model
    asked, objective = ComputeConfig(attention="varlen", compile=True), MaskedLmConfig()
    compute = Compute.of(asked)
    model = on_device(config, objective, asked)
    batch = make_batch([ROW] * ROWS, ROW, config.vocab_size, boundaries=4 * ROWS, rows=ROWS)
    plan = SimpleNamespace(objective=objective, phase="stable", row_tokens=ROW)
    step: Any = SimpleNamespace(plan=plan, microbatches=[batch], rows=[()] * ROWS)
    peaks = {}
    for _ in range(2):  # the first compiles
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        gradients(model, step, compute, 1, 1)
        peaks["step"] = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert find_non_finite(ComposerObjective(model), step, compute, 1, 1) == []
    print(json.dumps(peaks | {"search": torch.cuda.max_memory_allocated()}))


if __name__ == "__main__":
    main()
