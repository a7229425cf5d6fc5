"""The types of keys: what YAML has in place of them, whether a value is of one, and how one is said."""

from __future__ import annotations

import functools
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

_ZEROS = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}


@functools.cache
def hints_of(schema: type) -> dict[str, Any]:
    """The types of its fields, by name."""
    return typing.get_type_hints(schema)


def without_none(hint: Any) -> Any:
    """The type of a value that may also be None, where there is one."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return inner[0] if len(inner) == 1 else hint
    return hint


def as_meant(value: Any, hint: Any) -> Any:
    """A value of the type of its key, where YAML has another for it."""
    hint = without_none(hint)
    kinds, origin = typing.get_args(hint), typing.get_origin(hint)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 1e9 tokens is a whole number, whatever YAML thinks
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin in (list, tuple) and isinstance(value, list):
        each = spelled if origin is tuple else as_meant
        return origin(each(item, kinds[0]) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return {name: spelled(item, kinds[1]) for name, item in value.items()}
    return value


def spelled(value: Any, hint: Any) -> Any:
    """A text where one is meant: true and 1 among the values of a name, or as what another key has."""
    if typing.get_origin(hint) is list and isinstance(value, list):
        return [spelled(item, typing.get_args(hint)[0]) for item in value]
    return json.dumps(value) if hint is str and isinstance(value, (bool, int, float)) else as_meant(value, hint)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the very type asked for; numbers are finite."""
    kinds, origin = typing.get_args(hint), typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, kind) for kind in kinds)
    if origin is typing.Literal:
        return isinstance(value, str | int) and value in kinds
    if origin is tuple:
        kinds = (kinds[0],) * len(value) if isinstance(value, tuple) and kinds[-1] is ... else kinds
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(fits, value, kinds))
    if origin is list:
        return isinstance(value, list) and all(fits(item, kinds[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, kinds[1]) for item in value.values())
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return hint is Any or type(value) is hint


def describe(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a list like [{', '.join(getattr(a, '__name__', str(a)) for a in typing.get_args(hint))}]"
    if hint == list[str]:
        return "a list of texts"
    if hint == dict[str, str]:
        return "a section with a text for each name"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(hint, str(hint))


def spelled_out(value: Any, hint: Any) -> str:
    """A number with a letter for its thousands, as YAML has it."""
    found = re.fullmatch(r"([0-9.]{1,20})\s?([kKmMgGbBtT])", value) if isinstance(value, str) else None
    if found is None or hint not in (int, float):
        return ""
    return f" Write {found[1]}e{_ZEROS[found[2].lower()]}."
