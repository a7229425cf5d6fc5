"""What the recipes have in common: a library that may not be there, settings, an encoder as a folder, a run's folder.

A run is a folder with the settings, the model under `model`, and result.json, which is written last: a folder without
it is not finished, and the same command starts it again.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from modernbert_train.config.load import load_typed, to_yaml
from modernbert_train.errors import ConfigError, DataError, StorageError
from modernbert_train.files import publish, write_whole
from modernbert_train.finetune.result import RESULT
from modernbert_train.finetune.task import run_name
from modernbert_train.ranks.gpus import uses_gpu

MODEL = "model"
T = TypeVar("T")


def require(extra: str, *libraries: str) -> None:
    """Refuse to go on without libraries, which are looked for and not imported.

    Raises:
        ConfigError: names those that are missing, and what installs them.
    """
    if missing := [name for name in libraries if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"{extra}: needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed. "
            f"pip install 'modernbert-train[{extra}]'"
        )


def require_one_process(verb: str) -> None:
    """The libraries would each train a model of their own, or average gradients in ways of theirs."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(f"{verb}: trains in one process, and WORLD_SIZE={os.environ['WORLD_SIZE']}. Start it alone.")


def read_settings(
    schema: type[T], problems: Callable[[T], Iterator[str]], file: Path, overrides: Sequence[str] = ()
) -> T:
    """Settings out of a YAML file and the command line.

    Raises:
        ConfigError: what is wrong with them, all of it.
    """
    config = load_typed(schema, [file], overrides)
    if found := list(problems(config)):
        raise ConfigError("\n".join(f"{file}: {problem}" for problem in found))
    return config


def choose_device(asked: Literal["auto", "cpu", "cuda"]) -> str:
    """cpu or cuda; raises ConfigError if torch sees no GPU though one was asked for or is there."""
    return "cuda" if uses_gpu(asked, "device") else "cpu"


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' reports that a head was not loaded which nobody asked for."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def exported_encoder(model: str) -> Iterator[Path]:
    """A run, a checkpoint or a model as a folder that AutoModel loads, in fp32; there as long as the block runs.

    A Hugging Face folder is written anew too, because the libraries load what it is stored in, half precision, and run
    code that its config.json names.

    Raises:
        ConfigError: it sees one side of a text alone.
        DataError, StorageError: see `open_source`.
    """
    from modernbert_train.weights.export import export_source
    from modernbert_train.weights.source import open_source

    source = open_source(model)
    if source.order == "causal":
        raise ConfigError(f"--model={model}: a decoder, whose states know nothing of the words after. Name an encoder.")
    with tempfile.TemporaryDirectory() as folder:
        yield export_source(source, Path(folder) / "encoder")


def new_folder(runs_folder: str, name: str | None, recipe: str, model: str, seed: int) -> Path:
    """The folder of a run that begins.

    Raises:
        ConfigError: a run there is finished.
    """
    folder = Path(runs_folder) / (name or run_name(recipe, model, seed))
    if (folder / RESULT).exists():
        raise ConfigError(f"{folder}: holds a finished run. Name another with name=, or remove it.")
    return folder


@contextmanager
def whole_run(folder: Path, settings_name: str, config: Any) -> Iterator[Path]:
    """Write a run's folder: its settings, and its model, which appears when it is whole.

    Args:
        folder: see `new_folder`.
        settings_name: file of the settings.
        config: the settings.

    Yields:
        An empty folder for the model.

    Raises:
        StorageError: the disk refuses it.
    """
    staging = folder / f".{MODEL}.{os.getpid()}.partial"
    try:
        staging.mkdir(parents=True)
        write_whole(folder / settings_name, to_yaml(config))
        yield staging
        replaced = publish(staging, folder / MODEL)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error}). Free the disk or name another.") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def open_run(folder: str, settings_name: str, verb: str) -> Path:
    """The folder of a finished run.

    Raises:
        DataError: it is none of this kind.
    """
    found = Path(folder)
    if not (found / settings_name).is_file() or not (found / MODEL).is_dir():
        raise DataError(
            f"{folder}: no run of `{verb} train`, which leaves {settings_name} and {MODEL}. Name the folder of one."
        )
    return found


def in_words(name: str, figures: dict[str, dict[str, float]], metrics: Sequence[str], result: Path | None) -> str:
    """A line for the terminal."""
    parts = [
        f"{split} " + ", ".join(f"{metric} {found[metric]:.4f}" for metric in metrics if metric in found)
        for split, found in figures.items()
    ]
    return "; ".join([f"{name}: {parts[0]}", *parts[1:], *([str(result)] if result else [])])


def print_warnings(counts: Mapping[str, Any], said: Mapping[str, str]) -> None:
    """Print what became of the texts of each split that somebody should know.

    Args:
        counts: by split; `texts` of one were used and `empty` left out.
        said: names of its other counts -> what they mean.
    """
    for name, of in counts.items():
        if found := [f"{getattr(of, each):,} {text}" for each, text in said.items() if getattr(of, each)]:
            print(f"warning: {name}, {of.texts + of.empty:,} texts: " + "; ".join(found))


def has_letter(text: str) -> bool:
    return any(letter.isalnum() for letter in text)
