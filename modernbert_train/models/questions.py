"""Encoders for extractive answers and for multiple choice, in the form of transformers' classes.

Shape legend: T packed tokens, W windows (padded), M tokens of windows (padded), P choices (padded), G questions
(padded), C choices of a question, D model width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from modernbert_train.batch import IGNORED_LABEL, Batch, Sums
from modernbert_train.config.schema import AnswerConfig, ChooseConfig
from modernbert_train.models.classifier import Classifier, Pooling

# keys of the targets that objectives/questions.py makes
PLACES, LENGTHS, SPANS, CHOICES, RIGHT = "places_M", "lengths_W", "spans_W2", "choices_GC", "right_G"
NO_LOGIT = torch.finfo(torch.float32).min  # for a missing choice: finite, and exactly 0 after softmax


class Answerer(Classifier):
    """Two logits for each token of a window: the answer starts here, the answer ends here."""

    objective: AnswerConfig

    def pooled(self, hidden_TD: Tensor, batch: Batch) -> Tensor:
        """See `Classifier`."""
        return hidden_TD.index_select(0, batch.targets[PLACES])

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        """See `OnEncoder`: `answer`, each window's mean of both cross-entropies; hits are windows with both right."""
        logits_M2, lengths_W = self.predict(batch), batch.targets[LENGTHS]
        spans_W2 = batch.targets[SPANS].view(-1, 2)
        known_W = spans_W2[:, 0] != IGNORED_LABEL
        firsts_W = lengths_W.cumsum(0) - lengths_W
        # tokens outside all windows form one extra window
        lengths_V = torch.cat([lengths_W, (len(logits_M2) - lengths_W.sum()).unsqueeze(0)])
        window_M = torch.repeat_interleave(
            torch.arange(len(lengths_V), device=lengths_V.device), lengths_V, output_size=len(logits_M2)
        )
        most_V2 = torch.segment_reduce(logits_M2.detach(), "max", lengths=lengths_V, axis=0, unsafe=True)
        shares_M2 = (logits_M2 - most_V2.index_select(0, window_M)).exp()
        sums_V2 = torch.segment_reduce(shares_M2, "sum", lengths=lengths_V, axis=0, unsafe=True)
        places_W2 = (firsts_W.unsqueeze(1) + spans_W2).masked_fill(~known_W.unsqueeze(1), 0)
        told_W2 = logits_M2.gather(0, places_W2)
        # make masked values finite before the mask, or their gradient is not
        sums_W2 = sums_V2[:-1].masked_fill(~known_W.unsqueeze(1), 1.0)
        most_W2 = most_V2[:-1].masked_fill(~known_W.unsqueeze(1), 0.0)
        loss_W = (sums_W2.log() + most_W2 - told_W2).mean(dim=1).masked_fill(~known_W, 0.0)
        if not figures:
            return Sums({"answer": loss_W.sum()}, {})
        hits = ((told_W2 >= most_W2).all(dim=1) & known_W).sum()
        return Sums({"answer": loss_W.sum()}, {"answer/hits": hits})


class Chooser(Pooling):
    """A logit for each choice."""

    objective: ChooseConfig

    def predict(self, batch: Batch) -> Tensor:
        """Return logits_GC in fp32, of each question's choices; `NO_LOGIT` for missing choices."""
        logits_P = super().predict(batch).squeeze(1)
        choices_GC = batch.targets[CHOICES].view(-1, self.objective.prediction_width)
        logits_GC = logits_P.index_select(0, choices_GC.clamp(min=0).view(-1)).view_as(choices_GC)
        return logits_GC.masked_fill(choices_GC < 0, NO_LOGIT)

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        """See `OnEncoder`: `choose`, and its hits."""
        logits_GC, right_G = self.predict(batch), batch.targets[RIGHT]
        loss = F.cross_entropy(logits_GC, right_G, ignore_index=IGNORED_LABEL, reduction="sum")
        hits = (logits_GC.argmax(dim=-1) == right_G).sum()
        return Sums({"choose": loss}, {"choose/hits": hits} if figures else {})
