"""Compare the classes or scores that a model predicts with those of labelled texts: a fine-tuning's validation.

Every text counts once, also those whose class training had not: they cannot be told right. Ranks share the texts; the
figures are made of all of them, in fp64, and are the same on any number of ranks.

Shape legend: N texts, W words of all texts, L logits.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.evals import BASELINE, COUNT, SPANS
from modernbert_train.config.schema import (
    ClassifyConfig,
    LabelledConfig,
    PhaseConfig,
    RunConfig,
    ScoresConfig,
    TagConfig,
)
from modernbert_train.core.text import plural
from modernbert_train.data.facts import read_folder
from modernbert_train.data.labels import DocumentLabels
from modernbert_train.data.microbatches import MicrobatchMaker, share_of_rank
from modernbert_train.data.mixture import Stream, TokenStreams
from modernbert_train.data.open_shards import open_shards
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import num_ranks, sum_over_ranks, this_rank
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.evaluate.embeddings import entered, plan_rows
from modernbert_train.evaluate.metrics import METRICS, accuracy, entity_figures, macro_f1
from modernbert_train.models.classifier import Classifier
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.objectives import build_objective
from modernbert_train.vocabulary import read_vocabulary


class Scores:
    """See `Evaluator`.

    Args:
        key: evals.NAME.
        settings: what stands there.
        config: the run.

    Raises:
        ConfigError: the run's objective tells no classes.
        DataError: the texts cannot be read, or have no labels.
    """

    def __init__(self, key: str, settings: ScoresConfig, config: RunConfig) -> None:
        if not config.objective.is_labelled:
            raise ConfigError(f"{key}: objective.name={config.objective.name} tells no classes. Use a probe.")
        vocabulary = read_vocabulary(config.data.tokenizer)
        folder = read_folder(f"{key}.shards", settings.shards, config.data)
        shards = open_shards(folder, config.data, vocabulary)
        if shards.labels is None:
            raise DataError(f"{key}.shards={settings.shards}: without labels. Name shards that `finetune` has written.")
        self._settings = settings
        self._lengths = shards.lengths
        self._labels: DocumentLabels = shards.labels
        streams = TokenStreams([Stream(key, 0, shards)])
        self._maker = MicrobatchMaker(streams, partial(build_objective, vocabulary=vocabulary), vocabulary)

    def __str__(self) -> str:
        return plural(len(self._lengths), "labelled text")

    def __call__(self, model: OnEncoder, now: RunConfig, phase: PhaseConfig, compute: Compute) -> dict[str, float]:
        """The loss and the metrics of the settings, with the accuracy of always telling the most frequent class.

        `num_texts` were told.
        """
        logits, objective = self.told(model, now, phase, compute), now.objective
        if "tag" in objective.heads:
            figures = self._of_words(logits, cast(TagConfig, objective))
        else:
            figures = self._of_texts(logits, cast(ClassifyConfig, objective))
        return figures | {f"{COUNT}texts": float(len(self._lengths))}

    @torch.no_grad()
    def told(
        self, model: OnEncoder, now: RunConfig, phase: PhaseConfig, compute: Compute, *, alone: bool = False
    ) -> Tensor:
        """Logits of every text, or of every word of every text, [N, L] or [W, L], in fp32 on the CPU.

        `alone`: this process computes all of it, whatever other ranks there are.
        """
        objective = cast(LabelledConfig, now.objective)
        plan = plan_rows(self._lengths, phase, objective)
        rank, ranks = (0, 1) if alone else (this_rank(), num_ranks())
        mine = share_of_rank(plan.rows, rank, ranks, plan.microbatch_rows)
        words_N = np.array([self._words(number) for number in range(len(self._lengths))], dtype=np.int64)
        ends_N = np.cumsum(words_N)
        logits_WL = torch.zeros(int(ends_N[-1]), objective.num_logits, device=compute.device)
        was_training = model.training
        model.eval()
        at = 0
        with entered(model, "predict") as told:
            assert isinstance(told, Classifier)
            for batch in self._maker.microbatches(mine, plan):
                rows, at = mine[at : at + batch.num_rows], at + batch.num_rows
                numbers = [chunk.document for row in rows for chunk in row]
                places = [np.arange(ends_N[number] - words_N[number], ends_N[number]) for number in numbers]
                place_W = torch.from_numpy(np.concatenate([*places, np.empty(0, dtype=np.int64)]))
                with torch.autocast(compute.device.type, torch.bfloat16, enabled=compute.bf16):
                    found_WL = told.predict(batch.to(compute.device))
                logits_WL[place_W.to(compute.device)] = found_WL[: len(place_W)]
        model.train(was_training)
        if ranks > 1:
            sum_over_ranks(logits_WL)  # of the other ranks' texts each has zeros: nothing is rounded
        return logits_WL.cpu()

    def _words(self, number: int) -> int:
        """How many things of a text are told: its words, or the text itself."""
        labels = self._labels[number]
        return 1 if labels.ndim == 2 else int((labels != IGNORED_LABEL).sum())

    def _of_texts(self, logits_NL: Tensor, objective: ClassifyConfig) -> dict[str, float]:
        labels_NL = torch.from_numpy(np.concatenate([self._labels[n] for n in range(len(self._lengths))]))
        figures = {name: METRICS[objective.kind][name] for name in self._settings.metrics}
        if objective.kind == "regression":
            told_N, labels_N = logits_NL.squeeze(1), labels_NL.squeeze(1)
            loss = (told_N.double() - labels_N.double()).square().mean()
            return {"loss": float(loss), **_finite(logits_NL, {n: f(told_N, labels_N) for n, f in figures.items()})}
        if objective.kind == "multi-label":
            loss = F.binary_cross_entropy_with_logits(logits_NL.double(), labels_NL.double())
            told_NL = (logits_NL > 0).long()
            found = {name: figure(told_NL, labels_NL.long()) for name, figure in figures.items()}
            return {"loss": float(loss), **_finite(logits_NL, found)}
        told_N, labels_N = logits_NL.argmax(dim=1), labels_NL.squeeze(1).long()
        found = {name: figure(told_N, labels_N) for name, figure in figures.items()}
        if "accuracy" in found:
            found[f"{BASELINE}accuracy"] = _most_frequent(labels_N)
        return {"loss": _loss(logits_NL, labels_N), **_finite(logits_NL, found)}

    def _of_words(self, logits_WL: Tensor, objective: TagConfig) -> dict[str, float]:
        names = [*objective.labels, *self._settings.unseen]
        told_W = logits_WL.argmax(dim=1)
        told, labels, at = [], [], 0
        for number in range(len(self._lengths)):
            own = self._labels[number]
            own = own[own != IGNORED_LABEL].tolist()
            labels.append([names[label] for label in own])
            told.append([names[label] for label in told_W[at : at + len(own)].tolist()])
            at += len(own)
        labels_W = torch.tensor([names.index(name) for each in labels for name in each])
        wanted = self._settings.metrics
        figures = {"accuracy": accuracy(told_W, labels_W), "macro_f1": macro_f1(told_W, labels_W)}
        if any(name.startswith(SPANS) for name in wanted):  # else tags may be no spans
            figures |= entity_figures(told, labels)
        found = {name: figures[name] for name in wanted}
        if "accuracy" in found:
            found[f"{BASELINE}accuracy"] = _most_frequent(labels_W)
        return {"loss": _loss(logits_WL, labels_W), **_finite(logits_WL, found)}


def _loss(logits_NL: Tensor, labels_N: Tensor) -> float:
    """Cross-entropy, over the classes that there are logits of."""
    known_N = labels_N < logits_NL.shape[1]
    return float(F.cross_entropy(logits_NL[known_N].double(), labels_N[known_N]))


def _most_frequent(labels_N: Tensor) -> float:
    return float(torch.bincount(labels_N).max()) / len(labels_N)


def _finite(logits: Tensor, figures: dict[str, Any]) -> dict[str, float]:
    """Figures of logits that are not finite are not numbers."""
    return figures if bool(logits.isfinite().all()) else dict.fromkeys(figures, float("nan"))
