"""An encoder without a head, or with a config.json that names no class: embedding models, and many older ones.

Its tensors lack the prefix that a model with a head gives them. A stored head is read; a missing one is left out, and
code that needs it raises the error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from modernbert_train.config.objective import Order
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats.config_json import Described
from modernbert_train.weights.formats.shape import Shape, stored_shape

if TYPE_CHECKING:
    from modernbert_train.weights.formats import HubFormat


class Names(NamedTuple):
    """Transformers' names of an encoder's tensors.

    Attributes:
        prefix: of the names in a model with a head.
        modules: prefixes of the names in a model without a head.
        class_with_head: class of transformers that the format can read.
        pools: True if the format can store the pooler.
    """

    prefix: str
    modules: tuple[str, ...]
    class_with_head: str
    pools: bool = False


_BERT = ("embeddings.", "encoder.", "pooler.")
# model_type -> names; the formats of llama, gemma and neobert read both kinds
NAMES = {
    "modernbert": Names("model.", ("embeddings.", "layers.", "final_norm."), "ModernBertForMaskedLM"),
    "bert": Names("bert.", _BERT, "BertForMaskedLM", pools=True),
    "roberta": Names("roberta.", _BERT, "RobertaForMaskedLM"),
    "xlm-roberta": Names("roberta.", _BERT, "XLMRobertaForMaskedLM"),
    "camembert": Names("roberta.", _BERT, "CamembertForMaskedLM"),
    "albert": Names("albert.", _BERT, "AlbertForMaskedLM", pools=True),
    "electra": Names("electra.", (*_BERT, "embeddings_project."), "ElectraForPreTraining"),
    "deberta": Names("deberta.", _BERT, "DebertaForMaskedLM"),
    "deberta-v2": Names("deberta.", _BERT, "DebertaV2ForMaskedLM"),
    "distilbert": Names("distilbert.", ("embeddings.", "transformer."), "DistilBertForMaskedLM"),
    "xlnet": Names("transformer.", ("word_embedding.", "mask_emb", "layer."), "XLNetLMHeadModel"),
    "esm": Names("esm.", (*_BERT, "contact_head."), "EsmForMaskedLM"),
    "neobert": Names("", (), "NeoBERTLMHead"),
    "eurobert": Names("", (), "EuroBertForMaskedLM"),
    "llama": Names("", (), "LlamaForCausalLM"),
    "qwen2": Names("", (), "Qwen2ForCausalLM"),
    "qwen3": Names("", (), "Qwen3ForCausalLM"),
    "gemma3_text": Names("", (), "Gemma3ForCausalLM"),
}

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
        return raw.get("model_type") in NAMES and named in (None, [])
    alone = [str(each) for each in named]
    return all((each.endswith("Model") and not each.endswith("LMHeadModel")) or each == "NeoBERT" for each in alone)


class Headless:
    """See `HubFormat`.

    Args:
        whole: the format of the same encoder with a head.
        model_type: a key of `NAMES`.
        named: class with a head that the format reads instead; None: the one in `NAMES`.
    """

    headless = True

    def __init__(self, whole: HubFormat, model_type: str, named: str | None = None) -> None:
        self._whole = whole
        self._names = NAMES[model_type]
        self._named = named or self._names.class_with_head
        self.TIED: Mapping[str, str] = getattr(whole, "TIED", {})

    def read(self, raw: dict[str, Any], where: str) -> Described:
        """See `HubFormat`."""
        described = self._whole.read({**raw, "architectures": [self._named]}, where)
        return described._replace(detects=False)

    def theirs(self, name: str, config: Any) -> tuple[str, ...]:
        """See `HubFormat`."""
        return self._whole.theirs(name, config)

    def today(self, name: str) -> str | None:
        """See `HubFormat`."""
        if self._names.modules and name.startswith(self._names.modules):
            name = self._names.prefix + name
        if name.startswith(f"{self._names.prefix}pooler.") and not self._names.pools:
            return None
        return self._whole.today(name)

    def shape(self, name: str, config: Any) -> Shape | None:
        """See `HubFormat`."""
        return stored_shape(self._whole, name, config)

    def describe(
        self, config: Any, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
    ) -> dict[str, Any]:
        """See `HubFormat`."""
        about = self._whole.describe(config, order, modules, max_tokens, vocabulary)
        return about | {"architectures": [without_head(str(about["architectures"][0]))]}
