"""Write a plain tree over the defaults of a schema, key by key: each leaf is checked against its dataclass.

A wrong key or value adds a line to `errors`, and filling continues, so a mistake does not hide the next. A section with
a `name` (see schema.VARIANTS) has the dataclass of that name as its schema. A phase's override of another section is
checked against that section's schema, and its key must be marked `phased` there.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from modernbert_train.config.callbacks import ARGUMENTS, REFUSED
from modernbert_train.config.knob import facts_of, phased_keys
from modernbert_train.config.read_yaml import INTERPOLATION, Origins, shown
from modernbert_train.config.renamed import REMOVED_KEYS, REMOVED_RECIPE_KEYS, VALUE_SYNONYMS, new_name, own_word
from modernbert_train.config.schema import CHANGED_WHOLE, VARIANTS, PhaseConfig, RunConfig
from modernbert_train.config.value_types import as_meant, describe, fits, hints_of, spelled, spelled_out, without_none
from modernbert_train.core.redact import has_secret, is_secret_name
from modernbert_train.core.text import did_you_mean
from modernbert_train.core.trees import KeyPath, leaves

_LITERAL = r"write \${ for text with ${"
_NO_RESOLVERS = f"a value, or another key as ${{section.key}}; resolvers are not run; {_LITERAL}"
_NO_SECRETS = (
    "looks like a key, a token or a password, and a configuration is saved with the run and printed. Put it "
    "into the environment variable that the library reads, and leave it out here. See docs/security.md."
)


class Section(dict[str, Any]):
    """The values of a section that is being filled, by key; at first the defaults, or an instance's values."""

    def __init__(self, schema: type, instance: Any = None) -> None:
        super().__init__()
        self.schema = schema
        for field in dataclasses.fields(schema):
            value = _default(field) if instance is None else getattr(instance, field.name)
            self[field.name] = as_meant(_editable(value), hints_of(schema)[field.name])


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default


def _editable(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return Section(type(value), value)
    if isinstance(value, dict):
        return {key: _editable(each) for key, each in value.items()}
    return list(value) if isinstance(value, list) else value


def build_dataclass(value: Any) -> Any:
    """Build the dataclass of a section and of every section in it; other values are returned as they are."""
    if isinstance(value, dict):
        entries = {key: build_dataclass(each) for key, each in value.items()}
        return value.schema(**entries) if isinstance(value, Section) else entries
    return value


def missing_paths(values: dict[str, Any]) -> list[KeyPath]:
    """Return the keys that have no default and were not set."""
    return [path for path, value in leaves(values) if isinstance(value, str) and value == MISSING]


def section_of(root: Any, path: KeyPath) -> Any:
    """Return the section that contains the key at `path`."""
    return functools.reduce(lambda section, key: section[key], path[:-1], root)


class Filling:
    """Defaults that a plain tree is written over, key by key, and the mistakes found."""

    def __init__(self, schema: type, origins: Origins, errors: list[str]) -> None:
        self.root = Section(schema)
        self._origins, self._errors = origins, errors
        self._interpolated: list[tuple[KeyPath, Any]] = []  # leaves, with their types

    def fill(self, config: Section, tree: Any, path: KeyPath) -> None:
        schema = config.schema
        hints, names = hints_of(schema), _names(schema)
        facts = {field.name: facts_of(field) for field in dataclasses.fields(schema)}
        for key, value in sorted(tree.items(), key=lambda item: item[0] == "phases"):  # last: they override others
            here = (*path, key)
            if key not in names:
                of_the_run = schema is PhaseConfig and key in RunConfig.__dataclass_fields__ and new_name(here) is None
                self._unphased(here, key, []) if of_the_run else self._unknown(here, names)
                continue
            hint = without_none(hints[key])
            inner = _dataclass_in_dict(hint)
            if facts[key].overrides:
                self._overrides(config, key, value, here)
            elif not path and key in ARGUMENTS:
                self._arguments(config, key, value)
            elif inner is not None:
                if self._is_section(here, value, "one entry for each name"):
                    for name, entry in value.items():
                        if entry is not None:
                            self._section(config[key], name, here, (*here, name), entry, inner)
            elif not dataclasses.is_dataclass(hint):
                self._leaf(config, key, value, hints[key], here)
            elif value is None and hint is not hints[key]:
                config[key] = None
            else:
                self._section(config, key, here, here, value, typing.cast(type, hint))

    def resolve(self) -> Iterator[str]:
        """Replace interpolations by their values; yield the mistakes."""
        if not self._interpolated:
            return
        try:
            resolved = OmegaConf.to_container(OmegaConf.create(_plain(self.root)), resolve=True)
        except OmegaConfBaseException as error:
            reason = " ".join(str(error).split())
            yield f"an interpolation cannot be resolved: {reason}. Name a key that has a value, or {_LITERAL}."
            return
        interpolated, self._interpolated = self._interpolated, []
        for path, hint in interpolated:
            value, kind = section_of(resolved, path)[path[-1]], without_none(hint)
            value = spelled(value, kind)
            if not fits(value, hint):
                key = ".".join(path)
                wrong = f"{key}={shown(value)}: expected {describe(kind)}"
                yield f"an interpolation cannot be resolved: {wrong}. Name another key."
            section_of(self.root, path)[path[-1]] = value

    def _section(self, config: Any, key: str, section: KeyPath, here: KeyPath, value: Any, base: type) -> None:
        """Fill the section at `here`, with the schema `base` or the variant that it names."""
        existing = config.get(key)
        schema = self._variant(section, here, value, base, existing if isinstance(existing, Section) else None)
        if schema is None:
            return
        if not isinstance(existing, Section) or existing.schema is not schema:
            config[key] = Section(schema)
        if self._is_section(here, value, f"keys {', '.join(_names(schema))}"):
            self.fill(config[key], value, here)

    def _variant(self, section: KeyPath, here: KeyPath, value: Any, base: type, default: Any) -> type | None:
        """Return the schema of the section at `here`: `base`, or the dataclass of its name.

        The table of names belongs to `section`: `here` itself, or its parent if that has one entry for each name.
        """
        table = VARIANTS.get(".".join(section))
        if table is None:
            return base
        if value is not None and not self._is_section(here, value, f"a name, one of {', '.join(table)}, and its keys"):
            return None
        name = None if value is None else value.get("name", default.get("name") if default else None)
        if not isinstance(name, str) or name not in table:
            self._bad((*here, "name"), name, "one of " + ", ".join(table), did_you_mean(str(name), table))
            return None
        return table[name]

    def _overrides(self, config: Any, section: str, value: Any, here: KeyPath) -> None:
        """Read a phase's overrides of a section, typed as in the run; null removes an override."""
        of_run: Section = self.root[section]
        schema = of_run.schema
        allowed = phased_keys(schema)
        if value is None or not self._is_section(here, value, f"keys {', '.join(allowed)}"):
            return
        if section in CHANGED_WHOLE and value.get("name", None) not in (None, of_run["name"]):
            variant = self._variant((section,), (section,), value, schema, of_run)
            if variant is None:
                return
            schema, allowed = variant, _names(variant)
        for key, item in value.items():
            if key not in _names(schema):
                self._unknown((*here, key), allowed)
            elif key not in allowed:
                self._unphased((*here, key), section, allowed)
            elif item is not None:
                self._leaf(config[section], key, item, hints_of(schema)[key], (*here, key))

    def _arguments(self, config: Any, section: str, value: Any) -> None:
        """Read `callbacks:` and `loggers:`, with arguments of Composer's constructors; see config/callbacks.py."""
        if not self._is_section((section,), value, "one entry for each name"):
            return
        arguments_of = ARGUMENTS[section]
        for name, arguments in value.items():
            here = (section, name)
            if self._is_refused(here):
                continue
            if name not in arguments_of:
                self._unknown(here, list(arguments_of))
            elif isinstance(arguments, Mapping):
                mistakes = len(self._errors)
                for key in arguments:
                    if key not in arguments_of[name] and not self._is_refused((*here, key)):
                        self._unknown((*here, key), list(arguments_of[name]))
                for key, each in arguments.items():
                    for text in _texts(each):
                        if INTERPOLATION.search(text) and ":" in text:
                            self._bad((*here, key), text, _NO_RESOLVERS)
                self._has_secret(
                    here, {key: arguments[key] for key in arguments if ".".join((*here, key)) not in REFUSED}
                )
                if len(self._errors) == mistakes:
                    config[section][name] = arguments
                    if any("${" in text for text in _texts(arguments)):
                        self._interpolated.append((here, Any))
            elif arguments is not False:
                self._bad(here, arguments, "a section with its arguments, {} for none, or false to leave it out")

    def _leaf(self, config: Any, key: str, value: Any, hint: Any, here: KeyPath) -> None:
        if self._has_secret(here, value):
            return
        interpolations = [text for text in _texts(value) if "${" in text]
        if any(INTERPOLATION.search(text) and ":" in text for text in interpolations):
            # a resolver such as oc.env would copy secrets of the environment into the saved configuration
            self._bad(here, value, _NO_RESOLVERS)
            return
        value = as_meant(value, hint)
        if interpolations:
            self._interpolated.append((here, hint))
        elif not fits(value, hint):
            hint = without_none(hint)
            choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
            near = _nearest_value(str(value), [*map(str, choices)]) if choices else spelled_out(value, hint)
            self._bad(here, value, describe(hint), near)
            return
        config[key] = value

    def _is_section(self, here: KeyPath, value: Any, content: str) -> bool:
        if not isinstance(value, Mapping):
            self._bad(here, value, f"a section with {content}")
        return isinstance(value, Mapping)

    def _is_refused(self, here: KeyPath) -> bool:
        reason = REFUSED.get(".".join(here))
        if reason is not None:
            self._say(here, f"cannot work here, {reason}. Remove it.")
        return reason is not None

    def _has_secret(self, here: KeyPath, value: Any) -> bool:
        secret = _secret_in(value)
        if secret is not None:
            self._errors.append(f"{'.'.join((*here, *secret))} ({self._origin(here)}): {_NO_SECRETS}")
        return secret is not None

    def _unphased(self, here: KeyPath, section: str, allowed: list[str]) -> None:
        may = ", ".join(f"{section}.{name}" for name in allowed) or f"nothing of {section}"
        instead = f" Set {'.'.join(here[:2])}.lr_ratio for its peak rate." if here[2:] == ("optim", "lr") else ""
        self._say(here, f"the same in all phases. A phase may change {may}.{instead}")

    def _unknown(self, here: KeyPath, names: list[str]) -> None:
        renamed, word = new_name(here), own_word(here, names)
        if (removed := (REMOVED_KEYS | REMOVED_RECIPE_KEYS).get(".".join(here))) is not None:
            self._say(here, removed)
        elif renamed is not None:
            self._say(here, f"is now {renamed}. Rename it.")
        elif word:
            self._say(here, f"unknown key. {word}.")
        else:
            near = (
                did_you_mean(here[-1], names, "".join(f"{part}." for part in here[:-1]))
                or f" Known here: {', '.join(names) or 'none'}."
            )
            self._say(here, f"unknown key.{near}")

    def _bad(self, here: KeyPath, value: Any, expected: str, near: str = "") -> None:
        self._errors.append(f"{'.'.join(here)}={shown(value)} ({self._origin(here)}): expected {expected}.{near}")

    def _say(self, here: KeyPath, message: str) -> None:
        self._errors.append(f"{'.'.join(here)} ({self._origin(here)}): {message}")

    def _origin(self, here: KeyPath) -> str:
        return self._origins.get(here) or self._origins.get(here[:-1], "default")


def _plain(value: Any) -> Any:
    """Return values without dataclasses, for OmegaConf."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def _names(schema: type) -> list[str]:
    return [field.name for field in dataclasses.fields(schema)]


def _nearest_value(word: str, choices: list[str]) -> str:
    synonym = VALUE_SYNONYMS.get(word.lower())
    return f" Here it is {synonym}." if synonym in choices else did_you_mean(word, choices)


def _secret_in(value: Any) -> tuple[str, ...] | None:
    """Return the path within a value, however deep, of a secret by its name or shape; None without one."""
    if isinstance(value, Mapping):
        entries = [(str(name), each) for name, each in value.items()]
    elif isinstance(value, (list, tuple)):
        entries = [(str(number), each) for number, each in enumerate(value)]
    else:
        return () if isinstance(value, str) and has_secret(value) else None
    for name, each in entries:
        if is_secret_name(name):
            return (name,)
        if (inner := _secret_in(each)) is not None:
            return (name, *inner)
    return None


def _dataclass_in_dict(hint: Any) -> type | None:
    args = typing.get_args(hint)
    if typing.get_origin(hint) is dict and dataclasses.is_dataclass(args[1]):
        return typing.cast(type, args[1])
    return None
