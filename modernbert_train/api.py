"""The Python interface: `from modernbert_train import ...`, which imports lazily.

Most functions correspond to a verb of the command. None ends the process; mistakes raise a `RunError` that names the
problem, its place and a remedy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modernbert_train.config.schema import RunConfig
from modernbert_train.evaluate.loaded import LoadedEncoder as LoadedEncoder
from modernbert_train.evaluate.loaded import load_model as load_model

if TYPE_CHECKING:
    from composer import Callback

    from modernbert_train.data.loader import StepBatch
    from modernbert_train.models.encoder import OnEncoder
    from modernbert_train.plan.make import Plan


def load_config(*words: str | Path) -> RunConfig:
    """Load a run's configuration.

    Args:
        words: as on the command line: YAML files, merged left to right, or one run's folder; then overrides
            `section.key=value`.

    Raises:
        ConfigError: lists all mistakes visible in the text: unknown keys with the nearest name, values of the wrong
            type. `check_run` finds mistakes that involve several keys.
    """
    from modernbert_train.cli.arguments import read_run

    return read_run([str(word) for word in words])


def check_run(config: RunConfig, ranks: int = 1) -> None:
    """Find all mistakes before training, without torch: in the configuration, its data and its folder.

    Args:
        config: the run.
        ranks: processes that would train.

    Raises:
        RunError: all mistakes at once.
    """
    from modernbert_train.plan.resolve import resolve

    resolve(config, ranks)


def plan_run(config: RunConfig, ranks: int = 1) -> Plan:
    """Predict parameters, FLOPs, steps, padding and bytes sent, without a GPU and without training.

    Args:
        config: the run; its data is read where it exists.
        ranks: GPUs that would train.
    """
    from modernbert_train.plan.make import make_plan
    from modernbert_train.plan.resolve import resolve

    return make_plan(config, ranks, facts=resolve(config, ranks, purpose="plan").facts)


def iter_batches(config: RunConfig, ranks: int = 1, rank: int = 0) -> Iterator[StepBatch]:
    """Yield the batches of training, from the first on: packed, masked, the same in every call.

    Args:
        config: the run.
        ranks: processes that would share each batch.
        rank: the rank whose share is yielded.

    Yields:
        One optimizer step: `microbatches` of packed sequences with their targets, and the `plan` of the whole batch.
    """
    from modernbert_train.plan.resolve import resolve
    from modernbert_train.train.build_trainer import build_data

    here = replace(config, data=replace(config.data, num_workers=0))
    facts = resolve(here, ranks, purpose="measure").facts
    assert facts is not None
    yield from build_data(here, facts).loader(rank, ranks)


def build_model(config: RunConfig) -> OnEncoder:
    """Build the model that a run trains, with its initial weights from scratch: a function of the seed.

    Calling it with a microbatch of `iter_batches` returns the sums of its losses.
    """
    from modernbert_train.models.build import build_model as build
    from modernbert_train.models.init import initialize

    model = build(config.model, config.objective, config.compute)
    initialize(model, config.model, config.seed)
    return model


def train_run(config: RunConfig, *, fresh: bool = False, callbacks: Sequence[Callback | type[Callback]] = ()) -> Path:
    """Train a run to its end, from its newest checkpoint if it has one; a second call resumes.

    Args:
        config: the run.
        fresh: move the contents of the run's folder aside and start from scratch.
        callbacks: subclasses of `composer.Callback`, or instances; they get Composer's events in addition to the
            run's own callbacks. Their state is not saved: after a resume they start fresh.

    Returns:
        The run's folder.

    Raises:
        RunError: anything that the user has to fix; StoppedEarly when a signal ended the run after a checkpoint.
    """
    from modernbert_train.plan.resolve import resolve_alone

    resolved = resolve_alone(config, fresh=fresh)
    from modernbert_train.train.session import train

    train(config, fresh=fresh, callbacks=callbacks, resolved=resolved)
    return Path(config.folder)


def evaluate_run(config: RunConfig) -> dict[str, dict[str, float]]:
    """Evaluate a run's newest checkpoint on its held-out text and by its `evals`; results are stored with the run.

    Returns:
        Figures by name; `heldout` are those for the held-out text.
    """
    from modernbert_train.evaluate import evaluate

    return evaluate.evaluate_run(config)


def export_run(config: RunConfig, out: str | Path | None = None) -> Path:
    """Export a run's newest checkpoint for Hugging Face; return the folder, by default hf in the run's."""
    from modernbert_train.weights import export

    return export.export_run(config, None if out is None else Path(out))


def finetune_model(task: str | Path, model: str | Path, *overrides: str) -> dict[str, Any]:
    """Fine-tune a model on labelled texts, evaluate it, and export it with its classes.

    Args:
        task: one of yamls/tasks, such as "mnli", or a YAML file.
        model: see `load_model`.
        overrides: keys of the task and of the run, `key=value`.

    Returns:
        The contents of result.json: figures by split, counts, settings.
    """
    from modernbert_train.train.finetune import finetune

    result = finetune(str(task), str(model), overrides)
    return dict(json.loads(result.read_text(encoding="utf-8")))
