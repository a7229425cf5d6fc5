"""A ModernBERT trained to detect replaced tokens, as transformers' ModernBertForTokenClassification.

The head is the same. One logit here becomes two, of which the first is always 0: their softmax equals the sigmoid of
the one, exactly.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from modernbert_train.config.objective import Order
from modernbert_train.config.read import shown
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import modernbert
from modernbert_train.weights.formats.config_json import Described
from modernbert_train.weights.formats.electra import TOKEN_HEAD
from modernbert_train.weights.formats.shape import Shape

ARCHITECTURE = "ModernBertForTokenClassification"
LABELS = ("original", "replaced")

_HEADS = {
    f"{TOKEN_HEAD}.transform.dense.weight": "head.dense.weight",
    f"{TOKEN_HEAD}.transform.norm.weight": "head.norm.weight",
    f"{TOKEN_HEAD}.classifier.weight": "classifier.weight",
    f"{TOKEN_HEAD}.classifier.bias": "classifier.bias",
}


def theirs(name: str, config: ModernBertConfig) -> tuple[str, ...]:
    """See `HubFormat`."""
    if name in _HEADS:
        return (_HEADS[name],)
    return (name,) if name.startswith("model.") else ()


def shape(name: str, config: ModernBertConfig) -> Shape | None:
    """See `HubFormat`: a row of zeros is stored above the row of the one logit."""
    if name.startswith(f"{TOKEN_HEAD}.classifier."):
        return Shape((2, config.hidden_size) if name.endswith("weight") else (2,), zero_rows=1)
    return None


def today(name: str) -> str | None:
    """See `HubFormat`."""
    return name


def describe(
    config: ModernBertConfig, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    """See `HubFormat`."""
    return modernbert.describe(config, order, modules, max_tokens, vocabulary) | {
        "architectures": [ARCHITECTURE],
        "id2label": {str(number): label for number, label in enumerate(LABELS)},
        "label2id": {label: number for number, label in enumerate(LABELS)},
    }


def is_one(raw: dict[str, Any]) -> bool:
    """Return True if a config.json describes such a model; one with other labels classifies words."""
    labels = raw.get("id2label")
    return raw.get("architectures") == [ARCHITECTURE] and isinstance(labels, dict) and [*labels.values()] == [*LABELS]


def read(raw: dict[str, Any], where: str) -> Described:
    """See `HubFormat`."""
    model = modernbert.architecture(raw, where, named=ARCHITECTURE)
    labels = raw.get("id2label")
    if not isinstance(labels, dict) or [*labels.values()] != [*LABELS]:
        raise DataError(
            f"{where}: id2label={shown(labels)}; of {ARCHITECTURE} only {', '.join(LABELS)} can be read. Name the "
            "model before it was trained for other labels."
        )
    return Described(model, modernbert.max_tokens_of(raw), "all", detects=True)
