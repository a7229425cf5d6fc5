"""Summary of a plan before its tables: how large, how long, at what cost, whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from modernbert_train.core.text import plural, tokens_text
from modernbert_train.plan.cost import Bill, bill_of, stored
from modernbert_train.plan.gpus import GPUS
from modernbert_train.plan.make import Plan
from modernbert_train.plan.memory import usable_bytes
from modernbert_train.plan.sections import MEASURE, Section, between, gb, memory_notes, time_between

GAIN = 1.05  # a change is proposed if it makes a run faster by this factor
MAX_NOTES = 2


def answer(plan: Plan, gpu: str, shown: Sequence[str], prices: dict[str, float]) -> Section:
    """Build the first section of a plan.

    Args:
        plan: the run; keys may still be open.
        gpu: key of GPUS that the lines are about.
        shown: keys of GPUS among which the cheapest is named.
        prices: dollars an hour for one GPU, replacing the assumed ones.
    """
    bills = {name: bill_of(plan.on(name), name, prices) for name in shown}
    plan = plan.on(gpu)
    bill = bill_of(plan, gpu, prices)
    price = f"{bill.price:.2f} dollars an hour for one GPU" + ("" if gpu in prices else ", assumed")
    rows = [
        ("model", f"{plan.parameters.total:,} parameters"),
        ("training", f"{tokens_text(plan.tokens)} tokens in {plural(plan.steps, 'step')}, {_phases(plan)}"),
        ("takes", f"{time_between(bill)}, predicted, and {between(*bill.dollars)} dollars at {price}"),
        ("memory", _memory(plan, gpu)),
        ("disk", f"{gb(stored(plan, gpu).max_bytes)} GB for checkpoints"),
    ]
    if (line := _cheaper(plan, bill, bills)) is not None:
        rows.insert(3, ("cheapest", line))
    if plan.expected is not None:
        rows.append(("loss", f"held out {plan.expected}; unigram {plan.unigram_loss:.2f}"))
    notes = list(_notes(plan, gpu, bill))
    rows += [("note", line) for line in notes[:MAX_NOTES]]
    return Section(f"{plan.config.name} on {plan.ranks} x {GPUS[gpu].label}", rows, flush_left=True)


def _phases(plan: Plan) -> str:
    return plural(len(plan.phases), "phase") + ("" if plan.exact else "; counted with batches of mean size")


def _memory(plan: Plan, gpu: str) -> str:
    """Return a line on whether every phase fits, judged by the largest."""
    if not plan.knows_memory:
        return MEASURE
    peak, name = max((plan.memory(phase, gpu).peak, phase.name) for phase in plan.phases)
    usable = usable_bytes(GPUS[gpu])
    verdict = (
        f"fits, {gb(usable - peak)} GB to spare" if peak <= usable else f"does NOT fit, {gb(peak - usable)} GB too much"
    )
    return f"{verdict}: {gb(peak)} of {gb(usable)} usable GB in phase {name}"


def _cheaper(plan: Plan, bill: Bill, bills: dict[str, Bill]) -> str | None:
    """Return the cheapest of the GPUs shown, unless it is the one that the plan is about."""
    fitting = {name: each for name, each in bills.items() if each.fits}
    if not fitting:
        return None
    name, best = min(fitting.items(), key=lambda item: sum(item[1].dollars))
    if bill.fits and sum(bill.dollars) - sum(best.dollars) < max(2.0, (GAIN - 1) * sum(bill.dollars)):
        return None
    return f"{plan.ranks} x {GPUS[name].label}: {time_between(best)}, {between(*best.dollars)} dollars"


def _notes(plan: Plan, gpu: str, bill: Bill) -> Iterator[str]:
    """Yield obstacles, then assumptions, then faster settings."""
    yield from memory_notes(plan, gpu)
    if not plan.bf16:
        yield "compute.precision=fp32: time and cost are predicted for bf16; fp32 is several times slower."
    if not plan.documents.streams:
        yield f"Documents are {plan.documents.source}."
    compiled = replace(plan, config=replace(plan.config, compute=replace(plan.config.compute, compile=True)))
    faster = bill_of(compiled, gpu, {})
    if faster.seconds * GAIN < bill.seconds:
        yield f"compute.compile=true: {time_between(faster)} instead of {time_between(bill)}, predicted."
    if plan.config.data.validation is None:
        yield "data.validation is not set: nothing will show whether the model learns more than its own text."
