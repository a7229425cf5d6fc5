"""Arguments that several verbs share: the run named on a command line, and options with one meaning."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modernbert_train.checkpoints.manifest import CONFIG_YAML, MANIFEST
from modernbert_train.checkpoints.results import run_of
from modernbert_train.checkpoints.run_folder import RESOLVED, TOKENIZER_COPY
from modernbert_train.config.read import read_yaml
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.read_json import read_json

if TYPE_CHECKING:
    from modernbert_train.checkpoints.checkpoint import Checkpoint

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


def read_run(arguments: list[str]) -> RunConfig:
    """Load the configuration named on a command line: YAML files or one run folder, and overrides."""
    from modernbert_train.weights.names import read_config

    return read_config(*files_and_overrides(arguments))


def files_and_overrides(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """Split the words of a command line into files (a folder's config.yaml) and overrides with `=`.

    A run's folder may have been moved or copied, or be named from another working directory. Overrides are added so
    that the configuration means this folder, and not the one that its config.yaml was written for.
    """
    paths = [Path(argument) for argument in arguments if "=" not in argument]
    overrides = [word for path in paths for word in _present_place(path)]
    overrides += [argument for argument in arguments if "=" in argument]
    return [path / CONFIG_YAML if path.is_dir() else path for path in paths], overrides


def _present_place(folder: Path) -> list[str]:
    """Return overrides for a run's folder, or its checkpoint's, that is not where its config.yaml says."""
    place = run_of(folder.absolute()) if (folder / MANIFEST).is_file() else folder.absolute()
    if place is None or not (place / CONFIG_YAML).is_file():
        return []
    if not any((place / each).exists() for each in ("checkpoints", "metrics.jsonl")):  # a folder of the user's YAMLs
        return []
    tree = read_yaml(place / CONFIG_YAML, {}, [])  # mistakes in it are reported when all of it is loaded
    written = Path(str(tree.get("runs_folder", RunConfig.runs_folder))) / str(tree.get("name"))
    words = [*_present_data(place, tree.get("data"))]
    if not (written.is_dir() and written.samefile(place)):
        words += [f"runs_folder={json.dumps(str(place.parent))}", f"name={json.dumps(place.name)}"]
    return words


def _present_data(run: Path, data: Any) -> Iterator[str]:
    """Yield overrides for paths in a run's data section that do not exist from here: the run's own copy of its
    tokenizer, and shards below the folder in which the run was started."""
    if not isinstance(data, dict):
        return
    tokenizer = data.get("tokenizer")
    if isinstance(tokenizer, str) and not Path(tokenizer).exists() and (run / TOKENIZER_COPY).is_dir():
        yield f"data.tokenizer={json.dumps(str(run / TOKENIZER_COPY))}"
    home = None
    with suppress(OSError, ValueError, KeyError, TypeError):  # written by an earlier version, or damaged
        home = Path(read_json(run / RESOLVED)["home"])
    streams = data.get("streams") if isinstance(data.get("streams"), dict) else {}
    named = {"data.train": data.get("train"), "data.validation": data.get("validation")}
    named |= {f"data.streams.{key}.path": each.get("path") for key, each in streams.items() if isinstance(each, dict)}
    for key, path in named.items():
        if home is not None and isinstance(path, str) and not Path(path).exists() and (home / path).is_dir():
            yield f"{key}={json.dumps(str(home / path))}"


def named_model(words: list[str]) -> str | None:
    """Return the model that a command line names, other than a run by its folder or its YAML files."""
    from modernbert_train.weights.names import is_checkpoint

    for word in (word for word in words if "=" not in word and not word.endswith((".yaml", ".yml"))):
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


@contextmanager
def many_imports() -> Iterator[None]:
    """Pause garbage collection, which takes a fifth of the time to import torch and Composer.

    Afterwards the half million objects that exist by then are exempt from it; they stay to the end.
    """
    first = "torch" not in sys.modules
    if first:
        gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
            gc.enable()
