"""Arguments that several verbs share: the run named on a command line, and options with one meaning."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modernbert_train.checkpoints.evaluations import run_of
from modernbert_train.checkpoints.manifest import CONFIG_YAML, MANIFEST
from modernbert_train.checkpoints.run_folder import RESOLVED, TOKENIZER_COPY
from modernbert_train.config.read_yaml import literal, read_yaml
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.files import os_errors_as
from modernbert_train.core.read_json import read_json
from modernbert_train.distributed.launched import check_launch_variables
from modernbert_train.errors import StorageError

if TYPE_CHECKING:
    from modernbert_train.checkpoints.checkpoint import Checkpoint
    from modernbert_train.plan.resolve import Purpose

_PATHS = ("train", "validation", "tokenizer", "path", "shards", "test")  # keys of paths, in `data` and `evals`
MODEL = "a run's folder, a checkpoint, a Hugging Face folder or hub id, a Composer checkpoint FILE.pt"


def with_run(parser: argparse.ArgumentParser) -> None:
    """Add the YAML files and overrides of a run, as `options.run`."""
    parser.add_argument("run", nargs="+", metavar="RUN [KEY=VALUE]", help="YAML files or a run's folder, overrides")


def with_licence(parser: argparse.ArgumentParser) -> None:
    """Add the licence that a model card names, as `options.licence`."""
    words = "licence of the model for its card, as the hub names it: apache-2.0, cc-by-4.0, other; default: unknown"
    parser.add_argument("--licence", "--license", metavar="ID", help=words)


def is_run(folder: Path) -> bool:
    """True if a folder has the configuration of a run."""
    return (folder / CONFIG_YAML).is_file()


def is_override(word: str) -> bool:
    """True if a word is KEY=VALUE, and no path with such a sign; a model's may follow frozen: or untrained:."""
    key, equals, _ = word.partition("=")
    if ":" in key:
        from modernbert_train.evaluate.finetune.task import named_model

        word = named_model(word).source
    return bool(equals) and not os.path.exists(word)


def read_run(arguments: list[str]) -> RunConfig:
    """Load the configuration named on a command line: YAML files or one run folder, and overrides."""
    from modernbert_train.weights.names import read_config

    return read_config(*files_and_overrides(arguments))


def files_and_overrides(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """Split the words of a command line into files (a folder's config.yaml) and overrides with `=`.

    A run's folder may have been moved or copied, or be named from another working directory. Overrides are added so
    that the configuration means this folder, and not the one that its config.yaml was written for.
    """
    paths = [Path(argument) for argument in arguments if not is_override(argument)]
    overrides = [word for path in paths for word in _present_place(path)]
    overrides += [argument for argument in arguments if is_override(argument)]
    return [path / CONFIG_YAML if path.is_dir() else path for path in paths], overrides


def _present_place(folder: Path) -> list[str]:
    """Return overrides for a run's folder, or its checkpoint's, that is not where its config.yaml says."""
    run = run_of(folder.absolute()) if (folder / MANIFEST).is_file() else folder.absolute()
    if run is None or not (run / CONFIG_YAML).is_file():
        return []
    if not any((run / each).exists() for each in ("checkpoints", "metrics.jsonl")):  # a folder of the user's YAMLs
        return []
    tree = read_yaml(run / CONFIG_YAML, {}, [])  # mistakes in it are reported when all of it is loaded
    written = Path(str(tree.get("runs_folder", RunConfig.runs_folder))) / str(tree.get("name"))
    words = [*_present_paths(run, written, tree)]
    if not _is_same(written, run):
        words += [f"runs_folder={json.dumps(literal(str(run.parent)))}", f"name={json.dumps(literal(run.name))}"]
    return words


def _is_same(written: Path, run: Path) -> bool:
    return written.is_dir() and written.samefile(run)


def _present_paths(run: Path, written: Path, tree: Any) -> Iterator[str]:
    """Yield overrides for the paths of a run's data that mean another place when they are read from here.

    Paths below the run's folder moved with it. Other relative paths begin at the folder in which the run was started,
    unless the whole project was copied with the run. The tokenizer is also in the run.

    Args:
        run: the folder.
        written: the folder as its config.yaml states it.
        tree: content of its config.yaml.
    """
    home, record = Path(), run / RESOLVED
    if record.exists():  # earlier versions wrote none
        remedy = "Restore it; or remove it, and call this from the folder in which the run was started."
        with os_errors_as(StorageError, f"{record}: cannot be read", remedy, ValueError, AttributeError, TypeError):
            home = Path(read_json(record).get("home", ""))
    begins_here = _is_same(written, run) and (not written.is_absolute() or home.absolute() == Path.cwd())
    for key, path in _paths(tree):
        inside = [run / TOKENIZER_COPY] if key == "data.tokenizer" else []
        inside += [run / path.relative_to(written)] if path.is_relative_to(written) else []
        candidates = [path, *inside, home / path] if begins_here else [*inside, home / path, path]
        present = next((each for each in candidates if each.exists()), path)
        if present != path:
            yield f"{key}={json.dumps(literal(str(present)))}"


def _paths(tree: Any) -> Iterator[tuple[str, Path]]:
    """Yield the keys of a run that name its data, with their paths."""
    data = _section(tree, "data")
    sections: dict[str, Any] = {"data": data}
    sections |= {f"data.streams.{name}": each for name, each in _section(data, "streams").items()}
    sections |= {f"evals.{name}": each for name, each in _section(tree, "evals").items()}
    for section, keys in sections.items():
        for key in _PATHS:
            if isinstance(keys, dict) and isinstance(keys.get(key), str):
                yield f"{section}.{key}", Path(keys[key])


def _section(tree: Any, key: str) -> dict[str, Any]:
    section = tree.get(key) if isinstance(tree, dict) else None
    return section if isinstance(section, dict) else {}


def named_model(words: list[str]) -> str | None:
    """Return the model that a command line names, other than a run by its folder or its YAML files."""
    from modernbert_train.weights.names import is_checkpoint

    for word in (word for word in words if not is_override(word) and not word.endswith((".yaml", ".yml"))):
        if not is_run(Path(word)) or is_checkpoint(Path(word)):
            return word
    return None


def named_checkpoint(model: str | None) -> Checkpoint | None:
    """Open a named checkpoint, before its configuration is read; None for any other model.

    Raises:
        DataError, StorageError: see `open_model`.
    """
    from modernbert_train.weights.names import look_up

    if model is None or look_up(model).kind != "checkpoint":
        return None
    from modernbert_train.weights.source import open_model

    return open_model(model).checkpoint


def read_sound(words: list[str], purpose: Purpose, num_ranks: int = 1) -> RunConfig:
    """Read a run as `read_run`; wrong keys are reported together with everything else that `resolve` would refuse.

    Args:
        words: YAML files or a run's folder, and overrides.
        purpose, num_ranks: see `resolve`.

    Raises:
        ConfigError: see `with_later_mistakes`.
    """
    from modernbert_train.plan.resolve import with_later_mistakes

    with with_later_mistakes(num_ranks, purpose):
        return read_run(words)


@contextmanager
def many_imports() -> Iterator[None]:
    """Pause garbage collection, which takes a fifth of the time to import torch and Composer.

    Afterwards it ignores the half million imported objects, which live as long as the process.

    Raises:
        ConfigError: see `check_launch_variables`; Composer's import reads the same variables, and fails.
    """
    check_launch_variables()
    first = "torch" not in sys.modules
    if first:
        gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
            gc.enable()
