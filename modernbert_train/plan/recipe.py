"""Derive a whole run from a size, its tokens and its device, by published rules; `pretrain` and `init run` print it.

The sizes are those of published runs, and each is an anchor: at its own tokens a recipe has its published values, and
with fewer tokens the batch shrinks by a scaling law. Each value of the YAML carries its rule and source as a comment.
Nothing is looked at here, neither text nor device: the same question has the same answer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from modernbert_train.config.model import ModernBertConfig
from modernbert_train.config.tools.prepare import SMALLEST_VOCABULARY
from modernbert_train.core.text import rate, tokens_text
from modernbert_train.plan.expected_loss import effective_tokens, share_of_unigram
from modernbert_train.plan.parameters import Parameters, count_parameters

TOKENS_PER_PARAMETER = 20  # where the loss for a given compute is lowest: Hoffmann et al. 2022, arXiv 2203.15556
MOST_PASSES = 4  # repeated so often, text is worth about as much as new text: Muennighoff et al. 2023, arXiv 2305.16264
LEAST_PER_PARAMETER = 0.4  # tokens a parameter, as yamls/quickstart.yaml has: a larger model would learn text by heart
BATCH_EXPONENT = 0.327  # of the best batch over compute: DeepSeek LLM, arXiv 2401.02954, equation 1
LEAST_STEPS = 800  # as many as yamls/quickstart.yaml takes
LEAST_BATCH_TOKENS = 2048  # of yamls/quickstart.yaml
WARMUP_STEPS = 100  # 2 / (1 - beta2): Ma and Yarats 2021, arXiv 1910.04209
MOST_WARMUP = 0.04  # of the first phase, as in yamls/quickstart.yaml
ENTRIES, ENTRIES_BYTES = 8192, 12.5e6  # of yamls/data/quickstart.yaml, and the bytes of its text
LONG_BASE = 160_000  # RoPE base of long rows: ModernBERT, arXiv 2412.13663, table 3
_CPU_ROWS = (512, 1024)  # as in yamls/quickstart.yaml: attention over longer rows is what a CPU is slowest at
_ROUND = 1000  # tokens of a phase are a multiple of it


class PhaseRule(NamedTuple):
    """A phase in proportion to the whole run.

    Attributes:
        name: its key.
        parts: its tokens, over the sum of those of all phases.
        long: its rows have the long context.
        lr_ratio: its peak learning rate over optim.lr.
        decay_to: the rate falls by 1 - sqrt to this part of the phase's peak; None: it stays.
        overrides: lines of YAML with other keys of the phase.
    """

    name: str
    parts: float
    long: bool = False
    lr_ratio: float = 1.0
    decay_to: float | None = None
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """What sizes of one published recipe share.

    Attributes:
        source: its name, for the comments.
        phases: in order.
        rows: tokens of a row, and of a long one.
        dropout: model.attention_out_dropout.
        long_local: rotary base of local layers in long rows; None: it stays.
        warmup: share of the first phase in which the learning rate rises.
        checkpoint_seconds: between checkpoints.
    """

    source: str
    phases: tuple[PhaseRule, ...]
    rows: tuple[int, int]
    dropout: float
    long_local: int | None
    warmup: float
    checkpoint_seconds: int


@dataclass(frozen=True)
class Size:
    """A published run, from which runs of its size are derived.

    Attributes:
        name: on the command line.
        family: the recipe that it is of.
        layers, width, intermediate, heads: the encoder's shape.
        entries: of its vocabulary, where there is text enough for so many.
        lr, weight_decay: of StableAdamW, at this run's batch.
        init_std: of its first weights.
        tokens, batch_tokens: of the published run.
        batch_warmup: share of the first phase in which the batch grows.
        stages: batch sizes that it passes through, the last included.
        source: its name, for the comments.
        file: of yamls/, which says where its values were published.
    """

    name: str
    family: Family
    layers: int
    width: int
    intermediate: int
    heads: int
    entries: int
    lr: float
    weight_decay: float
    init_std: float
    tokens: float
    batch_tokens: int
    batch_warmup: float
    stages: int
    source: str
    file: str

    def counted(self, entries: int) -> Parameters:
        """Parameters of the model with a vocabulary of so many entries."""
        return count_parameters(
            ModernBertConfig(
                vocab_size=entries,
                num_layers=self.layers,
                hidden_size=self.width,
                intermediate_size=self.intermediate,
                num_heads=self.heads,
            )
        )

    def parameters(self, entries: int) -> int:
        """All of them, the embedding table included."""
        return self.counted(entries).total


_OURS = Family(
    source="the quickstart",
    phases=(
        PhaseRule("stable", 1000),
        PhaseRule("context", 180, long=True),
        PhaseRule("decay", 460, long=True, decay_to=0.01),
    ),
    rows=_CPU_ROWS,
    dropout=0.0,
    long_local=None,
    warmup=MOST_WARMUP,
    checkpoint_seconds=60,
)
_ETTIN = Family(
    source="Ettin",
    phases=(
        PhaseRule("stable", 1700),
        PhaseRule("context", 250, long=True, decay_to=0.5),
        PhaseRule("decay", 50, True, 0.5, 0.04, ("objective: {mask_rate: 0.15}",)),
    ),
    rows=(1024, 8192),
    dropout=0.1,
    long_local=LONG_BASE,
    warmup=3 / 1700,
    checkpoint_seconds=900,
)
_BASE = Family(
    source="ModernBERT-base",
    phases=(
        PhaseRule("stable", 1719),
        PhaseRule("context", 250, True, 0.375),
        PhaseRule("decay", 50, True, 0.375, 0.001),
    ),
    rows=(1024, 8192),
    dropout=0.1,
    long_local=None,
    warmup=3 / 1719,
    checkpoint_seconds=900,
)
_LESS_DECAY = ("optim: {weight_decay: 1.0e-6}",)
_LARGE = Family(
    source="ModernBERT-large",
    phases=(
        PhaseRule("stable", 900),
        PhaseRule("lower", 819, False, 0.1, None, _LESS_DECAY),
        PhaseRule("context", 250, True, 0.1, None, _LESS_DECAY),
        PhaseRule("decay", 50, True, 0.1, 0.001, _LESS_DECAY),
    ),
    rows=(1024, 8192),
    dropout=0.1,
    long_local=None,
    warmup=2 / 900,
    checkpoint_seconds=900,
)


def _ettin(
    name: str, layers: int, width: int, intermediate: int, lr: float, weight_decay: float, batch_warmup: float
) -> Size:
    return Size(
        name, _ETTIN, layers, width, intermediate, width // 64, 50_368, lr, weight_decay, 0.02, 2.0e12, 4608 * 1024,
        batch_warmup / 1700, 6, f"Ettin {name.upper()}", f"recipes/ettin-{name}.yaml",
    )  # fmt: skip


SIZES: dict[str, Size] = {
    size.name: size
    for size in (
        Size(
            "tiny", _OURS, 4, 128, 192, 2, 8192, 2e-3, 1e-5, 0.05, 460_000, 2048, 0.1, 2,
            "the tiny recipe", "recipes/tiny.yaml",
        ),
        Size(
            "quickstart", _OURS, 7, 192, 288, 3, 8192, 2e-3, 1e-5, 0.05, 1.64e6, 2048, 0.1, 2,
            "the quickstart", "quickstart.yaml",
        ),
        _ettin("17m", 7, 256, 384, 3e-3, 3e-4, 125),
        _ettin("32m", 10, 384, 576, 3e-3, 3e-4, 100),
        _ettin("68m", 19, 512, 768, 3e-3, 3e-4, 75),
        _ettin("150m", 22, 768, 1152, 8e-4, 1e-5, 50),
        _ettin("400m", 28, 1024, 2624, 5e-4, 1e-5, 10),
        _ettin("1b", 28, 1792, 3840, 5e-4, 5e-5, 3),
        Size(
            "base", _BASE, 22, 768, 1152, 12, 50_368, 8e-4, 1e-5, 0.02, 2.019e12, 4608 * 1024, 50 / 1719, 6,
            "ModernBERT-base", "recipes/modernbert-base.yaml",
        ),
        Size(
            "large", _LARGE, 28, 1024, 2624, 16, 50_368, 5e-4, 1e-5, 0.02, 2.019e12, 4928 * 1024, 10 / 900, 11,
            "ModernBERT-large", "recipes/modernbert-large.yaml",
        ),
    )
}  # fmt: skip
BY_PARAMETERS = ("tiny", "quickstart", "17m", "32m", "68m", "150m", "400m", "1b")  # among which hours choose


@dataclass(frozen=True)
class Asked:
    """The run that is asked for.

    Attributes:
        name: of the run.
        size: of the model.
        tokens: to train on.
        entries: of the vocabulary.
        gpus: that train; 0: a CPU.
        folder: of the dataset.
        runs_folder: of the run.
        text_tokens: of the training text, for the number of passes; None: unknown.
        longest: tokens of the longest documents, which bounds the context; None: unknown.
        tokenizer: one that exists; None: one is trained.
        head: lines of comment that open the YAML.
    """

    name: str
    size: Size
    tokens: int
    entries: int
    gpus: int
    folder: str
    runs_folder: str = "runs"
    text_tokens: float | None = None
    longest: int | None = None
    tokenizer: str | None = None
    head: tuple[str, ...] = ()


def entries_for(size: Size, text_bytes: float) -> int:
    """Entries of a tokenizer that is trained on so much text: a power of two, or the size's own.

    They grow as the root of the text, as the number of different words does: Heaps' law, with the exponent 0.5 that is
    usual for English (Manning, Raghavan and Schuetze 2008, section 5.1.1).
    """
    fitting = max(SMALLEST_VOCABULARY, ENTRIES * math.sqrt(text_bytes / ENTRIES_BYTES))
    return size.entries if fitting >= size.entries else max(512, power_of_two(fitting))


def power_of_two(number: float) -> int:
    """The largest that is not above a number."""
    return 1 << int(math.log2(number))


def tokens_for(size: Size, parameters: int, text_tokens: float) -> int:
    """Tokens of a run of which only the size is given."""
    wanted = size.tokens if size.family in (_BASE, _LARGE) else TOKENS_PER_PARAMETER * parameters
    return _whole(min(wanted, MOST_PASSES * text_tokens))


class Affordable(NamedTuple):
    """A size, and what a number of hours is enough for with it; loss is a share of the unigram loss."""

    size: Size
    entries: int
    tokens: int
    loss: float


def sizes_for_hours(
    hours: float,
    tokens_per_second: Callable[[Size, int], float | None],
    entries_of: Callable[[Size], int],
    text_tokens: float,
) -> Iterator[Affordable]:
    """What these hours are enough for with each size, the smallest first, until the expected loss of two in a row
    is above the lowest, or there are less than LEAST_PER_PARAMETER tokens.

    The loss is that of `plan.expected_loss`, far beyond the runs that it was fitted to where sizes are large.

    Args:
        hours: of training.
        tokens_per_second: of a size with so many entries, on all devices together; None where it does not fit.
        entries_of: vocabulary of a size on this text.
        text_tokens: of the text.
    """
    best, worse = math.inf, 0
    for name in BY_PARAMETERS:
        size = SIZES[name]
        entries = entries_of(size)
        speed = tokens_per_second(size, entries)
        if speed is None:
            return
        tokens = min(hours * 3600 * speed, MOST_PASSES * text_tokens)
        parameters = size.parameters(entries)
        if math.isfinite(best) and tokens < LEAST_PER_PARAMETER * parameters:
            return
        loss = share_of_unigram(size.counted(entries).active, effective_tokens(max(1.0, tokens), text_tokens))
        yield Affordable(size, entries, _whole(tokens), loss)
        worse = worse + 1 if loss > best else 0
        if worse == 2:
            return
        best = min(best, loss)


class Batches(NamedTuple):
    """Rows of a run's batches.

    Attributes:
        row_tokens, long_row_tokens: capacity of a row.
        rows, long_rows: of a batch.
        unit: rows by which the batch grows in its warmup; `rows` where it does not.
        ruled_tokens: of the batch that the rule gives, before it is made whole rows of every GPU.
    """

    row_tokens: int
    long_row_tokens: int
    rows: int
    long_rows: int
    unit: int
    ruled_tokens: float


def batches_for(asked: Asked) -> Batches:
    """Row lengths and batch of a run.

    The batch grows with compute, from the published run of its size: with the exponent of DeepSeek LLM. It leaves the
    run LEAST_STEPS steps, and divides among the GPUs in all stages of its warmup.
    """
    size, ranks = asked.size, max(1, asked.gpus)
    row, longest = size.family.rows if asked.gpus else _CPU_ROWS
    if asked.longest is not None:
        longest = min(longest, max(row, 1 << (asked.longest + 1).bit_length()))
    ruled = size.batch_tokens * (asked.tokens / size.tokens) ** BATCH_EXPONENT
    tokens = min(ruled, max(LEAST_BATCH_TOKENS, asked.tokens / LEAST_STEPS))
    per_rank = max(1, round(tokens / row / ranks))
    stages = min(size.stages, per_rank)
    unit = max(1, round(per_rank / stages)) * ranks
    rows = unit * stages
    long_rows = max(1, round(rows * row / longest / ranks)) * ranks
    return Batches(row, longest, rows, long_rows, unit, ruled)


def learning_rate(asked: Asked) -> float:
    """The published rate of the size; smaller by the square root of the batch that LEAST_STEPS took from the rule.

    Source of the root: Malladi et al. 2022, arXiv 2205.10287.
    """
    batches = batches_for(asked)
    ratio = min(1.0, batches.rows * batches.row_tokens / batches.ruled_tokens)
    return float(f"{asked.size.lr * math.sqrt(ratio):.2g}") if ratio < 0.9 else asked.size.lr


def phase_tokens(asked: Asked) -> dict[str, int]:
    """Tokens of each phase, in the proportions of the published run."""
    whole = sum(rule.parts for rule in asked.size.family.phases)
    return {rule.name: _whole(asked.tokens * rule.parts / whole) for rule in asked.size.family.phases}


def run_yaml(asked: Asked) -> str:
    """The run as a YAML in which each value has its rule and source beside it."""
    size, family = asked.size, asked.size.family
    lines = [f"# {line}".rstrip() for line in (*asked.head, *_sources(asked))] + [""]
    lines += [
        f"name: {_text(asked.name)}",
        f"runs_folder: {_text(asked.runs_folder)}",
        "seed: 17",
        "",
        "data:",
        f"  train: {_text(f'{asked.folder}/train')}",
        f"  validation: {_text(f'{asked.folder}/validation')}",
        f"  tokenizer: {_text(f'{asked.folder}/tokenizer')}",
        "",
        f"model: # {size.parameters(asked.entries):,} parameters in the shape of {size.source}",
        f"  vocab_size: {asked.entries} # {_why_entries(asked)}",
        f"  hidden_size: {size.width}",
        f"  num_layers: {size.layers}",
        f"  num_heads: {size.heads}",
        f"  intermediate_size: {size.intermediate}",
        f"  init_std: {size.init_std} # {_why_init(size)}",
        f"  attention_out_dropout: {family.dropout} # {family.source}",
        "",
        "objective: {mask_rate: 0.3, eval_mask_rate: 0.15} # ModernBERT, section 2",
        "",
        "optim:",
        "  name: stable_adamw",
        f"  lr: {rate(learning_rate(asked))} # {_why_rate(asked)}",
        "  betas: [0.9, 0.98] # ModernBERT, appendix A",
        f"  weight_decay: {rate(size.weight_decay)} # {size.source}",
        "",
        f"checkpoint: {{interval_seconds: {family.checkpoint_seconds}}}",
        "",
        f"# {_why_tokens(asked)}",
        f"# Phases are in the proportions of {family.source}. Microbatches and kernels are left open: a run takes what",
        "# is fast on its device, and fits there.",
        "phases:",
    ]
    return "\n".join([*lines, *_phase_lines(asked)]) + "\n"


def _text(value: str) -> str:
    """A name or path as YAML; in quotes where it could be read as anything else."""
    plain = re.fullmatch(r"[A-Za-z_./][A-Za-z0-9_./-]*", value) and value.lower() not in _WORDS_OF_YAML
    return value if plain else json.dumps(value, ensure_ascii=False)


_WORDS_OF_YAML = ("true", "false", "yes", "no", "on", "off", "null", "y", "n", ".inf", ".nan")


def _sources(asked: Asked) -> Iterator[str]:
    size = asked.size
    tokens = f"{tokens_text(size.tokens)} tokens in batches of {tokens_text(size.batch_tokens)}"
    kind, _, stem = f"run/{size.file}".removesuffix(".yaml").replace("run/recipes", "recipe").partition("/")
    yield f"The anchor is {size.source}, {tokens}; `init {kind} {stem}` prints it with its sources."
    yield "Other tokens change batch, warmup and phases, by the rules beside them."
    if size.family is _LARGE:
        yield "The published weights grew out of base: weights.grow_from=RUN does so. Without it they begin random."


def _phase_lines(asked: Asked) -> Iterator[str]:
    family = asked.size.family
    batches, tokens = batches_for(asked), phase_tokens(asked)
    for number, rule in enumerate(family.phases):
        row, rows = (batches.long_row_tokens, batches.long_rows) if rule.long else (batches.row_tokens, batches.rows)
        yield f"  {rule.name}:"
        yield f"    tokens: {tokens[rule.name]:_}"
        yield f"    row_tokens: {row}{_why_row(asked, rule, batches)}"
        yield f"    batch_rows: {rows}{f' # {_why_batch(asked, batches)}' if not number else ''}"
        if rule.lr_ratio != 1:
            yield f"    lr_ratio: {rule.lr_ratio}"
        if not number:
            yield from _warmup_lines(asked, batches, tokens[rule.name])
        if rule.decay_to is not None:
            decay = f"decay_tokens: {tokens[rule.name]:_}, decay: one_minus_sqrt, final_lr_ratio: {rule.decay_to}"
            yield f"    schedule: {{{decay}}}"
        if rule.long and batches.long_row_tokens > batches.row_tokens:
            local = f", local_rope_theta: {family.long_local:_}" if family.long_local is not None else ""
            yield f"    model: {{global_rope_theta: {LONG_BASE:_}{local}}}"
        yield from (f"    {line}" for line in rule.overrides)


def _warmup_lines(asked: Asked, batches: Batches, tokens: int) -> Iterator[str]:
    size, batch = asked.size, batches.rows * batches.row_tokens
    if batches.unit < batches.rows:
        grows = _whole(size.batch_warmup * tokens)
        stages = f"start_rows: {batches.unit}, step_rows: {batches.unit}, tokens: {grows:_}"
        yield f"    batch_warmup: {{{stages}}} # {size.batch_warmup:.1%} of the phase: {size.source}"
    least = min(WARMUP_STEPS * batch, MOST_WARMUP * tokens)
    if least > size.family.warmup * tokens:
        why = f"{WARMUP_STEPS} steps, arXiv 1910.04209, or {MOST_WARMUP:.0%} of the phase"
    else:
        least, why = size.family.warmup * tokens, f"{size.family.warmup:.2%} of the phase: {size.family.source}"
    yield f"    schedule: {{warmup_tokens: {_whole(least):_}}} # {why}"


def _why_entries(asked: Asked) -> str:
    if asked.tokenizer is not None:
        return f"of {asked.tokenizer}"
    if asked.entries == asked.size.entries:
        return asked.size.source
    return "a power of two; it grows from the quickstart's as the root of the text (Heaps' law)"


def _why_init(size: Size) -> str:
    return size.source if size.init_std == 0.02 else f"{size.source}; 0.02 is for widths from 768"


def _why_rate(asked: Asked) -> str:
    if learning_rate(asked) == asked.size.lr:
        return asked.size.source
    return f"{rate(asked.size.lr)} of {asked.size.source}, times the root of the share of the batch (arXiv 2205.10287)"


def _why_tokens(asked: Asked) -> str:
    text = f"{tokens_text(asked.tokens)} tokens"
    if asked.text_tokens:
        passes = asked.tokens / asked.text_tokens
        text += f", {passes:.2g} passes over the text; up to {MOST_PASSES} repeats cost little (arXiv 2305.16264)"
    return f"{text}; {asked.tokens / asked.size.parameters(asked.entries):.2g} a parameter."


def _why_row(asked: Asked, rule: PhaseRule, batches: Batches) -> str:
    if rule.long and asked.longest is not None and batches.long_row_tokens < asked.size.family.rows[1] and asked.gpus:
        return f" # the longest documents have {asked.longest:,} tokens"
    return "" if rule.long or asked.gpus else " # for a CPU, as in the quickstart"


def _why_batch(asked: Asked, batches: Batches) -> str:
    batch = f"{tokens_text(batches.rows * batches.row_tokens)} tokens"
    if batches.rows * batches.row_tokens == asked.size.batch_tokens:
        return f"{batch}: {asked.size.source}"
    if batches.rows * batches.row_tokens < 0.9 * batches.ruled_tokens:
        return f"{batch}, which leaves {LEAST_STEPS} steps, as the quickstart has"
    return f"{batch}: that of {asked.size.source} times (tokens / its tokens)^{BATCH_EXPONENT} (arXiv 2401.02954)"


def _whole(tokens: float) -> int:
    """A round number of tokens, at least one."""
    return max(1, round(tokens / _ROUND)) * _ROUND
