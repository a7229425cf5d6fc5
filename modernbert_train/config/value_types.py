"""Types of keys: convert YAML's values to them, check values against them, and describe them."""

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
    """Return the types of a dataclass's fields, by name."""
    return typing.get_type_hints(schema)


def without_none(hint: Any) -> Any:
    """Return the type of an optional value; any other type as it is."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return inner[0] if len(inner) == 1 else hint
    return hint


def as_meant(value: Any, hint: Any) -> Any:
    """Convert a value to the type of its key where YAML gives another one."""
    hint = without_none(hint)
    kinds, origin = typing.get_args(hint), typing.get_origin(hint)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)  # YAML reads 1e9 as a float
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin in (list, tuple) and isinstance(value, list):
        each = spelled if origin is tuple else as_meant
        return origin(each(item, kinds[0]) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return {name: spelled(item, kinds[1]) for name, item in value.items()}
    return value


def spelled(value: Any, hint: Any) -> Any:
    """Convert to text where the key has text: true and 1 in a list of names, or an interpolated value."""
    if typing.get_origin(hint) is list and isinstance(value, list):
        return [spelled(item, typing.get_args(hint)[0]) for item in value]
    return json.dumps(value) if hint is str and isinstance(value, (bool, int, float)) else as_meant(value, hint)


def fits(value: Any, hint: Any) -> bool:
    """Return True if a value is exactly of this type; numbers must be finite."""
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
    """Suggest YAML's form for a number with a letter for its thousands, and for a text that looks like a number."""
    if hint is str and isinstance(value, bool | int | float):
        return f' Put it in quotes: "{value}".'
    match = re.fullmatch(r"([0-9.]{1,20})\s?([kKmMgGbBtT])", value) if isinstance(value, str) else None
    if match is None or hint not in (int, float):
        return ""
    return f" Write {match[1]}e{_ZEROS[match[2].lower()]}."
