"""The time of a microbatch on a GPU by part, as predicted by `plan`, and the largest possible gains.

    python -m benchmarks.roofline --gpu h100 h200

The parts are from `modernbert_train/plan/speed.py`, with kernel times measured in isolation. Bytes of elementwise
kernels and launches were counted: `make test-cuda` runs base and large on a CUDA device that computes nothing and
records its calls (tests/cuda_build/microbatch.py). Nothing here was timed; `benchmarks.published` has published speeds.
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
from modernbert_train.config.schema import ComputeConfig, ModelConfig, ObjectiveConfig, StableAdamWConfig
from modernbert_train.core.text import markdown_table
from modernbert_train.plan import speed
from modernbert_train.plan.attended_keys import mean_tiles
from modernbert_train.plan.census import census
from modernbert_train.plan.gpus import GPUS, HOPPER
from modernbert_train.plan.parameters import count_parameters

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "tests/cuda_build/recorded/microbatch.json"
SIZES, ROWS, FORMS = ("base", "large"), (1024, 8192), ("compiled", "eager")
MICROBATCH_TOKENS = {"base": 98_304, "large": 49_152}
BATCH_TOKENS = 589_824  # of one rank of eight in the recipe's batch of 4,608 x 1,024
COPY_SHARE = 0.92  # of the memory's rate, reached by a plain copy
COMPARED = {  # label -> index into GOALS
    "h200": {"relative to the goal": 0, "relative to the next goal": 1},
    "h100": {"relative to the published average": 2},
}
_LAYERS = 4  # a kernel launched more often than this belongs to the layers


@dataclass(frozen=True)
class Kernel:
    """Memory traffic of a kernel in a microbatch.

    Attributes:
        name: Inductor's, or of the operation.
        launches: in a microbatch.
        token_bytes: for each token of it.
        other_bytes: in addition: weights.
    """

    name: str
    launches: int
    token_bytes: int
    other_bytes: int

    @property
    def of_layers(self) -> bool:
        return self.launches > _LAYERS

    @property
    def of_loss(self) -> bool:
        """True for the loss's kernels: unlike embedding, final norm and head, they compute a logarithm."""
        return not self.of_layers and ("_log_" in self.name or not self.name.startswith("triton"))

    def bytes(self, tokens: int) -> int:
        return self.token_bytes * tokens + self.other_bytes


@dataclass(frozen=True)
class Case:
    """A microbatch of a model, with one document in each row.

    Attributes:
        size, form: base or large, compiled or eager.
        work: its shapes; the update is fused if layers are compiled.
        tokens: of the microbatch.
        kernels: recorded, all except products and attention.
        product_flops: of a token, recorded.
        launches: recorded, of all kinds.
    """

    size: str
    form: str
    work: speed.Work
    tokens: int
    kernels: tuple[Kernel, ...]
    product_flops: float
    launches: int

    @property
    def title(self) -> str:
        return f"{self.size} at {self.work.row_tokens:,}, {self.form}"

    @property
    def layer_bytes(self) -> float:
        """Bytes of a token in one layer, forward and backward."""
        return sum(each.token_bytes for each in self.kernels if each.of_layers) / self.work.model.num_layers


def model_of(size: str) -> tuple[ModelConfig, ObjectiveConfig]:
    run = load_run([ROOT / f"yamls/recipes/modernbert-{size}.yaml"])
    first = next(iter(run.in_phase.values()))
    return first.model, first.objective


def read_case(recorded: dict[str, Any], size: str, row_tokens: int, form: str) -> Case:
    """Build a case from a recording."""
    record, (model, objective) = recorded[f"{size} {form}"], model_of(size)
    compiled = form == "compiled"
    compute, optim = ComputeConfig(compile=compiled), StableAdamWConfig(lr=1.0, fused=compiled)
    tiles = mean_tiles([row_tokens], census(model, objective))
    return Case(
        size=size,
        form=form,
        work=speed.Work(model, objective, compute, optim, row_tokens, tiles, row_tokens, fill=1.0),
        tokens=MICROBATCH_TOKENS[size],
        kernels=tuple(Kernel(name, *numbers) for name, numbers in record["kernels"].items()),
        product_flops=record["products"][1],
        launches=sum(record["launches"].values()),
    )


def parts(case: Case, gpu: str) -> dict[str, float]:
    """Return the device's seconds for one microbatch, by part; of the optimizer, the microbatch's share of a batch."""
    weights = count_parameters(case.work.model, case.work.objective).total
    update = speed.optimizer_bytes(case.work.optim) * weights / (speed.MEMORY_SHARE * GPUS[gpu].memory_rate)
    return {**speed.parts(gpu, case.work, case.tokens), "optimizer": update * case.tokens / BATCH_TOKENS}


def wins(case: Case, gpu: str) -> Iterator[tuple[float, str]]:
    """Yield the seconds of a microbatch that each change would save alone, and its description."""
    now = parts(case, gpu)
    products = case.product_flops * case.tokens / (speed.PRODUCT_TOP * GPUS[gpu].peak_flops)
    yield now["products of layers"] + now["products of heads"] - products, "products as fast as large square ones"
    if gpu in HOPPER:
        third = replace(case.work, compute=replace(case.work.compute, attention="flash"))
        yield sum(now.values()) - sum(parts(replace(case, work=third), gpu).values()), "FlashAttention-3"
    yield now["elementwise, layers"] * (1 - speed.MEMORY_SHARE / COPY_SHARE), "elementwise work as fast as a copy"
    for kernel in case.kernels:
        text = f"without `{short(kernel.name)}` ({kernel.launches} x)"
        yield kernel.bytes(case.tokens) / (speed.MEMORY_SHARE * GPUS[gpu].memory_rate), text


def short(name: str) -> str:
    """Shorten a generated kernel name by its common parts."""
    name = re.sub(r"^triton_(poi|per|red|tem)_fused_", "", name.removeprefix("aten."))
    return name if len(name) <= 60 else f"{name[:57]}..."


def report(gpu: str, cases: Sequence[Case], most: int) -> Iterator[str]:
    """Yield the tables of one GPU."""
    label = GPUS[gpu].label
    yield f"## {label}: milliseconds of a microbatch, by part"
    spent = [parts(case, gpu) for case in cases]
    rows = [[name, *(f"{1e3 * each[name]:.1f}" for each in spent)] for name in spent[0]]
    rows.append(["launches, by the host meanwhile", *(_milliseconds(case) for case in cases)])
    times = [sum(each.values()) for each in spent]
    rows.append(["sum", *(f"{1e3 * each:.1f}" for each in times)])
    fastest = [case.tokens / each for case, each in zip(cases, times, strict=True)]
    slowest = [1 / (speed.SLOWEST.device / rate + speed.SLOWEST.token) for rate in fastest]
    rows.append(["tokens/s, from", *(f"{each:,.0f}" for each in slowest)])
    rows.append(["to", *(f"{each:,.0f}" for each in fastest)])
    goals = [GOALS[f"{case.size}-{case.work.row_tokens}"] for case in cases]
    for title, which in COMPARED.get(gpu, {}).items():
        pairs = zip(slowest, fastest, goals, strict=True)
        rows.append([title, *(f"{a / goal[which]:.2f} to {b / goal[which]:.2f} x" for a, b, goal in pairs)])
    rows.append(["bytes of a token and layer", *(f"{case.layer_bytes:,.0f}" for case in cases)])
    yield markdown_table(["", *(case.title for case in cases)], rows)
    for case, total in zip(cases, times, strict=True):
        if case.form == "compiled":
            yield f"## {label}, {case.title}: the largest gains, each alone"
            largest = sorted(wins(case, gpu), key=lambda win: win[0], reverse=True)[:most]
            yield markdown_table(
                ["", "ms", "of the microbatch"],
                [[text, f"{1e3 * won:.1f}", f"{won / total:.1%}"] for won, text in largest if won > 0],
            )


def _milliseconds(case: Case) -> str:
    least, most = (1e3 * pace.launch * case.launches for pace in (speed.FASTEST, speed.SLOWEST))
    return f"{least:.0f} to {most:.0f}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", nargs="+", choices=sorted(GPUS), default=["h100"], help="default h100")
    parser.add_argument("--most", type=int, default=10, help="rows of gains; default %(default)s")
    options = parser.parse_args(words)
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    cases = [read_case(recorded, size, row, form) for size in SIZES for row in ROWS for form in FORMS]
    for gpu in options.gpu:
        for text in report(gpu, cases, options.most):
            print(text, end="\n\n")


if __name__ == "__main__":
    main()
