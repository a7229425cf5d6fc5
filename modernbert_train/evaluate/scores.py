"""Compare the classes or scores that a model predicts with those of labelled texts: a fine-tuning's validation.

Every text counts once, also those whose class training had not: they cannot be told right. Ranks share the texts; the
figures are made of all of them, in fp64, and are the same on any number of ranks.

Shape legend: N texts, or tokens of one, W words of all texts, T tokens of all, L logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.clock import Position
from modernbert_train.config.evals import BASELINE, COUNT, SPANS
from modernbert_train.config.schema import (
    AnswerConfig,
    LabelledConfig,
    ScoresConfig,
    TagConfig,
)
from modernbert_train.core.text import plural
from modernbert_train.data.facts import read_folder
from modernbert_train.data.labels import DocumentLabels
from modernbert_train.data.microbatches import MicrobatchMaker, share_of_rank
from modernbert_train.data.mixture import Stream, TokenStreams
from modernbert_train.data.open_shards import open_shards
from modernbert_train.data.packing import SPECIAL_TOKENS
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import num_ranks, sum_over_ranks, this_rank
from modernbert_train.errors import DataError
from modernbert_train.evaluate.answers import answer_figures, told_answers
from modernbert_train.evaluate.embeddings import entered, plan_rows
from modernbert_train.evaluate.heldout import HeldOutTexts
from modernbert_train.evaluate.metrics import METRICS, accuracy, entity_figures, macro_f1
from modernbert_train.evaluate.texts_beside import read_texts
from modernbert_train.models.classifier import Classifier
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.objectives import build_objective

Labels = Sequence[NDArray[Any]]  # of each document


class Scores:
    """See `Evaluator`.

    Args:
        key: evals.NAME.
        settings: what stands there.
        texts: see `HeldOutTexts`.

    Raises:
        DataError: the texts cannot be read, or have no labels.
    """

    def __init__(self, key: str, settings: ScoresConfig, texts: HeldOutTexts) -> None:
        vocabulary = texts.facts.vocabulary
        folder = read_folder(f"{key}.shards", settings.shards, texts.data)
        shards = open_shards(folder, texts.data, vocabulary)
        if shards.labels is None:
            raise DataError(f"{key}.shards={settings.shards}: without labels. Name shards that `finetune` has written.")
        self._settings = settings
        self._lengths = shards.lengths
        self._labels: DocumentLabels = shards.labels
        streams = TokenStreams([Stream(key, 0, shards)])
        self._maker = MicrobatchMaker(streams, partial(build_objective, vocabulary=vocabulary), vocabulary)

    def __str__(self) -> str:
        return plural(len(self._lengths), "labelled text")

    def __call__(self, model: OnEncoder, now: Position, compute: Compute) -> dict[str, float]:
        """The loss and the metrics of the settings, with the accuracy of always telling the most frequent class.

        `num_texts` were told.
        """
        logits, objective = self.told(model, now, compute), now.objective
        labels = [self._labels[number] for number in range(len(self._lengths))]
        sizes = [self._told_of(number, cast(LabelledConfig, objective)) for number in range(len(labels))]
        (head,) = objective.heads
        figures = FIGURES[head](logits, labels, sizes, objective, self._settings)
        figures.setdefault(f"{COUNT}texts", float(len(labels)))
        return figures

    @torch.no_grad()
    def told(self, model: OnEncoder, now: Position, compute: Compute, *, alone: bool = False) -> Tensor:
        """Logits of every text, or of every word or token of every text, [N, L] or [W, L], in fp32 on the CPU.

        `alone`: this process computes all of it, whatever other ranks there are.
        """
        objective = cast(LabelledConfig, now.objective)
        plan = plan_rows(self._lengths, now.phase, objective)
        rank, ranks = (0, 1) if alone else (this_rank(), num_ranks())
        mine = share_of_rank(plan.rows, rank, ranks, plan.microbatch_rows)
        words_N = np.array([self._told_of(number, objective) for number in range(len(self._lengths))], dtype=np.int64)
        ends_N = np.cumsum(words_N)
        logits_WL = torch.zeros(int(ends_N[-1]), objective.num_told, device=compute.device)
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

    def _told_of(self, number: int, objective: LabelledConfig) -> int:
        """How many things of a document are told."""
        if objective.tells == "tokens":
            return int(self._lengths[number]) + SPECIAL_TOKENS
        return 1 if objective.tells == "texts" else int((self._labels[number] != IGNORED_LABEL).sum())


def of_texts(
    logits_NL: Tensor, labels: Labels, sizes: Sequence[int], objective: Any, settings: ScoresConfig
) -> dict[str, float]:
    """Figures of classes or scores of texts; of choices as of single labels."""
    labels_NL, kind = torch.from_numpy(np.concatenate(labels)), objective.task_kind
    figures = {name: METRICS[kind][name] for name in settings.metrics}
    if kind == "regression":
        told_N, labels_N = logits_NL.squeeze(1), labels_NL.squeeze(1)
        loss = (told_N.double() - labels_N.double()).square().mean()
        return {"loss": float(loss), **_finite(logits_NL, {n: f(told_N, labels_N) for n, f in figures.items()})}
    if kind == "multi-label":
        loss = F.binary_cross_entropy_with_logits(logits_NL.double(), labels_NL.double())
        told_NL = (logits_NL > 0).long()
        found = {name: figure(told_NL, labels_NL.long()) for name, figure in figures.items()}
        return {"loss": float(loss), **_finite(logits_NL, found)}
    told_N, labels_N = logits_NL.argmax(dim=1), labels_NL.squeeze(1).long()
    found = {name: figure(told_N, labels_N) for name, figure in figures.items()}
    if "accuracy" in found:
        found[f"{BASELINE}accuracy"] = _most_frequent(labels_N)
    return {"loss": _loss(logits_NL, labels_N), **_finite(logits_NL, found)}


def of_words(
    logits_WL: Tensor, labels: Labels, sizes: Sequence[int], objective: TagConfig, settings: ScoresConfig
) -> dict[str, float]:
    """Figures of the tags of words."""
    names = [*objective.labels, *settings.unseen]
    told_W = logits_WL.argmax(dim=1)
    told, true, at = [], [], 0
    for each in labels:
        own = each[each != IGNORED_LABEL].tolist()
        true.append([names[label] for label in own])
        told.append([names[label] for label in told_W[at : at + len(own)].tolist()])
        at += len(own)
    labels_W = torch.tensor([names.index(name) for each in true for name in each])
    figures = {"accuracy": accuracy(told_W, labels_W), "macro_f1": macro_f1(told_W, labels_W)}
    if any(name.startswith(SPANS) for name in settings.metrics):  # else tags may be no spans
        figures |= entity_figures(told, true)
    found = {name: figures[name] for name in settings.metrics}
    if "accuracy" in found:
        found[f"{BASELINE}accuracy"] = _most_frequent(labels_W)
    return {"loss": _loss(logits_WL, labels_W), **_finite(logits_WL, found)}


def of_answers(
    logits_T2: Tensor, labels: Labels, sizes: Sequence[int], objective: AnswerConfig, settings: ScoresConfig
) -> dict[str, float]:
    """Figures of answers told of whole questions; the loss is the mean over windows whose answer is known."""
    texts = read_texts(Path(settings.shards))
    said = [told.text for told in told_answers(texts, logits_T2.numpy(), objective)]
    figures = answer_figures(said, [text["label"] for text in texts], unanswerable=objective.unanswerable)
    losses = []
    for logits_N2, label in zip(logits_T2.double().split(list(sizes)), labels, strict=True):
        if label[0, 0] != IGNORED_LABEL:
            losses.append(float(F.cross_entropy(logits_N2.T, torch.from_numpy(label[0].astype(np.int64)))))
    found = _finite(logits_T2, {name: figures[name] for name in settings.metrics})
    return {"loss": sum(losses) / len(losses) if losses else float("nan"), **found, f"{COUNT}texts": float(len(texts))}


# what stands on the encoder -> figures of its logits, of which each document has `sizes`; another kind is a row here
FIGURES: dict[str, Callable[[Tensor, Labels, Sequence[int], Any, ScoresConfig], dict[str, float]]] = {
    "class": of_texts,
    "choice": of_texts,
    "tag": of_words,
    "answer": of_answers,
}


def _loss(logits_NL: Tensor, labels_N: Tensor) -> float:
    """Cross-entropy, over the classes that there are logits of."""
    known_N = labels_N < logits_NL.shape[1]
    return float(F.cross_entropy(logits_NL[known_N].double(), labels_N[known_N]))


def _most_frequent(labels_N: Tensor) -> float:
    return float(torch.bincount(labels_N).max()) / len(labels_N)


def _finite(logits: Tensor, figures: dict[str, Any]) -> dict[str, float]:
    """Figures of logits that are not finite are not numbers."""
    return figures if bool(logits.isfinite().all()) else dict.fromkeys(figures, float("nan"))
