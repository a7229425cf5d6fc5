"""A library that may not be there, settings of a recipe, and an encoder as a folder that the library opens."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from modernbert_train.config.load import load_typed
from modernbert_train.distributed.gpus import uses_gpu
from modernbert_train.errors import ConfigError
from modernbert_train.evaluate.finetune.task import FROZEN, SEED, Named, named_model

if TYPE_CHECKING:
    from modernbert_train.weights.source import Source

T = TypeVar("T")
MODEL = "st"  # of a run's folder: what it has trained


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


def encoder_named(model: str) -> Named:
    """A model as it is named, as it is or untrained.

    Raises:
        ConfigError: it is to be frozen.
    """
    named = named_model(model)
    if FROZEN in named.baseline:
        raise ConfigError(
            f"--model={model}: retrieval has no head to train beside a frozen encoder. Leave out `{FROZEN}:`; "
            "`retrieval evaluate` measures an encoder as it is."
        )
    return named


@contextmanager
def exported_encoder(model: str, seed: int = SEED) -> Iterator[Path]:
    """A run, a checkpoint or a model as a folder that AutoModel loads, in fp32; there as long as the block runs.

    A Hugging Face folder is written anew too, because the libraries load what it is stored in, half precision, and run
    code that its config.json names.

    Raises:
        ConfigError: it sees one side of a text alone.
        DataError, StorageError: see `open_model`.
    """
    from modernbert_train.weights.export import export_source

    source = encoder_source(model, seed)
    with tempfile.TemporaryDirectory() as folder:
        yield export_source(source, Path(folder) / "encoder")


def encoder_source(model: str, seed: int = SEED) -> Source:
    """Find the weights of an encoder; see `open_model`. `untrained:` draws new ones by the seed, as `finetune` does.

    Raises:
        ConfigError: it sees one side of a text alone.
        DataError, StorageError: see `open_model`.
    """
    from modernbert_train.weights.source import open_model

    named = encoder_named(model)
    source = open_model(named.source, untrained=seed if named.baseline else None)
    if source.order == "causal":
        raise ConfigError(f"--model={model}: a decoder, whose states know nothing of the words after. Name an encoder.")
    return source


def in_words(name: str, figures: dict[str, dict[str, float]], metrics: Sequence[str], result: Path | None) -> str:
    """A line for the terminal."""
    parts = [
        f"{split} " + ", ".join(f"{metric} {found[metric]:.4f}" for metric in metrics if metric in found)
        for split, found in figures.items()
    ]
    return "; ".join([f"{name}: {parts[0]}", *parts[1:], *([str(result)] if result else [])])
