"""Training objectives: turn packed text into inputs and targets. One file per objective.

To add one, add a row to `OBJECTIVES` and a dataclass to config/objective.py. Objectives do not know models: the
configuration names the heads on the encoder, and models/build.py creates them.
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

    The planner reads special tokens and loss terms from the objective's section of the configuration.
    """

    def __init__(self, config: Any, vocabulary: Vocabulary) -> None: ...

    def make(self, text: PackedText, settings: Any) -> Inputs:
        """Return inputs and targets of a microbatch: a pure function of the text and its keys, with static shapes.

        Args:
            text: packed text.
            settings: the section in the current phase; its `phased` fields may differ from the constructor's.
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
    """Return the objective of a section."""
    return OBJECTIVES[type(config)](config, vocabulary)
