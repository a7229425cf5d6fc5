"""YAML text to nodes, within bounds: what a stranger's file may cost is known before it is read.

Through aliases a hundred bytes stand for a billion values, and nesting costs stack. So size and depth are counted while
the nodes are made, an alias as what it stands for, and reading ends at the first that is beyond a limit.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

MAX_BYTES = 1_000_000  # of one file
MAX_CHARACTERS = 1_000_000  # of all keys and values together, aliases written out
MAX_NODES = 20_000  # keys, values and list items together, aliases written out
MAX_DEPTH = 50  # sections and lists within each other
MAX_KEY = 200  # characters
MAX_NUMBER = 200  # characters; the time to make a number of digits grows with their square

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")


class Beyond(yaml.YAMLError):
    """A limit is exceeded; says which, on which line, and what to do."""

    def __init__(self, problem: str, event: yaml.Event) -> None:
        super().__init__(problem)
        self.line = event.start_mark.line + 1 if event.start_mark is not None else 1


class TooLarge(Exception):
    """A file is larger than MAX_BYTES."""


class _Cost(NamedTuple):
    """Of a node with all that is in it, aliases written out."""

    nodes: int
    characters: int
    height: int


class Loader(yaml.SafeLoader):
    """YAML as people mean it: `1e-4` is a number, `on` and `010` are not silently something else; within the limits."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._characters = self._depth = 0  # so far
        self._costs: dict[yaml.Node, _Cost] = {}  # of every node that is complete

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Make one node and all that is in it.

        Raises:
            Beyond: there is too much, or it contains itself.
        """
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            assert node is not None
            if node not in self._costs:
                raise Beyond("an alias contains itself. Write its content in its place.", event)
            self._add(self._costs[node], event)
            return node
        nodes, characters = self._nodes, self._characters
        self._add(_Cost(1, len(getattr(event, "value", "")), 1), event)
        self._depth += 1
        node = super().compose_node(parent, index)
        assert node is not None
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS and len(node.value) > MAX_NUMBER:
            raise Beyond(
                f"a number or date of {len(node.value):,} characters; the limit is {MAX_NUMBER}. Quote it if it is "
                "text.",
                event,
            )
        height = 1 + max((self._costs[inner].height for inner in _inside(node)), default=0)
        self._costs[node] = _Cost(self._nodes - nodes, self._characters - characters, height)
        return node

    def _add(self, cost: _Cost, event: yaml.Event) -> None:
        self._nodes += cost.nodes
        self._characters += cost.characters
        if self._nodes > MAX_NODES:
            raise Beyond(
                f"more than {MAX_NODES:,} keys and values, each alias counted with all its content. Remove "
                "aliases, or name a folder or a pattern in place of a long list.",
                event,
            )
        if self._characters > MAX_CHARACTERS:
            raise Beyond(
                f"more than {MAX_CHARACTERS:,} characters, each alias counted with all its content. Remove "
                "aliases, or shorten the texts.",
                event,
            )
        if self._depth + cost.height > MAX_DEPTH:
            raise Beyond(
                f"more than {MAX_DEPTH} sections or lists within each other. Nothing here is nested so deeply: look "
                "for a missing bracket.",
                event,
            )


Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in ("tag:yaml.org,2002:bool",)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    if first is not None
}
for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:float", r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$", "-+0123456789"),
):
    Loader.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))


def compose(text: str) -> yaml.Node | None:
    """The root node of a text; None if it is empty.

    Raises:
        yaml.YAMLError: it is not YAML; or `Beyond`, it is too much.
    """
    return yaml.compose(text, Loader=Loader)


def read_bounded(file: Path) -> str:
    """The text of a file of at most MAX_BYTES; what is behind them is never read, be it endless.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
        TooLarge: there is more.
    """
    with file.open("rb") as opened:
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise TooLarge(f"{file}: larger than {MAX_BYTES:,} bytes")
    return content.decode("utf-8")


def _inside(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []
