"""YAML files and a.b=c overrides to a typed, frozen configuration; every mistake is reported at once.

Files merge left to right, then the overrides; later wins. The merged tree is then written leaf by leaf into an
OmegaConf structured config, so that each leaf is checked against its dataclass and one wrong key does not hide the
next. A section that carries `name` (see schema.VARIANTS) takes the dataclass of that name as its schema.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from modernbert_train.config.schema import VARIANTS, ModelConfig, RunConfig
from modernbert_train.errors import ConfigError

T = TypeVar("T")
Leaves = dict[tuple[str, ...], Any]
Origins = dict[tuple[str, ...], str]
Place = Callable[[yaml.Node], str]


def load_run(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> RunConfig:
    """Load a run's configuration. See `load_typed`; the rules of config/check.py are not applied here."""
    return load_typed(RunConfig, files, overrides)


def load_model(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> ModelConfig:
    """The model section of a run, or of a file that has no other, as in yamls/model. See `load_typed`."""
    rest = ("name=model", "data.train=none", "data.tokenizer=none", "optim.lr=1")  # what a whole run must have
    return load_typed(RunConfig, files, [*overrides, *rest]).model


def load_typed(schema: type[T], files: Sequence[str | Path], overrides: Sequence[str] = ()) -> T:
    """Merge YAML files and overrides into a frozen dataclass.

    Args:
        schema: the root dataclass.
        files: YAML files; later ones win.
        overrides: `a.b=c`, with c written as in YAML; they win over the files.

    Returns:
        An instance of `schema` with every interpolation resolved.

    Raises:
        ConfigError: lists every unknown key and bad value with its file, line and remedy; every missing value when
            nothing else is wrong, since a misspelt key is missing too.
    """
    errors: list[str] = []
    tree: dict[str, Any] = {}
    origins: Origins = {}
    for file in files:
        _merge(tree, _read_yaml(Path(file), origins, errors))
    for override in overrides:
        _merge(tree, _read_override(override, origins, errors))
    config = _build(schema, tree, origins, errors)
    if errors:
        raise ConfigError("\n".join(errors))
    return typing.cast(T, OmegaConf.to_object(config))


def to_yaml(config: Any) -> str:
    """The configuration as YAML that loads to the same configuration."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def differences(old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """Dotted keys whose values differ between two configurations, with both values (None where a key is absent)."""
    trees = [OmegaConf.to_container(OmegaConf.structured(config)) for config in (old, new)]
    flat = [{".".join(path): value for path, value in _leaves(typing.cast(dict[str, Any], tree))} for tree in trees]
    keys = [*flat[0], *(key for key in flat[1] if key not in flat[0])]
    return [(key, flat[0].get(key), flat[1].get(key)) for key in keys if flat[0].get(key) != flat[1].get(key)]


# --- reading -----------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: `1e-4` is a number, `on` and `010` are not silently something else."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in ("tag:yaml.org,2002:bool",)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    if first is not None
}
for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:float", r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$", "-+0123456789"),
):
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))


def _read_yaml(file: Path, origins: Origins, errors: list[str]) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        errors.append(f"{file}: no such file. Give the path of a YAML file, relative to the current folder.")
        return {}
    except (OSError, UnicodeDecodeError) as error:
        errors.append(f"{file}: cannot be read ({error}). Check that it is a readable UTF-8 text file.")
        return {}
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        errors.append(f"{file}: not valid YAML. {' '.join(str(error).split())}")
        return {}
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        errors.append(f"{file}: holds no keys. Expected `key: value` lines.")
        return {}
    try:
        return _construct(node, lambda node: f"{file}:{node.start_mark.line + 1}", (), origins, errors)
    except RecursionError:
        errors.append(f"{file}: an alias contains itself. Write out what it stands for.")
        return {}


def _read_override(override: str, origins: Origins, errors: list[str]) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    path = key.split(".")
    if not equals or not all(path):
        errors.append(f"{override!r}: not an override. Write section.key=value, for example optim.lr=1e-3.")
        return {}
    try:
        node = yaml.compose(text, Loader=_Loader) or yaml.ScalarNode("tag:yaml.org,2002:null", "")
    except yaml.YAMLError as error:
        errors.append(f"{override!r}: the value is not valid YAML. {' '.join(str(error).split())}")
        return {}
    for part in reversed(path):
        node = yaml.MappingNode("tag:yaml.org,2002:map", [(yaml.ScalarNode("tag:yaml.org,2002:str", part), node)])
    assert isinstance(node, yaml.MappingNode)
    return _construct(node, lambda node: "command line", (), origins, errors)


def _construct(
    node: yaml.MappingNode, place: Place, path: tuple[str, ...], origins: Origins, errors: list[str]
) -> dict[str, Any]:
    """A mapping as plain values; what is no plain value is reported and left out."""
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = place(key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            errors.append(f"{line}: a list or a section stands where a key belongs. Write `key: value`.")
            continue
        key = str(key_node.value)
        here = (*path, key)
        dotted = ".".join(here)
        if key in found:
            errors.append(f"{dotted} ({line}): given twice. Remove one of the two.")
        origins[here] = line
        if isinstance(value_node, yaml.MappingNode):
            found[key] = _construct(value_node, place, here, origins, errors)
            continue
        for scalar in _octals(value_node):
            errors.append(f"{dotted}={scalar} ({line}): a leading zero means octal. Write it without.")
        try:
            found[key] = _Loader("").construct_object(value_node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            reason = str(error).splitlines()[0]
            errors.append(f"{dotted} ({line}): not a plain value ({reason}). Quote it if it is text.")
    return found


def _octals(node: yaml.Node) -> list[str]:
    if isinstance(node, yaml.SequenceNode):
        return [scalar for item in node.value for scalar in _octals(item) if item is not node]
    is_octal = node.tag == "tag:yaml.org,2002:int" and re.fullmatch(r"[-+]?0[0-9_]+", str(node.value))
    return [node.value] if is_octal else []


def _merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


# --- checking against the schema ---------------------------------------------------------------------------------


def _build(schema: type, tree: dict[str, Any], origins: Origins, errors: list[str]) -> Any:
    config = _structured(schema)
    _fill(config, schema, tree, (), origins, errors)
    if not errors:
        try:
            OmegaConf.resolve(config)
        except OmegaConfBaseException as error:
            errors.append(f"an interpolation cannot be resolved: {' '.join(str(error).split())}")
    if not errors:
        errors.extend(
            f"{key}: missing. It has no default; set it in the YAML or as {key}=..."
            for key in sorted(OmegaConf.missing_keys(config))
        )
    return config


def _structured(schema: type) -> Any:
    config = OmegaConf.structured(schema)
    _set_editable(config)
    return config


def _set_editable(config: Any) -> None:
    """Frozen dataclasses make read-only configs; while one is being filled it must not be."""
    OmegaConf.set_readonly(config, False)
    for key in config:
        if not OmegaConf.is_missing(config, key) and OmegaConf.is_dict(config[key]):
            _set_editable(config[key])


def _fill(config: Any, schema: type, tree: Any, path: tuple[str, ...], origins: Origins, errors: list[str]) -> None:
    hints = typing.get_type_hints(schema)
    names = [f.name for f in dataclasses.fields(schema)]
    for key, value in tree.items():
        here = (*path, key)
        if key not in names:
            errors.append(_unknown(here, names, origins))
            continue
        hint = _strip_optional(hints[key])
        inner: type | None = _dataclass_in_dict(hint)
        if inner is not None:
            if not isinstance(value, Mapping):
                errors.append(_bad(here, value, "a section with one entry for each name", origins))
                continue
            for name, entry in value.items():
                if entry is None:
                    continue
                config[key][name] = OmegaConf.structured(inner)
                _set_editable(config[key][name])
                _fill_section(config[key], name, inner, entry, (*here, name), origins, errors)
        elif dataclasses.is_dataclass(hint):
            if value is None and hint is not hints[key]:
                config[key] = None
                continue
            variant = _variant(key, path, value, typing.cast(type, hint), config, origins, errors)
            if variant is None:
                continue
            assert isinstance(variant, type)
            if config[key] is None or OmegaConf.get_type(config, key) is not variant:
                config[key] = OmegaConf.structured(variant)
                _set_editable(config[key])
            _fill_section(config, key, typing.cast(type, variant), value, here, origins, errors)
        else:
            _set_leaf(config, key, value, hint, here, origins, errors)


def _fill_section(
    config: Any, key: str, schema: type, value: Any, here: tuple[str, ...], origins: Origins, errors: list[str]
) -> None:
    if not isinstance(value, Mapping):
        known = ", ".join(f.name for f in dataclasses.fields(schema))
        errors.append(_bad(here, value, f"a section with keys {known}", origins))
        return
    _fill(config[key], schema, value, here, origins, errors)


def _variant(
    key: str, path: tuple[str, ...], value: Any, base: type, config: Any, origins: Origins, errors: list[str]
) -> type | None:
    table = VARIANTS.get(".".join((*path, key)))
    if table is None:
        return base
    name = value.get("name", config[key].get("name")) if isinstance(value, Mapping) else None
    if not isinstance(name, str) or name not in table:
        near = _nearest(str(name), list(table))
        errors.append(_bad((*path, key, "name"), name, "one of " + ", ".join(table), origins) + near)
        return None
    return table[name]


def _set_leaf(
    config: Any, key: str, value: Any, hint: Any, here: tuple[str, ...], origins: Origins, errors: list[str]
) -> None:
    interpolations = [text for text in _texts(value) if "${" in text]
    if any(":" in text for text in interpolations):
        # a resolver such as oc.env would copy secrets of the environment into the saved configuration
        errors.append(_bad(here, value, "a value, or another key as ${section.key}; resolvers are not run", origins))
        return
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # 1e9 tokens is a whole number, whatever YAML thinks
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    elif typing.get_origin(hint) is tuple and isinstance(value, list):
        value = tuple(float(item) if isinstance(item, int) else item for item in value)
    wrong_kind = value is not None and not interpolations and not _fits(value, hint)
    try:
        if wrong_kind:
            raise ValueError(value)
        config[key] = value
    except (OmegaConfBaseException, ValueError, TypeError):
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        near = _nearest(str(value), [str(choice) for choice in choices]) if choices else ""
        errors.append(_bad(here, value, _describe(hint), origins) + near)


def _texts(value: Any) -> list[str]:
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the very type asked for, which OmegaConf would otherwise convert to; numbers are finite."""
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return hint not in (str, bool, int, float) or type(value) is hint


def _unknown(here: tuple[str, ...], names: list[str], origins: Origins) -> str:
    near = _nearest(here[-1], names, ".".join(here[:-1])) or f" Known here: {', '.join(names)}."
    return f"{'.'.join(here)} ({_origin(here, origins)}): unknown key.{near}"


def _bad(here: tuple[str, ...], value: Any, wanted: str, origins: Origins) -> str:
    return f"{'.'.join(here)}={value!r} ({_origin(here, origins)}): expected {wanted}."


def _origin(here: tuple[str, ...], origins: Origins) -> str:
    return origins.get(here) or origins.get(here[:-1], "default")


def _nearest(word: str, names: list[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f" Did you mean {prefix + '.' if prefix else ''}{near[0]}?" if near else ""


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) in (list, tuple):
        return f"a list like [{', '.join(getattr(a, '__name__', str(a)) for a in typing.get_args(hint))}]"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(hint, str(hint))


def _strip_optional(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(inner) == 1:
            return inner[0]
    return hint


def _dataclass_in_dict(hint: Any) -> type | None:
    args = typing.get_args(hint)
    if typing.get_origin(hint) is dict and dataclasses.is_dataclass(args[1]):
        return typing.cast(type, args[1])
    return None


def _leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value
