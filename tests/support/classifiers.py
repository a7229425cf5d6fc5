"""Classifiers in our code and in transformers'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modernbert_train.batch import Batch
from modernbert_train.config.schema import ModelConfig, ObjectiveConfig, TagConfig
from modernbert_train.core.keyed_random import Keys
from modernbert_train.data.microbatches import MicrobatchMaker
from modernbert_train.data.packing import Chunk
from modernbert_train.data.planner import BatchPlan
from modernbert_train.models.build import build_model
from modernbert_train.models.classifier import Classifier
from modernbert_train.models.init import initialize
from modernbert_train.objectives import build_objective
from modernbert_train.plan.parameters import count_parameters
from modernbert_train.vocabulary import read_vocabulary
from modernbert_train.weights.formats.classifiers import classifier_format
from modernbert_train.weights.hf_folder import export, load_weights
from modernbert_train.weights.source import open_model

PAIRS = [("aki nabe ruto", "kelo tinda mosa lebi"), ("lamu", "domi domi"), ("beru nabe", "ruto"), ("mosa " * 9, "aki")]


class Documents:
    """Documents and labels in memory."""

    def __init__(self, documents: list[list[int]], labels: list[Any]) -> None:
        self._documents, self._labels = documents, labels

    def read(self, document: int) -> np.ndarray:
        return np.array(self._documents[document])

    def mask_keys(self, chunks: Any) -> Keys:
        return np.zeros(len(chunks), dtype=np.uint64)

    def labels(self, chunks: Any) -> np.ndarray:
        return np.concatenate([np.array(self._labels[chunk.document]) for chunk in chunks])


def packed(
    documents: list[list[int]], labels: list[Any], objective: ObjectiveConfig, folder: Path, rows: list[list[int]]
) -> Batch:
    """Return a microbatch of rows of 64 tokens with these documents."""
    vocabulary = read_vocabulary(folder)
    maker = MicrobatchMaker(Documents(documents, labels), lambda c: build_objective(c, vocabulary), vocabulary)
    chunks = tuple(tuple(Chunk(0, number, 0, len(documents[number])) for number in row) for row in rows)
    plan = BatchPlan("p", 0, 0, chunks, len(rows), 64, len(rows), objective)
    (batch,) = maker.microbatches(chunks, plan)
    return batch.to("cpu")


def encoded(tokenizer: Path, texts: list[tuple[str, ...]]) -> list[list[int]]:
    """Return documents as `finetune` writes them: two texts with [SEP] between."""
    from tokenizers import Tokenizer

    own, sep = Tokenizer.from_file(f"{tokenizer}/tokenizer.json"), read_vocabulary(tokenizer).sep_id
    found = []
    for parts in texts:
        ids = [own.encode(part, add_special_tokens=False).ids for part in parts]
        found.append([token for n, part in enumerate(ids) for token in ([sep] * (n > 0) + part)])
    return found


def made(config: ModelConfig, objective: ObjectiveConfig) -> Classifier:
    model = build_model(config, objective)
    initialize(model, config, 5)
    with torch.no_grad():  # so that a missing bias or norm has an effect
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(len(parameter), generator=torch.Generator().manual_seed(len(name))))
    assert isinstance(model, Classifier)
    return model.eval()


def exported(model: Classifier, config: ModelConfig, objective: Any, tokenizer: Path, out: Path) -> Path:
    export(
        dict(model.state_dict()), config, max_tokens=64, tokenizer_folder=tokenizer, out=out, card="",
        hub=classifier_format(config, objective), pairs=objective.segments > 1,
        shapes={name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
    )  # fmt: skip
    return out


def assert_opens_again(folder: Path, model: Classifier, objective: Any) -> None:
    """The folder has this model's weights and objective, as far as config.json has it, and the plan its size."""
    weights, config = load_weights(folder), model.config
    assert {*weights} == {*model.state_dict()}
    assert all(torch.equal(weights[key], tensor) for key, tensor in model.state_dict().items())
    there = objective if isinstance(objective, TagConfig) else replace(objective, segments=1)
    assert open_model(folder).objective == there
    assert count_parameters(config, objective).total == sum(each.numel() for each in model.parameters())
