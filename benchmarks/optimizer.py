"""Time of one optimizer step: our StableAdamW beside torch's fused AdamW and torch-optimi's StableAdamW.

    python -m benchmarks.optimizer --preset cpu      # seconds to two minutes on a laptop
    python -m benchmarks.optimizer --preset full     # on a GPU, timed with CUDA events

The optimizers take turns on the same parameters, round by round, so that a busy machine disturbs all alike. The floor
is the time to move the bytes that any implementation must move, at the bandwidth of a large copy in the same run:
AdamW reads p, g, m, v and writes p, m, v (28 bytes a parameter). StableAdamW cannot move p before the RMS of its whole
tensor is known, and reads m and v again (36 bytes).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import optimi  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from modernbert_train.config.schema import ModelConfig
from modernbert_train.optim.stable_adamw import StableAdamW

LR, DECAY = 1e-4, 1e-5
SETTINGS = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": DECAY}
MODELS = {
    "small": ModelConfig(vocab_size=8192, hidden_size=256, num_layers=6, num_heads=4, intermediate_size=384),
    "base": ModelConfig(),
}
PRESETS = {"cpu": {"small": 15, "base": 3}, "full": {"small": 100, "base": 50}}  # model -> rounds


@dataclass
class Entry:
    """One optimizer of the table; times in milliseconds."""

    build: Callable[[list[nn.Parameter]], Optimizer]
    floor_bytes: int
    step_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # processor time of all threads until step() returns


def entries(device: torch.device) -> dict[str, Entry]:
    def build_optimi(triton: bool) -> Callable[[list[nn.Parameter]], Optimizer]:
        return lambda params: optimi.StableAdamW(
            params, lr=LR, decouple_lr=True, max_lr=LR, triton=triton, foreach=not triton, **SETTINGS
        )

    table = {
        "torch AdamW, fused": Entry(lambda params: AdamW(params, LR, fused=True, **SETTINGS), 28),  # type: ignore[arg-type]
        "StableAdamW (ours)": Entry(lambda params: StableAdamW(params, LR, **SETTINGS), 36),  # type: ignore[arg-type]
        "optimi, foreach": Entry(build_optimi(triton=False), 36),
    }
    if device.type == "cuda":
        table["optimi, triton"] = Entry(build_optimi(triton=True), 36)
    return table


def parameter_shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    """The weights of the encoder and its masked-LM head, the decoder tied to the embedding."""
    width, hidden = model.hidden_size, model.intermediate_size
    layer: list[tuple[int, ...]] = [(3 * width, width), (width, width), (2 * hidden, width), (width, hidden), (width,)]
    shapes: list[tuple[int, ...]] = [(model.vocab_size, width), (width,)]
    for index in range(model.num_layers):
        shapes += layer if index == 0 else [*layer, (width,)]  # the first layer has no norm before attention
    return [*shapes, (width,), (width, width), (width,), (model.vocab_size,)]


def time_step(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Milliseconds until the work is done, and of processor time until the call returned.

    Processor time is what a busy machine changes least; with a GPU it is the cost of launching, waits included.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if on_gpu:
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end), 1e3 * cpu
    return 1e3 * wall, 1e3 * cpu


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per millisecond by the best of ten copies of 256 MiB."""
    source, target = (torch.ones(2**26, device=device) for _ in range(2))
    times = [time_step(lambda: target.copy_(source), device)[0] for _ in range(10)]
    return 2 * source.nbytes / min(times)


def measure(model: ModelConfig, rounds: int, device: torch.device) -> tuple[int, dict[str, Entry]]:
    """Step every optimizer `rounds` times, in turns.

    Returns:
        The number of parameters, and the filled table.
    """
    params = [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in parameter_shapes(model)]
    grads = [torch.randn_like(param) for param in params]
    for param in params:
        param.grad = torch.empty_like(param)
    table = entries(device)
    optimizers = {name: entry.build(params) for name, entry in table.items()}
    for index in range(rounds + 1):
        for name, optimizer in optimizers.items():
            for param, grad in zip(params, grads, strict=True):
                assert param.grad is not None
                param.grad.copy_(grad)  # optimi leaves other values in it
            step_ms, cpu_ms = time_step(optimizer.step, device)
            if index > 0:  # the first step allocates the moments
                table[name].step_ms.append(step_ms)
                table[name].cpu_ms.append(cpu_ms)
    return sum(param.numel() for param in params), table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)

    bandwidth = copy_bandwidth(device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    print(f"{where}, {torch.get_num_threads()} threads, torch {torch.__version__}, copies {bandwidth / 1e6:.1f} GB/s")
    columns = f"{'median ms':>10} {'min':>9} {'max':>9} {'cpu ms':>9} {'/ AdamW':>8} {'floor ms':>9} {'/ floor':>8}"
    for model_name, rounds in PRESETS[arguments.preset].items():
        size, table = measure(MODELS[model_name], rounds, device)
        print(f"\n{model_name + f': {size / 1e6:.1f} M weights, {rounds} rounds':<40} {columns}")
        fused = median(table["torch AdamW, fused"].step_ms)
        for name, entry in table.items():
            step, floor = median(entry.step_ms), entry.floor_bytes * size / bandwidth
            print(
                f"  {name:<38} {step:>10.2f} {min(entry.step_ms):>9.2f} {max(entry.step_ms):>9.2f} "
                f"{median(entry.cpu_ms):>9.2f} {step / fused:>8.2f} {floor:>9.2f} {step / floor:>8.2f}"
            )


if __name__ == "__main__":
    main()
