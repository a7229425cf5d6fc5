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

from modernbert_train.config.callbacks import ARGUMENTS, REFUSED
from modernbert_train.config.knob import facts_of, phased_keys, refuse_too_many
from modernbert_train.config.plugins import import_plugins
from modernbert_train.config.read import Origins, merge, read_override, read_yaml, shown
from modernbert_train.config.renamed import new_name, own_word
from modernbert_train.config.schema import CHANGED_WHOLE, VARIANTS, PhaseConfig, RunConfig
from modernbert_train.core.redact import has_secret, is_secret_name
from modernbert_train.errors import ConfigError

T = TypeVar("T")

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
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))  # in a third of the time of structured()


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


def _fill(config: Any, schema: type, tree: Any, path: tuple[str, ...], origins: Origins, errors: list[str]) -> None:
    hints = _hints(schema)
    names = [f.name for f in dataclasses.fields(schema)]
    facts = {f.name: facts_of(f) for f in dataclasses.fields(schema)}
    for key, value in sorted(tree.items(), key=lambda item: item[0] == "phases"):  # after what they override
        here = (*path, key)
        if key not in names:
            of_the_run = schema is PhaseConfig and key in RunConfig.__dataclass_fields__ and new_name(here) is None
            errors.append(_unphased(here, key, [], origins) if of_the_run else _unknown(here, names, origins))
            continue
        hint = _strip_optional(hints[key])
        inner: type | None = _dataclass_in_dict(hint)
        if facts[key].overrides:
            _fill_overrides(config, key, value, here, origins, errors)
        elif not path and key in ARGUMENTS:
            _fill_callbacks(config, key, value, origins, errors)
        elif inner is not None:
            if not isinstance(value, Mapping):
                errors.append(_bad(here, value, "a section with one entry for each name", origins))
                continue
            for name, entry in value.items():
                if entry is None:
                    continue
                schema_of_entry = _variant(here, (*here, name), entry, inner, None, origins, errors)
                if schema_of_entry is None:
                    continue
                config[key][name] = _structured(schema_of_entry)
                _set_editable(config[key][name])
                _fill_section(config[key], name, schema_of_entry, entry, (*here, name), origins, errors)
        elif dataclasses.is_dataclass(hint):
            if value is None and hint is not hints[key]:
                config[key] = None
                continue
            variant = _variant(here, here, value, typing.cast(type, hint), config, origins, errors)
            if variant is None:
                continue
            assert isinstance(variant, type)
            if config[key] is None or OmegaConf.get_type(config, key) is not variant:
                config[key] = _structured(variant)
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


def _fill_overrides(
    config: Any, section: str, value: Any, here: tuple[str, ...], origins: Origins, errors: list[str]
) -> None:
    """What a phase changes of a section of the run, as typed as it is there; null takes a change back."""
    schema = OmegaConf.get_type(config._get_root(), section)
    assert schema is not None
    allowed, known = phased_keys(schema), [field.name for field in dataclasses.fields(schema)]
    if value is None:
        return
    if not isinstance(value, Mapping):
        errors.append(_bad(here, value, f"a section with keys {', '.join(allowed)}", origins))
        return
    if section in CHANGED_WHOLE and value.get("name", None) not in (None, config._get_root()[section].name):
        variant = _variant((section,), (section,), value, schema, config._get_root(), origins, errors)
        if variant is None:
            return
        schema, allowed = variant, [field.name for field in dataclasses.fields(variant)]
        known = allowed
    typed = _structured(schema)
    for key, item in value.items():
        if key not in known:
            errors.append(_unknown((*here, key), allowed, origins))
        elif key not in allowed:
            errors.append(_unphased((*here, key), section, allowed, origins))
        elif item is not None:
            mistakes = len(errors)
            _set_leaf(
                typed, key, item, _strip_optional(typing.get_type_hints(schema)[key]), (*here, key), origins, errors
            )
            if len(errors) == mistakes:
                config[section][key] = typed._get_node(key)


def _unphased(here: tuple[str, ...], section: str, allowed: list[str], origins: Origins) -> str:
    may = ", ".join(f"{section}.{name}" for name in allowed) or f"nothing of {section}"
    instead = f" Its peak rate follows from {'.'.join(here[:2])}.lr_ratio." if here[2:] == ("optim", "lr") else ""
    return f"{'.'.join(here)} ({_origin(here, origins)}): the same in all phases. A phase may change {may}.{instead}"


def _fill_callbacks(config: Any, section: str, value: Any, origins: Origins, errors: list[str]) -> None:
    """`callbacks:` and `loggers:`, whose entries are what Composer's constructors take; see config/callbacks.py."""
    if not isinstance(value, Mapping):
        errors.append(_bad((section,), value, "a section with one entry for each name", origins))
        return
    known = ARGUMENTS[section]
    for name, arguments in value.items():
        here = (section, name)
        if _refused(here, origins, errors):
            continue
        if name not in known:
            errors.append(_unknown(here, list(known), origins))
        elif isinstance(arguments, Mapping):
            wrong = [key for key in arguments if key not in known[name] and not _refused((*here, key), origins, errors)]
            errors.extend(_unknown((*here, key), list(known[name]), origins) for key in wrong)
            texts = [(key, text) for key, value in arguments.items() for text in _texts(value)]
            resolvers = [(key, text) for key, text in texts if "${" in text and ":" in text]
            errors.extend(_bad((*here, key), text, _NO_RESOLVERS, origins) for key, text in resolvers)
            secret = _secret_in(
                {key: each for key, each in arguments.items() if f"{section}.{name}.{key}" not in REFUSED}
            )
            if secret is not None:
                errors.append(f"{'.'.join((*here, *secret))} ({_origin(here, origins)}): {_NO_SECRETS}")
            if not wrong and not resolvers and secret is None:
                config[section][name] = arguments
        elif arguments is not False:
            wanted = "a section with its arguments, {} for none, or false to leave it out"
            errors.append(_bad(here, arguments, wanted, origins))


def _refused(here: tuple[str, ...], origins: Origins, errors: list[str]) -> bool:
    reason = REFUSED.get(".".join(here))
    if reason is not None:
        errors.append(f"{'.'.join(here)} ({_origin(here, origins)}): cannot work here, {reason}. Remove it.")
    return reason is not None


def _variant(
    section: tuple[str, ...],
    here: tuple[str, ...],
    value: Any,
    base: type,
    config: Any,
    origins: Origins,
    errors: list[str],
) -> type | None:
    """The schema of what stands at `here`: `base`, or that of its name in the table of the section.

    The section is `here` itself or, where it has an entry for each name, the one above. Its default is in `config`;
    entries have none.
    """
    table = VARIANTS.get(".".join(section))
    if table is None:
        return base
    if value is not None and not isinstance(value, Mapping):
        errors.append(_bad(here, value, f"a section with a name, one of {', '.join(table)}, and its keys", origins))
        return None
    default = None if config is None else config[here[-1]].get("name")
    name = None if value is None else value.get("name", default)
    if not isinstance(name, str) or name not in table:
        near = _nearest(str(name), list(table))
        errors.append(_bad((*here, "name"), name, "one of " + ", ".join(table), origins) + near)
        return None
    return table[name]


def _set_leaf(
    config: Any, key: str, value: Any, hint: Any, here: tuple[str, ...], origins: Origins, errors: list[str]
) -> None:
    if (secret := _secret_in(value)) is not None:
        errors.append(f"{'.'.join((*here, *secret))} ({_origin(here, origins)}): {_NO_SECRETS}")
        return
    interpolations = [text for text in _texts(value) if "${" in text]
    if any(":" in text for text in interpolations):
        # a resolver such as oc.env would copy secrets of the environment into the saved configuration
        errors.append(_bad(here, value, _NO_RESOLVERS, origins))
        return
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # 1e9 tokens is a whole number, whatever YAML thinks
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    elif typing.get_origin(hint) is tuple and isinstance(value, list):
        numbers = float in typing.get_args(hint)
        value = tuple(float(item) if numbers and isinstance(item, int) else item for item in value)
    elif hint == dict[str, str] and isinstance(value, Mapping):
        simple = (bool, int, float)  # true and 1 are what someone writes who means the texts
        value = {name: json.dumps(item) if isinstance(item, simple) else item for name, item in value.items()}
    wrong_kind = value is not None and not interpolations and not _fits(value, hint)
    try:
        if wrong_kind:
            raise ValueError(value)
        config[key] = value
    except (OmegaConfBaseException, ValueError, TypeError):
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        near = _nearest(str(value), [str(choice) for choice in choices]) if choices else _spelled_out(value, hint)
        errors.append(_bad(here, value, _describe(hint), origins) + near)


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


def _unknown(here: tuple[str, ...], names: list[str], origins: Origins) -> str:
    renamed = new_name(here)
    if renamed is not None:
        return f"{'.'.join(here)} ({_origin(here, origins)}): is {renamed} now. Rename it."
    word = own_word(here, names)
    near = (
        f" {word}."
        if word
        else _nearest(here[-1], names, ".".join(here[:-1])) or f" Known here: {', '.join(names) or 'none'}."
    )
    return f"{'.'.join(here)} ({_origin(here, origins)}): unknown key.{near}"


def _bad(here: tuple[str, ...], value: Any, wanted: str, origins: Origins) -> str:
    return f"{'.'.join(here)}={shown(value)} ({_origin(here, origins)}): expected {wanted}."


def _origin(here: tuple[str, ...], origins: Origins) -> str:
    return origins.get(here) or origins.get(here[:-1], "default")


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
