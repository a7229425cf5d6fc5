"""Format a plan as tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from modernbert_train.core.text import percent, plural, tokens_text
from modernbert_train.plan.advice import Setting, settings
from modernbert_train.plan.census import census
from modernbert_train.plan.cost import Bill, bill_of, stored
from modernbert_train.plan.flops import optimizer_flops
from modernbert_train.plan.gpus import GPUS, PRICE_DATE
from modernbert_train.plan.make import Plan, PlannedPhase
from modernbert_train.plan.memory import TEXT_TOKENS, sharing_ranks, usable_bytes
from modernbert_train.plan.memory_fit import does_not_fit, teacher_memory
from modernbert_train.plan.parameters import count_parameters
from modernbert_train.plan.speed import ERROR, PLANNED_TOKENS_PER_SECOND, PUBLISHED
from modernbert_train.plan.teacher_cost import teacher_of

GB = 1e9
# printed if memory is not predicted
MEASURE = (
    "predicted for ModernBERT and ESM-2 only, without a generator. Measure it: start the run under another name (train "
    "RUN name=trial), stop it with Ctrl-C after some steps, and read peak_memory_bytes in its metrics.jsonl, which its "
    "progress lines show in GB."
)
SCALES = (8, 16, 32, 64, 128, 256, 512, 1024)
SHARE = percent(1)
Cells = tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A heading, a table (its first row is the head, and may be the only row), and sentences below it.

    A table of two columns holds names and values, without a head; if `flush_left`, the values are sentences.
    """

    title: str
    rows: Sequence[Cells] = ()
    notes: Sequence[str] = ()
    flush_left: bool = False


def sections(plan: Plan, gpu: str, shown: Sequence[str], prices: dict[str, float]) -> list[Section]:
    """Return all sections of a plan.

    Args:
        plan: the run; keys may still be open.
        gpu: key of GPUS for memory, advice and scaling.
        shown: keys of GPUS for the table of hours and cost.
        prices: dollars an hour for one GPU, replacing the assumed ones.
    """
    gpus = _gpus(plan, shown, prices)
    plan = plan.on(gpu)
    return [
        _model(plan),
        _phases(plan),
        _flops(plan),
        *_teacher(plan, gpu),
        *([_memory(plan, gpu), _advice(plan, gpu)] if plan.knows_memory else [_no_memory(gpu)]),
        _storage(plan, gpu),
        gpus,
        _scaling(plan, gpu),
    ]


def gb(count: float) -> str:
    """Format bytes as GB, with three digits."""
    value = count / GB
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def between(lowest: float, highest: float) -> str:
    """Format a range with two digits: 4231 and 6712 -> '4,200 to 6,700'."""
    low, high = _two_digits(lowest), _two_digits(highest)
    return low if low == high else f"{low} to {high}"


def _two_digits(number: float) -> str:
    digits = 1 - math.floor(math.log10(number)) if number > 0 else 0
    return f"{round(number, digits):,.{max(0, digits)}f}"


def time_between(bill: Bill) -> str:
    """Format the range of a bill's time, in one unit: '9.9 to 14 d'."""
    low, high = bill.between
    unit, size = next(((unit, size) for unit, size in _UNITS if low >= 2 * size), _UNITS[-1])
    return f"{between(low / size, high / size)} {unit}"


_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def _model(plan: Plan) -> Section:
    counts, model = plan.parameters, plan.config.model
    return Section(
        "Model",
        [
            ("parameters", f"{counts.total:,}"),
            ("embedding, shared with the decoder", f"{counts.embedding:,}"),
            ("active in every token, all the rest", f"{counts.active:,}"),
        ],
        [f"{model.num_layers} layers of width {model.hidden_size}, {_windows(plan)}.", *_generator(plan)],
    )


def _generator(plan: Plan) -> Iterator[str]:
    generator = plan.config.objective.generator_of(plan.config.model)
    if generator is not None:
        size = f"{generator.num_layers} layers of width {generator.hidden_size}"
        yield f"A generator of {size} is trained with it; both are counted."


def _windows(plan: Plan) -> str:
    """Describe the windows of the layers."""
    windows, num_global = census(plan.config.model).windows, census(plan.config.model).num_global
    local = sorted({window for window in windows if window is not None})
    if not local:
        return "all of them global"
    sides = " or ".join(f"{window}" for window in local)
    return f"{num_global} of them global, the others within {sides} tokens on each side"


def _phases(plan: Plan) -> Section:
    rows = [("phase", "tokens", "steps", "batch rows", "row tokens", "full", "microbatches", "passes")]
    for phase in plan.phases:
        sizes = sorted({part.rows for part in phase.ranges}) or [phase.config.batch_rows]
        own = -(-phase.config.batch_rows // plan.ranks)
        cut = min(own, phase.config.microbatch_rows)
        rows.append(
            (
                phase.name,
                tokens_text(phase.tokens),
                f"{phase.steps:,}",
                f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}",
                f"{phase.config.row_tokens:,}",
                SHARE(phase.fill),
                f"{-(-own // cut):,} of {plural(cut, 'row')}",
                ", ".join(f"{passes:.2f}" for passes in phase.text.passes.values()) or "unknown",
            )
        )
    rows.append(("all", tokens_text(plan.tokens), f"{plan.steps:,}", "", "", "", "", ""))
    how = "the run's actual batches" if plan.exact else "counted with batches of mean size"
    return Section(
        "Training",
        rows,
        [
            f"Documents: {plan.documents.source}.",
            f"Steps are {how}. Microbatches are counted on each of {plural(plan.ranks, 'rank')} at the full batch; "
            "passes are over the data.",
            *_queries(plan),
            *_bias(plan),
            *_dropout(plan),
        ],
    )


def _queries(plan: Plan) -> Iterator[str]:
    """Describe the query tokens that the encoder reads besides text."""
    for phase in plan.phases:
        if phase.objective.query_share:
            encoded = phase.objective.encoded_tokens(phase.text.sequence_tokens)
            yield (
                f"Phase {phase.name}: with a query token for each that is predicted, the encoder reads {encoded:.2f} "
                "tokens for each of text; tokens here, and the clock, count text only."
            )


def _bias(plan: Plan) -> Iterator[str]:
    """Describe a bias of attention scores, which fast kernels do not compute."""
    bias = plan.config.model.score_bias
    if bias:
        flex = ", and flex, pair by pair" if bias == "pairs" else " alone"
        yield (
            f"Scores of {plan.config.model.name} have a bias, which compute.attention=sdpa computes, one sequence at a "
            f"time{flex}: slower than the attention that is predicted here."
        )


def _dropout(plan: Plan) -> Iterator[str]:
    """Warn if dropout depends on the number of ranks; see `share_of_rank` of data/microbatches.py."""
    if not any(now.model.has_dropout for now in plan.config.in_phase.values()):
        return
    for phase in plan.phases:
        shared = phase.config.microbatch_rows * plan.ranks
        uneven = [rows for rows in phase.config.batch_sizes if rows % shared]
        if uneven and plan.ranks > 1:
            yield (
                f"Phase {phase.name}: a batch of {uneven[0]:,} rows does not divide into microbatches of "
                f"{plural(phase.config.microbatch_rows, 'row')} on each of {plan.ranks} ranks, so rows are dealt "
                "singly and dropout differs on another number of ranks; batches and masks do not."
            )


def _flops(plan: Plan) -> Section:
    rows: list[Cells] = [
        ("phase", "keys global", "keys local", "layers", "global", "local", "head", "forward", "training", "total")
    ]
    for phase in plan.phases:
        flops, spans = phase.flops, phase.text.spans
        columns = (
            flops.layers,
            flops.global_attention,
            flops.local_attention,
            flops.head,
            flops.forward,
            flops.training,
        )
        rows.append(
            (
                phase.name,
                f"{spans.whole:,.0f}",
                f"{spans.local:,.0f}" if spans.local else "-",
                *(f"{part / 1e9:.4f}" for part in columns),
                f"{phase.tokens * flops.training:.3g}",
            )
        )
    return Section(
        "GFLOP per token",
        rows,
        [
            "Keys are the tokens that a token really sees, on average: its own document, in local layers within the "
            "window; in causal order only itself and the tokens before it. Training is three times forward, four times "
            "if texts are compared, and a teacher's once; the head counts the predicted tokens and the pairs; the "
            "total counts the whole phase, in FLOPs.",
            *_newton_schulz(plan),
        ],
    )


def _teacher(plan: Plan, gpu: str) -> Iterator[Section]:
    objective = plan.config.objective
    if objective.named_teacher is None:
        return
    model = teacher_of(objective)
    if model is None:
        text = f"{objective.named_teacher} is in no folder here: neither its FLOPs nor its memory are counted."
        yield Section("Teacher", notes=[text])
        return
    ways = plan.config.distributed
    shards = sharing_ranks(ways.strategy, plan.ranks, ways.shard_ranks, GPUS[gpu])
    rows: list[Cells] = [("phase", "GFLOP per token", "of training", "GB on each GPU")]
    for phase in plan.phases:
        tokens = phase.config.tokens_at_once
        held = teacher_memory(plan.config, phase.name, bf16=plan.bf16, tokens=tokens, shards=shards)
        flops = phase.flops
        rows.append((phase.name, f"{flops.teacher / 1e9:.4f}", SHARE(flops.teacher / flops.training), gb(held)))
    size = f"{model.name} of {model.num_layers} layers of width {model.hidden_size}"
    parameters = count_parameters(model).total
    held_as = "whole on each GPU" if shards == 1 else f"a share on each of {shards} GPUs"
    notes = f"{size}, {parameters:,} parameters: forward only, {held_as}. Its memory is an estimate."
    yield Section("Teacher", rows, [notes])


def _newton_schulz(plan: Plan) -> Iterator[str]:
    per_step = optimizer_flops(plan.census, plan.config.optim)
    if per_step:
        training = sum(phase.tokens * phase.flops.training for phase in plan.phases)
        yield (
            f"Newton-Schulz takes {per_step:.3g} FLOPs more in each step, over the run "
            f"{percent(2)(plan.steps * per_step / training)} of the training's; under ddp each rank computes all of it."
        )


def _no_memory(gpu: str) -> Section:
    return Section(f"Memory of one {GPUS[gpu].label}", [("memory", MEASURE)], flush_left=True)


def _memory(plan: Plan, gpu: str) -> Section:
    each = [plan.memory(phase, gpu) for phase in plan.phases]
    names = list(dict.fromkeys(name for memory in each for name in memory.parts()))
    rows: list[Cells] = [("phase", "microbatch", *names, "peak", "fits")]
    for phase, memory in zip(plan.phases, each, strict=True):
        own = min(-(-phase.config.batch_rows // plan.ranks), phase.config.microbatch_rows) * phase.config.row_tokens
        sizes = (*(getattr(memory, name) for name in names), memory.peak)
        rows.append((phase.name, f"{own:,}", *(gb(size) for size in sizes), "yes" if plan.fits(phase, gpu) else "NO"))
    kept = "layer inputs only" if plan.config.compute.activation_checkpointing else "no activation checkpointing"
    compiled = "compiled" if plan.config.compute.compile else "not compiled"
    precision = "bf16 over fp32 weights" if plan.bf16 else "fp32"
    return Section(
        f"Memory of one {GPUS[gpu].label}, GB",
        rows,
        [
            f"{plan.config.distributed.strategy} on {plural(plan.ranks, 'rank')}, {precision}, {compiled}, {kept}. "
            f"Usable are {gb(usable_bytes(GPUS[gpu]))} of {gb(GPUS[gpu].memory_bytes)} GB. copies and buffers are "
            "weights for the matrix products and communication; step is the optimizer's and is allocated after layers "
            "and head are freed."
            + (f" compared is for comparing texts, {TEXT_TOKENS} tokens each." if "compared" in names else "")
        ],
    )


def _advice(plan: Plan, gpu: str) -> Section:
    rows: list[Cells] = [
        ("phase", "strategy", "microbatch_tokens", "of at most", "accumulation", "peak GB", "step", "efficiency")
    ]
    notes = ["The largest that divides the rows of a rank, and the largest that fits; sharding must gain 2 % over ddp."]
    best: dict[str, list[str]] = {}
    for phase in plan.phases:
        found_settings = settings(plan, phase, gpu, plan.ranks)
        rows += [_setting_row(phase, setting) for setting in found_settings]
        if len(found_settings) > 1:
            best.setdefault(found_settings[0].strategy, []).append(phase.name)
    notes += memory_notes(plan, gpu)
    notes += [f"{strategy} is the best of those that fit: {', '.join(names)}." for strategy, names in best.items()]
    return Section(f"Largest microbatch that fits {plan.ranks} x {GPUS[gpu].label}", rows, notes)


def memory_notes(plan: Plan, gpu: str) -> Iterator[str]:
    """Yield a message for each phase that does not fit the usable memory of a GPU."""
    limit = usable_bytes(GPUS[gpu])
    for phase in plan.phases if plan.knows_memory else ():
        if (message := does_not_fit(plan.config, phase.name, GPUS[gpu], plan.ranks, limit)) is not None:
            yield message


def _setting_row(phase: PlannedPhase, setting: Setting) -> Cells:
    assert setting.memory is not None
    return (
        phase.name,
        setting.strategy,
        f"{setting.microbatch_rows * phase.config.row_tokens:,}",
        f"{setting.fitting_rows * phase.config.row_tokens:,}",
        f"{setting.microbatches:,}",
        gb(setting.memory.peak),
        f"{between(*setting.step.between)} s",
        SHARE(setting.step.efficiency),
    )


def _storage(plan: Plan, gpu: str) -> Section:
    storage = stored(plan, gpu)
    validation = "none: data.validation is not set"
    if plan.config.data.validation is not None:
        tokens = "all its" if plan.validation_tokens is None else f"{plan.validation_tokens:,}"
        validation = f"{plan.validations:,} passes over {tokens} tokens"
    kept_text = f"{gb(storage.kept_bytes)} GB; {gb(storage.max_bytes)} GB while one is written"
    return Section(
        "Checkpoints and validation",
        [
            ("one checkpoint", f"{gb(storage.checkpoint_bytes)} GB"),
            ("written", f"about {storage.written:,}, {gb(storage.written * storage.checkpoint_bytes)} GB in all"),
            ("kept", f"at most {storage.kept:,}, {kept_text}"),
            ("validation", validation),
        ],
    )


def _gpus(plan: Plan, shown: Sequence[str], prices: dict[str, float]) -> Section:
    fit = ("fits",) if plan.knows_memory else ()
    head = ("GPUs", "tokens/s each", "MFU", "time", "GPU hours", "dollars an hour", "cost", *fit)
    rows: list[Cells] = [head]
    plans = {name: plan.on(name) for name in shown}
    plan = plans[shown[0]]
    for name in shown:
        bill = bill_of(plans[name], name, prices)
        rows.append(
            (
                f"{plan.ranks} x {GPUS[name].label}",
                between(*bill.tokens_per_second),
                " to ".join(map(SHARE, bill.mfu)),
                time_between(bill),
                between(*bill.gpu_hours),
                f"{bill.price:.2f}" + ("" if name in prices else " assumed"),
                between(*bill.dollars),
                *(("yes" if bill.fits else "NO",) if plan.knows_memory else ()),
            )
        )
    compiled = "compiled" if plan.config.compute.compile else "NOT compiled (compute.compile=true is faster)"
    more = f"{PUBLISHED.device:.2f} times as long and {1e6 * PUBLISHED.token:.2f} us a token more, for any model"
    notes = [
        f"Predicted, {compiled}. One GPU was timed so far: an H200 trained base and large within their ranges. The "
        "fast end is every kernel at the speed it has alone. Published runs of ModernBERT's program, 17 M to 1 B "
        f"parameters, took {more}; the slow end adds "
        f"{percent(0)(ERROR - 1)} to that. Prices are assumptions of {PRICE_DATE}; --price NAME=DOLLARS sets yours."
    ]
    if not plan.knows_memory or plan.config.model.name != "modernbert":
        notes.append(
            f"For {plan.config.model.name} nothing was published: its matrices and attention are counted, its "
            "elementwise work is assumed to equal ModernBERT's layers."
            + ("" if plan.knows_memory else " Its memory is not predicted.")
        )
    if amd := [GPUS[name].label for name in shown if GPUS[name].rocm]:
        notes.append(f"Shares were measured on NVIDIA's GPUs; of {', '.join(amd)} only the datasheet is known.")
    if not plan.bf16:
        notes.append("compute.precision=fp32: predictions are for bf16; fp32 is several times slower.")
    return Section("Time and cost", rows, notes)


def _scaling(plan: Plan, gpu: str) -> Section:
    phase = max(plan.phases, key=lambda p: p.tokens)
    kind = GPUS[gpu]
    rows = [("GPUs", "batch rows", "strategy", "microbatch_tokens", "GB sent", "exposed", "efficiency", "tokens/s all")]
    for ranks in SCALES:
        batch = -(-phase.config.batch_rows // ranks) * ranks
        for setting in sorted(settings(plan, phase, gpu, ranks), key=lambda choice: choice.strategy):
            step = setting.step
            rows.append(
                (
                    f"{ranks:,}",
                    f"{batch:,}",
                    setting.strategy,
                    f"{setting.microbatch_rows * phase.config.row_tokens:,}",
                    gb(step.sent.payload),
                    f"{1e3 * step.sent.exposed:.1f} ms",
                    SHARE(step.efficiency),
                    " to ".join(tokens_text(step.tokens / each) for each in reversed(step.between)),
                )
            )
    return Section(
        f"Scaling of phase {phase.name}: one step on many {kind.label}",
        rows,
        [
            *([] if plan.knows_memory else ["Microbatches have at most the configured rows."]),
            f"The same global batch, rounded up to whole rows on every GPU, in nodes of {kind.per_node}. GB sent are "
            f"the tensors gathered and reduced in a step. Links reach 80 % of {kind.node_link / GB:.0f} GB/s in a node "
            f"and {kind.network_link / GB:.0f} GB/s per GPU between nodes. Efficiency is computation over the whole "
            "step, which lasts at least as long as every rank needs to plan the next batch, "
            f"{PLANNED_TOKENS_PER_SECOND / 1e6:.0f} M tokens a second.",
        ],
    )
