"""Retrieval with sentence-transformers: `retrieval train` on pairs of texts, `retrieval evaluate` on BEIR and MTEB.

The library trains, with its losses. The negatives of a query are the other texts of its batch, so a batch is never
split: training uses one process, and GradCache where the batch does not fit. Reading, counting, search and metrics are
this package's. A run's folder holds retrieval.json (its inputs), checkpoints/ until training.json and st/ (the model)
are there, and result.json, written last.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from modernbert_train.config.load import load_typed
from modernbert_train.config.tools.retrieval import (
    MTEB,
    EvaluateConfig,
    MeasureConfig,
    RetrievalConfig,
    retrieval_problems,
)
from modernbert_train.core.files import lock_now, os_errors_as, write_whole
from modernbert_train.core.read_json import parse_object, read_json
from modernbert_train.data.dataset_card import file_sha256
from modernbert_train.distributed.bf16 import takes_bf16
from modernbert_train.errors import ConfigError, DataError, StoppedEarly, StorageError
from modernbert_train.evaluate.finetune.result import RESULT, write_figures
from modernbert_train.evaluate.finetune.task import run_name
from modernbert_train.evaluate.retrieval.beir import Beir, read_beir
from modernbert_train.evaluate.retrieval.beir_sets import beir_folder
from modernbert_train.evaluate.retrieval.measure import AT_ONCE, SHOWN, mean_of, measure, measure_all
from modernbert_train.evaluate.retrieval.pairs import QUERY, Pairs, read_pairs
from modernbert_train.evaluate.retrieval.rerank import RUN_ENDS, is_candidates
from modernbert_train.evaluate.retrieval.runs import (
    MODEL,
    in_words,
    read_settings,
    require,
    require_one_process,
)
from modernbert_train.evaluate.retrieval.sentence_model import (
    check_model,
    describe,
    is_multi_vector,
    is_sentence_model,
    open_sentence_model,
    save,
)

if TYPE_CHECKING:
    from modernbert_train.evaluate.retrieval.sentence_model import Model

STARTED, TRAINING, CHECKPOINTS, LOCK = "retrieval.json", "training.json", "checkpoints", ".lock"
_WHOLE = "whole"  # written into a checkpoint last, to mark it complete
# keys that may change on resume: they affect speed and the measurements after training
_MAY_CHANGE = frozenset(
    (
        "name",
        "runs_folder",
        "device",
        "encode_batch",
        "split",
        "beir_folder",
        "ignore_identical_ids",
        "evaluate",
        "save_every_steps",
        "train",
    )
)
_LOGGED = 50  # lines about the loss, at most


def train(recipe: str, model: str, overrides: Sequence[str]) -> Path:
    """Train a model on pairs of texts, resuming an interrupted run, and measure it.

    Args:
        recipe: YAML file of a `RetrievalConfig`.
        model: see `open_sentence_model`.
        overrides: KEY=VALUE for keys of the recipe.

    Returns:
        Path of result.json.

    Raises:
        RunError: anything that the user has to fix; StoppedEarly when a signal ended the run after a checkpoint.
    """
    require_one_process("retrieval train")
    config = read_settings(RetrievalConfig, retrieval_problems, Path(recipe), overrides)
    require("retrieval", "sentence_transformers", "accelerate", "datasets")
    check_model(model, config)
    folder = Path(config.runs_folder) / (config.name or run_name(recipe, _naming(model), config.seed))
    pairs = read_pairs(config)
    folders = {
        name: read_beir(beir_folder(each, config.beir_folder), config.split, f"evaluate.{name}")
        for name, each in config.evaluate.items()
    }
    with _in_use(folder):
        _same_run(folder, model, config, pairs)
        _say(pairs, folders)
        if is_sentence_model(str(folder / MODEL)):
            trained = open_sentence_model(str(folder / MODEL), EvaluateConfig(device=config.device))
            training = read_json(folder / TRAINING)
        else:
            from transformers import set_seed

            set_seed(config.seed)  # unused random weights, such as BERT's pooler, are saved too
            trained = open_sentence_model(model, config)
            training = _learn(trained, config, pairs, folder)
            write_whole(folder / TRAINING, json.dumps(training, indent=2) + "\n")
            save(trained, folder / MODEL, model, f"{len(pairs.columns[QUERY]):,} pairs")
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        figures = {name: measure(trained, each, config) for name, each in folders.items()}
        about, counts = asdict(describe(trained)), {"train": pairs.counts}
        _write(folder, Path(recipe).stem, model, config, about, figures, folders, counts, training)
    print(in_words(folder.name, figures | mean_of(figures) or {"trained": {}}, SHOWN, folder / RESULT))
    return folder / RESULT


def evaluate(sets: Sequence[str], model: str, overrides: Sequence[str]) -> Path:
    """Measure a model on BEIR folders and tasks of mteb.

    Args:
        sets: folders, names of BEIR's public sets, and tasks as mteb:NAME.
        model: see `open_sentence_model`; with `rerank` see `open_reranker`.
        overrides: keys of `MeasureConfig`.

    Returns:
        Path of result.json.

    Raises:
        RunError: anything that the user has to fix. If a task's data is not available, the others are measured first.
    """
    config = load_typed(MeasureConfig, [], overrides)
    tasks = [name.removeprefix(MTEB) for name in sets if name.startswith(MTEB)]
    if problems := [*retrieval_problems(config), *_set_problems(sets, tasks, config)]:
        raise ConfigError("\n".join(problems))
    require("retrieval", "sentence_transformers", *(["mteb"] if tasks else []))
    check_model(model, config)
    if config.rerank is not None and not is_candidates(config.rerank):
        check_model(config.rerank, EvaluateConfig())
    found = [beir_folder(name, config.beir_folder) for name in sets if not name.startswith(MTEB)]
    folders = {each.resolve().name: read_beir(each, config.split) for each in found}
    names = [*folders, *tasks]
    if len({*names}) < len(sets):
        raise ConfigError(f"{', '.join(map(str, found))}: two sets have one name in results. Rename a folder.")
    task = names[0] if len(names) == 1 else f"{names[0]}-and-{len(names) - 1}"
    folder = Path(config.runs_folder) / (config.name or run_name(task, _naming(model), config.split))
    with _in_use(folder):
        if (folder / STARTED).exists():
            raise ConfigError(
                f"{folder}: a run of `retrieval train`, whose {RESULT} would be lost. Name another with name=."
            )
        figures, about, lost = measure_all(model, folders, tasks, config, folder)
        if figures:
            _write(folder, task, model, config, about, figures, folders, {}, None)
            print(in_words(folder.name, figures | mean_of(figures), SHOWN, folder / RESULT))
    if lost:
        raise DataError("\n".join(lost))
    return folder / RESULT


def _set_problems(sets: Sequence[str], tasks: Sequence[str], config: MeasureConfig) -> Iterator[str]:
    if len({*sets}) < len(sets):
        yield f"{' '.join(sets)}: names a set twice. Name it once."
    for key in ("pooling", "normalize", "query_max_tokens", "index"):
        if config.rerank is not None and (value := getattr(config, key)) is not None:
            yield f"{key}={value}: a reranker reads query and document together. Leave it out, or leave out rerank."
    for key in ("rerank", "index"):
        if tasks and (value := getattr(config, key)) is not None:
            yield f"{key}={value}: is of BEIR folders; mteb does it in its own way. Leave out mteb:{tasks[0]}."
    if config.rerank is not None and not Path(config.rerank).exists() and Path(config.rerank).suffix in RUN_ENDS:
        yield f"rerank={config.rerank}: no such file. Correct the path."
    if config.rerank is not None and is_candidates(config.rerank) and len(sets) > 1:
        yield f"rerank={config.rerank}: candidates are of one set. Name one, or a model to search with."


def _naming(model: str) -> str:
    return str(Path(model).parent) if Path(model).name == MODEL else model


# --- a run's folder ------------------------------------------------------------------------------------------------


@contextmanager
def _in_use(folder: Path) -> Iterator[None]:
    """Create a run's folder and lock it against other processes."""
    with os_errors_as(StorageError, f"{folder}: cannot be written", "Free the disk, or set runs_folder."):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK).open("a") as file:
            if not lock_now(file):
                raise ConfigError(
                    f"{folder}: another process is at work there. Wait for it, or name another with name=."
                )
            yield


def _same_run(folder: Path, model: str, config: RetrievalConfig, pairs: Pairs) -> None:
    """Record a run's inputs when it starts, or compare them with the recorded ones.

    Raises:
        ConfigError: the inputs differ; names the differences.
    """
    sha256 = hashlib.sha256()
    for column in pairs.columns.values():
        for text in column:
            sha256.update(text.encode("utf-8", "surrogatepass") + b"\0")
    settings = {key: value for key, value in asdict(config).items() if key not in _MAY_CHANGE}
    now = {"model": model, "texts_sha256": sha256.hexdigest(), **settings}
    file = folder / STARTED
    if not file.exists():
        if others := sorted(path.name for path in folder.iterdir() if path.name != LOCK):
            raise ConfigError(
                f"{folder}: holds {', '.join(others[:5])}, of something else. Name another run with name=."
            )
        write_whole(file, json.dumps(now, indent=2) + "\n")
        return
    remedy = "Remove the folder, or name another run with name=."
    with os_errors_as(StorageError, f"{file}: is damaged", remedy, ValueError):
        before = read_json(file)
    differing = [key for key in now if not isinstance(before, dict) or before.get(key) != now[key]]
    if differing:
        listed = "\n  ".join(f"{key}={now[key]!r} here, {before.get(key)!r} there" for key in differing)
        raise ConfigError(
            f"{folder}: begun with other settings:\n  {listed}\nName another run with name=, or remove it."
        )


def _say(pairs: Pairs, folders: Mapping[str, Beir]) -> None:
    print(f"pairs: {pairs.counts['pairs']:,}")
    for key, count in pairs.counts.items():
        if key != "pairs" and count:
            print(f"warning: left out: {count:,} pairs, {key.removeprefix('skipped_')}")
    for name, beir in folders.items():
        for key in ("documents_without_text", "queries_without_relevant_document"):
            if beir.counts[key]:
                print(f"warning: {name}: {beir.counts[key]:,} {key.replace('_', ' ')}")


def _write(
    folder: Path,
    task: str,
    model: str,
    config: EvaluateConfig,
    about: Mapping[str, Any],
    figures: Mapping[str, Mapping[str, float]],
    folders: Mapping[str, Beir],
    counts: Mapping[str, Mapping[str, int]],
    training: Any,
) -> None:
    write_figures(
        folder / RESULT,
        task=task,
        source=model,
        seed=config.seed,
        run=folder.name,
        figures=figures,
        counts={**counts, **{name: each.counts for name, each in folders.items()}},
        settings={**asdict(config), **about},
        training=training,
    )


# --- training ------------------------------------------------------------------------------------------------------


def _learn(model: Model, config: RetrievalConfig, pairs: Pairs, folder: Path) -> dict[str, Any]:
    """Train a model in place; return steps, losses and the number of texts cut."""
    import sentence_transformers
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback

    batches = len(pairs.columns[QUERY]) // config.batch_size
    steps = math.ceil(math.ceil(batches / config.accumulate) * config.epochs)
    kind: Any = "MultiVectorEncoder" if is_multi_vector(model) else "SentenceTransformer"
    on_gpu = model.device.type == "cuda"
    bf16 = takes_bf16(config.precision, "precision", on_gpu=on_gpu)
    roles = {name: "query" if name == QUERY else "document" for name in pairs.columns}
    arguments = getattr(sentence_transformers, f"{kind}TrainingArguments")(
        output_dir=str(folder / CHECKPOINTS),
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulate,
        num_train_epochs=config.epochs,
        learning_rate=config.lr,
        warmup_steps=config.warmup,  # below 1: a share
        lr_scheduler_type="linear",
        weight_decay=config.weight_decay,
        seed=config.seed,
        bf16=bf16,
        use_cpu=not on_gpu,
        batch_sampler="no_duplicates" if config.no_duplicates else "batch_sampler",
        prompts={name: prompt for name, role in roles.items() if (prompt := (model.prompts or {}).get(role))},
        router_mapping=roles,  # lengths of queries and documents
        dataloader_drop_last=True,  # a smaller batch would be another loss
        dataloader_pin_memory=on_gpu,
        save_strategy="steps",
        save_steps=config.save_every_steps,
        save_total_limit=2,
        logging_steps=max(1, steps // _LOGGED),
        report_to="none",
        disable_tqdm=True,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # the library would share a batch among GPUs, and with it the negatives
    model.model_card_data.local_files_only = True
    model.model_card_data.generate_widget_examples = False
    stop: list[int] = []

    class Follow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save |= bool(stop)
            control.should_training_stop |= bool(stop)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saved = folder / CHECKPOINTS / f"checkpoint-{state.global_step}"
            write_whole(saved / _WHOLE, json.dumps(_hashes(saved)) + "\n")

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                print(f"step {state.global_step:,} of {state.max_steps:,}: loss {float(logs['loss']):.4f}", flush=True)

    trainer = getattr(sentence_transformers, f"{kind}Trainer")(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(pairs.columns),
        loss=_loss(model, config),
        callbacks=[Follow()],
    )
    trainer.remove_callback(PrinterCallback)
    if (newest := _newest_whole(folder / CHECKPOINTS)) is not None:
        print(f"resuming from {newest}")
    with _heard(stop):
        trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    state = trainer.state
    if not stop and not state.global_step:
        texts = len({text for column in pairs.columns.values() for text in column})
        raise DataError(
            f"train: no batch of batch_size={config.batch_size} pairs without a text twice can be made of "
            f"{len(pairs.columns[QUERY]):,} pairs with {texts:,} different texts, so there was no step. Lower "
            "batch_size, give more pairs, or set no_duplicates=false."
        )
    if stop and state.global_step < state.max_steps:
        raise StoppedEarly(
            f"{signal.Signals(stop[0]).name}: saved at step {state.global_step:,} of {state.max_steps:,}. The same "
            "command resumes."
        )
    logged = [(each["step"], each["loss"]) for each in state.log_history if "loss" in each]
    return {
        "steps": state.global_step,
        "texts_cut": _texts_cut(model, pairs),
        "pairs_per_epoch": len(pairs.columns[QUERY]) // config.batch_size * config.batch_size,
        "precision": "bf16" if bf16 else "fp32",
        "losses": [{"step": step, "loss": float(loss)} for step, loss in logged],
    }


def _loss(model: Any, config: RetrievalConfig) -> Any:
    """Build the library's loss; its negatives are all other texts of the batch."""
    if config.loss == "multi_vector":
        from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss

        return CachedMultiVectorMultipleNegativesRankingLoss(
            model, scale=config.scale or 1.0, mini_batch_size=config.mini_batch
        )
    from sentence_transformers.sentence_transformer import losses

    scale = config.scale or 20.0
    if config.loss == "mnrl":
        return losses.MultipleNegativesRankingLoss(model, scale=scale)
    return losses.CachedMultipleNegativesRankingLoss(model, scale=scale, mini_batch_size=config.mini_batch)


def _texts_cut(model: Model, pairs: Pairs) -> dict[str, int]:
    """Count the texts of each column that exceed the model's length, prompts included."""
    backend = model.tokenizer.backend_tokenizer
    tokenizer = type(backend).from_str(backend.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    about = describe(model)
    found = {}
    for name, texts in pairs.columns.items():
        prompt, most = about.document_prompt, about.max_tokens
        if name == QUERY:
            prompt, most = about.query_prompt, about.query_max_tokens
        parts = (texts[start : start + AT_ONCE] for start in range(0, len(texts), AT_ONCE))
        found[name] = sum(
            len(each.ids) > most
            for part in parts
            for each in tokenizer.encode_batch_fast([prompt + text for text in part])
        )
    return found


@contextmanager
def _heard(stop: list[int]) -> Iterator[None]:
    """Record a stop signal inside this context, to act on it after the step."""
    from modernbert_train.distributed.stop_signals import handled_by

    def note(number: int, _: FrameType | None) -> None:
        stop.append(number)

    with handled_by(note):
        yield


def _hashes(checkpoint: Path) -> dict[str, str]:
    """Return the sha256 of each file of a checkpoint."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != _WHOLE)
    return {str(path.relative_to(checkpoint)): file_sha256(path) for path in files}


def _newest_whole(folder: Path) -> Path | None:
    """Return the newest undamaged checkpoint; name damaged ones, remove unfinished ones."""
    found = {}
    for path in folder.glob("checkpoint-*"):
        if not (path / _WHOLE).is_file():
            shutil.rmtree(path, ignore_errors=True)
        elif (step := re.fullmatch(r"checkpoint-(\d+)", path.name)) is not None:
            found[int(step[1])] = path
    for _, path in sorted(found.items(), reverse=True):
        text = (path / _WHOLE).read_text(encoding="utf-8")
        there = _hashes(path)
        kept = parse_object(text) or {} if text.strip() else there  # without hashes, as before 2026-11-28
        if kept == there:
            return path
        wrong = [name for name in {*kept, *there} if kept.get(name) != there.get(name)]
        print(f"warning: {path}: {', '.join(sorted(wrong)[:3])} is not what was saved; passed over", file=sys.stderr)
    return None
