"""YAML files and a.b=c overrides to a typed, frozen configuration; every mistake is reported at once.

Files merge left to right, then the overrides; later wins. The merged tree is then written leaf by leaf into an
OmegaConf structured config, so that each leaf is checked against its dataclass and one wrong key does not hide the
next. A section that carries `name` (see schema.VARIANTS) takes the dataclass of that name as its schema. What a phase
overrides of another section is checked against that section's schema, and must be marked `phased` there.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import pickle
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from modernbert_train.config.bounded_yaml import dump
from modernbert_train.config.callbacks import ARGUMENTS, REFUSED
from modernbert_train.config.knob import facts_of, phased_keys, refuse_too_many
from modernbert_train.config.plugins import import_plugins
from modernbert_train.config.read import Origins, merge, read_override, read_yaml, shown
from modernbert_train.config.renamed import new_name, own_word
from modernbert_train.config.schema import CHANGED_WHOLE, VARIANTS, PhaseConfig, RunConfig
from modernbert_train.core.redact import has_secret, is_secret_name
from modernbert_train.errors import ConfigError

T = TypeVar("T")
KeyPath = tuple[str, ...]  # of a key

_MAX_ERRORS = 100


class WrongKeys(ConfigError):
    """Keys or values that no configuration has.

    Attributes:
        rest: the configuration without them, with placeholders for values that must be given; None where a file cannot
            be read or a section is unknown. It serves to find more mistakes, and nothing else.
        sections: those with a mistake or a placeholder; each phase and evaluation is one.
    """

    def __init__(self, message: str, rest: Any, sections: frozenset[str]) -> None:
        super().__init__(message)
        self.rest = rest
        self.sections = sections


_NO_RESOLVERS = "a value, or another key as ${section.key}; resolvers are not run"
_ZEROS = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
_NO_SECRETS = (
    "holds what looks like a key, a token or a password, and a configuration is saved with the run and printed. Put it "
    "into the environment, where the libraries look for it, and leave it out here. See docs/security.md."
)


def load_run(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> RunConfig:
    """Load a run's configuration. See `load_typed`; the rules of config/check.py are not applied here.

    But a model that nothing could build is refused, since `eval`, `export` and others build it from a file alone.
    """
    config = load_typed(RunConfig, files, overrides)
    refuse_too_many(config.model, ("model",))
    return config


def load_given(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> tuple[RunConfig, frozenset[str]]:
    """The same, with the dotted keys that files and overrides give; all others have their defaults."""
    origins: Origins = {}
    config = _load(RunConfig, files, overrides, origins)
    return config, frozenset(".".join(path) for path in origins)


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
        PluginError: a plugin of the run cannot be imported.
    """
    return _load(schema, files, overrides, {})


def _load(schema: type[T], files: Sequence[str | Path], overrides: Sequence[str], origins: Origins) -> T:
    errors: list[str] = []
    tree: dict[str, Any] = {}
    for file in files:
        merge(tree, read_yaml(Path(file), origins, errors))
    for override in overrides:
        merge(tree, read_override(override, origins, errors))
    plugins = tree.get("plugins") if schema is RunConfig else None
    if isinstance(plugins, list) and _fits(plugins, list[str]):
        import_plugins(plugins, origins["plugins",])
    config = _build(schema, tree, origins, errors)
    if errors:
        more = [f"and {len(errors) - _MAX_ERRORS:,} more mistakes. Fix these first."] * (len(errors) > _MAX_ERRORS)
        raise WrongKeys("\n".join(errors[:_MAX_ERRORS] + more), *_sound_part(schema, config, errors))
    return typing.cast(T, OmegaConf.to_object(config))


def _sound_part(schema: type, config: Any, errors: Sequence[str]) -> tuple[Any, frozenset[str]]:
    """`rest` and `sections` of WrongKeys."""
    known = {field.name for field in dataclasses.fields(schema)}
    found = [re.match(r"\w+(\.[\w-]+)*", error) for error in errors]
    keys = [key[0].split(".") for key in found if key is not None and key[0].split(".")[0] in known]
    if len(keys) < len(errors):
        return None, frozenset()
    try:
        OmegaConf.resolve(config)
        for key in OmegaConf.missing_keys(config):
            OmegaConf.update(config, key, 1)
            keys.append(key.split("."))
        rest = OmegaConf.to_object(config)
    except (OmegaConfBaseException, TypeError, ValueError):
        return None, frozenset()
    return rest, frozenset(".".join(key[: 2 if key[0] in ("phases", "evals") else 1]) for key in keys)


def to_yaml(config: Any) -> str:
    """The configuration as YAML that loads to the same configuration."""
    return dump(dataclasses.asdict(config))


def differences(old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """Dotted keys whose values differ between two configurations, with both values (None where a key is absent)."""
    before, after = flat(old), flat(new)
    keys = [*before, *(key for key in after if key not in before)]
    changed = [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]
    # a section that is empty on one side: what stands in it on the other is there key by key
    return [each for each in changed if {} not in each or not any(key.startswith(f"{each[0]}.") for key in keys)]


def flat(config: Any) -> dict[str, Any]:
    """Every value of a configuration by its dotted key."""
    return {".".join(path): value for path, value in _leaves(dataclasses.asdict(config))}


# --- checking against the schema ---------------------------------------------------------------------------------


def _build(schema: type, tree: dict[str, Any], origins: Origins, errors: list[str]) -> Any:
    config = _structured(schema)
    _Filling(config, origins, errors).fill(config, schema, tree, ())
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
    """The schema with its defaults, to be filled; a copy, made in an eighth of the time that `deepcopy` takes."""
    return pickle.loads(_defaults(schema))


@functools.cache
def _defaults(schema: type) -> bytes:
    config = OmegaConf.structured(schema)
    _set_editable(config)
    return pickle.dumps(config)


@functools.cache
def _hints(schema: type) -> dict[str, Any]:
    return typing.get_type_hints(schema)


def _set_editable(config: Any) -> None:
    """Frozen dataclasses make read-only configs; while one is being filled it must not be."""
    OmegaConf.set_readonly(config, False)
    for key in config:
        if not OmegaConf.is_missing(config, key) and OmegaConf.is_dict(config[key]):
            _set_editable(config[key])


class _Filling:
    """A structured config that a plain tree is written into, key by key, and the mistakes that are met."""

    def __init__(self, root: Any, origins: Origins, errors: list[str]) -> None:
        self._root, self._origins, self._errors = root, origins, errors

    def fill(self, config: Any, schema: type, tree: Any, path: KeyPath) -> None:
        hints, names = _hints(schema), _names(schema)
        facts = {field.name: facts_of(field) for field in dataclasses.fields(schema)}
        for key, value in sorted(tree.items(), key=lambda item: item[0] == "phases"):  # after what they override
            here = (*path, key)
            if key not in names:
                of_the_run = schema is PhaseConfig and key in RunConfig.__dataclass_fields__ and new_name(here) is None
                self._unphased(here, key, []) if of_the_run else self._unknown(here, names)
                continue
            hint = _strip_optional(hints[key])
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
                self._leaf(config, key, value, hint, here)
            elif value is None and hint is not hints[key]:
                config[key] = None
            else:
                self._section(config, key, here, here, value, typing.cast(type, hint))

    def _section(self, config: Any, key: str, section: KeyPath, here: KeyPath, value: Any, base: type) -> None:
        """The section at `here`, of `base` or of the variant that it names."""
        schema = self._variant(section, here, value, base, config.get(key))
        if schema is None:
            return
        if config.get(key) is None or OmegaConf.get_type(config, key) is not schema:
            config[key] = _structured(schema)
            _set_editable(config[key])
        if self._is_section(here, value, f"keys {', '.join(_names(schema))}"):
            self.fill(config[key], schema, value, here)

    def _variant(self, section: KeyPath, here: KeyPath, value: Any, base: type, default: Any) -> type | None:
        """The schema of what stands at `here`: `base`, or that of its name in the table of the section.

        The section is `here` itself or, where it has an entry for each name, the one above.
        """
        table = VARIANTS.get(".".join(section))
        if table is None:
            return base
        if value is not None and not self._is_section(here, value, f"a name, one of {', '.join(table)}, and its keys"):
            return None
        name = None if value is None else value.get("name", None if default is None else default.get("name"))
        if not isinstance(name, str) or name not in table:
            self._bad((*here, "name"), name, "one of " + ", ".join(table), _nearest(str(name), list(table)))
            return None
        return table[name]

    def _overrides(self, config: Any, section: str, value: Any, here: KeyPath) -> None:
        """What a phase changes of a section of the run, as typed as it is there; null takes a change back."""
        schema = OmegaConf.get_type(self._root, section)
        assert schema is not None
        allowed = phased_keys(schema)
        if value is None or not self._is_section(here, value, f"keys {', '.join(allowed)}"):
            return
        of_run = self._root[section]
        if section in CHANGED_WHOLE and value.get("name", None) not in (None, of_run.name):
            variant = self._variant((section,), (section,), value, schema, of_run)
            if variant is None:
                return
            schema, allowed = variant, _names(variant)
        typed = _structured(schema)
        for key, item in value.items():
            if key not in _names(schema):
                self._unknown((*here, key), allowed)
            elif key not in allowed:
                self._unphased((*here, key), section, allowed)
            elif item is not None:
                mistakes = len(self._errors)
                self._leaf(typed, key, item, _strip_optional(_hints(schema)[key]), (*here, key))
                if len(self._errors) == mistakes:
                    config[section][key] = typed._get_node(key)

    def _arguments(self, config: Any, section: str, value: Any) -> None:
        """`callbacks:` and `loggers:`, whose entries are what Composer's constructors take; see config/callbacks.py."""
        if not self._is_section((section,), value, "one entry for each name"):
            return
        known = ARGUMENTS[section]
        for name, arguments in value.items():
            here = (section, name)
            if self._is_refused(here):
                continue
            if name not in known:
                self._unknown(here, list(known))
            elif isinstance(arguments, Mapping):
                mistakes = len(self._errors)
                for key in arguments:
                    if key not in known[name] and not self._is_refused((*here, key)):
                        self._unknown((*here, key), list(known[name]))
                for key, each in arguments.items():
                    for text in _texts(each):
                        if "${" in text and ":" in text:
                            self._bad((*here, key), text, _NO_RESOLVERS)
                self._has_secret(
                    here, {key: arguments[key] for key in arguments if ".".join((*here, key)) not in REFUSED}
                )
                if len(self._errors) == mistakes:
                    config[section][name] = arguments
            elif arguments is not False:
                self._bad(here, arguments, "a section with its arguments, {} for none, or false to leave it out")

    def _leaf(self, config: Any, key: str, value: Any, hint: Any, here: KeyPath) -> None:
        if self._has_secret(here, value):
            return
        interpolations = [text for text in _texts(value) if "${" in text]
        if any(":" in text for text in interpolations):
            # a resolver such as oc.env would copy secrets of the environment into the saved configuration
            self._bad(here, value, _NO_RESOLVERS)
            return
        value = _as_meant(value, hint)
        try:
            if value is not None and not interpolations and not _fits(value, hint):
                raise ValueError(value)
            config[key] = value
        except (OmegaConfBaseException, ValueError, TypeError):
            choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
            near = _nearest(str(value), [str(choice) for choice in choices]) if choices else _spelled_out(value, hint)
            self._bad(here, value, _describe(hint), near)

    def _is_section(self, here: KeyPath, value: Any, wanted: str) -> bool:
        if not isinstance(value, Mapping):
            self._bad(here, value, f"a section with {wanted}")
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
        instead = f" Its peak rate follows from {'.'.join(here[:2])}.lr_ratio." if here[2:] == ("optim", "lr") else ""
        self._say(here, f"the same in all phases. A phase may change {may}.{instead}")

    def _unknown(self, here: KeyPath, names: list[str]) -> None:
        renamed, word = new_name(here), own_word(here, names)
        if renamed is not None:
            self._say(here, f"is {renamed} now. Rename it.")
        elif word:
            self._say(here, f"unknown key. {word}.")
        else:
            near = _nearest(here[-1], names, ".".join(here[:-1])) or f" Known here: {', '.join(names) or 'none'}."
            self._say(here, f"unknown key.{near}")

    def _bad(self, here: KeyPath, value: Any, wanted: str, near: str = "") -> None:
        self._errors.append(f"{'.'.join(here)}={shown(value)} ({self._origin(here)}): expected {wanted}.{near}")

    def _say(self, here: KeyPath, what: str) -> None:
        self._errors.append(f"{'.'.join(here)} ({self._origin(here)}): {what}")

    def _origin(self, here: KeyPath) -> str:
        return self._origins.get(here) or self._origins.get(here[:-1], "default")


def _as_meant(value: Any, hint: Any) -> Any:
    """A value of the type of its key, where YAML has another for it."""
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 1e9 tokens is a whole number, whatever YAML thinks
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        numbers = float in typing.get_args(hint)
        return tuple(float(item) if numbers and isinstance(item, int) else item for item in value)
    if hint == dict[str, str] and isinstance(value, Mapping):
        simple = (bool, int, float)  # true and 1 are what someone writes who means the texts
        return {name: json.dumps(item) if isinstance(item, simple) else item for name, item in value.items()}
    return value


def _spelled_out(value: Any, hint: Any) -> str:
    """A number with a letter for its thousands, as YAML has it."""
    found = re.fullmatch(r"([0-9.]{1,20})\s?([kKmMgGbBtT])", value) if isinstance(value, str) else None
    if found is None or hint not in (int, float):
        return ""
    return f" Write {found[1]}e{_ZEROS[found[2].lower()]}."


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the very type asked for, which OmegaConf would otherwise convert to; numbers are finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if hint == list[str]:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return hint not in (str, bool, int, float) or type(value) is hint


def _names(schema: type) -> list[str]:
    return [field.name for field in dataclasses.fields(schema)]


def _nearest(word: str, names: list[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f" Did you mean {prefix + '.' if prefix else ''}{near[0]}?" if near else ""


def _secret_in(value: Any) -> tuple[str, ...] | None:
    """Where within a value, however deep, something is named or shaped as secrets are; None if nothing is."""
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


def _describe(hint: Any) -> str:
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
