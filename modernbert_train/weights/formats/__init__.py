"""Models as other libraries name and describe them: read and write config.json, map names of tensors.

Each architecture is one file, with a row in `FORMATS` to read it and one in `EXPORTS` to write it. Nothing here imports
torch, so a folder can be refused on a login node; tensors.py applies the names.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from modernbert_train.config.objective import Order
from modernbert_train.config.read_yaml import shown
from modernbert_train.config.schema import BertConfig, ContrastiveConfig, ModelConfig, ModernBertConfig
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.read_json import is_count
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.vocabulary import TOKENIZER_CONFIG, Vocabulary
from modernbert_train.weights.formats import (
    albert,
    bert,
    deberta,
    distilbert,
    electra,
    esm,
    gemma,
    llama,
    modernbert,
    modernbert_decoder,
    modernbert_tokens,
    neobert,
    xlnet,
)
from modernbert_train.weights.formats.classifiers import KINDS, Classifiers
from modernbert_train.weights.formats.config_json import ADAPTER_JSON, CONFIG_JSON, Described, read_object
from modernbert_train.weights.formats.electra import TOKEN_HEAD
from modernbert_train.weights.formats.headless import Headless, is_headless
from modernbert_train.weights.formats.sentence_encoder import WITH_HEAD, SentenceEncoder, read_own
from modernbert_train.weights.formats.table_format import EXPORTED_BY, Format


class HubFormat(Protocol):
    """Transformers' format of one kind of model: a `Format` in a file of this folder, or a plugin's module.

    A format with tensors of other shapes also has `shape(name, config) -> Shape | None`, see shape.py.
    """

    def read(self, raw: dict[str, Any], where: str) -> Described:
        """Read the content of a config.json; `where` names it in messages.

        Raises:
            DataError: it describes another architecture or none; names the key that differs.
        """

    def describe(
        self, config: Any, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
    ) -> dict[str, Any]:
        """Return the content of config.json.

        Args:
            config: the architecture, in the phase of the weights.
            order: which tokens each token saw in training.
            modules: modules of the stored weights, such as model, head and pair_head.
            max_tokens: longest sequence of their training.
            vocabulary: of their tokenizer.

        Raises:
            ConfigError: the class in transformers would compute something different.
        """

    def theirs(self, name: str, config: Any) -> tuple[str, ...]:
        """Return the format's name of a parameter, or the names of its parts, stored separately along the rows.

        Empty if the format cannot store it. The tied decoder's matrix is never a `name`; only the embedding is stored.
        A tensor that the format stores several times is looked up under each of its names, see `ModelConfig.stored`.
        """

    def today(self, name: str) -> str | None:
        """Return the current name of a tensor from older files or of a tied copy; None if it is not a weight."""


# model_type of a config.json -> its format
FORMATS: dict[str, HubFormat] = {
    each.model_type: each
    for each in (
        modernbert.FORMAT,
        modernbert_decoder.FORMAT,
        bert.FORMAT,
        bert.ROBERTA,
        *bert.OTHERS,
        distilbert.FORMAT,
        electra.FORMAT,
        albert.FORMAT,
        xlnet.FORMAT,
        deberta.V1,
        deberta.FORMAT,
        llama.EUROBERT,
        llama.LLAMA,
        llama.QWEN2,
        llama.QWEN3,
        gemma.FORMAT,
        neobert.FORMAT,
        esm.FORMAT,
    )
}

# class in a config.json -> its format, if it differs from its model_type's
CLASSES: dict[str, HubFormat] = {name: Classifiers(name) for name in KINDS}

# architecture and order of the exported model -> its format, if its model_type's is another
EXPORTS: dict[tuple[type[ModelConfig], Order], HubFormat] = {(ModernBertConfig, "causal"): modernbert_decoder.FORMAT}

# architecture of a replaced-token detector -> the format of it and its generator, if its model_type's is another
DISCRIMINATORS: dict[type[ModelConfig], HubFormat] = {
    ModernBertConfig: modernbert_tokens.FORMAT,
    BertConfig: electra.FORMAT,
}


def format_of(raw: dict[str, Any], where: str) -> HubFormat:
    """Return the format of a config.json; `where` names it in messages.

    Raises:
        DataError: no format can read it.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise DataError(
            f"{where}: model_type={shown(kind)}; only model_type={', '.join(FORMATS)} can be read. Name such a model."
        )
    if isinstance(raw.get(WITH_HEAD), str):
        return SentenceEncoder(FORMATS[kind])
    if isinstance(FORMATS[kind], Format) and is_headless(raw):
        return Headless(FORMATS[kind])
    named = raw.get("architectures")
    for each in named if isinstance(named, list) else ():
        if isinstance(each, str) and each in CLASSES:
            return modernbert_tokens.FORMAT if modernbert_tokens.is_one(raw) else CLASSES[each]
    return FORMATS[kind]


def export_format(model: ModelConfig, order: Order, modules: Collection[str] = ()) -> HubFormat:
    """Return the format for an export; a model trained with given orders is exported as bidirectional.

    Args:
        model: their architecture.
        order: which tokens each token saw in training.
        modules: modules of the weights.

    Raises:
        ConfigError: transformers lacks a class for such a model.
    """
    plain: Order = "all" if order == "given" else order
    usual, detects = FORMATS.get(model.model_type), TOKEN_HEAD in modules
    hub = DISCRIMINATORS.get(type(model)) if detects else EXPORTS.get((type(model), plain))
    if hub is None and isinstance(usual, Format):
        usual = usual if plain in usual.classes else usual.decoder
        hub = usual if usual and (not detects or TOKEN_HEAD in usual.for_heads) else None
    if hub is None:
        how = "to detect replaced tokens" if detects else f"in order {order}"
        raise ConfigError(
            f"model.name={model.name}: transformers lacks such a model for weights that were trained {how}. "
            "Continue the run itself; it cannot be exported."
        )
    return hub


def read(raw: dict[str, Any], where: str) -> Described:
    """Read a config.json of any known format; see `HubFormat.read`."""
    return format_of(raw, where).read(raw, where)


def read_folder(folder: Path) -> Described:
    """Read the config.json of a model folder, written by this program or any other.

    Raises:
        DataError: see `read_content`; or it describes another architecture; names the difference.
    """
    raw = read_content(folder)
    described = read(raw, str(folder / CONFIG_JSON))
    if EXPORTED_BY in raw and (folder / TOKENIZER_CONFIG).is_file():  # the longest text of training, in every format
        max_length = read_object(folder / TOKENIZER_CONFIG).get("model_max_length")
        longest = max_length if is_count(max_length) and max_length else described.max_tokens
        described = described._replace(max_tokens=min(described.max_tokens, longest))
    if described.objective is None or not described.objective.compares:
        return described
    objective = cast(ContrastiveConfig, described.objective)
    return described._replace(objective=replace(objective, query_max_tokens=read_own(folder)[1]))


def read_content(folder: Path) -> dict[str, Any]:
    """Read the config.json of a model folder, of any architecture.

    Raises:
        DataError: the file is missing or damaged, or the folder is an adapter's.
    """
    require_own_files(folder)
    path = folder / CONFIG_JSON
    is_whole = path.exists() and any(folder.glob("model*.safetensors"))
    if (folder / ADAPTER_JSON).is_file() and not is_whole:
        base = read_object(folder / ADAPTER_JSON).get("base_model_name_or_path") or "an unknown model"
        raise DataError(
            f"{folder}: an adapter of {base}, without that model's weights. Name the merged model, of a run hf in its "
            "folder; or merge it with peft: "
            "AutoPeftModel.from_pretrained(old).merge_and_unload().save_pretrained(new)."
        )
    return read_object(path)
