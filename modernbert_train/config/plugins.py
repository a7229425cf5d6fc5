"""Users' packages that add encoders, objectives, optimizers or evaluations: `plugins:` in a run's YAML.

Importing a plugin calls `add` with the dataclass of each. The code is named as text, "package.module:name", and
imported when a run builds it, so `check` works without torch if the plugin's first module does.

A configuration may be untrusted. It can name an installed package but not bring one, and a package whose named module
does not mention modernbert_train is refused before any of it runs.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import re
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, TypeVar

from modernbert_train.config.schema import VARIANTS, EvaluatorConfig, ModelConfig, ObjectiveConfig, OptimConfig
from modernbert_train.errors import ConfigError, PluginError

# section -> the base of its dataclasses, and the keywords of `add` for its code, each the name of a table
_KINDS: dict[str, tuple[type, set[str]]] = {
    "model": (ModelConfig, {"encoder", "count"}),
    "objective": (ObjectiveConfig, {"objective"}),
    "optim": (OptimConfig, {"optimizer"}),
    "evals": (EvaluatorConfig, {"evaluator"}),
}
_RENAMED = {"init_std_of": "init_of", "init_cutoff_of": "init_of"}  # former methods of ModelConfig -> their names now
_added: dict[tuple[str, type], str] = {}  # table and dataclass -> "package.module:name"

K = TypeVar("K")
V = TypeVar("V")


def code_at(location: str) -> Any:
    """Import "package.module:name"."""
    module, _, name = location.partition(":")
    return getattr(importlib.import_module(module), name)


class Rows(dict[K, V]):
    """A table from dataclass to code, whose rows may be text: "package.module:name", imported at lookup.

    So a run imports only the kinds that it uses, from this package or from plugins.

    Args:
        table: keyword of `add` for its rows.
        rows: the rows of this package.
    """

    def __init__(self, table: str, rows: Mapping[K, V | str]) -> None:
        super().__init__(rows)  # type: ignore[arg-type]  # text until its lookup
        self._table = table

    def __getitem__(self, key: K) -> V:
        row = super().__getitem__(key)
        if isinstance(row, str):
            row = self[key] = code_at(row)
        return row

    def __missing__(self, config: Any) -> V:
        """Import the row that a plugin has added.

        Raises:
            KeyError: the row is missing.
            PluginError: it cannot be imported.
        """
        location = _added[self._table, config]
        module, _, name = location.partition(":")
        row: V = _imported(module, f"{config.__module__}: {self._table}={location}", name)
        self[config] = row
        return row


def add(config: type[Any], **tables: str) -> None:
    """Add an encoder, objective, optimizer or evaluation; called when a plugin is imported.

    Args:
        config: its frozen dataclass, a ModelConfig, ObjectiveConfig, OptimConfig or EvaluatorConfig with a `name`.
        tables: "package.module:name" of the code: `encoder` and `count` of a model, `objective`, `optimizer`,
            or `evaluator`; see docs/extending.md.

    Raises:
        ConfigError: the name is taken, something is missing, or a method has a former name.
    """
    where = _path(config)
    section = next((name for name, (base, _) in _KINDS.items() if issubclass(config, base)), None)
    if section is None:
        bases = ", ".join(base.__name__ for base, _ in _KINDS.values())
        raise ConfigError(f"{where}: not a known kind. Derive it from {bases}.")
    name = config.__dataclass_fields__["name"].default
    if not isinstance(name, str) or name == "???" or "__dataclass_params__" not in vars(config):
        raise ConfigError(
            f'{where}: lacks a name. Begin it with @dataclass(frozen=True, kw_only=True) and name: str = "...".'
        )
    _, keywords = _KINDS[section]
    if tables.keys() != keywords or not all(
        re.fullmatch(r"[\w.]+:\w+", dotted_name) for dotted_name in tables.values()
    ):
        needed = ", ".join(f'{each}="package.module:name"' for each in sorted(keywords))
        raise ConfigError(f"{where}: add() is called with {tables}. Call it with {needed}.")
    if (existing := VARIANTS[section].get(name)) is not None and _path(existing) != where:
        raise ConfigError(f"{where}: {section}.name={name} exists already, {_path(existing)}. Choose another name.")
    if former := [method for method in _RENAMED if hasattr(config, method)]:
        raise ConfigError(
            f"{where}: defines {' and '.join(former)}, which nothing calls any more. Define {_RENAMED[former[0]]} "
            "instead; its docstring says what it returns."
        )
    VARIANTS[section][name] = config
    _added.update({(table, config): dotted_name for table, dotted_name in tables.items()})


def _path(config: type[Any]) -> str:
    return f"{config.__module__}.{config.__qualname__}"


def import_plugins(names: Sequence[str], origin: str) -> None:
    """Import the plugins of a run, each once per process.

    Args:
        names: of modules.
        origin: file and line of the names, for messages.

    Raises:
        PluginError: a module is missing, is not a plugin, or fails.
    """
    for number, name in enumerate(names):
        where = f"plugins[{number}]={name} ({origin})"
        spec = _find(name) if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) else None
        if spec is None or spec.origin is None or not spec.has_location:
            raise PluginError(
                f"{where}: cannot be imported: no such module. Install its package (pip install -e FOLDER), or start "
                "with PYTHONPATH=FOLDER, the folder that contains it."
            )
        if b"modernbert_train" not in Path(spec.origin).read_bytes():
            raise PluginError(
                f"{where}: {spec.origin} does not use modernbert_train, so it adds nothing. Name the module that "
                "calls modernbert_train.config.plugins.add."
            )
        _imported(name, where)


def _imported(module: str, where: str, name: str | None = None) -> Any:
    """Import a module of a plugin, or a name in it."""
    try:
        imported = importlib.import_module(module)
        return imported if name is None else getattr(imported, name)
    except Exception as error:  # a user's code may raise anything
        raise PluginError(
            f"{where}: cannot be imported: {_described(error)}. Fix the plugin, or install its requirements."
        ) from error


def versions(names: Sequence[str]) -> dict[str, str]:
    """Return the version of each plugin's package with a hash of its source."""
    return {name: f"{_version(name)} ({_hash(name)})" for name in names}


_distributions = functools.cache(importlib.metadata.packages_distributions)  # takes a fifth of a second


def _version(name: str) -> str:
    package = name.partition(".")[0]
    distribution = _distributions().get(package, [package])[0]
    return next((each.version for each in importlib.metadata.distributions(name=distribution)), "no version")


def _hash(name: str) -> str:
    """Hash all modules of the package."""
    spec, sha256 = _find(name.partition(".")[0]), hashlib.sha256()
    for folder in [] if spec is None else spec.submodule_search_locations or [str(spec.origin)]:
        top = Path(folder)
        for path in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
            sha256.update(f"{path.relative_to(top.parent)}\n".encode() + path.read_bytes())
    return sha256.hexdigest()[:12]


def _find(name: str) -> ModuleSpec | None:
    """Find a module without importing it or its packages."""
    package, *inner = name.split(".")
    spec = None
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec


def _described(error: Exception) -> str:
    """Describe an error with the line that raised it; syntax errors and errors of `add` name it already."""
    if isinstance(error, ConfigError):
        return str(error).rstrip(".")
    at = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename != __file__ and "importlib" not in frame.filename and not isinstance(error, SyntaxError):
            at = f" ({frame.filename}:{frame.lineno})"
    return f"{type(error).__name__}: {error}{at}"
