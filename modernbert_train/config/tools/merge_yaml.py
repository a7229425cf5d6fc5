"""Merge a file of yamls/ with its includes into one file, with the comments of all: the output of `init`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from modernbert_train.config.read_yaml import INCLUDE, read_yaml

_KEY = re.compile(r"( *)([\w-]+):( |$)")


def starting_point(path: Path) -> str:
    """Return the text of a file, with the keys of its includes merged in; a later file's keys win."""
    text = path.read_text(encoding="utf-8")
    if INCLUDE not in yaml.safe_load(text):
        return text
    head, _ = _divided(text)
    tree = read_yaml(path, {}, [])
    merged = "\n".join([*head, *_lines(_merged(path, set())), ""])
    with suppress(yaml.YAMLError):
        if yaml.safe_load(merged) == tree:
            return merged
    return "\n".join([*head, "", yaml.safe_dump(tree, sort_keys=False)])


@dataclass
class _Block:
    """A key with the comments above it: its first line, then its subkeys, or other lines."""

    above: list[str]
    line: str
    lines: list[str] = field(default_factory=list)
    keys: dict[str, _Block] = field(default_factory=dict)


def _included(path: Path) -> list[Path]:
    names = yaml.safe_load(path.read_text(encoding="utf-8")).get(INCLUDE, [])
    return [path.parent / name for name in ([names] if isinstance(names, str) else names)]


def _merged(path: Path, done: set[Path]) -> dict[str, _Block]:
    keys: dict[str, _Block] = {}
    for other in _included(path):
        if other.resolve() not in done:  # a file that several include counts once, at its first place
            done.add(other.resolve())
            _put(keys, _merged(other, done))
    _, body = _divided(path.read_text(encoding="utf-8"))
    _put(keys, _blocks(body))
    keys.pop(INCLUDE, None)
    return keys


def _put(keys: dict[str, _Block], others: Mapping[str, _Block]) -> None:
    for name, other in others.items():
        here = keys.get(name)
        if here is not None and _opened(here) and _opened(other):
            here.above += [line for line in other.above if line.strip()]
            _put(here.keys, other.keys)
        else:
            keys[name] = other


def _opened(block: _Block) -> bool:
    """Return True if a key has subkeys; subkeys in braces are split into lines, so that they can be merged."""
    value = yaml.safe_load(block.line.strip())
    (braces,) = value.values()
    if isinstance(braces, dict) and not block.lines:
        start, _, after = block.line.partition("{")
        block.line = start.rstrip() + after.rpartition("}")[2]
        indent = " " * (len(start) - len(start.lstrip()) + 2)
        for key, each in braces.items():
            text = yaml.safe_dump(each, default_flow_style=True, width=1000).removesuffix("...\n").strip()
            block.keys[key] = _Block([], f"{indent}{key}: {text}")
    return bool(block.keys)


def _divided(text: str) -> tuple[list[str], list[str]]:
    """Split a file into the comment at its head and the rest."""
    lines = text.splitlines()
    end = next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return lines[:end], lines[end:]


def _blocks(lines: list[str]) -> dict[str, _Block]:
    """Return the keys of one depth; empty if the lines are something else, such as a list."""
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    blocks: dict[str, _Block] = {}
    above: list[str] = []
    last: _Block | None = None
    for line in lines:
        key = _KEY.match(line)
        if key is not None and len(key.group(1)) == min(indents):
            last = blocks[key.group(2)] = _Block(above, line)
            above = []
        elif not line.strip() or line.lstrip().startswith("#"):
            above.append(line)
        elif last is None:
            return {}
        else:
            last.lines += [*above, line]
            above = []
    for block in blocks.values():
        block.keys = _blocks(block.lines) if block.lines else {}
    return blocks


def _lines(keys: Mapping[str, _Block]) -> list[str]:
    merged: list[str] = []
    for block in keys.values():
        merged += [*block.above, block.line, *(_lines(block.keys) if block.keys else block.lines)]
    return merged
