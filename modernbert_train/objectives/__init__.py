"""What is trained: how text becomes inputs and targets, and what a model makes of them. One file an objective.

A row in `OBJECTIVES` and a section in config/ add one; docs/extending.md shows it. Workers read this without models:
`module` alone imports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from modernbert_train.batch import Inputs, PackedText
from modernbert_train.config.schema import ObjectiveConfig
from modernbert_train.objectives.mlm import MaskedLM
from modernbert_train.vocabulary import Vocabulary

if TYPE_CHECKING:
    from torch import nn

    from modernbert_train.models.encoder import Encoder


class Objective(Protocol):
    """One way to train an encoder.

    Attributes:
        special_tokens: that a chunk of text gets: [CLS] before it and the others after it; all that packing asks.
        terms: loss term -> weight.
    """

    @property
    def terms(self) -> Mapping[str, float]: ...

    @property
    def special_tokens(self) -> int: ...

    def make(self, text: PackedText, mask_rate: float) -> Inputs:
        """Inputs and targets of a microbatch: a pure function of the text and its keys, of static shapes."""

    def module(self, encoder: Encoder) -> nn.Module:
        """The encoder with what stands on or beside it; its forward takes a Batch, and `figures`, and gives Sums."""


OBJECTIVES = {ObjectiveConfig: MaskedLM}


def build_objective(config: ObjectiveConfig, vocabulary: Vocabulary) -> Objective:
    """The objective of a section."""
    return OBJECTIVES[type(config)](config, vocabulary)
