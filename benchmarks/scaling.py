"""Scaling on paper, from 8 to 1,024 GPUs, by the functions of `plan`.

    python -m benchmarks.scaling            # tables, a few seconds, no GPU

Strong scaling keeps the recipe's global batch, rounded up to whole rows on each GPU, as long as that adds no more than
an eighth. Weak scaling gives each GPU one microbatch of the recipe in each step, whatever their number. Efficiency is
tokens a second of a GPU over those of one GPU alone at the recipe's batch, so it counts all that does not shrink with
the number of GPUs: exposed communication and, under DDP, the update of all weights on each GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from modernbert_train.__main__ import read_run
from modernbert_train.core.text import markdown_table
from modernbert_train.plan.advice import Setting, settings
from modernbert_train.plan.communication import LINK_SHARE, Transfer, exchange, transfers
from modernbert_train.plan.gpus import GPUS
from modernbert_train.plan.make import Plan, PlannedPhase, make_plan
from modernbert_train.plan.memory import Strategy, sharing_ranks
from modernbert_train.plan.speed import MEMORY_SHARE, microbatch_seconds, step_time

RECIPES = Path(__file__).resolve().parent.parent / "yamls/recipes"
SHAPES = (
    "modernbert-base/1-stable",
    "modernbert-base/2-context",
    "modernbert-large/1-stable",
    "modernbert-large/2-context",
)
SCALES = (8, 16, 32, 64, 128, 256, 512, 1024)
STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp2", "hsdp")
MOST_ADDED = 1 / 8  # of the recipe's batch, to give every GPU the same number of rows


def read_plan(shape: str) -> Plan:
    """A phase of a recipe, compiled, its rows full of one sequence each, which costs most."""
    return make_plan(
        read_run([str(RECIPES / f"{shape}.yaml"), "compute.compile=true", "optim.fused=true", "data.train=absent"]),
        ranks=1,
    )


def title(plan: Plan) -> str:
    name = plan.config.name.split("-")[1]
    return f"{name} at {plan.phases[0].config.row_tokens:,}"


def with_rows(phase: PlannedPhase, rows: int) -> PlannedPhase:
    return replace(phase, config=replace(phase.config, batch_rows=rows))


def strong_rows(phase: PlannedPhase, ranks: int) -> int | None:
    """The recipe's batch in whole rows on each GPU; None where that is another batch."""
    rows = -(-phase.config.batch_rows // ranks) * ranks
    return rows if rows <= (1 + MOST_ADDED) * phase.config.batch_rows else None


def alone(plan: Plan, phase: PlannedPhase, gpu: str) -> float:
    """Tokens a second of one GPU that has the recipe's batch to itself."""
    rows, microbatch_rows = phase.config.batch_rows, phase.config.microbatch_rows
    work = plan.work(phase)
    return step_time(gpu, work, strategy="ddp", ranks=1, rows=rows, microbatch_rows=microbatch_rows).tokens_per_second


def cells(setting: Setting | None, reference: float) -> tuple[str, str]:
    """Exposed milliseconds and efficiency; nothing where a strategy is the same as another one or does not fit."""
    if setting is None:
        return "", ""
    return f"{1e3 * setting.step.sent.exposed:.1f}", f"{setting.step.tokens_per_second / reference:.1%}"


def scaling_rows(plan: Plan, gpu: str, *, weak: bool, scales: Sequence[int] = SCALES) -> Iterator[list[str]]:
    """Rows of a table: GPUs, batch rows, for each strategy exposed ms and efficiency, then what `plan` advises."""
    (phase, *_) = plan.phases
    reference = alone(plan, phase, gpu)
    for ranks in scales:
        rows = phase.config.microbatch_rows * ranks if weak else strong_rows(phase, ranks)
        if rows is None:
            continue
        found = settings(plan, with_rows(phase, rows), gpu, ranks)
        by_strategy = {setting.strategy: setting for setting in found}
        columns = [cell for strategy in STRATEGIES for cell in cells(by_strategy.get(strategy), reference)]
        best = found[0]
        cut = f"{best.microbatch_rows * phase.config.row_tokens:,} x {best.microbatches}"
        yield [f"{ranks:,}", f"{rows:,}", *columns, best.strategy, cut, f"{1e3 * best.step.seconds:,.1f}"]


def choice_rows(plan: Plan, gpu: str, scales: Sequence[int] = (8, 16, 64)) -> Iterator[list[str]]:
    """What each choice of train/gradients.py and train/adapters.py is worth, and what others would be.

    Milliseconds of exposed communication that the other way costs (or would save, where it is not taken), and memory.
    """
    (phase, *_) = plan.phases
    kind, counts = GPUS[gpu], plan.parameters
    root, layers, whole = 4 * counts.root, 4 * counts.layers, 4 * counts.total
    for ranks in scales:
        rows = strong_rows(phase, ranks)
        assert rows is not None
        for setting in sorted(settings(plan, with_rows(phase, rows), gpu, ranks), key=lambda each: each.strategy):
            shards = sharing_ranks(setting.strategy, ranks, None, kind)
            tokens = setting.microbatch_rows * phase.config.row_tokens
            computed = [microbatch_seconds(gpu, plan.work(phase), tokens)] * setting.microbatches
            parts = transfers(
                setting.strategy,
                counts,
                num_layers=plan.config.model.num_layers,
                ranks=ranks,
                shards=shards,
                per_node=kind.per_node,
            )
            now = exchange(parts, kind, computed).exposed

            def saved(other: Sequence[Transfer], now: float = now, computed: list[float] = computed) -> float:
                return now - exchange(other, kind, computed).exposed

            gather, *_ = (part for part in parts if part.kind == "all_gather") if shards > 1 else parts
            again = [*parts, replace(gather, moment="backward")]
            always = [*parts[:1], *(replace(part, every_microbatch=True) for part in parts[1:])]
            late = [replace(part, every_microbatch=part.kind != "reduce_scatter") for part in parts[1:]]
            kept = [part for part in parts if (part.kind, part.moment) != ("all_gather", "backward")]
            choices = {
                "ddp": [
                    ("yes", "reduce with the last microbatch only", -saved(always), 0),
                    ("yes", "gradients lie in the buckets", 2 * whole / (MEMORY_SHARE * kind.memory_rate), 0),
                ],
                "fsdp2": [
                    ("yes", "what is outside the layers stays gathered", -saved(again), root),
                    ("no", "reduce-scatter with the last microbatch only", saved([parts[0], *late]), whole),
                    ("no", "layers stay gathered", saved(kept), layers),
                ],
                "hsdp": [("yes", "copies meet with the last microbatch only", -saved(always), 0)],
            }[setting.strategy]
            for done, name, seconds, size in choices:
                seconds = max(0.0, seconds)
                worth = [f"{1e3 * seconds:.1f}", f"{seconds / setting.step.seconds:.2%}", f"{size / 1e9:.2f}"]
                yield [title(plan), f"{ranks}", setting.strategy, f"{setting.microbatches}", name, done, *worth]


def print_tables(gpus: Sequence[str], shapes: Sequence[str] = SHAPES, scales: Sequence[int] = SCALES) -> None:
    """All tables of the first kind."""
    head = ["GPUs", "rows", *(f"{s} {c}" for s in STRATEGIES for c in ("exposed ms", "efficiency"))]
    head += ["advice", "microbatch tokens x number", "step ms"]
    plans = [read_plan(shape) for shape in shapes]
    for gpu in gpus:
        kind = GPUS[gpu]
        print(
            f"\n{kind.label}: links of {kind.node_link / 1e9:.0f} GB/s in nodes of {kind.per_node}, "
            f"{kind.network_link / 1e9:.0f} GB/s a GPU between nodes, of which {LINK_SHARE:.0%} are reached"
        )
        for plan in plans:
            (phase, *_) = plan.phases
            print(f"\n{title(plan)}, expected {alone(plan, phase, gpu):,.0f} tokens/s of one GPU alone")
            for weak in (False, True):
                print(f"\n{'weak' if weak else 'strong'} scaling\n")
                print(markdown_table(head, scaling_rows(plan, gpu, weak=weak, scales=scales)))
    print("\nWhat choices are worth, on H100\n")
    head = ["", "GPUs", "strategy", "microbatches", "choice", "taken", "ms of a step", "share", "GB it takes"]
    print(
        markdown_table(
            head, [row for plan in plans if "stable" in plan.config.phases for row in choice_rows(plan, "h100")]
        )
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", nargs="+", choices=GPUS, default=["h100", "h200"])
    print_tables(parser.parse_args(words).gpu)


if __name__ == "__main__":
    main()
