"""Adapters in peft's format: a folder with adapter_config.json and the matrices, without the encoder's weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from modernbert_train.checkpoints.checkpoint import Checkpoint
from modernbert_train.checkpoints.evaluations import run_of
from modernbert_train.checkpoints.manifest import CONFIG_YAML
from modernbert_train.config.classify import LORA_A, LORA_B, LabelledConfig, LoraConfig
from modernbert_train.core.files import os_errors_as, whole_folder
from modernbert_train.core.tensor_files import write_tensors
from modernbert_train.errors import ConfigError, RunError, StorageError
from modernbert_train.models.init import module_of
from modernbert_train.vocabulary import SPECIAL_TOKENS_MAP, TOKENIZER, TOKENIZER_CONFIG
from modernbert_train.weights.formats.classifiers import Classifiers, classifier_format
from modernbert_train.weights.formats.config_json import ADAPTER_JSON, CONFIG_JSON
from modernbert_train.weights.formats.tensors import EMBEDDING, places_of
from modernbert_train.weights.names import EXPORT
from modernbert_train.weights.source import Source, open_model, phase_objective, source_of

WEIGHTS = "adapter_model.safetensors"
_BEGIN = "base_model.model."  # prefix of every name in peft's files
# head -> peft's name of the task; peft has none for multiple choice
_TASKS = {"class": "SEQ_CLS", "tag": "TOKEN_CLS", "answer": "QUESTION_ANS"}


def base_of(source: Source, name: str, *, untrained: bool) -> str:
    """Return the folder or the id from which peft loads the weights that an encoder started from.

    Args:
        source: these weights; of a run, one of its exports must hold the same.
        name: of the model, as the user wrote it.
        untrained: True if the encoder began with new random weights.

    Raises:
        ConfigError: nothing that peft could open holds these weights.
    """
    if untrained:
        raise ConfigError(
            f"it started from new random weights, which are in no file; peft would load it onto the weights of {name}. "
            f"Use the merged model in {EXPORT}/."
        )
    if source.folder.is_file():
        raise ConfigError(f"peft cannot open {name}. Convert it (`export {name} --out FOLDER`), and start from FOLDER.")
    if source.checkpoint is None:  # of a run without checkpoints, its export
        return str(source.folder) if (Path(name) / CONFIG_YAML).is_file() else name
    step = source.checkpoint.folder
    exports = [] if (run := run_of(step)) is None else [run / EXPORT, run / f"{EXPORT}-{step.name}"]
    for export in exports:
        with suppress(RunError):
            if _same_encoder(source, open_model(export)):
                return str(export)
    raise ConfigError(
        f"peft cannot open {name}, a run of this program, and its folder has no export of these weights. Write one "
        f"(`export {name}`); the same command then writes the adapter."
    )


def _same_encoder(source: Source, export: Source) -> bool:
    ours, theirs = source.weights(), export.weights()
    encoder = [name for name in ours if module_of(name) == "model"]
    return all(name in theirs and torch.equal(ours[name], theirs[name]) for name in encoder)


def export_adapter(checkpoint: Checkpoint, base: str, merged: Path, out: Path) -> Path:
    """Write the adapters of a fine-tuned checkpoint, with the heads trained with them, for peft.

    Args:
        checkpoint: of a run with `objective.lora`.
        base: the model that the encoder started from, see `base_of`.
        merged: the exported model with the adapters merged into its weights; its config.json and tokenizer are copied,
            since the base lacks labels.
        out: the folder; an earlier adapter there is replaced.

    Returns:
        The folder.

    Raises:
        ConfigError: transformers lacks such a class, or stores these layers in a shape that peft does not adapt.
        StorageError: the folder cannot be written.
    """
    source, objective = source_of(checkpoint), phase_objective(checkpoint)
    objective = cast(LabelledConfig, objective)
    assert objective.lora is not None
    hub, weights = classifier_format(source.model, objective), checkpoint.weights()
    tensors, targets = {}, set()
    for name in (name.removesuffix(LORA_A) for name in weights if name.endswith(LORA_A)):
        for theirs, part_B in _parts(hub, name, source.model, weights[name + LORA_B]):
            tensors[f"{_BEGIN}{theirs}{LORA_A}"] = weights[name + LORA_A].clone()
            tensors[f"{_BEGIN}{theirs}{LORA_B}"] = part_B.contiguous()
            targets.add(_within_layer(theirs))
    heads = {name: tensor for name, tensor in weights.items() if module_of(name) not in ("model", "adapters")}
    for name, tensor in heads.items():
        for (stored,) in places_of(hub, name, source.model):
            tensors[_BEGIN + stored] = tensor
    encoder = {name.partition(".")[0] for name in hub.theirs(EMBEDDING, source.model)}
    theirs = {name.rpartition(".")[0] for ours in heads for name in hub.theirs(ours, source.model)}
    # peft saves a head as a whole module; a pooler within the encoder by its full name
    saved = sorted({name if (top := name.partition(".")[0]) in encoder else top for name in theirs})
    described = _describe(objective, objective.lora, base, sorted(targets), saved)
    if out.exists() and not (out / ADAPTER_JSON).is_file():
        raise ConfigError(f"{out} exists and is not an adapter of this program. Remove it or name another folder.")
    with (
        os_errors_as(StorageError, f"{out}: cannot be written", "Free the disk or name another."),
        whole_folder(out) as new,
    ):
        write_tensors(new / WEIGHTS, tensors, metadata={"format": "pt"})
        for name in (CONFIG_JSON, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP):
            if (merged / name).is_file():
                shutil.copyfile(merged / name, new / name)
        (new / ADAPTER_JSON).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return out


def _parts(hub: Classifiers, name: str, model: Any, matrix_B: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield transformers' names of the linear layers that store one layer here, each with its rows of B."""
    if hub.shape(f"{name}.weight", model) is not None:
        raise ConfigError(
            f"objective.lora: transformers' {hub.name} stores {name} in another shape, which peft does not adapt. Use "
            "the merged model in hf/."
        )
    for theirs in places_of(hub, f"{name}.weight", model):
        yield from zip((each.removesuffix(".weight") for each in theirs), matrix_B.chunk(len(theirs)), strict=True)


def _within_layer(name: str) -> str:
    """Return the part of a module's name after its layer number, by which peft finds it in all layers."""
    words = name.split(".")
    numbers = [index for index, part in enumerate(words) if part.isdigit()]
    return ".".join(words[numbers[-1] + 1 :] if numbers else words)


def _describe(
    objective: LabelledConfig, lora: LoraConfig, base: str, targets: list[str], saved: list[str]
) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": _TASKS.get(objective.heads[0]),
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "target_modules": targets,
        "modules_to_save": saved,
    }
