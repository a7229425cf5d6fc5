"""An encoder without a head, or with a config.json that names no class: embedding models, and many older ones.

Its tensors lack the prefix that a model with a head gives them. A stored head is read; a missing one is left out, and
code that needs it raises the error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from modernbert_train.config.objective import Order
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats.config_json import Described
from modernbert_train.weights.formats.table_format import Around

_ENDS = ("ForMaskedLM", "ForCausalLM", "ForPreTraining", "LMHeadModel")
_OTHERS = {"Gemma3ForCausalLM": "Gemma3TextModel", "NeoBERTLMHead": "NeoBERT"}


def without_head(named: str) -> str:
    """Return transformers' class of an encoder, by its class with a head."""
    plain = next((named.removesuffix(end) + "Model" for end in _ENDS if named.endswith(end)), named)
    return _OTHERS.get(named, plain)


def is_headless(raw: Mapping[str, Any]) -> bool:
    """Return True if a config.json names no class, or the class of an encoder without a head."""
    named = raw.get("architectures")
    if not isinstance(named, list) or not named:
        return named in (None, [])
    alone = [str(each) for each in named]
    return all((each.endswith("Model") and not each.endswith("LMHeadModel")) or each == "NeoBERT" for each in alone)


class Headless(Around):
    """See `HubFormat`."""

    headless = True

    def read(self, raw: dict[str, Any], where: str) -> Described:
        """See `HubFormat`."""
        named = next(iter(self.whole.classes.values()))
        return self.whole.read({**raw, "architectures": [named]}, where)

    def describe(
        self, config: Any, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
    ) -> dict[str, Any]:
        """See `HubFormat`."""
        about = self.whole.describe(config, order, modules, max_tokens, vocabulary)
        return about | {"architectures": [without_head(str(about["architectures"][0]))]}
