"""A model of contrastive training: an encoder without a head, under another class; sparse vectors keep the head.

Keys in config.json record the class with a head, by which the file is read again, and the pooling of the hidden states.
Further files make the folder one of sentence-transformers too; for late interaction they hold the projection from
hidden states to token vectors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

from modernbert_train.config.contrastive import TOKEN_PROJECTION
from modernbert_train.config.objective import Order
from modernbert_train.config.schema import ContrastiveConfig
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats.config_json import Content, Described, read_object
from modernbert_train.weights.formats.headless import without_head
from modernbert_train.weights.formats.table_format import Around

WITH_HEAD, POOLING, WIDTH = "with_head", "pooling_of_vectors", "token_vectors"  # this program's keys in config.json
DENSE = "1_Dense"  # folder of the projection
SETTINGS, LENGTHS = "config_sentence_transformers.json", "sentence_bert_config.json"  # sentence-transformers' files
_SPLADE = "sparse_encoder.modules.splade_pooling.SpladePooling"
_OF_TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
_PLACES = {
    "Transformer": "base.modules.transformer",
    "Dense": "base.modules.dense",
    "MultiVectorMask": "multi_vector_encoder.modules.multi_vector_mask",
    "Normalize": "base.modules.normalize",
}


class SentenceEncoder(Around):
    """See `HubFormat`.

    Args:
        whole: the format of the same encoder with a head.
        objective: pooling and width of the vectors; only to write.
        prompts: prefix of each text in training, by `query` and `document`; only to write.
    """

    def __init__(
        self,
        whole: Any,
        objective: ContrastiveConfig | None = None,
        prompts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(whole)
        self._prompts = {} if prompts is None else {"prompts": dict(prompts), "default_prompt_name": None}
        self._objective = objective or ContrastiveConfig()

    def read(self, raw: dict[str, Any], where: str) -> Described:
        """See `HubFormat`."""
        content, choices = Content(raw, where), get_args(get_type_hints(ContrastiveConfig)["pooling"])
        pooling, width = cast(Any, content.get(POOLING)), content.number(WIDTH, 128)
        if pooling not in choices:
            raise content.unknown(", ".join(map(str, choices)), POOLING)
        described = self.whole.read({**raw, "architectures": [raw[WITH_HEAD]]}, where)
        return described._replace(objective=ContrastiveConfig(pooling=pooling, token_vectors=width))

    def describe(
        self, config: Any, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
    ) -> dict[str, Any]:
        """See `HubFormat`."""
        about = self.whole.describe(config, order, modules, max_tokens, vocabulary)
        named = str(about["architectures"][0])
        how: dict[str, Any] = {WITH_HEAD: named, POOLING: self._objective.pooling}
        if self._objective.is_late:
            how[WIDTH] = self._objective.token_vectors
        return {**about, "architectures": [named if self._objective.is_sparse else without_head(named)], **how}

    def theirs(self, name: str, config: Any) -> tuple[str, ...]:
        """See `HubFormat`."""
        if name == f"{TOKEN_PROJECTION}.weight":
            return (f"{DENSE}/linear.weight",)
        return super().theirs(name, config) if name.startswith(("model.", "head.", "decoder.")) else ()

    def today(self, name: str) -> str | None:
        """See `HubFormat`; sentence-transformers saves a pooler that nothing has trained."""
        current = name if name.startswith(f"{DENSE}/") else super().today(name)
        pooler = f"{getattr(self.whole, 'prefix', '')}pooler."
        return None if current is not None and current.startswith(pooler) else current

    def files(self, width: int, max_tokens: int) -> dict[str, Any]:
        """Return sentence-transformers' files by name: pooling and vectors of length 1, or late interaction."""
        length: dict[str, Any] = {"max_seq_length": max_tokens, "do_lower_case": False}
        if self._objective.query_max_tokens is not None:
            length["query_length"] = self._objective.query_max_tokens
        if self._objective.is_sparse:
            files = _modules([("Transformer", _PLACES["Transformer"] + ".Transformer"), ("SpladePooling", _SPLADE)])
            files |= {LENGTHS: length | {"transformer_task": "fill-mask"}}
            files |= {SETTINGS: {"model_type": "SparseEncoder"} | self._prompts}
            return files | {"1_SpladePooling/config.json": {"pooling_strategy": "max", "activation_function": "relu"}}
        if not self._objective.is_late:
            modules = [(kind, f"models.{kind}") for kind in ("Transformer", "Pooling", "Normalize")]
            how = {"word_embedding_dimension": width, "pooling_mode": self._objective.pooling}
            files = _modules(modules) | {LENGTHS: length, "1_Pooling/config.json": how}
            return files | ({SETTINGS: self._prompts} if self._prompts else {})
        matrix: dict[str, Any] = {"in_features": width, "out_features": self._objective.token_vectors, "bias": False}
        matrix["activation_function"] = "torch.nn.modules.linear.Identity"
        return _modules([(kind, f"{place}.{kind}") for kind, place in _PLACES.items()]) | {
            LENGTHS: length,
            SETTINGS: {"model_type": "MultiVectorEncoder"} | self._prompts,
            f"{DENSE}/config.json": matrix | _OF_TOKENS,
            "2_MultiVectorMask/config.json": {},
            "3_Normalize/config.json": _OF_TOKENS,
        }


def read_own(folder: Path) -> tuple[dict[str, str], int | None]:
    """Return the prompts and the length of queries in a folder of sentence-transformers; empty and None elsewhere.

    Raises:
        DataError: a file is damaged.
    """
    settings, lengths = (
        Content(read_object(folder / name) if (folder / name).is_file() else {}, str(folder / name))
        for name in (SETTINGS, LENGTHS)
    )
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(each, str) for each in prompts.values()):
        raise settings.damaged("prompts", "not a text for each kind of text")
    query_length = lengths.get("query_length")
    return prompts, None if query_length is None else lengths.number("query_length", 1)


def _modules(kinds: Sequence[tuple[str, str]]) -> dict[str, Any]:
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if not index else f"{index}_{kind}",
            "type": f"sentence_transformers.{place}",
        }
        for index, (kind, place) in enumerate(kinds)
    ]
    return {"modules.json": modules}
