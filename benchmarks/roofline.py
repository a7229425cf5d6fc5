"""A roofline of a microbatch, kernel by kernel: where the time of a GPU goes, and what to win next.

    python -m benchmarks.roofline --gpu h100 h200

FLOPs of products, bytes of kernels and launches are counted, not assumed: `make test-cuda` runs base and large through
a CUDA device that computes nothing and records what it was asked (tests/cuda_build/microbatch.py). Attention's work is
that of the pairs that see each other. What is assumed are rates: a share of the datasheet's peak for products and for
attention, a share of the memory's rate for all else, 5 us for a launch; each is an option. Nothing here was timed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.train_step import GOALS
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import ComputeConfig, ModelConfig, ObjectiveConfig, OptimConfig, StableAdamWConfig
from modernbert_train.core.text import markdown_table
from modernbert_train.plan import speed
from modernbert_train.plan.census import census
from modernbert_train.plan.flops import Flops, flops_per_token, mean_spans
from modernbert_train.plan.gpus import GPUS, Gpu
from modernbert_train.plan.parameters import count_parameters

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "tests/cuda_build/recorded/microbatch.json"
SIZES, ROWS, FORMS = ("base", "large"), (1024, 8192), ("compiled", "eager")
MICROBATCH_TOKENS = {"base": 98_304, "large": 49_152}
BATCH_TOKENS = 589_824  # of one rank of eight in the recipe's batch of 4,608 x 1,024
BESIDE = {  # of GOALS
    "h200": {"beside the goal": 0, "beside the goal after that": 1},
    "h100": {"beside the published average": 2},
}
_LAYERS = 4  # launched more often than this, a kernel belongs to the layers


@dataclass(frozen=True)
class Rates:
    """Shares of the datasheet's rates that are taken to be reached."""

    products: float
    attention: float
    memory: float
    local_tiles: float


# what `plan` takes (FlashAttention-2); and what is assumed to be in reach: products as a large square one has them,
# FlashAttention-3 on heads of 64, forward and backward, its tiles of local windows, and a plain copy's share of memory
NOW = Rates(speed.MATRIX_SHARE, speed.ATTENTION_SHARE, speed.MEMORY_SHARE, speed.LOCAL_TILES)
REACHABLE = Rates(products=0.80, attention=0.45, memory=0.92, local_tiles=2.0)


@dataclass(frozen=True)
class Kernel:
    """What a kernel of a microbatch moves.

    Attributes:
        name: Inductor's, or of the operation.
        launches: in a microbatch.
        token_bytes: for each token of it.
        other_bytes: besides: weights.
    """

    name: str
    launches: int
    token_bytes: int
    other_bytes: int

    @property
    def of_layers(self) -> bool:
        return self.launches > _LAYERS

    def bytes(self, tokens: int) -> int:
        return self.token_bytes * tokens + self.other_bytes


@dataclass(frozen=True)
class Case:
    """A microbatch of a model.

    Attributes:
        size, row_tokens, form: base or large, compiled or eager.
        tokens: of the microbatch.
        kernels: all but products and attention.
        product_flops: of a token.
        launches: of all kinds, attention included.
        optim: the optimizer; fused where layers are compiled.
        flops: of a token in the forward pass, by part.
        weights: parameters.
        num_layers: of the encoder.
    """

    size: str
    row_tokens: int
    form: str
    tokens: int
    kernels: tuple[Kernel, ...]
    product_flops: float
    launches: int
    optim: OptimConfig
    flops: Flops
    weights: int
    num_layers: int

    @property
    def title(self) -> str:
        return f"{self.size} at {self.row_tokens:,}, {self.form}"

    @property
    def layer_bytes(self) -> float:
        """Of a token in one layer, forward and backward."""
        return sum(kernel.token_bytes for kernel in self.kernels if kernel.of_layers) / self.num_layers


def model_of(size: str) -> tuple[ModelConfig, ObjectiveConfig]:
    run = load_run([ROOT / f"yamls/recipes/modernbert-{size}.yaml"])
    first = next(iter(run.in_phase.values()))
    return first.model, first.objective


def read_case(recorded: dict[str, Any], size: str, row_tokens: int, form: str) -> Case:
    """A case from what is on record, its rows full of one document each, which costs most."""
    found = recorded[f"{size} {form}"]
    model, objective = model_of(size)
    counted = census(model, objective)
    share = {"tokens": objective.predicted_share}
    kernels = tuple(Kernel(name, *numbers) for name, numbers in found["kernels"].items())
    return Case(
        size=size,
        row_tokens=row_tokens,
        form=form,
        tokens=MICROBATCH_TOKENS[size],
        kernels=kernels,
        product_flops=found["products"][1],
        launches=sum(found["launches"].values()),
        optim=StableAdamWConfig(lr=1.0, fused=form == "compiled"),
        flops=flops_per_token(counted, mean_spans([row_tokens], counted), share),
        weights=count_parameters(model, objective).total,
        num_layers=model.num_layers,
    )


def parts(case: Case, gpu: Gpu, rates: Rates) -> dict[str, float]:
    """Seconds of the device for one microbatch, by part; the optimizer's as its share of a batch."""
    memory, tokens = rates.memory * gpu.memory_rate, case.tokens
    attention = 3 * tokens / (rates.attention * gpu.peak_flops)
    layers = [kernel for kernel in case.kernels if kernel.of_layers]
    rest = [kernel for kernel in case.kernels if not kernel.of_layers]
    update = case.weights * speed.optimizer_bytes(case.optim) * tokens / BATCH_TOKENS
    return {
        "products": case.product_flops * tokens / (rates.products * gpu.peak_flops),
        "attention, global": attention * case.flops.global_attention,
        "attention, local": attention * case.flops.local_attention * rates.local_tiles,
        "elementwise, layers": sum(kernel.token_bytes for kernel in layers) * tokens / memory,
        "elementwise, embedding, head and loss": sum(kernel.token_bytes for kernel in rest) * tokens / memory,
        "casts and gradients of weights": sum(kernel.other_bytes for kernel in case.kernels) / memory,
        "optimizer": update / memory,
    }


def host_seconds(case: Case) -> float:
    """What the host needs to launch it all; where that is more, the device waits."""
    return speed.LAUNCH_SECONDS * case.launches


def seconds(case: Case, gpu: Gpu, rates: Rates) -> float:
    return max(sum(parts(case, gpu, rates).values()), host_seconds(case))


def predicted(case: Case, gpu_name: str) -> float:
    """Tokens/s by `plan`'s roofline, the optimizer included."""
    model, objective = model_of(case.size)
    work = speed.Work(
        model, objective, ComputeConfig(compile=case.form == "compiled"), case.optim, case.row_tokens, case.flops, 1.0
    )
    spent = speed.microbatch_seconds(gpu_name, work, case.tokens)
    update = speed.optimizer_bytes(case.optim) * case.weights / (speed.MEMORY_SHARE * GPUS[gpu_name].memory_rate)
    return case.tokens / (spent + update * case.tokens / BATCH_TOKENS)


def wins(case: Case, gpu: Gpu, rates: Rates) -> Iterator[tuple[float, str]]:
    """Seconds of a microbatch that each thing would win alone, and what it is."""
    names = {
        "products": f"products at {REACHABLE.products:.0%} of the peak",
        "attention": f"attention at {REACHABLE.attention:.0%} of the peak (FlashAttention-3)",
        "memory": f"elementwise work at {REACHABLE.memory:.0%} of the memory's rate",
        "local_tiles": f"local layers that compute {REACHABLE.local_tiles:g} keys for each that is seen",
    }
    now = sum(parts(case, gpu, rates).values())
    for name, text in names.items():
        better = replace(rates, **{name: getattr(REACHABLE, name)})
        yield now - sum(parts(case, gpu, better).values()), text
    for kernel in case.kernels:
        text = f"without `{short(kernel.name)}` ({kernel.launches} x)"
        yield kernel.bytes(case.tokens) / (rates.memory * gpu.memory_rate), text


def short(name: str) -> str:
    """A generated name without what all share."""
    name = re.sub(r"^triton_(poi|per|red|tem)_fused_", "", name.removeprefix("aten."))
    return name if len(name) <= 60 else f"{name[:57]}..."


def report(gpu_name: str, cases: Sequence[Case], rates: Rates, most: int) -> Iterator[str]:
    """The tables of one GPU."""
    gpu = GPUS[gpu_name]
    yield f"## {gpu.label}: milliseconds of a microbatch, by part"
    spent = [parts(case, gpu, rates) for case in cases]
    rows = [[name, *(f"{1e3 * each[name]:.1f}" for each in spent)] for name in spent[0]]
    rows.append(["launches, by the host meanwhile", *(f"{1e3 * host_seconds(case):.1f}" for case in cases)])
    times = [seconds(case, gpu, rates) for case in cases]
    rows.append(["sum, or the host where it is slower", *(f"{1e3 * each:.1f}" for each in times)])
    rates_of = [case.tokens / each for case, each in zip(cases, times, strict=True)]
    rows.append(["tokens/s", *(f"{each:,.0f}" for each in rates_of)])
    planned = [predicted(case, gpu_name) for case in cases]
    rows.append(["beside `plan`'s roofline", *(f"{a / b:.2f} x" for a, b in zip(rates_of, planned, strict=True))])
    goals = [GOALS[f"{case.size}-{case.row_tokens}"] for case in cases]
    for title, which in BESIDE.get(gpu_name, {}).items():
        beside = zip(rates_of, goals, strict=True)
        rows.append([title, *(f"{rate / goal[which]:.2f} x of {goal[which]:,}" for rate, goal in beside)])
    rows.append(["bytes of a token and layer", *(f"{case.layer_bytes:,.0f}" for case in cases)])
    yield markdown_table(["", *(case.title for case in cases)], rows)
    for case, total in zip(cases, times, strict=True):
        if case.form == "compiled":
            yield f"## {gpu.label}, {case.title}: what to win next, each alone"
            found = sorted(wins(case, gpu, rates), key=lambda win: win[0], reverse=True)[:most]
            yield markdown_table(
                ["", "ms", "of the microbatch"],
                [[text, f"{1e3 * won:.1f}", f"{won / total:.1%}"] for won, text in found if won > 0],
            )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", nargs="+", choices=sorted(GPUS), default=["h100"], help="default h100")
    parser.add_argument("--products", type=float, default=NOW.products, help="share of the peak; default %(default)s")
    parser.add_argument("--attention", type=float, default=NOW.attention, help="share of the peak; default %(default)s")
    parser.add_argument("--memory", type=float, default=NOW.memory, help="share of its rate; default %(default)s")
    tiles = "keys that local layers compute for each that is seen; default %(default)s"
    parser.add_argument("--local-tiles", type=float, default=NOW.local_tiles, help=tiles)
    parser.add_argument("--most", type=int, default=10, help="rows of what to win next; default %(default)s")
    given = parser.parse_args(words)
    rates = Rates(given.products, given.attention, given.memory, given.local_tiles)
    for name in ("products", "attention", "memory"):
        if not 0 < getattr(rates, name) <= 1:
            parser.error(f"--{name} {getattr(rates, name):g}: a share is above 0 and at most 1")
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    cases = [read_case(recorded, size, row, form) for size in SIZES for row in ROWS for form in FORMS]
    for gpu in given.gpu:
        for text in report(gpu, cases, rates, given.most):
            print(text, end="\n\n")


if __name__ == "__main__":
    main()
