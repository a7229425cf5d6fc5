"""What is trained: how text becomes inputs and targets, and what a model makes of them. One file an objective.

A row in `OBJECTIVES` and a dataclass in config/ add one. Workers read this without any model: `module` alone imports
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from modernbert_train.batch import Inputs, PackedText
from modernbert_train.config.schema import CausalLmConfig, MaskedLmConfig, ObjectiveConfig, SentenceOrderConfig
from modernbert_train.objectives.causal import CausalLM
from modernbert_train.objectives.mlm import MaskedLM
from modernbert_train.objectives.sop import SentenceOrder
from modernbert_train.vocabulary import Vocabulary

if TYPE_CHECKING:
    from modernbert_train.models.encoder import Encoder
    from modernbert_train.models.masked_lm import ForMaskedLM


class Objective(Protocol):
    """One way to train an encoder: Objective(config, vocabulary).

    What planning has to know of it, its special tokens and its loss terms, stands in its section of the configuration.
    """

    def __init__(self, config: Any, vocabulary: Vocabulary) -> None: ...

    def make(self, text: PackedText, settings: Any) -> Inputs:
        """Inputs and targets of a microbatch: a pure function of the text and its keys, of static shapes.

        Args:
            text: laid out.
            settings: the section as it is now; what is `phased` may differ from what the objective was built with.
        """

    @staticmethod
    def module(config: Any, encoder: Encoder) -> ForMaskedLM:
        """The encoder with what stands on or beside it; its forward takes a Batch, and `figures`, and gives Sums."""


OBJECTIVES: dict[type[ObjectiveConfig], type[Objective]] = {
    MaskedLmConfig: MaskedLM,
    CausalLmConfig: CausalLM,
    SentenceOrderConfig: SentenceOrder,
}


def build_objective(config: ObjectiveConfig, vocabulary: Vocabulary) -> Objective:
    """The objective of a section."""
    return OBJECTIVES[type(config)](config, vocabulary)


def build_module(config: ObjectiveConfig, encoder: Encoder) -> ForMaskedLM:
    """What an objective trains, around an encoder; the vocabulary's ids are in its targets."""
    return OBJECTIVES[type(config)].module(config, encoder)
