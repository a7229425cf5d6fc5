"""Probe: a simple classifier on the frozen encoder's embeddings of labelled texts.

The texts are tokenised once, by rank 0, which sends them to all: no other machine needs the file. Ranks share the
encoding; rank 0 fits the classifiers, which takes a second or so for 2,000 texts, and all get its figures.

Shape legend: N texts, D model width.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from modernbert_train.clock import Position
from modernbert_train.config.evals import BASELINE
from modernbert_train.config.schema import ProbeConfig
from modernbert_train.data.labelled import ONLY_LEARNED, Labelled, read_labelled
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import on_rank_zero_slowly
from modernbert_train.evaluate.classifiers import CLASSIFIERS, Classify, majority
from modernbert_train.evaluate.embeddings import embed, max_tokens
from modernbert_train.evaluate.heldout import HeldOutTexts
from modernbert_train.evaluate.metrics import accuracy, macro_f1
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.vocabulary import Vocabulary, open_tokenizer, read_vocabulary

Ids = NDArray[np.int32]


class Probe:
    """A probe of the encoder; see `Evaluator`.

    Args:
        key: evals.NAME.
        settings: the section evals.NAME.
        texts: see `HeldOutTexts`.

    Raises:
        DataError: the texts cannot be read or learned from.
    """

    def __init__(self, key: str, settings: ProbeConfig, texts: HeldOutTexts) -> None:
        self._settings = settings
        self._vocabulary = read_vocabulary(texts.data.tokenizer)
        self._ids: list[Ids]
        self._labels_N: torch.Tensor
        self._about, self._ids, labels_N, parts_N, self._num_classes = on_rank_zero_slowly(
            lambda: _tokenised(read_labelled(key, settings), texts.data.tokenizer, self._vocabulary)
        )
        self._labels_N, self._parts_N = torch.from_numpy(labels_N), torch.from_numpy(parts_N)

    def __str__(self) -> str:
        return str(self._about)

    def __call__(self, model: OnEncoder, now: Position, compute: Compute) -> dict[str, float]:
        """Return `accuracy` and `macro_f1` of the predicted texts, with the baseline of the most frequent class.

        `num_texts` is the number of predicted texts, `num_cut` the number of all texts cut to the phase's rows.
        Embeddings that are not finite give NaN.
        """
        embeddings_ND = embed(model, self._ids, self._vocabulary, now, compute)
        figures = on_rank_zero_slowly(lambda: self._figures(embeddings_ND.double()))
        return figures | {"num_cut": float(sum(len(ids) > max_tokens(now.phase) for ids in self._ids))}

    def _figures(self, embeddings_ND: torch.Tensor) -> dict[str, float]:
        is_predicted_N = self._parts_N != ONLY_LEARNED
        labels_N = self._labels_N[is_predicted_N]
        found: dict[str, float] = {}
        classifiers = {"": CLASSIFIERS[self._settings.classifier], BASELINE: majority}
        for prefix, classify in classifiers.items():
            if prefix or bool(embeddings_ND.isfinite().all()):
                predicted_N = self._predict(classify, embeddings_ND)[is_predicted_N]
                found[f"{prefix}accuracy"] = accuracy(predicted_N, labels_N)
                found[f"{prefix}macro_f1"] = macro_f1(predicted_N, labels_N)
            else:
                found |= {"accuracy": math.nan, "macro_f1": math.nan}
        return found | {"num_texts": float(len(labels_N))}

    def _predict(self, classify: Classify, embeddings_ND: torch.Tensor) -> torch.Tensor:
        """Return each text's class as predicted by a classifier trained on the other parts."""
        predicted_N = torch.full_like(self._labels_N, -1)
        for part in self._parts_N[self._parts_N != ONLY_LEARNED].unique().tolist():
            other_N = self._parts_N != part
            predicted_N[~other_N] = classify(
                embeddings_ND[other_N], self._labels_N[other_N], self._num_classes, embeddings_ND[~other_N]
            )
        return predicted_N


def _tokenised(labelled: Labelled, tokenizer_folder: str, vocabulary: Vocabulary) -> tuple[Any, ...]:
    """Return the data of the texts that all ranks need. The parts of a text form one sequence, joined by [SEP]."""
    tokenizer = open_tokenizer(tokenizer_folder)

    def ids_of(parts: tuple[str, ...]) -> Ids:
        # one by one: batch encoding starts threads, and workers are forked later
        ids = [tokenizer.encode(part, add_special_tokens=False).ids for part in parts]
        joined = [token for number, part in enumerate(ids) for token in (*vocabulary.between * (number > 0), *part)]
        return np.array(joined, dtype=np.int32)

    ids = [ids_of(parts) for parts in labelled.texts]
    return str(labelled), ids, labelled.labels_N, labelled.parts_N, len(labelled.classes)
