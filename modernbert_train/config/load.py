"""Load YAML files and a.b=c overrides into a typed, frozen configuration; every mistake is reported at once.

Files merge left to right, then the overrides; later wins. The merged tree is written leaf by leaf over the defaults
(filling.py), so each leaf is checked against its dataclass and one wrong key does not hide the next. Interpolations are
resolved last, and the dataclasses are built from the result.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from modernbert_train.config.bounded_yaml import dump
from modernbert_train.config.filling import Filling, Section, build_dataclass, missing_paths, section_of
from modernbert_train.config.knob import refuse_too_many
from modernbert_train.config.plugins import import_plugins
from modernbert_train.config.read_yaml import Origins, is_saved, literal, merge, read_override, read_yaml
from modernbert_train.config.renamed import without_removed
from modernbert_train.config.schema import RunConfig
from modernbert_train.config.value_types import fits, hints_of, spelled, without_none
from modernbert_train.core.trees import dotted
from modernbert_train.errors import ConfigError

T = TypeVar("T")

_MAX_ERRORS = 100


class WrongKeys(ConfigError):
    """Unknown keys or invalid values.

    Attributes:
        rest: the configuration without them, with placeholders for required values; None if a file cannot be read or a
            section is unknown. It only serves to find more mistakes.
        sections: the sections with a mistake or a placeholder; each phase and evaluation is one.
    """

    def __init__(self, message: str, rest: Any, sections: frozenset[str]) -> None:
        super().__init__(message)
        self.rest = rest
        self.sections = sections


def load_run(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> RunConfig:
    """Load a run's configuration without the rules of config/check.py; see `load_typed`.

    A model too large to build is refused, since `eval`, `export` and others build it from a file without `check`.
    """
    config = load_typed(RunConfig, files, overrides)
    refuse_too_many(config.model, ("model",))
    return config


def load_given(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> tuple[RunConfig, frozenset[str]]:
    """Load a run, and return the dotted keys that files and overrides give; all others have their defaults."""
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
        ConfigError: lists every unknown key and bad value with its file, line and remedy; lists missing values only if
            there is no other mistake, since a misspelt key is missing too.
        PluginError: a plugin of the run cannot be imported.
    """
    return _load(schema, files, overrides, {})


_OF_VERBS = {  # key -> the only kind of file that has it
    "phases": "the file of a run, which `train`, `check` and `plan` read",
    "sources": "a spec of data, which `prepare` reads",
}


def _load(schema: type[T], files: Sequence[str | Path], overrides: Sequence[str], origins: Origins) -> T:
    errors: list[str] = []
    tree: dict[str, Any] = {}
    for file in map(Path, files):
        own = read_yaml(file, origins, errors)
        for key, kind in _OF_VERBS.items():
            if key in own and key not in hints_of(schema):
                raise ConfigError(f"{file}: is {kind}, for it has `{key}`. Give a file for this verb.")
        merge(tree, without_removed(own) if is_saved(file) else own)
    for override in overrides:
        merge(tree, read_override(override, origins, errors))
    plugins = tree.get("plugins") if schema is RunConfig else None
    if isinstance(plugins, list) and fits(plugins, list[str]):
        import_plugins(plugins, origins["plugins",])
    filling = Filling(schema, origins, errors)
    filling.fill(filling.root, tree, ())
    if not errors:
        errors.extend(filling.resolve())
    if not errors:
        errors.extend(
            f"{'.'.join(path)}: missing. It has no default; set it in the YAML or as {'.'.join(path)}=..."
            for path in sorted(missing_paths(filling.root))
        )
    if errors:
        more = [f"and {len(errors) - _MAX_ERRORS:,} more mistakes. Fix these first."] * (len(errors) > _MAX_ERRORS)
        raise WrongKeys("\n".join(errors[:_MAX_ERRORS] + more), *_sound_part(filling, errors))
    return typing.cast(T, build_dataclass(filling.root))


def _sound_part(filling: Filling, errors: Sequence[str]) -> tuple[Any, frozenset[str]]:
    """Return the configuration without its wrong keys, if it can be resolved: `rest` and `sections` of WrongKeys."""
    keys: list[tuple[str, ...]] = []
    for error in errors:
        key = re.match(r"\w+(\.[\w-]+)*", error)
        if key is None:
            return None, frozenset()
        path = tuple(key[0].split("."))
        meant = re.search(r"Did you mean (\w+)\?", error)  # the rest of a misspelt section cannot be checked either
        keys += [path] if path[0] in filling.root else [(meant[1],)] if meant else []
    if list(filling.resolve()):
        return None, frozenset()
    for path in missing_paths(filling.root):
        section = section_of(filling.root, path)
        hint = hints_of(section.schema)[path[-1]] if isinstance(section, Section) else Any
        section[path[-1]] = spelled(1, without_none(hint))
        if not fits(section[path[-1]], hint):
            return None, frozenset()
        keys.append(path)
    try:
        rest = build_dataclass(filling.root)
    except (TypeError, ValueError):
        return None, frozenset()
    return rest, frozenset(".".join(key[: 2 if key[0] in ("phases", "evals") else 1]) for key in keys)


def to_yaml(config: Any) -> str:
    """Return the configuration as YAML that loads to the same configuration."""
    return dump(literal(dataclasses.asdict(config)))


def differences(old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """Return the dotted keys whose values differ, with both values (None if a key is absent)."""
    before, after = flat(old), flat(new)
    keys = [*before, *(key for key in after if key not in before)]
    changed = [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]
    # a section that is empty on one side: the other side's values are listed key by key
    return [each for each in changed if {} not in each or not any(key.startswith(f"{each[0]}.") for key in keys)]


def flat(config: Any) -> dict[str, Any]:
    """Return every value of a configuration by its dotted key."""
    return dotted(dataclasses.asdict(config))
