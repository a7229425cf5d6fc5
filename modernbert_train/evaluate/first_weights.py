"""The held-out loss of a run's first weights, before any training.

For weights.shrink_from, the cost of each choice: the loss of the model with only that choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from modernbert_train.clock import Clock
from modernbert_train.config.schema import MaskedLmConfig, ModelConfig, RunConfig
from modernbert_train.core.text import fixed, percent, table
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import joined
from modernbert_train.errors import ConfigError
from modernbert_train.evaluate.heldout import HeldOutTexts
from modernbert_train.models.build import build_model
from modernbert_train.models.shrinking import drops_types
from modernbert_train.plan.resolve import resolve
from modernbert_train.weights.source import find_origin

_CHOICES = (("num_layers",), ("hidden_size", "num_heads"), ("intermediate_size",))


def describe_first(config: RunConfig) -> str:
    """Return a table of losses: of the named model; for shrink_from, also with each choice alone, and with all.

    Args:
        config: of a run that begins with the weights of another model. The table measures its data.validation.

    Raises:
        ConfigError: no held-out text, the model predicts no tokens, or see `find_origin`.
        DataError: see `resolve` and `Source.weights`.
    """
    if config.data.validation is None:
        raise ConfigError("data.validation: not set, so this run names no text to measure. Name held-out shards.")
    facts = resolve(config, purpose="measure").facts
    objective = config.objective.for_validation()
    if objective.heads != MaskedLmConfig().heads:
        objective = MaskedLmConfig().for_validation()
    config = replace(config, objective=objective)
    origin, compute = find_origin(config), Compute.of(config.compute)
    assert facts is not None and facts.validation is not None and origin is not None
    if origin.drawn:
        raise ConfigError(
            f"{origin.source.folder}: has no {', '.join(origin.drawn)}, so it predicts no tokens. Name a model with a "
            "masked-LM head."
        )
    now = replace(Clock.of(config).phases[0], objective=objective)
    texts = HeldOutTexts(config.data, config.eval, Clock.of(config), config.model.vocab_size, facts)
    rows = [("before any training", "parameters", "loss", "accuracy")]
    with joined(compute.device, config.distributed.timeout_seconds):
        text = texts.validation()
        for choice, model in _models(origin.source.model, config.model):
            built = build_model(model, objective, config.compute)
            replace(origin, config=replace(config, model=model, objective=objective)).fill(built)
            result = text.evaluate(built.to(compute.device), now, compute)
            count = sum(parameter.numel() for parameter in built.parameters())
            rows.append((choice, f"{count:,}", fixed(3)(result.loss), percent(1)(result.accuracy)))
    heading = f"held-out text, {objective.predicted_share:.0%} predicted; unigram loss {result.unigram_loss:.3f}"
    return f"{heading}\n{table(rows, numbers=True)}"


def _models(old: ModelConfig, new: ModelConfig) -> Iterator[tuple[str, ModelConfig]]:
    """Yield each model with its label."""
    words, model = replace(old, vocab_size=new.vocab_size), "as it is"
    if words != old:
        model = f"vocab_size {new.vocab_size:,} of {old.vocab_size:,}"
    yield model, words
    changed = [each for each in _CHOICES if any(getattr(old, key) != getattr(new, key) for key in each)]
    for keys in changed:
        change = ", ".join(f"{key} {getattr(new, key):,} of {getattr(old, key):,}" for key in keys)
        yield change, replace(words, **{key: getattr(new, key) for key in keys})
    if len(changed) > 1 or drops_types(old, new):
        yield "all of them", new
