"""The first token of a text, predicted at [CLS] while it is hidden: a minimal objective."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from modernbert_train.batch import IGNORED_LABEL, Inputs, PackedText
from modernbert_train.config.knob import knob
from modernbert_train.config.schema import ObjectiveConfig
from modernbert_train.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class FirstTokenConfig(ObjectiveConfig):
    name: str = "first"
    weight: float = knob(2.0, above=0)

    @property
    def terms(self) -> Mapping[str, float]:
        return {"first": self.weight}

    @property
    def predicted_share(self) -> float:
        return 0.05


class FirstToken:
    def __init__(self, config: FirstTokenConfig, vocabulary: Vocabulary) -> None:
        self._mask_id = vocabulary.mask_id

    def make(self, text: PackedText, settings: FirstTokenConfig) -> Inputs:
        ids_T, firsts = text.ids_T.copy(), text.starts_Q
        ids_T[firsts] = self._mask_id
        spare = len(ids_T) // 3 - len(firsts)  # a sequence has at least three tokens
        targets = {
            "positions_M": np.pad(firsts - 1, (0, spare)),
            "labels_M": np.pad(text.ids_T[firsts], (0, spare), constant_values=IGNORED_LABEL),
        }
        return Inputs(ids_T, targets, {"first": len(firsts)})
