"""A ModernBERT trained to detect replaced tokens, as transformers' ModernBertForTokenClassification.

The head is the same. One logit here becomes two, of which the first is always 0: their softmax equals the sigmoid of
the one, exactly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modernbert_train.config.objective import Order
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import modernbert
from modernbert_train.weights.formats.electra import TOKEN_HEAD
from modernbert_train.weights.formats.shape import Shape
from modernbert_train.weights.formats.table_format import places

ARCHITECTURE = "ModernBertForTokenClassification"
LABELS = ("original", "replaced")
_HEADS = {
    f"{TOKEN_HEAD}.transform.dense": "head.dense",
    f"{TOKEN_HEAD}.transform.norm": "head.norm",
    f"{TOKEN_HEAD}.classifier": "classifier",
}


def _names(name: str, config: ModernBertConfig) -> tuple[str, ...]:
    return (name,) if name.startswith("model.") else places(name, "", {}, _HEADS)


def _shapes(name: str, config: ModernBertConfig) -> Shape | None:
    """See `HubFormat.shape`: a row of zeros is stored above the row of the one logit."""
    if name.startswith(f"{TOKEN_HEAD}.classifier."):
        return Shape((2, config.hidden_size) if name.endswith("weight") else (2,), zero_rows=1)
    return None


def _more(config: ModernBertConfig, order: Order, vocabulary: Vocabulary) -> dict[str, Any]:
    by_number = {str(number): label for number, label in enumerate(LABELS)}
    labels = {"id2label": by_number, "label2id": {label: int(number) for number, label in by_number.items()}}
    return modernbert.more(config, order, vocabulary) | labels


def is_one(raw: dict[str, Any]) -> bool:
    """Return True if a config.json describes such a model; one with other labels classifies words."""
    labels = raw.get("id2label")
    return raw.get("architectures") == [ARCHITECTURE] and isinstance(labels, dict) and [*labels.values()] == [*LABELS]


FORMAT = replace(
    modernbert.FORMAT,
    classes={"all": ARCHITECTURE},
    for_heads={TOKEN_HEAD: ARCHITECTURE},
    renamed={},
    copies={},
    names=_names,
    shapes=_shapes,
    more=_more,
)
