"""Compare predictions with labelled texts: the validation of a fine-tuning.

Every text counts once, also if its class is missing in training, where no prediction is right. Ranks share the texts;
figures are computed from all of them, in fp64, and are the same on any number of ranks.

Shape legend: N texts, or tokens of one, W words of all texts, T tokens of all, L logits.
"""

from __future__ import annotations

import time
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.clock import Position
from modernbert_train.config.evals import COUNT
from modernbert_train.config.schema import LabelledConfig, ScoresConfig
from modernbert_train.core.text import plural
from modernbert_train.data.facts import read_folder
from modernbert_train.data.labels import DocumentLabels
from modernbert_train.data.microbatches import MicrobatchMaker, share_of_rank
from modernbert_train.data.mixture import Stream, TokenStreams
from modernbert_train.data.open_shards import open_shards
from modernbert_train.data.packing import SPECIAL_TOKENS
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import num_ranks, sum_over_ranks, this_rank
from modernbert_train.distributed.launched import speaks_for_all
from modernbert_train.errors import DataError
from modernbert_train.evaluate.embeddings import entered, plan_rows
from modernbert_train.evaluate.finetune.kinds import kind_of
from modernbert_train.evaluate.finetune.numbers import Outputs
from modernbert_train.evaluate.heldout import HeldOutTexts
from modernbert_train.models.classifier import Classifier
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.objectives import build_objective

_LINE_SECONDS = 60  # between two progress lines


class Scores:
    """See `Evaluator`.

    Args:
        key: evals.NAME.
        settings: of that key.
        texts: see `HeldOutTexts`.

    Raises:
        DataError: the texts cannot be read, or lack labels.
    """

    def __init__(self, key: str, settings: ScoresConfig, texts: HeldOutTexts) -> None:
        vocabulary = texts.facts.vocabulary
        folder = read_folder(f"{key}.shards", settings.shards, texts.data)
        shards = open_shards(folder, texts.data, vocabulary)
        if shards.labels is None:
            raise DataError(f"{key}.shards={settings.shards}: without labels. Name shards that `finetune` has written.")
        self._key, self._settings = key, settings
        self._lengths = shards.lengths
        self._labels: DocumentLabels = shards.labels
        streams = TokenStreams([Stream(key, 0, shards)])
        self._maker = MicrobatchMaker(streams, partial(build_objective, vocabulary=vocabulary), vocabulary)

    def __str__(self) -> str:
        return plural(len(self._lengths), "labelled text")

    def __call__(self, model: OnEncoder, now: Position, compute: Compute) -> dict[str, float]:
        """Return the loss and the configured metrics, with the accuracy of always predicting the most frequent class.

        `num_texts` is the number of predicted texts.
        """
        logits, objective = self.logits(model, now, compute), now.objective
        labels = [self._labels[number] for number in range(len(self._lengths))]
        sizes = [self._num_predictions(number, cast(LabelledConfig, objective)) for number in range(len(labels))]
        kind = kind_of(cast(LabelledConfig, objective).task_kind)
        figures = kind.figures(Outputs(logits, labels, sizes, objective, self._settings))
        figures.setdefault(f"{COUNT}texts", float(len(labels)))
        return figures

    @torch.no_grad()
    def logits(self, model: OnEncoder, now: Position, compute: Compute, *, alone: bool = False) -> Tensor:
        """Return the logits of texts [N, L], or of all their words or tokens [W, L], in fp32 on the CPU.

        `alone`: this process computes all of it, without the other ranks.
        """
        objective = cast(LabelledConfig, now.objective)
        plan = plan_rows(self._lengths, now.phase, objective)
        rank, ranks = (0, 1) if alone else (this_rank(), num_ranks())
        mine = share_of_rank(plan.rows, rank, ranks, plan.microbatch_rows)
        words_N = np.array(
            [self._num_predictions(number, objective) for number in range(len(self._lengths))], dtype=np.int64
        )
        ends_N = np.cumsum(words_N)
        logits_WL = torch.zeros(int(ends_N[-1]), objective.prediction_width, device=compute.device)
        was_training = model.training
        model.eval()
        at, shown = 0, time.monotonic()
        with entered(model, "predict") as classifier:
            assert isinstance(classifier, Classifier)
            for batch in self._maker.microbatches(mine, plan):
                rows, at = mine[at : at + batch.num_rows], at + batch.num_rows
                if speaks_for_all() and time.monotonic() - shown >= _LINE_SECONDS:
                    shown = time.monotonic()
                    print(f"{self._key}: {at:,} of {len(mine):,} rows of texts", flush=True)
                numbers = [chunk.document for row in rows for chunk in row]
                positions = [np.arange(ends_N[number] - words_N[number], ends_N[number]) for number in numbers]
                place_W = torch.from_numpy(np.concatenate([*positions, np.empty(0, dtype=np.int64)]))
                with torch.autocast(compute.device.type, torch.bfloat16, enabled=compute.bf16):
                    found_WL = classifier.predict(batch.to(compute.device))
                logits_WL[place_W.to(compute.device)] = found_WL[: len(place_W)]
        model.train(was_training)
        if ranks > 1:
            sum_over_ranks(logits_WL)  # each rank has zeros for the others' texts, so the sums are exact
        return logits_WL.cpu()

    def _num_predictions(self, number: int, objective: LabelledConfig) -> int:
        """Return the number of predictions for a document."""
        if objective.label_unit == "tokens":
            return int(self._lengths[number]) + SPECIAL_TOKENS
        return 1 if objective.label_unit == "texts" else int((self._labels[number] != IGNORED_LABEL).sum())
