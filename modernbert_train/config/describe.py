"""Describe a configuration in a few lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from modernbert_train.config.schema import ModelConfig, OptimConfig, PhaseConfig, RunConfig, WeightsConfig
from modernbert_train.core.text import table


def describe(config: RunConfig) -> str:
    """Return a table of the run's phases, batch sizes, learning rates and expected steps, and advice."""
    head = ("phase", "tokens", "row", "batch rows", "steps", "peak lr", "decay", "its own")
    rows = [head, *(_row(config, name, phase) for name, phase in config.phases.items())]
    advised = [f"advice: {text}" for text in advice(config.model, config.optim, config.weights, config.phases)]
    return "\n".join(
        [f"{config.name}: good. {config.total_tokens:,} tokens into {config.folder}", table(rows), *advised]
    )


def advice(
    model: ModelConfig, optim: OptimConfig, weights: WeightsConfig, phases: Mapping[str, PhaseConfig]
) -> list[str]:
    """Return advice on settings that work but may be improved."""
    warnings, size, max_lr = [], model.vocab_size, optim.max_usual_lr
    if size % 64:
        warnings.append(
            f"model.vocab_size={size} is not a multiple of 64, so the head is slower on GPUs. Keep it for the weights "
            f"of a published model; otherwise set {-(-size // 64) * 64}."
        )
    peak = optim.lr * max((phase.lr_ratio for phase in phases.values()), default=1.0)
    if max_lr is not None and peak > max_lr:
        warnings.append(
            f"optim.lr={optim.lr:g} with optim.name={optim.name}: a peak of {peak:g}, and usual ones are "
            f"at most {max_lr:g}. Each step would move weights by more than their initial size; the loss would rise or "
            "stay at the unigram loss. Set one between 1e-5 and 1e-2."
        )
    if weights.named and optim.newton_schulz_iterations:
        warnings.append(
            f"optim.name={optim.name} with weights.{next(iter(weights.named))}: full training by Muon degrades "
            "weights that Adam trained, as nearly all published ones were (arXiv 2605.10468). Set "
            "optim.name=stable_adamw, or ignore this if Muon trained them."
        )
    return warnings


def _row(config: RunConfig, name: str, phase: PhaseConfig) -> tuple[str, ...]:
    sizes = phase.batch_sizes
    schedule = phase.schedule
    decay = f"{schedule.decay} over {schedule.decay_tokens:,}" if schedule.decay_tokens else "none"
    return (
        name,
        f"{phase.tokens:,}",
        f"{phase.row_tokens:,}",
        f"{sizes[0]:,} to {sizes[-1]:,}" if len(sizes) > 1 else f"{sizes[0]:,}",
        f"about {expected_steps(phase):,}",
        f"{config.optim.lr * phase.lr_ratio:.2e}",
        decay,
        ", ".join(_own(phase)) or "nothing",
    )


def _own(phase: PhaseConfig) -> Iterator[str]:
    """Yield the phase's overrides, as keys of the run."""
    for section in phase.overridden:
        for key, value in getattr(phase, section).items():
            yield f"{section}.{key} {value:,g}" if isinstance(value, float) else f"{section}.{key} {value}"


def expected_steps(phase: PhaseConfig) -> int:
    """Return the optimizer steps of a phase if every row were full; real rows are about 99 % full."""
    warmup_tokens, warmup_steps = 0, 0.0
    if phase.batch_warmup is not None:
        sizes = phase.batch_sizes[:-1]
        warmup_tokens = phase.batch_warmup.tokens
        warmup_steps = len(sizes) * warmup_tokens / (sum(sizes) * phase.row_tokens)
    return round(warmup_steps + (phase.tokens - warmup_tokens) / (phase.batch_rows * phase.row_tokens))
