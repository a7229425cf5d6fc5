"""Training objectives: turn packed text into inputs and targets. One file per objective.

A row in `OBJECTIVES` and a dataclass in config/objective.py add one. Nothing here knows a model: which heads stand on
the encoder is said in the configuration, and models/build.py makes them.
Imports: batch, config, core, vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

from modernbert_train.batch import Inputs, PackedText
from modernbert_train.config.plugins import Rows
from modernbert_train.config.schema import (
    AnswerConfig,
    CausalLmConfig,
    ChooseConfig,
    ClassifyConfig,
    ContrastiveConfig,
    DistillConfig,
    MaskedLmConfig,
    ObjectiveConfig,
    PermutationLmConfig,
    ReplacedTokensConfig,
    SentenceOrderConfig,
    TagConfig,
    TranslationConfig,
)
from modernbert_train.vocabulary import Vocabulary


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


OBJECTIVES: Rows[type[ObjectiveConfig], type[Objective]] = Rows(
    "objective",
    {
        MaskedLmConfig: "modernbert_train.objectives.mlm:MaskedLM",
        TranslationConfig: "modernbert_train.objectives.tlm:Translation",
        CausalLmConfig: "modernbert_train.objectives.causal:CausalLM",
        SentenceOrderConfig: "modernbert_train.objectives.sop:SentenceOrder",
        ReplacedTokensConfig: "modernbert_train.objectives.rtd:ReplacedTokens",
        DistillConfig: "modernbert_train.objectives.distill:Distill",
        PermutationLmConfig: "modernbert_train.objectives.permutation:PermutationLM",
        ClassifyConfig: "modernbert_train.objectives.classify:Classify",
        TagConfig: "modernbert_train.objectives.classify:Tag",
        AnswerConfig: "modernbert_train.objectives.questions:Answer",
        ChooseConfig: "modernbert_train.objectives.questions:Choose",
        ContrastiveConfig: "modernbert_train.objectives.contrastive:Contrastive",
    },
)


def build_objective(config: ObjectiveConfig, vocabulary: Vocabulary) -> Objective:
    """The objective of a section."""
    return OBJECTIVES[type(config)](config, vocabulary)
