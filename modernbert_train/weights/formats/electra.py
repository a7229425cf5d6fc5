"""A BERT trained to detect replaced tokens, and its generator, as transformers' ELECTRA.

The encoder is BERT's under another prefix. A discriminator is an ElectraForPreTraining, a generator an
ElectraForMaskedLM, whose embeddings may be wider than its layers. ELECTRA counts positions from 0, so a RoBERTa's rows
before the first token's, which are never read, are left out (`positions_from_zero` in tensors.py).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from modernbert_train.config.bert import BertConfig
from modernbert_train.config.objective import Order
from modernbert_train.config.read import shown
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import bert
from modernbert_train.weights.formats.config_json import Described, places, require_fixed

MODEL_TYPE, DISCRIMINATOR, GENERATOR = "electra", "ElectraForPreTraining", "ElectraForMaskedLM"
TOKEN_HEAD = "token_head"  # name of the module `TokenClass`

# transformers' defaults where they differ from BERT's
_DEFAULTS = {"embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
_HEADS = {
    f"{TOKEN_HEAD}.transform.dense": "discriminator_predictions.dense",
    f"{TOKEN_HEAD}.classifier": "discriminator_predictions.dense_prediction",
    "head.dense": "generator_predictions.dense",
    "head.norm": "generator_predictions.LayerNorm",
    "decoder": "generator_lm_head",
    "model.embeddings.projection": f"{MODEL_TYPE}.embeddings_project",
}
_COPIES = {
    "generator_lm_head.weight": f"{MODEL_TYPE}.embeddings.word_embeddings.weight",
    "generator_predictions.bias": "generator_lm_head.bias",
}


@dataclass(frozen=True)
class Electra:
    """See `HubFormat`.

    Attributes:
        embedding_size: of a generator whose embeddings are wider than its layers; None: equally wide.
    """

    embedding_size: int | None = None

    def theirs(self, name: str, config: BertConfig) -> tuple[str, ...]:
        """See `HubFormat`."""
        return places(name, "", {}, _HEADS) or bert.encoder_name(name, MODEL_TYPE)

    def today(self, name: str) -> str | None:
        """See `HubFormat`."""
        known = bert.today(name)
        return None if known is None else _COPIES.get(known, known)

    def describe(
        self, config: BertConfig, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
    ) -> dict[str, Any]:
        """See `HubFormat`.

        Raises:
            ConfigError: a generator whose activation is not gelu.
        """
        named = DISCRIMINATOR if TOKEN_HEAD in modules else GENERATOR
        if named == GENERATOR and config.activation != "gelu":
            raise ConfigError(
                f"model.activation={config.activation}: transformers' ELECTRA always has the exact GELU in a "
                "generator's head, so it would compute something different. Export only the discriminator."
            )
        described = bert.describe(config, "all", (), max_tokens, vocabulary)
        del described["is_decoder"]
        return described | {
            "architectures": [named],
            "model_type": MODEL_TYPE,
            "embedding_size": self.embedding_size or config.hidden_size,
        }

    def read(self, raw: dict[str, Any], where: str) -> Described:
        """See `HubFormat`."""
        named = raw.get("architectures")
        if not isinstance(named, list) or not {DISCRIMINATOR, GENERATOR} & {str(each) for each in named}:
            raise DataError(
                f"{where}: model_type={MODEL_TYPE}, architectures={shown(named)}; only {DISCRIMINATOR} and {GENERATOR} "
                "can be read. Name such a model."
            )
        raw = _DEFAULTS | {key: value for key, value in raw.items() if value is not None}
        require_fixed(raw, {"is_decoder": False}, where)
        if raw["embedding_size"] != raw["hidden_size"]:
            raise DataError(
                f"{where}: embedding_size={shown(raw['embedding_size'])}, hidden_size={shown(raw['hidden_size'])}; "
                "this encoder only knows embeddings of its hidden width. Name another model."
            )
        model = bert.architecture(raw, where, "bert")
        return Described(model, model.max_positions, "all", detects=DISCRIMINATOR in named)
