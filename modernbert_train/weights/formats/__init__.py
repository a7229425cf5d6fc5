"""Models as other libraries name and describe them: config.json read and written, names of tensors there and here.

One file an architecture, a row in `FORMATS` to read it and one in `EXPORTS` to write it. Nothing here needs torch, so
that a folder can be refused on a login node; tensors.py applies the names.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from modernbert_train.config.objective import Order
from modernbert_train.config.read import shown
from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    DebertaConfig,
    DistilBertConfig,
    GemmaConfig,
    LlamaConfig,
    ModelConfig,
    ModernBertConfig,
    NeoBertConfig,
    XLNetConfig,
)
from modernbert_train.core.own_files import require_own_files
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import (
    albert,
    bert,
    deberta,
    distilbert,
    gemma,
    llama,
    modernbert,
    modernbert_decoder,
    modernbert_tokens,
    neobert,
    xlnet,
)
from modernbert_train.weights.formats.alone import WITH_HEAD, Alone
from modernbert_train.weights.formats.classifiers import KINDS, Classifiers
from modernbert_train.weights.formats.config_json import CONFIG_JSON, Described, read_object
from modernbert_train.weights.formats.electra import TOKEN_HEAD, Electra
from modernbert_train.weights.formats.headless import Headless, is_headless


class HubFormat(Protocol):
    """How transformers stores one kind of model: a file of this folder.

    One whose tensors do not all have our shapes has `shape(name, config) -> Shape | None` too, see shape.py.
    """

    def read(self, raw: dict[str, Any], where: str) -> Described:
        """What the content of a config.json says; `where` is how messages name it.

        Raises:
            DataError: it describes an architecture that is not this one, or none; names the key that differs.
        """

    def describe(
        self, config: Any, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
    ) -> dict[str, Any]:
        """The content of config.json.

        Args:
            config: the architecture, as in the phase that the weights come from.
            order: what they were trained to see.
            modules: first parts of our names of the weights that are stored, such as model, head and pair_head.
            max_tokens: longest sequence that they were trained on.
            vocabulary: of the tokenizer that they were trained with.

        Raises:
            ConfigError: transformers would compute something else.
        """

    def theirs(self, name: str, config: Any) -> tuple[str, ...]:
        """Their name of a parameter of ours, or those of the parts that lie there apart, along the rows.

        Empty: it has no place there. The tied decoder's matrix is not asked for; it is stored as the embedding alone.
        What is one tensor here and several equal ones there is asked for as each of them, see `ModelConfig.stored`.
        """

    def today(self, name: str) -> str | None:
        """The present name of a tensor that older files, or copies of a tied one, name otherwise; None: no weight."""


# model_type of a config.json -> its format
FORMATS: dict[str, HubFormat] = {
    "modernbert": modernbert,
    "modernbert-decoder": modernbert_decoder,
    "bert": bert,
    "roberta": bert,
    **dict.fromkeys(bert.ROBERTAS, bert),
    "distilbert": distilbert,
    "electra": Electra(),
    "albert": albert,
    "xlnet": xlnet,
    "deberta": deberta,
    "deberta-v2": deberta,
    **dict.fromkeys(llama.KINDS, llama),
    gemma.MODEL_TYPE: gemma,
    neobert.MODEL_TYPE: neobert,
}

# class in a config.json -> its format, where it is not that of its model_type
CLASSES: dict[str, HubFormat] = {name: Classifiers(name) for name in KINDS}

# architecture and order of what is exported -> its format
EXPORTS: dict[tuple[type[ModelConfig], Order], HubFormat] = {
    (ModernBertConfig, "all"): modernbert,
    (ModernBertConfig, "causal"): modernbert_decoder,
    (BertConfig, "all"): bert,
    (BertConfig, "causal"): bert,
    (AlbertConfig, "all"): albert,  # transformers has no decoder of it
    (DebertaConfig, "all"): deberta,  # nor of it
    (DistilBertConfig, "all"): distilbert,
    (LlamaConfig, "all"): llama,
    (LlamaConfig, "causal"): llama,
    (GemmaConfig, "all"): gemma,
    (GemmaConfig, "causal"): gemma,
    (NeoBertConfig, "all"): neobert,  # its code has no decoder
    (XLNetConfig, "all"): xlnet,
    (XLNetConfig, "causal"): xlnet,
}

# architecture of what was trained to tell replaced tokens -> its format, and that of its generator
DISCRIMINATORS: dict[type[ModelConfig], HubFormat] = {
    ModernBertConfig: modernbert_tokens,
    BertConfig: Electra(),
    DebertaConfig: deberta,
}


def format_of(raw: dict[str, Any], where: str) -> HubFormat:
    """The format that a config.json is of; `where` is how messages name it.

    Raises:
        DataError: of none that can be read.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise DataError(
            f"{where}: model_type={shown(kind)}; only model_type={', '.join(FORMATS)} can be read. Name such a model."
        )
    if isinstance(raw.get(WITH_HEAD), str):
        return Alone(FORMATS[kind])
    if is_headless(raw):
        return Headless(FORMATS[kind], kind)
    named = raw.get("architectures")
    for each in named if isinstance(named, list) else ():
        if isinstance(each, str) and each in CLASSES:
            return modernbert_tokens if modernbert_tokens.is_one(raw) else CLASSES[each]
    return FORMATS[kind]


def export_format(model: ModelConfig, order: Order, modules: Collection[str] = ()) -> HubFormat:
    """The format that weights are exported in; what was trained in an order that was given sees all elsewhere.

    Args:
        model: their architecture.
        order: what they were trained to see.
        modules: first parts of their names.

    Raises:
        ConfigError: there is none for such a model.
    """
    plain = "all" if order == "given" else order
    found = DISCRIMINATORS.get(type(model)) if TOKEN_HEAD in modules else EXPORTS.get((type(model), plain))
    if found is None:
        how = "to tell replaced tokens" if TOKEN_HEAD in modules else f"in order {order}"
        raise ConfigError(
            f"model.name={model.name}: transformers has no such model for weights that were trained {how}. "
            "Continue the run itself; it cannot be exported."
        )
    return found


def read(raw: dict[str, Any], where: str) -> Described:
    """What a config.json of any known format says; see `HubFormat.read`."""
    return format_of(raw, where).read(raw, where)


def read_folder(folder: Path) -> Described:
    """What the config.json of a model folder says, ours or anybody's.

    Raises:
        DataError: the file is missing or damaged, or describes another architecture; names what differs.
    """
    require_own_files(folder)
    path = folder / CONFIG_JSON
    if not path.exists() and (folder / "adapter_config.json").exists():
        raise DataError(
            f"{folder}: an adapter of peft, not a model. Join it with its model, and name what that writes: "
            "AutoPeftModel.from_pretrained(old).merge_and_unload().save_pretrained(new)."
        )
    return read(read_object(path), str(path))
