"""Each part of a training step alone, relative to the minimum time for its bytes or FLOPs: a table for each group.

    python -m benchmarks.kernels --preset cpu                    # two minutes on a laptop
    python -m benchmarks.kernels --preset gpu                    # bf16; attention alone takes 1.5 minutes on an H200
    python -m benchmarks.kernels --only attention head --json kernels.json

`x floor` is the time over the larger of FLOPs at the rate of a large matrix product and bytes at the rate of a large
copy, both measured in the same run; see benchmarks/measure.py. The floors of attention count visible pairs of tokens;
the floors of elementwise parts count each tensor once. An unsupported or failing kernel is a line with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: sys.path begins with this folder, the packages are one above it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.attention import Sizes, attention_groups
from benchmarks.measure import Group, Line, Rates, measure_rates, reason, take_turns
from benchmarks.model_parts import head_groups, layer_groups
from benchmarks.optimizer import optimizer_groups
from modernbert_train.config.schema import ModernBertConfig

SMALL = ModernBertConfig(
    vocab_size=8192, hidden_size=192, num_layers=7, num_heads=3, intermediate_size=288
)  # quickstart
BASE = ModernBertConfig()


@dataclass(frozen=True)
class Preset:
    """Sizes of everything.

    Attributes:
        attention: of the attention benchmark.
        model: whose layers and head are measured, on attention.tokens.
        optimized: models whose weights are stepped, by name.
        rounds: that count.
        compile: measure compiled forms too.
        matrix_size, copied_floats: of the matrix product and the copy that define floors.
    """

    attention: Sizes
    model: ModernBertConfig
    optimized: dict[str, ModernBertConfig]
    rounds: int
    compile: bool
    matrix_size: int
    copied_floats: int


PRESETS = {
    "cpu": Preset(
        Sizes(4096, documents=((300, 1024), (14, 64)), heads=(3, 12), half_window=64, padded_documents=8),
        SMALL,
        {"quickstart": SMALL},
        rounds=5,
        compile=True,
        matrix_size=1024,
        copied_floats=1 << 26,
    ),
    "gpu": Preset(
        Sizes(98_304, ((300, 1024), (300, 8192), (4096, 8192)), heads=(12, 16), half_window=64, padded_documents=64),
        BASE,
        {
            "base": BASE,
            "large": ModernBertConfig(hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=2624),
        },
        rounds=8,
        compile=True,
        matrix_size=8192,
        copied_floats=1 << 28,
    ),
}


def parts(preset: Preset, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], Iterator[Group]]]:
    """Return the choices of `--only`."""
    common = (preset.model, preset.attention.tokens, device, dtype, preset.compile)
    return {
        "attention": lambda: attention_groups(preset.attention, device, dtype),
        "layer": lambda: layer_groups(*common),
        "head": lambda: head_groups(*common),
        "optimizer": lambda: optimizer_groups(preset.optimized, device),
    }


def run(preset: Preset, device: torch.device, only: list[str] | None = None) -> tuple[Rates, list[dict[str, Any]]]:
    """Measure, and print each group's table when it is ready.

    Returns:
        The rates behind the floors, and a dict for each line.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rates = measure_rates(device, dtype, preset.matrix_size, preset.copied_floats)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    print(f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, {preset.rounds} rounds in turns")
    print(
        f"floors: {rates.flops / 1e12:.4g} TFLOP/s (matrix product, {str(dtype).removeprefix('torch.')}), "
        f"{rates.bytes / 1e9:.4g} GB/s (copy)"
    )
    rows: list[dict[str, Any]] = []
    seen: set[tuple[str, str]] = set()  # cases that cannot be measured, seen once
    for part, groups in parts(preset, device, dtype).items():
        if only is not None and part not in only:
            continue
        try:
            for group in groups():
                lines = list(take_turns(group.cases, preset.rounds, device, rates))
                print(table(group.title, [line for line in lines if (line.case, line.error) not in seen]), flush=True)
                seen |= {(line.case, line.error) for line in lines if line.error}
                rows += [{"part": part, "group": group.title} | line.figures() for line in lines]
        except Exception as error:
            print(f"\n{part}: {reason(error)}", flush=True)
            rows.append({"part": part, "error": reason(error)})
    return rates, rows


def table(title: str, lines: list[Line]) -> str:
    """Format a line for each stage; GPU memory only if there is some."""
    columns = f"{'ms':>9} {'min':>9} {'cpu ms':>9} {'TFLOP/s':>8} {'M tok/s':>8} {'floor ms':>9} {'x floor':>8}"
    columns += f" {'MB':>8}" * any(line.peak_bytes for line in lines)
    rows = [f"\n{title}", f"  {'':34} {columns}"]
    for line in lines:
        if line.error:
            rows.append(f"  {line.case:34} {line.error}")
            continue
        figures = line.figures()
        name = line.case if len(lines) == len({each.case for each in lines}) else f"{line.case}, {line.stage}"
        cells = [
            f"{figures['ms']:9.3f} {figures['min_ms']:9.3f} {figures['cpu_ms']:9.3f}",
            f"{figures['flops_per_second'] / 1e12:8.3f}" if line.work.flops else " " * 8,
            f"{figures['tokens_per_second'] / 1e6:8.3f}" if line.work.tokens else " " * 8,
            f"{line.floor_ms:9.3f} {figures['x_floor']:8.2f}" if line.floor_ms else " " * 18,
            f"{line.peak_bytes / 1e6:8.0f}" if line.peak_bytes else "",
        ]
        rows.append(f"  {name:34} {' '.join(cells)}".rstrip())
    return "\n".join(rows)


def fastest(timed: list[dict[str, Any]]) -> str:
    """Return the best case of each group, by the total time of its stages without preparation."""
    took: dict[str, dict[str, list[float]]] = {}
    for line in timed:
        if "error" not in line and line["stage"] != "prepare":
            sums = took.setdefault(line["group"], {}).setdefault(line["case"], [0.0, 0.0])
            sums[0] += line["ms"]
            sums[1] += line["floor_ms"]
    rows = [f"\n{'the fastest of each group':28} {'ms':>9} {'x floor':>8}"]
    for group, cases in took.items():
        if len(cases) > 1:
            name, (ms, floor_ms) = min(cases.items(), key=lambda case: case[1][0])
            rows.append(f"{name[:28]:28} {ms:9.3f} {ms / floor_ms:8.2f}  {group}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--preset", choices=PRESETS, default="gpu" if on_gpu else "cpu")
    names = list(parts(PRESETS["cpu"], torch.device("cpu"), torch.float32))
    parser.add_argument("--only", choices=names, nargs="+", help="parts to measure; all by default")
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    arguments = parser.parse_args()
    started = time.perf_counter()
    rates, rows = run(PRESETS[arguments.preset], torch.device(arguments.device), arguments.only)
    print(f"{fastest(rows)}\n{time.perf_counter() - started:.0f} seconds in all")
    if arguments.json is not None:
        about = {"device": arguments.device, "torch": torch.__version__, "threads": torch.get_num_threads()}
        about |= {"flops_per_second": rates.flops, "bytes_per_second": rates.bytes}
        arguments.json.write_text(json.dumps(about | {"lines": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
