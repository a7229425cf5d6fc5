"""Graphs that a whole run compiles, one microbatch after the other: python -m tests.cuda_build.recompiles FOLDER

The whole of `train` on the null device: batch warmup, two phases of other rows, validation. Prints JSON: for each call
of the model whether it trains, its tokens, its predicted positions, and the number of graphs compiled for it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from modernbert_train.__main__ import read_run
from modernbert_train.batch import Batch, Sums
from modernbert_train.evaluate import heldout
from modernbert_train.models.masked_lm import POSITIONS, ForMaskedLM
from modernbert_train.train import session
from tests.cuda_build.layers import graphs
from tests.support.tiny_run import TINY_YAML, make_tiny_data

WORDS = (
    *("compute.device=cuda", "compute.precision=bf16", "compute.attention=varlen", "compute.compile=true"),
    *("model.hidden_size=128", "model.num_heads=2", "model.intermediate_size=192"),
    *("phases.short.microbatch_tokens=256", "phases.long.microbatch_tokens=512", "optim.fused=false"),
)


def main(here: Path) -> list[dict[str, Any]]:
    make_tiny_data(here / "data")
    file = here / "run.yaml"
    file.write_text(TINY_YAML.format(runs=here / "runs", data=here / "data"), encoding="utf-8")
    calls = []
    forward = ForMaskedLM.forward

    def counted(model: ForMaskedLM, batch: Batch, figures: bool = False) -> Sums:
        before = graphs()
        found = forward(model, batch, figures)
        tokens, predicted = len(batch.packed.input_ids_T), len(batch.targets[POSITIONS])
        call = {"trains": model.training, "tokens": tokens, "predicted": predicted, "graphs": graphs() - before}
        calls.append(call | {"boundaries": len(batch.packed.cu_seqlens_S), "longest": batch.packed.longest})
        return found

    # counts are known to the host, but would be read back from the device as zeros
    known = patch.object(heldout, "sums_over_ranks", lambda sums, counts: [0.0] * len(sums) + counts)
    with known, patch.object(ForMaskedLM, "forward", counted):
        session.train(read_run([str(file), *WORDS]))
    return calls


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
