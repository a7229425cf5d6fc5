"""Parse YAML text to nodes, within bounds: through aliases, a hundred bytes can expand to a billion values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yaml.events import CollectionEndEvent, CollectionStartEvent

MAX_BYTES = 1_000_000  # of one file
MAX_NODES = 20_000  # keys, values and list items together, aliases written out
MAX_DEPTH = 50  # nesting of sections and lists
MAX_KEY = 200  # characters
MAX_NUMBER = 200  # characters; parsing a number takes time in the square of its digits

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")


class Loader(yaml.SafeLoader):
    """YAML as users expect it: `1e-4` is a number, `on` and `010` are not silently converted."""


class _InC(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same loader by libyaml, ten times faster; its messages are poorer, and deep nesting crashes the process."""


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Write YAML for `Loader`: a text that it would read as a number is quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_FLOAT = ("tag:yaml.org,2002:float", r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$", "-+0123456789")
_BOOL = ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in ("tag:yaml.org,2002:bool",)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    if first is not None
}
for _class, _tag, _pattern, _first in ((Loader, *_BOOL), (Loader, *_FLOAT), (_Dumper, *_FLOAT)):
    _class.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))
_InC.yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


class _Size(NamedTuple):
    """Size of a node with its contents, aliases expanded."""

    nodes: int
    height: int


def compose(text: str) -> yaml.Node | None:
    """Return the root node of a text; None if it is empty.

    Raises:
        yaml.YAMLError: the text is not valid, or exceeds a bound.
    """
    try:
        node = _composed(text)
    except RecursionError:
        raise yaml.YAMLError(f"more than {MAX_DEPTH} nested sections or lists") from None
    if node is not None:
        _measure(node, {})
    return node


def _composed(text: str) -> yaml.Node | None:
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_InC):  # events do not recurse, however deep the text
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise RecursionError
        return yaml.compose(text, Loader=_InC)
    except yaml.YAMLError:
        return yaml.compose(text, Loader=Loader)  # for its better message


def _measure(node: yaml.Node, sizes: dict[yaml.Node, _Size | None]) -> _Size:
    """Return the size of a node; it is None in `known` while it is being measured."""
    if node in sizes:
        size = sizes[node]
        if size is None:
            raise yaml.YAMLError("an alias contains itself. Replace it by its content.")
        return size
    if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS and len(node.value) > MAX_NUMBER:
        raise yaml.YAMLError(f"a number or date of {len(node.value):,} characters. Quote it if it is text.")
    sizes[node] = None
    inside = [_measure(each, sizes) for each in _inside(node)]
    size = _Size(1 + sum(each.nodes for each in inside), 1 + max((each.height for each in inside), default=0))
    if size.nodes > MAX_NODES or size.height > MAX_DEPTH:
        raise yaml.YAMLError(
            f"more than {MAX_NODES:,} keys and values, each alias counted with all its content, or {MAX_DEPTH} "
            "nested sections or lists. Remove aliases, or look for a missing bracket."
        )
    sizes[node] = size
    return size


def _inside(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def dump(tree: Any) -> str:
    """Return plain values as YAML, in their order."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_bounded(file: Path) -> str:
    """Return the text of a file of at most MAX_BYTES, without reading further, even if the file is endless.

    Raises:
        OSError: it cannot be read, or is larger.
        UnicodeDecodeError: it is not UTF-8.
    """
    with file.open("rb") as opened:
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(f"larger than {MAX_BYTES:,} bytes")
    return content.decode("utf-8")
