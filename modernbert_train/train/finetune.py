"""The verb `finetune`: build a run from a task and a model, train it, and write one file of figures.

The run is saved as finetune.yaml in its folder, and is trained, guarded, saved and resumed like any other. It is
exported at its end. result.json holds the figures from which tables are made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from modernbert_train.checkpoints.evaluations import keep_result
from modernbert_train.config.schema import RunConfig
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.core.files import errors_to
from modernbert_train.distributed.launched import speaks_for_all
from modernbert_train.errors import ConfigError
from modernbert_train.evaluate.finetune.best import Outcome, find_outcome, remove_others
from modernbert_train.evaluate.finetune.examples import TRAIN
from modernbert_train.evaluate.finetune.kinds import kind_of
from modernbert_train.evaluate.finetune.predictions import write_predictions
from modernbert_train.evaluate.finetune.result import ADAPTER, PREDICTIONS, RESULT, write_figures
from modernbert_train.evaluate.finetune.shards import Prepared, prepare, warnings_of
from modernbert_train.evaluate.finetune.task import (
    FROZEN,
    UNTRAINED,
    Named,
    as_run,
    as_trained,
    asked,
    check_run,
    named_model,
    read_task,
)
from modernbert_train.train.recipes import (
    adamw,
    first_hash,
    first_weights,
    held_for_all,
    phase,
    run_of,
    train_recipe,
    training_of,
)
from modernbert_train.vocabulary import read_vocabulary
from modernbert_train.weights.adapter import base_of, export_adapter
from modernbert_train.weights.export import export_run
from modernbert_train.weights.formats.classifiers import classifier_format
from modernbert_train.weights.names import EXPORT
from modernbert_train.weights.source import Source, open_model

RUN_YAML, SHARDS, PHASE = "finetune.yaml", "task", "finetune"
_SMALL = 256  # warn of a low rate up to this width; seen at 128: benchmarks/RESULTS.md, A retriever from nothing


def finetune(task_name: str, model: str, overrides: Sequence[str]) -> Path:
    """Fine-tune a model on a task, or resume it, up to its result.

    Args:
        task_name: a name from yamls/tasks, or a YAML file.
        model: a run, a checkpoint or a model, see `open_model`; or a baseline of it, see task.py.
        overrides: keys of the task and of the run.

    Returns:
        Path of result.json.

    Raises:
        RunError: anything that the user has to fix; StoppedEarly when a signal ended the run after a checkpoint.
    """
    task, run_overrides = read_task(task_name, overrides)
    named, request = named_model(model), asked(task, model, run_overrides)
    source = open_model(named.source)
    weights = source.checkpoint.weights_hash if source.checkpoint is not None and speaks_for_all() else ""
    task = as_trained(task, named, source.model.hidden_size)
    max_tokens = min(task.max_tokens, source.max_tokens, source.model.max_positions or source.max_tokens)
    run_overrides = as_run(task_name, model, run_overrides)
    folder = Path(check_run(run_overrides, [model]).folder)
    with held_for_all(folder):
        with source.tokenizer_folder() as tokenizer:
            prepared = prepare(task, tokenizer, max_tokens, folder / SHARDS)
        config = _run(task, named, source, prepared, folder, run_overrides)
        _say_before(config, task, prepared, overrides)
        train_recipe(config)
        if speaks_for_all():
            outcome = _export(config, task, named, source, prepared)
            write_result(folder / RESULT, task_name, task, request, config, prepared, outcome)  # marks it as finished
            if task.best is not None:
                remove_others(config, outcome)
            _keep(source, weights, named, Path(task_name).stem, config, outcome.figures)
            of = "" if outcome.epoch is None else f"epoch {outcome.epoch}, {outcome.checkpoint.folder.name}: "
            print(f"{config.name}: {of}{_in_words(outcome.figures, task)}; {folder / RESULT}")
    return folder / RESULT


def _say_before(config: RunConfig, task: TaskConfig, prepared: Prepared, overrides: Sequence[str]) -> None:
    if speaks_for_all():
        for line in (*warnings_of(prepared, task), *_unused(task, overrides), *_low_rate(config, task)):
            print(f"warning: {line}")
        if (reason := _cannot_export(config)) is not None:
            print(f"warning: the outcome will not be exported: {reason}")


def _low_rate(config: RunConfig, task: TaskConfig) -> Iterator[str]:
    """Yield a warning if a small encoder is trained at a rate that suits large ones, such as the default."""
    width, lr = config.model.hidden_size, config.optim.lr
    if width <= _SMALL and lr < 3e-4 and not task.freeze and task.lora is None:
        yield f"lr={lr}: is low for an encoder of width {width}, which may need about 1e-3; see docs/finetuning.md"


def _export(config: RunConfig, task: TaskConfig, named: Named, source: Source, prepared: Prepared) -> Outcome:
    """Export the checkpoint that counts, and write its predictions."""
    outcome, folder = find_outcome(config, task), Path(config.folder)
    if task.best is not None and not math.isfinite(outcome.figures[next(iter(task.validation))][task.best]):
        print(f"warning: best={task.best}: undefined at every epoch, so the last one counts")
    if _cannot_export(config) is None:
        export_run(config, checkpoint=outcome.checkpoint, out=folder / EXPORT)
        if task.lora is not None:
            with errors_to(lambda text: print(f"warning: no adapter is written: {text}"), ConfigError):
                base = base_of(source, named.source, untrained=UNTRAINED in named.baseline)
                export_adapter(outcome.checkpoint, base, folder / EXPORT, folder / ADAPTER)
    write_predictions(config, task, prepared, outcome.checkpoint, folder / PREDICTIONS)
    return outcome


def _keep(
    source: Source,
    weights: str,
    named: Named,
    task: str,
    config: RunConfig,
    figures: dict[str, dict[str, float]],
) -> None:
    """Add figures to the run whose checkpoint was fine-tuned, if they still belong to that checkpoint."""
    begun = first_weights(config).partition(";")[0]
    if source.checkpoint is None or UNTRAINED in named.baseline or begun != f"weights.init_from={source.folder}":
        return
    frozen = f", {FROZEN}" if FROZEN in named.baseline else ""
    step, seed = source.checkpoint.step, config.seed
    for split, each in figures.items():
        name = f"finetune {task}{frozen}, {split}"
        keep_result(source.folder, name, each, step=step, weights=weights, seed=seed)


def _run(
    task: TaskConfig, named: Named, source: Source, prepared: Prepared, folder: Path, overrides: Sequence[str]
) -> RunConfig:
    """Return the run's configuration, written beneath the folder of its shards; overrides apply to every key."""
    of_batch = task.batch_texts * prepared.tokens / prepared.texts
    tokens = math.ceil(task.epochs * prepared.tokens if task.steps is None else task.steps * of_batch)
    only = phase(
        tokens=tokens,
        batch_tokens=of_batch,
        longest=prepared.longest,
        positions=source.model.max_positions,
        warmup=task.warmup,
    )
    sections: dict[str, Any] = {
        "objective": _objective(task, source, prepared),
        "optim": adamw(task.lr, task.weight_decay / task.lr, task.max_grad_norm, overrides),
        "phases": {PHASE: only},
        "evals": {
            name: {
                "name": "scores",
                "shards": str(prepared.folder / name),
                "metrics": task.measured,
                "unseen": list(prepared.unseen.get(name, ())),
                "every_tokens": prepared.tokens,
            }
            for name in task.validation
        },
        "checkpoint": {"keep": 1} | ({} if task.best is None else {"interval_tokens": prepared.tokens}),
    }
    of_data: dict[str, Any] = {
        "train": prepared.folder / TRAIN,
        "tokenizer": prepared.tokenizer,
        "texts": prepared.texts,
    }
    return run_of(folder / RUN_YAML, source, named, sections, overrides, **of_data)


def _objective(task: TaskConfig, source: Source, prepared: Prepared) -> dict[str, Any]:
    # the dropout that transformers' classes use
    own: dict[str, Any] = {"freeze": True} if task.freeze else {"dropout": source.model.dropout}
    if task.lora is not None:
        own["lora"] = {key: value for key, value in asdict(task.lora).items() if key != "lr"}
    own["max_tokens"] = source.max_tokens
    types = source.model.segments > 1 and read_vocabulary(prepared.tokenizer).segments_of_pairs
    return own | kind_of(task.kind).objective(task, source.model, prepared.labels, types)


def _unused(task: TaskConfig, overrides: Sequence[str]) -> Iterator[str]:
    """Yield warnings about command-line keys that a frozen encoder or adapters ignore."""
    if task.freeze:
        for key in asdict(task.frozen):
            if any(each.startswith(f"{key}=") for each in overrides):
                yield f"{key}= applies to full fine-tuning; a frozen encoder uses frozen.{key}={getattr(task, key):g}"
        for each in overrides:
            if each.startswith(("lora.", "lora=")):
                yield f"{each}: applies to adapters, and a frozen encoder has none. Leave it out, or frozen:"
    elif task.lora is not None and any(each.startswith("lr=") for each in overrides):
        yield f"lr= applies to fine-tuning all weights; adapters use lora.lr={task.lora.lr:g}"


def _cannot_export(config: RunConfig) -> str | None:
    try:
        classifier_format(config.model, config.objective)  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error)
    return None


def write_result(
    file: Path,
    task_name: str,
    task: TaskConfig,
    request: dict[str, Any],
    config: RunConfig,
    prepared: Prepared,
    outcome: Outcome,
) -> None:
    """Write the result of a run; figures that are NaN or infinite become null. `wanted`: see `asked`."""
    sections = ("large", "frozen", "labels", "lora")
    settings = {each.name: getattr(task, each.name) for each in fields(task) if each.name not in sections}
    write_figures(
        file,
        task=Path(task_name).stem,
        source=request["model"],
        weights=first_weights(config),
        begun=first_hash(config),
        seed=config.seed,
        run=config.name,
        figures=outcome.figures,
        counted={"epoch": outcome.epoch, "step": outcome.checkpoint.step, "checkpoint": outcome.checkpoint.folder.name},
        counts={name: asdict(each) for name, each in prepared.counts.items()},
        settings=settings
        | {"pooling": config.objective.pooling}
        | ({} if task.lora is None else {"lora": asdict(task.lora)}),
        labels=list(prepared.labels),
        unseen={name: list(each) for name, each in prepared.unseen.items()},
        training=training_of(config) | {"lr": config.optim.lr, "weight_decay_of_optimizer": config.optim.weight_decay},
        asked=request,
    )


def _in_words(figures: dict[str, dict[str, float]], task: TaskConfig) -> str:
    return "; ".join(
        f"{name} " + ", ".join(f"{metric} {of_split[metric]:.4f}" for metric in task.measured)
        for name, of_split in figures.items()
    )
