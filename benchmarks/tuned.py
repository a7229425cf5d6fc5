"""`tune` on a case of benchmarks.train_step, with drawn documents: what each switch wins, on a device of ours or yours.

    python -m benchmarks.tuned base-1024                    # a case of the preset gpu
    python -m benchmarks.tuned small-1024 --preset cpu

What is printed, and the table, are those of `python -m modernbert_train tune`; nothing else is measured here.
"""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.corpus import write_corpus
from benchmarks.train_step import PRESETS, run_config
from modernbert_train.config.schema import ComputeConfig
from modernbert_train.train.tune.findings import TABLE
from modernbert_train.train.tune.session import tune


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", help="such as base-1024")
    parser.add_argument("--preset", choices=PRESETS, default="gpu")
    parser.add_argument("--out", type=Path, default=Path("data/tuned"), help="folder for documents and what is found")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--json", type=Path, help="write the table here, too, and the picture beside it")
    options = parser.parse_args()
    if options.case not in PRESETS[options.preset]:
        parser.error(f"{options.case}: not in this preset, which has {', '.join(PRESETS[options.preset])}")
    case = PRESETS[options.preset][options.case]
    data = options.out / "data" / options.case
    if not data.is_dir():
        partial = data.with_name(f"{options.case}.{os.getpid()}")
        write_corpus(partial, case.model.vocab_size, min(40_000_000, 400 * case.batch_tokens), case.median_tokens,
                     4 * case.row_tokens)  # fmt: skip
        partial.rename(data)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = run_config(case, options.out, data, device, workers=1)
    # everything is left open but where it computes
    config = replace(config, compute=ComputeConfig(device=config.compute.device),
                     data=replace(config.data, num_workers=None))  # fmt: skip
    folder = tune(config, minutes=options.minutes)
    if options.json is not None:
        shutil.copyfile(folder / TABLE, options.json)


if __name__ == "__main__":
    main()
