"""Probe: a simple classifier on the frozen encoder's embeddings of labelled texts, whose kind reads and scores them.

The texts are tokenised once, by rank 0, which sends them to all: no other machine needs the file. Ranks share the
encoding; rank 0 fits the classifiers, which takes a second or so for 2,000 texts, and all get its figures.

Shape legend: N texts, D model width, C classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from modernbert_train.clock import Position
from modernbert_train.config.evals import BASELINE
from modernbert_train.config.schema import ProbeConfig, ScoresConfig
from modernbert_train.config.task_kinds import KINDS
from modernbert_train.core.tokenizer_threads import tokenizer_threads
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import on_rank_zero_slowly
from modernbert_train.evaluate.embedding_classifiers import CLASSIFIERS, Classify, majority
from modernbert_train.evaluate.embeddings import embed, max_tokens
from modernbert_train.evaluate.finetune.counts import Counts
from modernbert_train.evaluate.finetune.examples import TRAIN
from modernbert_train.evaluate.finetune.kinds import kind_of
from modernbert_train.evaluate.finetune.numbers import Outputs
from modernbert_train.evaluate.finetune.tokens import Reader
from modernbert_train.evaluate.heldout import HeldOutTexts
from modernbert_train.evaluate.probe_texts import ONLY_LEARNED, ProbeTexts, read_texts
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.vocabulary import read_vocabulary

_WHOLE = 1 << 30  # tokens of a text: the phase's rows cut it


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
        self._settings, self._kind = settings, kind_of(settings.kind)
        self._vocabulary = read_vocabulary(texts.data.tokenizer)
        self._about, self._ids, self._labels, parts_N, num_classes = on_rank_zero_slowly(
            lambda: _tokenised(read_texts(key, settings), Path(texts.data.tokenizer))
        )
        self._parts_N, labels_NL = torch.from_numpy(parts_N), torch.from_numpy(np.concatenate(self._labels))
        is_one_class = self._kind.link == "softmax"
        self._targets_NC = (F.one_hot(labels_NL[:, 0].long(), num_classes) if is_one_class else labels_NL).double()

    def __str__(self) -> str:
        return str(self._about)

    def __call__(self, model: OnEncoder, now: Position, compute: Compute) -> dict[str, float]:
        """Return the kind's metrics of the predicted texts, with the baseline of the most frequent class.

        `num_texts` is the number of predicted texts, `num_cut` the number of all texts cut to the phase's rows.
        Embeddings that are not finite give NaN.
        """
        embeddings_ND = embed(model, self._ids, self._vocabulary, now, compute)
        figures = on_rank_zero_slowly(lambda: self._figures(embeddings_ND.double()))
        return figures | {"num_cut": float(sum(len(ids) > max_tokens(now.phase) for ids in self._ids))}

    def _figures(self, embeddings_ND: torch.Tensor) -> dict[str, float]:
        predicted = np.flatnonzero(self._parts_N.numpy() != ONLY_LEARNED)
        labels = [self._labels[number] for number in predicted]
        metrics = list(KINDS[self._settings.kind].probed)
        scored = ScoresConfig(shards="", metrics=metrics)
        classifiers = {"": CLASSIFIERS[self._settings.classifier]}
        if self._kind.link != "identity":  # a constant score correlates with nothing
            classifiers[BASELINE] = majority
        figures_by_name: dict[str, float] = {}
        for prefix, classify in classifiers.items():
            outputs_NC = self._predict(classify, embeddings_ND if not prefix else torch.zeros_like(embeddings_ND))
            figures = self._kind.figures(Outputs(outputs_NC[predicted], labels, [1] * len(labels), None, scored))
            figures_by_name |= {f"{prefix}{name}": figures[name] for name in metrics}
        return figures_by_name | {"num_texts": float(len(labels))}

    def _predict(self, classify: Classify, embeddings_ND: torch.Tensor) -> torch.Tensor:
        """Return each text's outputs of a classifier trained on the other parts; NaN without finite embeddings."""
        outputs_NC = torch.full_like(self._targets_NC, torch.nan)
        if bool(embeddings_ND.isfinite().all()):
            for part in self._parts_N[self._parts_N != ONLY_LEARNED].unique().tolist():
                other_N = self._parts_N != part
                outputs_NC[~other_N] = classify(
                    embeddings_ND[other_N], self._targets_NC[other_N], embeddings_ND[~other_N], self._kind.link
                )
        return outputs_NC


def _tokenised(texts: ProbeTexts, tokenizer: Path) -> tuple[Any, ...]:
    """Return the data of the texts that all ranks need. The parts of a text form one sequence, joined by [SEP]."""
    reader, labels = Reader(tokenizer, texts.task, _WHOLE), texts.labels.values[TRAIN]
    encode = kind_of(texts.task.kind).encode
    with tokenizer_threads(False):  # workers are forked later
        documents_of = [each.documents for each in encode(texts.split, labels, texts.labels, reader, Counts())]
    ids = [np.array(documents[0][0] if documents else [], dtype=np.int32) for documents in documents_of]
    return str(texts), ids, labels, texts.parts_N, len(texts.labels.names)
