"""Encoders that classify texts or words, in the form of transformers' classes.

Layers between the hidden states and the classifier matrix: for ModernBERT the dense matrix and norm of its masked-LM
head, with their pretrained weights; for all other encoders, a dense matrix and tanh for texts (ReLU for DistilBERT,
GELU for Llama) and none for words. On a frozen encoder there are no such layers, so the classifier is a linear probe.

Shape legend: T packed tokens, S segments of the buffer, P sequences (padded), M words (padded), D model width,
L logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modernbert_train.batch import IGNORED_LABEL, Batch, Sums
from modernbert_train.config.schema import ChooseConfig, ClassifyConfig, LabelledConfig, ModelConfig, TagConfig
from modernbert_train.models.encoder import Encoder, OnEncoder

# keys of the targets that objectives/classify.py makes
CLASSIFIER = "classifier"  # module of the last matrix
POOLER = "pooler"  # module of the layer before it, for texts
FIRSTS, CLASSES, WORDS, TAGS = "firsts_P", "classes_PL", "words_M", "tags_M"


class Pooler(nn.Module):
    """tanh(dense(h)), or relu or gelu instead of tanh.

    Args:
        config: the encoder's.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        assert config.pooler_activation is not None
        self.activation = {"tanh": torch.tanh, "relu": torch.relu, "gelu": F.gelu}[config.pooler_activation]

    def forward(self, hidden_PD: Tensor) -> Tensor:
        return self.activation(self.dense(hidden_PD))


class Classifier(OnEncoder):
    """Base class of classifiers: `predict` returns logits, and `forward` their loss.

    Under FSDP2 call register_fsdp_forward_method for `predict` first, as for `encode`.

    Args:
        encoder: of any architecture.
        objective: the number of logits, and the dropout before them.
    """

    def __init__(self, encoder: Encoder, objective: LabelledConfig) -> None:
        super().__init__(encoder)
        self.objective = objective
        if objective.freeze or objective.lora is not None:
            encoder.requires_grad_(False)
        if objective.lora is not None:
            from modernbert_train.models.lora import add_adapters  # imported here: few runs have adapters

            add_adapters(encoder.layers, objective.lora)
        if objective.freeze:
            pass  # linear probe: the classifier reads the encoder's states directly
        elif encoder.config.pooler_activation is None:
            self.head = encoder.prediction_head()
        elif objective.pools:
            self.pooler = Pooler(encoder.config)
        self.dropout = nn.Dropout(objective.dropout)
        self.classifier = nn.Linear(encoder.config.hidden_size, objective.num_logits)

    @classmethod
    def build(
        cls,
        encoder: Encoder,
        objective: Any,
        another: Callable[[ModelConfig], Encoder],
    ) -> Self:
        """See `OnEncoder`."""
        return cls(encoder, objective)

    @classmethod
    def alone(cls, encoder: Encoder) -> OnEncoder:
        """See `OnEncoder`; without a classifier, whose number of logits only a run or a config.json knows."""
        return OnEncoder(encoder)

    def train(self, mode: bool = True) -> Self:
        """See nn.Module; a frozen encoder is never in training."""
        super().train(mode)
        if self.objective.freeze:
            self.model.eval()
        return self

    def predict(self, batch: Batch) -> Tensor:
        """Return logits in fp32: logits_PL of the sequences, or logits_ML of the words."""
        read_PD = self.pooled(self.encode(batch.packed), batch)
        between = getattr(self, "head", None) or getattr(self, "pooler", None)
        if between is not None:
            read_PD = between(read_PD)
        logits_PL: Tensor = self.classifier(self.dropout(read_PD))
        return logits_PL.float()

    def pooled(self, hidden_TD: Tensor, batch: Batch) -> Tensor:
        """Return the input of the classifier, [P, D] or [M, D]."""
        raise NotImplementedError


class Pooling(Classifier):
    """Logits of each sequence."""

    objective: ClassifyConfig | ChooseConfig

    def pooled(self, hidden_TD: Tensor, batch: Batch) -> Tensor:
        """See `Classifier`; the mean is summed in fp32 without atomics, so it is reproducible."""
        firsts_P, boundaries_S = batch.targets[FIRSTS], batch.packed.cu_seqlens_S
        if self.objective.pooling == "cls":
            return hidden_TD.index_select(0, firsts_P)
        lengths_S = boundaries_S.diff().long()
        sums_SD = torch.segment_reduce(hidden_TD.float(), "sum", lengths=lengths_S, axis=0, unsafe=True)
        number_P = torch.searchsorted(boundaries_S.long(), firsts_P, right=True) - 1
        mean_PD = sums_SD.index_select(0, number_P) / lengths_S.index_select(0, number_P).unsqueeze(1)
        return mean_PD.to(hidden_TD.dtype)


def _one_class(logits_PL: Tensor, classes_PL: Tensor) -> tuple[Tensor, Tensor]:
    classes_P = classes_PL.squeeze(1)
    loss = F.cross_entropy(logits_PL, classes_P, ignore_index=IGNORED_LABEL, reduction="sum")
    return loss, (logits_PL.argmax(dim=-1) == classes_P).sum()


def _several_classes(logits_PL: Tensor, classes_PL: Tensor) -> tuple[Tensor, Tensor]:
    real_PL = classes_PL != IGNORED_LABEL
    losses_PL = F.binary_cross_entropy_with_logits(logits_PL, classes_PL.float(), reduction="none")
    return losses_PL.masked_fill(~real_PL, 0.0).sum(), (((logits_PL > 0) == classes_PL) & real_PL).sum()


def _score(logits_PL: Tensor, bits_PL: Tensor) -> tuple[Tensor, None]:
    unknown_PL = bits_PL == IGNORED_LABEL
    scores_PL = bits_PL.to(torch.int32).view(torch.float32).masked_fill(unknown_PL, 0.0)
    return (logits_PL - scores_PL).square().masked_fill(unknown_PL, 0.0).sum(), None


# kind of labels -> function of logits and targets; returns the summed loss and the hits (None for a score)
LOSSES: Mapping[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]] = {
    "single-label": _one_class,
    "multi-label": _several_classes,
    "regression": _score,
}


class TextClassifier(Pooling):
    """One class, several classes or a score for each sequence."""

    objective: ClassifyConfig

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        """See `OnEncoder`: `classify`, and for single labels its hits."""
        logits_PL = self.predict(batch)
        classes_PL = batch.targets[CLASSES].view(len(logits_PL), -1)
        loss, hits = LOSSES[self.objective.kind](logits_PL, classes_PL)
        return Sums({"classify": loss}, {"classify/hits": hits} if figures and hits is not None else {})


class WordClassifier(Classifier):
    """One class for each word."""

    objective: TagConfig

    def pooled(self, hidden_TD: Tensor, batch: Batch) -> Tensor:
        """See `Classifier`."""
        return hidden_TD.index_select(0, batch.targets[WORDS])

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        """See `OnEncoder`: `tag`, and its hits."""
        logits_ML, tags_M = self.predict(batch), batch.targets[TAGS]
        loss = F.cross_entropy(logits_ML, tags_M, ignore_index=IGNORED_LABEL, reduction="sum")
        hits = (logits_ML.argmax(dim=-1) == tags_M).sum()
        return Sums({"tag": loss}, {"tag/hits": hits} if figures else {})
