"""predictions.jsonl of a fine-tuning: a prediction for each text that is measured or named in `predict`.

A line for each text of each split, in the order of its file, also for those that were left out, so that lines
match the file: `split`, `line`, `id` where the task names a column of it, `label` where it has one, `prediction`, and
`scores`. Scores are probabilities: of each class or choice, and of the predicted tag of each word. An answer has its
`start` in the context too, and sums of logits as scores; `null` is the score of no answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from modernbert_train.checkpoints.checkpoint import Checkpoint
from modernbert_train.clock import Clock
from modernbert_train.config.schema import LabelledConfig, PhaseConfig, RunConfig, ScoresConfig
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.core.files import os_errors_as, write_whole
from modernbert_train.data.facts import read_facts
from modernbert_train.distributed.compute import Compute
from modernbert_train.errors import StorageError
from modernbert_train.evaluate.finetune.kinds import kind_of
from modernbert_train.evaluate.finetune.shards import Prepared
from modernbert_train.evaluate.heldout import HeldOutTexts
from modernbert_train.evaluate.label_sidecar import read_texts
from modernbert_train.evaluate.scores import Scores
from modernbert_train.models.build import build_model
from modernbert_train.weights.gather import load_weights
from modernbert_train.weights.source import source_of


def write_predictions(
    config: RunConfig, task: TaskConfig, prepared: Prepared, checkpoint: Checkpoint, file: Path
) -> None:
    """Predict every split that is measured or named in `predict`, by this process alone.

    Args:
        config: the run.
        task, prepared: its texts.
        checkpoint: the chosen checkpoint.
        file: path to write to.

    Raises:
        DataError: the texts on disk differ from those that were prepared.
        StorageError: the file cannot be written.
    """
    compute, source = Compute.of(config.compute), source_of(checkpoint)
    model = build_model(source.model, checkpoint.config.objective, config.compute)
    load_weights(model, checkpoint.weights())
    model.to(compute.device)
    now = Clock.of(checkpoint.config).phase(checkpoint.state.phase)
    now = replace(now, phase=_holding(now.phase, prepared.longest))
    facts = read_facts(config.data)
    held_out = HeldOutTexts(config.data, config.eval, Clock.of(config), config.model.vocab_size, facts)
    lines: list[str] = []
    for split in (*task.validation, *task.predict):
        texts = read_texts(prepared.folder / split)
        scores = Scores(f"predictions.{split}", ScoresConfig(shards=str(prepared.folder / split)), held_out)
        logits = scores.logits(model, now, compute, alone=True)
        objective = cast(LabelledConfig, now.objective)
        lines += [
            json.dumps({"split": split, **entry}, ensure_ascii=False)
            for entry in predicted(texts, logits.double(), objective)
        ]
    with os_errors_as(StorageError, f"{file}: cannot be written", "Free some space; the same command resumes."):
        write_whole(file, "".join(f"{line}\n" for line in lines))


def _holding(phase: PhaseConfig, longest: int) -> PhaseConfig:
    """Return the phase with rows long enough for every text; later texts may be longer than those of training."""
    if longest <= phase.row_tokens:
        return phase
    return replace(phase, row_tokens=longest, microbatch_tokens=max(1, phase.tokens_at_once // longest) * longest)


def predicted(texts: list[dict[str, Any]], logits: Tensor, objective: LabelledConfig) -> Iterator[dict[str, Any]]:
    """Yield the predictions of each text.

    Args:
        texts: as shards.py has written them.
        logits: of every text that has a document, or of every predicted word or token, in order.
        objective: the run's.
    """
    kind = kind_of(objective.task_kind)
    for text, entry in zip(texts, kind.predicted(texts, logits, objective), strict=True):
        yield {key: text[key] for key in ("line", "id", "label") if key in text} | entry
