"""Derive a whole run from a size, its tokens and its device, by published rules; `pretrain` and `init run` print it.

The sizes are published runs. At its own number of tokens a recipe has the published values; with fewer tokens the batch
shrinks by a scaling law. Each value of the YAML carries its rule and source as a comment. This file reads neither text
nor device, so the same arguments give the same recipe.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from modernbert_train.config.load import load_run
from modernbert_train.config.schema import ModernBertConfig, PhaseConfig, RunConfig
from modernbert_train.config.tools.prepare import SMALLEST_VOCABULARY
from modernbert_train.core.installed import YAMLS
from modernbert_train.core.text import rate, tokens_text
from modernbert_train.plan.expected_loss import RULES, effective_tokens
from modernbert_train.plan.parameters import Parameters, count_parameters

TOKENS_PER_PARAMETER = 20  # compute-optimal: Hoffmann et al. 2022, arXiv 2203.15556
MAX_PASSES = 4  # up to here repeated text is worth about as much as new: Muennighoff et al. 2023, arXiv 2305.16264
MIN_PER_PARAMETER = 0.4  # tokens a parameter, as in yamls/quickstart.yaml: a larger model would memorise the text
BATCH_EXPONENT = 0.327  # exponent of the best batch over compute: DeepSeek LLM, arXiv 2401.02954, equation 1
MIN_STEPS = 800  # as in yamls/quickstart.yaml
MIN_BATCH_TOKENS = 2048  # as in yamls/quickstart.yaml
WARMUP_STEPS = 100  # 2 / (1 - beta2): Ma and Yarats 2021, arXiv 1910.04209
MAX_WARMUP = 0.04  # share of the first phase, as in yamls/quickstart.yaml
RACED_DECAY = 2e-4  # cautious weight decay of the runs in the race, docs/better-recipe.md
ENTRIES, ENTRIES_BYTES = 8192, 12.5e6  # vocabulary of yamls/data/quickstart.yaml, and the bytes of its text
_CPU_ROWS = (512, 1024)  # as in yamls/quickstart.yaml: attention over longer rows is slow on a CPU
_ROUND = 1000  # tokens of a phase are a multiple of this


@dataclass(frozen=True)
class Size:
    """A published run, from which runs of its size are derived.

    Attributes:
        name: on the command line.
        source: its name in comments.
        file: its file in yamls/, which names the publication of each value.
        family: name of the recipe that it shares with other sizes, in comments.
        like: file whose phases it uses; None: its own.
        checkpoint_seconds: time between checkpoints.
        raced: factor of the learning rate in the race of recipes, which NorMuon won at this size; None: not raced.
    """

    name: str
    source: str
    file: str
    family: str
    like: str | None = None
    checkpoint_seconds: int = 900
    raced: float | None = None

    @property
    def run(self) -> RunConfig:
        """The published run."""
        return _read(self.file)

    @property
    def model(self) -> ModernBertConfig:
        return self.run.modernbert

    @property
    def phases(self) -> dict[str, PhaseConfig]:
        return _read(self.like or self.file).phases

    @property
    def first(self) -> PhaseConfig:
        return next(iter(self.phases.values()))

    @property
    def rows(self) -> tuple[int, int]:
        """Tokens of a row in the first phase, and of the longest row."""
        return self.first.row_tokens, max(phase.row_tokens for phase in self.phases.values())

    @property
    def entries(self) -> int:
        """Vocabulary size, if the text is large enough for it."""
        return self.model.vocab_size

    @property
    def batch_tokens(self) -> int:
        first = next(iter(self.run.phases.values()))
        return first.batch_rows * first.row_tokens

    @property
    def optimizer(self) -> str:
        """The published optimizer, or NorMuon where it won the race."""
        return "normuon" if self.raced else self.run.optim.name

    @property
    def learning_rate(self) -> float:
        """Learning rate at the published batch size."""
        return self.run.optim.lr * (self.raced or 1.0)

    @property
    def batch_warmup(self) -> float:
        """Share of the first phase in which the batch grows."""
        return 0.0 if self.first.batch_warmup is None else self.first.batch_warmup.tokens / self.first.tokens

    @property
    def stages(self) -> int:
        """Number of batch sizes in the warmup, the last included."""
        return len(self.first.batch_sizes)

    @property
    def warmup(self) -> float:
        """Share of the first phase in which the learning rate rises."""
        return self.first.schedule.warmup_tokens / self.first.tokens

    def counted(self, entries: int) -> Parameters:
        """Return the parameter counts with a vocabulary of this size."""
        return count_parameters(replace(self.model, vocab_size=entries))

    def parameters(self, entries: int) -> int:
        """Return all parameters, the embedding table included."""
        return self.counted(entries).total


@functools.cache
def _read(file: str) -> RunConfig:
    return load_run([YAMLS / file])


SIZES: dict[str, Size] = {
    "tiny": Size("tiny", "the tiny recipe", "recipes/tiny.yaml", "the quickstart", "quickstart.yaml", 60, 2.0),
    "quickstart": Size("quickstart", "the quickstart", "quickstart.yaml", "the quickstart", None, 60, 2.0),
    **{
        name: Size(name, f"Ettin {name.upper()}", f"recipes/ettin-{name}.yaml", "Ettin")
        for name in ("17m", "32m", "68m", "150m", "400m", "1b")
    },
    **{
        name: Size(name, f"ModernBERT-{name}", f"recipes/modernbert-{name}.yaml", f"ModernBERT-{name}")
        for name in ("base", "large")
    },
}
BY_PARAMETERS = ("tiny", "quickstart", "17m", "32m", "68m", "150m", "400m", "1b")  # candidates for --hours


@dataclass(frozen=True)
class RunRequest:
    """A run to derive.

    Attributes:
        name: name of the run.
        size: size of the model.
        tokens: tokens to train on.
        entries: size of the vocabulary.
        gpus: number of GPUs; 0: a CPU.
        folder: the dataset's folder.
        runs_folder: the run's key.
        text_tokens: tokens of the training text, for the number of passes; None: unknown.
        longest: tokens of the longest documents, which limits the context; None: unknown.
        tokenizer: an existing tokenizer; None: one is trained.
        head: comment lines that open the YAML.
        bf16: set compute.precision, for a CPU with bf16 instructions; a GPU takes bf16 by itself.
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
    bf16: bool = False


def entries_for(size: Size, text_bytes: float) -> int:
    """Return the vocabulary size of a tokenizer trained on this much text: a power of two, at most the size's own.

    It grows with the square root of the text, as the number of different words does: Heaps' law, with the exponent 0.5
    that is usual for English (Manning, Raghavan and Schuetze 2008, section 5.1.1).
    """
    fitting = max(SMALLEST_VOCABULARY, ENTRIES * math.sqrt(text_bytes / ENTRIES_BYTES))
    return size.entries if fitting >= size.entries else max(512, power_of_two(fitting))


def power_of_two(number: float) -> int:
    """Return the largest power of two that is not above a number."""
    return 1 << int(math.log2(number))


def tokens_for(size: Size, parameters: int, text_tokens: float) -> int:
    """Return the tokens of a run if only its size is given."""
    published = size.run.total_tokens if size.name in ("base", "large") else TOKENS_PER_PARAMETER * parameters
    return _whole(min(published, MAX_PASSES * text_tokens))


class Affordable(NamedTuple):
    """A size, with the tokens that the given hours allow; loss is a share of the unigram loss."""

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
    """Yield each size with the tokens that the hours allow, the smallest first. Stop when the expected loss of two in a
    row is above the lowest, or with fewer than MIN_PER_PARAMETER tokens.

    `plan.expected_loss` predicts the loss; for large sizes that is far beyond the runs it was fitted to.

    Args:
        hours: training time.
        tokens_per_second: returns the speed of a size with this vocabulary on all devices; None if it does not fit.
        entries_of: returns the vocabulary of a size on this text.
        text_tokens: tokens of the text.
    """
    best, worse = math.inf, 0
    for name in BY_PARAMETERS:
        size = SIZES[name]
        entries = entries_of(size)
        speed = tokens_per_second(size, entries)
        if speed is None:
            return
        tokens = min(hours * 3600 * speed, MAX_PASSES * text_tokens)
        parameters = size.parameters(entries)
        if math.isfinite(best) and tokens < MIN_PER_PARAMETER * parameters:
            return
        loss = RULES[size.optimizer].share(
            size.counted(entries).active, effective_tokens(max(1.0, tokens), text_tokens)
        )
        yield Affordable(size, entries, _whole(tokens), loss)
        worse = worse + 1 if loss > best else 0
        if worse == 2:
            return
        best = min(best, loss)


class Batches(NamedTuple):
    """Rows of a run's batches.

    Attributes:
        row_tokens, long_row_tokens: capacity of a row.
        rows, long_rows: rows of a batch.
        unit: rows by which the batch grows in its warmup; `rows` without a warmup.
        ruled_tokens: tokens of the batch by the rule, before rounding to whole rows of every GPU.
    """

    row_tokens: int
    long_row_tokens: int
    rows: int
    long_rows: int
    unit: int
    ruled_tokens: float


def batches_for(request: RunRequest) -> Batches:
    """Return row lengths and batch of a run.

    The batch grows with compute, starting from the published run of its size, with DeepSeek LLM's exponent. It leaves
    at least MIN_STEPS steps, and divides among the GPUs in all stages of its warmup.
    """
    size, ranks = request.size, max(1, request.gpus)
    row, longest = size.rows if request.gpus else _CPU_ROWS
    if request.longest is not None:
        longest = min(longest, max(row, 1 << (request.longest + 1).bit_length()))
    ruled = size.batch_tokens * (request.tokens / size.run.total_tokens) ** BATCH_EXPONENT
    tokens = min(ruled, max(MIN_BATCH_TOKENS, request.tokens / MIN_STEPS))
    per_rank = max(1, round(tokens / row / ranks))
    stages = min(size.stages, per_rank)
    unit = max(1, round(per_rank / stages)) * ranks
    rows = unit * stages
    long_rows = max(1, round(rows * row / longest / ranks)) * ranks
    return Batches(row, longest, rows, long_rows, unit, ruled)


def learning_rate(request: RunRequest) -> float:
    """Return the size's learning rate, times the square root of the batch's reduction by MIN_STEPS.

    Source of the root: Malladi et al. 2022, arXiv 2205.10287.
    """
    batches = batches_for(request)
    ratio = min(1.0, batches.rows * batches.row_tokens / batches.ruled_tokens)
    published = request.size.learning_rate
    return float(f"{published * math.sqrt(ratio):.2g}") if ratio < 0.9 else published


def phase_tokens(request: RunRequest) -> dict[str, int]:
    """Return the tokens of each phase, in the proportions of the published run."""
    phases = request.size.phases
    total = sum(phase.tokens for phase in phases.values())
    return {name: _whole(request.tokens * phase.tokens / total) for name, phase in phases.items()}


def run_yaml(request: RunRequest) -> str:
    """Return the run as YAML with the rule and the source of each value as a comment."""
    size, model = request.size, request.size.model
    lines = [f"# {line}".rstrip() for line in (*request.head, *_sources(request))] + [""]
    lines += [
        f"name: {_text(request.name)}",
        f"runs_folder: {_text(request.runs_folder)}",
        "seed: 17",
        "",
        "data:",
        f"  train: {_text(f'{request.folder}/train')}",
        f"  validation: {_text(f'{request.folder}/validation')}",
        f"  tokenizer: {_text(f'{request.folder}/tokenizer')}",
        "",
        f"model: # {size.parameters(request.entries):,} parameters in the shape of {size.source}",
        f"  vocab_size: {request.entries} # {_why_entries(request)}",
        f"  hidden_size: {model.hidden_size}",
        f"  num_layers: {model.num_layers}",
        f"  num_heads: {model.num_heads}",
        f"  intermediate_size: {model.intermediate_size}",
        f"  init_std: {model.init_std} # {_why_init(size)}",
        f"  attention_out_dropout: {model.attention_out_dropout} # {size.family}",
        "",
        "objective: {mask_rate: 0.3, eval_mask_rate: 0.15} # ModernBERT, section 2",
        "",
        "optim:",
        *_optim_lines(request),
        "",
        f"checkpoint: {{interval_seconds: {size.checkpoint_seconds}}}",
        *["compute: {precision: bf16} # 1.7 x as fast on this processor, at like losses: docs/speed.md"] * request.bf16,
        "",
        f"# {_why_tokens(request)}",
        f"# Phases are in the proportions of {size.family}. Microbatches and kernels are left open: a run takes what",
        "# is fast on its device, and fits there.",
        "phases:",
    ]
    return "\n".join([*lines, *_phase_lines(request)]) + "\n"


def _optim_lines(request: RunRequest) -> Iterator[str]:
    size, raced = request.size, "the race: docs/better-recipe.md"
    yield f"  name: {size.optimizer} # {raced if size.raced else 'ModernBERT, appendix A'}"
    yield f"  lr: {rate(learning_rate(request))} # {_why_rate(request)}"
    yield "  betas: [0.9, 0.98] # ModernBERT, appendix A"
    if size.raced:
        yield "  cautious_decay: true # the race"
    decay, source = (RACED_DECAY, "the race") if size.raced else (size.run.optim.weight_decay, size.source)
    yield f"  weight_decay: {rate(decay)} # {source}"


def _text(value: str) -> str:
    """Format a name or path as YAML; in quotes if it could be read as anything else."""
    plain = re.fullmatch(r"[A-Za-z_./][A-Za-z0-9_./-]*", value) and value.lower() not in _WORDS_OF_YAML
    return value if plain else json.dumps(value, ensure_ascii=False)


_WORDS_OF_YAML = ("true", "false", "yes", "no", "on", "off", "null", "y", "n", ".inf", ".nan")


def _sources(request: RunRequest) -> Iterator[str]:
    size = request.size
    tokens = f"{tokens_text(size.run.total_tokens)} tokens in batches of {tokens_text(size.batch_tokens)}"
    kind, _, stem = f"run/{size.file}".removesuffix(".yaml").replace("run/recipes", "recipe").partition("/")
    yield f"The anchor is {size.source}, {tokens}; `init {kind} {stem}` prints it with its sources."
    yield "Other tokens change batch, warmup and phases, by the rules in their comments."
    if size.name == "large":
        yield "The published weights grew out of base: weights.grow_from=RUN does so. Without it they begin random."


def _phase_lines(request: RunRequest) -> Iterator[str]:
    size, batches, tokens = request.size, batches_for(request), phase_tokens(request)
    for number, (name, phase) in enumerate(size.phases.items()):
        long = phase.row_tokens > size.rows[0]
        row, rows = (batches.long_row_tokens, batches.long_rows) if long else (batches.row_tokens, batches.rows)
        yield f"  {name}:"
        yield f"    tokens: {tokens[name]:_}"
        yield f"    row_tokens: {row}{_why_row(request, batches, long=long)}"
        yield f"    batch_rows: {rows}{f' # {_why_batch(request, batches)}' if not number else ''}"
        if phase.lr_ratio != 1:
            yield f"    lr_ratio: {phase.lr_ratio}"
        if not number:
            yield from _warmup_lines(request, batches, tokens[name])
        if phase.schedule.decay_tokens:
            ratio = phase.schedule.final_lr_ratio
            yield f"    schedule: {{decay_tokens: {tokens[name]:_}, decay: one_minus_sqrt, final_lr_ratio: {ratio}}}"
        if long and batches.long_row_tokens > batches.row_tokens:
            yield f"    model: {{{', '.join(f'{key}: {value:_.0f}' for key, value in phase.model.items())}}}"
        for section in ("optim", "objective"):
            for key, value in getattr(phase, section).items():
                yield f"    {section}: {{{key}: {value if value > 0.01 else f'{value:.1e}'.replace('e-0', 'e-')}}}"


def _warmup_lines(request: RunRequest, batches: Batches, tokens: int) -> Iterator[str]:
    size, batch = request.size, batches.rows * batches.row_tokens
    if batches.unit < batches.rows:
        grows = _whole(size.batch_warmup * tokens)
        stages = f"start_rows: {batches.unit}, step_rows: {batches.unit}, tokens: {grows:_}"
        yield f"    batch_warmup: {{{stages}}} # {size.batch_warmup:.1%} of the phase: {size.source}"
    warmup_tokens = min(WARMUP_STEPS * batch, MAX_WARMUP * tokens)
    if warmup_tokens > size.warmup * tokens:
        why = f"{WARMUP_STEPS} steps, arXiv 1910.04209, or {MAX_WARMUP:.0%} of the phase"
    else:
        warmup_tokens, why = size.warmup * tokens, f"{size.warmup:.2%} of the phase: {size.family}"
    yield f"    schedule: {{warmup_tokens: {_whole(warmup_tokens):_}}} # {why}"


def _why_entries(request: RunRequest) -> str:
    if request.tokenizer is not None:
        return f"of {request.tokenizer}"
    if request.entries == request.size.entries:
        return request.size.source
    return "a power of two; it grows from the quickstart's as the root of the text (Heaps' law)"


def _why_init(size: Size) -> str:
    return size.source if size.model.init_std == 0.02 else f"{size.source}; 0.02 is for widths from 768"


def _why_rate(request: RunRequest) -> str:
    size, published = request.size, request.size.learning_rate
    source = f"the race, {size.raced:g} times that of {size.source}" if size.raced else size.source
    if learning_rate(request) == published:
        return source
    return f"{rate(published)} of {source}, times the root of the share of the batch (arXiv 2205.10287)"


def _why_tokens(request: RunRequest) -> str:
    text = f"{tokens_text(request.tokens)} tokens"
    if request.text_tokens:
        passes = request.tokens / request.text_tokens
        text += f", {passes:.2g} passes over the text; up to {MAX_PASSES} repeats cost little (arXiv 2305.16264)"
    return f"{text}; {request.tokens / request.size.parameters(request.entries):.2g} a parameter."


def _why_row(request: RunRequest, batches: Batches, *, long: bool) -> str:
    if long and request.longest is not None and batches.long_row_tokens < request.size.rows[1] and request.gpus:
        return f" # the longest documents have {request.longest:,} tokens"
    return "" if long or request.gpus else " # for a CPU, as in the quickstart"


def _why_batch(request: RunRequest, batches: Batches) -> str:
    batch = f"{tokens_text(batches.rows * batches.row_tokens)} tokens"
    if batches.rows * batches.row_tokens == request.size.batch_tokens:
        return f"{batch}: {request.size.source}"
    if batches.rows * batches.row_tokens < 0.9 * batches.ruled_tokens:
        return f"{batch}, which leaves {MIN_STEPS} steps, as the quickstart has"
    return f"{batch}: {request.size.source}'s times (tokens / its tokens)^{BATCH_EXPONENT} (arXiv 2401.02954)"


def _whole(tokens: float) -> int:
    """Round a number of tokens to a multiple of _ROUND, at least one."""
    return max(1, round(tokens / _ROUND)) * _ROUND
