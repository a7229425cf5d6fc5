"""One class for every architecture: it reads and writes config.json and maps names of tensors, by a format's tables.

A format states names, defaults and fixed values. `build` and `more` add the rest. The defaults are copied
from transformers' configuration classes, since importing one of them would import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from modernbert_train.config.objective import Order
from modernbert_train.config.read_yaml import shown
from modernbert_train.core.version import __version__
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats.config_json import ACTIVATIONS, SIZES, Content, Described
from modernbert_train.weights.formats.shape import Shape, stored_shape

# config.json's key of a special token -> its id in `Vocabulary`
_SPECIAL = {
    "pad_token_id": "pad_id", "bos_token_id": "cls_id", "eos_token_id": "sep_id", "cls_token_id": "cls_id",
    "sep_token_id": "sep_id", "mask_token_id": "mask_id",
}  # fmt: skip
_EMBEDDING = "model.embeddings.tok_embeddings.weight"
EXPORTED_BY = "exported_by"  # this program's key
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")

# (content with defaults, fields of the configuration, order by class, longest text) -> (configuration, order)
Build = Callable[[Content, dict[str, Any], Order, int], tuple[Any, Order]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Format:
    """See `HubFormat`. `key` means a key of config.json, `name` a tensor's name in transformers.

    Attributes:
        config: the architecture here.
        model_type: its name in config.json.
        classes: order -> class of transformers.
        for_heads: module -> class of transformers that can store it, written if the weights have it.
        any_class: True if other classes with this model_type are read too.
        decoder: the format of causal order, if it is another one.
        keys: field of `config` -> key, for numbers.
        longest: key of the longest text; None: its positions are a number in `keys`.
        activation, activations: its key, and the values that can be read.
        dropout: key of the dropout rate.
        without_dropout: keys of other rates, written as 0. They are ignored in reading: they only concern training, and
            the encoder here lacks them.
        special: keys of special tokens that are written.
        fixed: key -> the only value that the encoder implements.
        defaults: transformers' defaults where they differ from the defaults in `config`.
        prefix: beginning of the encoder's names, which a file without a head lacks; tables have names without it.
        layer: name of a layer, up to its number.
        parts: parameter or module of a layer here -> names in a layer, stored along the rows.
        outside: the same outside layers, and of heads.
        body: beginnings of further names of the encoder.
        renamed: part of a name in other files -> part today; the first that occurs counts.
        copies: another name -> name today. A tied decoder's copies of the embedding and of its bias need no row.
        tied: like `copies`, in a model whose decoder is tied.
        unread: parts of names of buffers and of heads that are not read.
        names: `theirs` of a format whose names no table has.
        shapes: see `shape`.
        more: further keys, by configuration, order and vocabulary.
        build: the configuration from its fields; may raise DataError.
    """

    config: Any
    model_type: str
    classes: dict[Order, str]
    for_heads: dict[str, str] = field(default_factory=dict)
    any_class: bool = False
    decoder: Format | None = None
    keys: dict[str, str] = field(default_factory=lambda: SIZES)
    longest: str | None = None
    activation: str | None = None
    activations: Collection[str] = tuple(ACTIVATIONS)
    dropout: str | None = None
    without_dropout: tuple[str, ...] = ()
    special: tuple[str, ...] = SPECIAL
    fixed: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    prefix: str = ""
    layer: str = ""
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)
    body: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    names: Callable[[str, Any], tuple[str, ...]] | None = None
    shapes: Callable[[str, Any], Shape | None] | None = None
    more: Callable[[Any, Order, Vocabulary], Mapping[str, Any]] | None = None
    build: Build | None = None

    def theirs(self, name: str, config: Any) -> tuple[str, ...]:
        """See `HubFormat`."""
        if self.names:
            return self.names(name, config)
        prefix = self.prefix if name.startswith("model.") else ""
        return tuple(prefix + each for each in places(name, self.layer, self.parts, self.outside))

    def today(self, name: str) -> str | None:
        """See `HubFormat`."""
        name = self.prefix + name if name.startswith(self._begins) else name
        if any(part in name for part in self.unread) or self._is_idle_pooler(name):
            return None
        name = self._copies.get(name, name)
        old = next((old for old in self.renamed if old in name), "")
        name = name.replace(old, self.renamed[old], 1) if old else name
        return self._copies.get(name, name)

    @cached_property
    def _begins(self) -> tuple[str, ...]:
        """Beginnings of all names of the encoder."""
        ours = [each for name, each in self.outside.items() if name.startswith("model.")]
        return (*self.body, *("".join(each.partition(".")[:2]) for each in (self.layer, *ours) if each))

    @cached_property
    def _copies(self) -> Mapping[str, str]:
        """Names of tied copies, and other names."""
        decoder = self.outside.get("decoder")
        if decoder is None or not self.fixed.get("tie_word_embeddings"):
            return self.copies
        (table,) = self.theirs(_EMBEDDING, None)
        tied = {f"{decoder}.weight": table, f"{decoder}.decoder.weight": table}
        return tied | {f"{decoder}.decoder.bias": f"{decoder}.bias"} | self.copies

    def _is_idle_pooler(self, name: str) -> bool:
        pooler = f"{self.prefix}pooler"
        return name.startswith(f"{pooler}.") and not any(each.startswith(pooler) for each in self.outside.values())

    def shape(self, name: str, config: Any) -> Shape | None:
        """See `HubFormat`."""
        return self.shapes(name, config) if self.shapes else None

    def describe(
        self, config: Any, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
    ) -> dict[str, Any]:
        """See `HubFormat`."""
        of_head = (each for module, each in self.for_heads.items() if module in modules and order != "causal")
        about = {
            "architectures": [next(of_head, self.classes.get(order) or self.classes["all"])],
            "model_type": self.model_type,
            EXPORTED_BY: f"modernbert_train {__version__}",
            "dtype": "float32",
            **{theirs: getattr(config, ours) for ours, theirs in self.keys.items()},
            **self.fixed,
            **dict.fromkeys(self.without_dropout, 0.0),
            **{key: getattr(vocabulary, _SPECIAL[key]) for key in self.special},
        }
        if self.longest:
            about[self.longest] = max_tokens
        if self.activation:
            about[self.activation] = next(each for each, ours in ACTIVATIONS.items() if ours == config.activation)
        if self.dropout:
            about[self.dropout] = config.dropout
        return about | dict(self.more(config, order, vocabulary) if self.more else {})

    def read(self, raw: dict[str, Any], where: str) -> Described:
        """See `HubFormat`."""
        order, named = self._class_of(raw, where), raw.get("architectures")
        missing = {key: value for key, value in self.defaults.items() if raw.get(key) is None}
        content = Content({**raw, **missing}, where)
        for key, value in (self.fixed | {"pruned_heads": {}}).items():
            if content.get(key) not in (None, value):
                raise content.unknown(value, key)
        fields = {ours: content.number(theirs, getattr(self.config, ours)) for ours, theirs in self.keys.items()}
        width, heads = fields["hidden_size"], fields["num_heads"]
        if width % heads:
            multiple = f"not a multiple of {self.keys['num_heads']}={heads}"
            raise DataError(f"{where}: {self.keys['hidden_size']}={width} is {multiple}. Restore the file from a copy.")
        if self.activation:
            fields["activation"] = ACTIVATIONS[content.word(self.activation, "gelu", self.activations)]
        if self.dropout:
            fields["dropout"] = content.share(self.dropout, self.config.dropout)
        longest = content.number(self.longest, self.defaults[self.longest]) if self.longest else 0
        config, order = self.build(content, fields, order, longest) if self.build else (self.config(**fields), order)
        if problem := next(config.mistakes(), None):
            raise DataError(f"{where}: {problem} Restore the file from a copy, or name another model.")
        detects = isinstance(named, list) and self.for_heads.get("token_head") in named
        return Described(config, longest or config.max_positions, order, detects)

    def _class_of(self, raw: dict[str, Any], where: str) -> Order:
        """Return the order of the class that a config.json names.

        Raises:
            DataError: the class or the model_type is another; names those that can be read.
        """
        kind, named = raw.get("model_type"), raw.get("architectures")
        of_heads: dict[str, Order] = dict.fromkeys(self.for_heads.values(), "all")
        classes = {each: order for order, each in self.classes.items()} | of_heads
        orders = [classes[each] for each in named if str(each) in classes] if isinstance(named, list) else []
        if kind == self.model_type and (orders or self.any_class):
            return orders[0] if orders else "all"
        choices = " or ".join(f"architectures=['{each}']" for each in classes)
        raise DataError(
            f"{where}: model_type={shown(kind)}, architectures={shown(named)}; only model_type={self.model_type}, "
            f"{choices} can be read. Name such a model."
        )


class Around:
    """Base class of a format of the same encoder with another head, or without one.

    Args:
        whole: the format with its usual head.
    """

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self.tied: Mapping[str, str] = getattr(whole, "tied", {})

    def theirs(self, name: str, config: Any) -> tuple[str, ...]:
        """See `HubFormat`."""
        return self.whole.theirs(name, config)

    def today(self, name: str) -> str | None:
        """See `HubFormat`."""
        return self.whole.today(name)

    def shape(self, name: str, config: Any) -> Shape | None:
        """See `HubFormat`."""
        return stored_shape(self.whole, name, config)


def places(name: str, layer: str, inside: Mapping[str, tuple[str, ...]], outside: Mapping[str, str]) -> tuple[str, ...]:
    """Return transformers' names of a parameter by tables of names or of modules; empty if they lack it.

    Args:
        name: the name here.
        layer, inside, outside: `layer`, `parts` and `outside` of `Format`.
    """
    number, _, part = name.removeprefix("model.layers.").partition(".")
    if part and name.startswith("model.layers."):
        table, name, prefix = inside, part, f"{layer}{number}."
    else:
        table, prefix = {ours: (named,) for ours, named in outside.items()}, ""
    module, _, end = name.rpartition(".")
    ends = table.get(name) or tuple(f"{each}.{end}" for each in table.get(module, ()))
    return tuple(prefix + each for each in ends)
