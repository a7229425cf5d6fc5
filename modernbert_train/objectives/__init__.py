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
from modernbert_train.objectives.causal import CausalLM
from modernbert_train.objectives.classify import Classify, Tag
from modernbert_train.objectives.contrastive import Contrastive
from modernbert_train.objectives.distill import Distill
from modernbert_train.objectives.mlm import MaskedLM
from modernbert_train.objectives.permutation import PermutationLM
from modernbert_train.objectives.questions import Answer, Choose
from modernbert_train.objectives.rtd import ReplacedTokens
from modernbert_train.objectives.sop import SentenceOrder
from modernbert_train.objectives.tlm import Translation
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


OBJECTIVES: Rows[type[Objective]] = Rows(
    "objective",
    {
        MaskedLmConfig: MaskedLM,
        TranslationConfig: Translation,
        CausalLmConfig: CausalLM,
        SentenceOrderConfig: SentenceOrder,
        ReplacedTokensConfig: ReplacedTokens,
        DistillConfig: Distill,
        PermutationLmConfig: PermutationLM,
        ClassifyConfig: Classify,
        TagConfig: Tag,
        AnswerConfig: Answer,
        ChooseConfig: Choose,
        ContrastiveConfig: Contrastive,
    },
)


def build_objective(config: ObjectiveConfig, vocabulary: Vocabulary) -> Objective:
    """The objective of a section."""
    return OBJECTIVES[type(config)](config, vocabulary)
