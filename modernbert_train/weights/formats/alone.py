"""An encoder without a head, as contrastive training leaves it: its format's own tensors and keys, another class.

config.json says which class of transformers it would be with a head, by which the rest of it is read again, and how a
text's vector is made of its states. The files beside it make the folder one of sentence-transformers too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from modernbert_train.config.objective import Order
from modernbert_train.config.read import shown
from modernbert_train.config.schema import ContrastiveConfig
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats.config_json import Described
from modernbert_train.weights.formats.shape import Shape

if TYPE_CHECKING:
    from modernbert_train.weights.formats import HubFormat

WITH_HEAD, POOLING = "with_head", "pooling_of_vectors"  # keys of ours in config.json
_ENDS = ("ForMaskedLM", "ForCausalLM", "ForPreTraining", "LMHeadModel")
_OTHERS = {"Gemma3ForCausalLM": "Gemma3TextModel", "NeoBERTLMHead": "NeoBERT"}


class Alone:
    """See `HubFormat`.

    Args:
        whole: the format of the same encoder with a head.
        pooling: see `ContrastiveConfig`; only to write.
    """

    def __init__(self, whole: HubFormat, pooling: str = "mean") -> None:
        self._whole = whole
        self._pooling = pooling

    def read(self, raw: dict[str, Any], where: str) -> Described:
        """See `HubFormat`."""
        pooling = raw.get(POOLING)
        if pooling not in ("cls", "mean"):
            raise DataError(f"{where}: {POOLING}={shown(pooling)}, neither cls nor mean. Restore it from a copy.")
        said = self._whole.read({**raw, "architectures": [raw[WITH_HEAD]]}, where)
        return said._replace(objective=ContrastiveConfig(pooling=pooling))

    def describe(
        self, config: Any, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
    ) -> dict[str, Any]:
        """See `HubFormat`."""
        about = self._whole.describe(config, order, modules, max_tokens, vocabulary)
        named = str(about["architectures"][0])
        plain = next((named.removesuffix(end) + "Model" for end in _ENDS if named.endswith(end)), named)
        return {**about, "architectures": [_OTHERS.get(named, plain)], WITH_HEAD: named, POOLING: self._pooling}

    def theirs(self, name: str, config: Any) -> tuple[str, ...]:
        """See `HubFormat`."""
        return self._whole.theirs(name, config) if name.startswith("model.") else ()

    def today(self, name: str) -> str | None:
        """See `HubFormat`."""
        return self._whole.today(name)

    def shape(self, name: str, config: Any) -> Shape | None:
        """See `HubFormat`."""
        ask = getattr(self._whole, "shape", None)
        return None if ask is None else ask(name, config)

    def files(self, width: int, max_tokens: int) -> dict[str, Any]:
        """What sentence-transformers reads beside the model, by name: vectors of length 1, by this pooling."""
        kinds = ("Transformer", "Pooling", "Normalize")
        modules = [
            {
                "idx": index,
                "name": str(index),
                "path": "" if not index else f"{index}_{kind}",
                "type": f"sentence_transformers.models.{kind}",
            }
            for index, kind in enumerate(kinds)
        ]
        return {
            "modules.json": modules,
            "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
            "1_Pooling/config.json": {"word_embedding_dimension": width, "pooling_mode": self._pooling},
        }
