"""Open an encoder by its name, or as a folder that transformers opens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from modernbert_train.distributed.visible_gpus import uses_gpu
from modernbert_train.errors import ConfigError
from modernbert_train.evaluate.finetune.task import FROZEN, SEED, Named, named_model

if TYPE_CHECKING:
    from modernbert_train.weights.source import Source

MODEL = "st"  # folder of the trained model, in a run's folder


def choose_device(device: Literal["auto", "cpu", "cuda"]) -> str:
    """Return cpu or cuda; raise ConfigError if torch sees no GPU although one is requested or present."""
    return "cuda" if uses_gpu(device, "device") else "cpu"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' warnings about unused heads."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def encoder_named(model: str) -> Named:
    """Return a named model, trained or untrained.

    Raises:
        ConfigError: the name asks to freeze it.
    """
    named = named_model(model)
    if FROZEN in named.baseline:
        raise ConfigError(
            f"--model={model}: retrieval trains the encoder only, so it cannot be frozen. Leave out `{FROZEN}:`; "
            "`retrieval evaluate` measures an encoder as it is."
        )
    return named


def exported_encoder(model: str, seed: int = SEED) -> AbstractContextManager[Path]:
    """Export a run, a checkpoint or a model to a temporary folder that AutoModel loads, in fp32.

    A Hugging Face folder is rewritten too: the libraries would load it in its stored half precision and run code that
    its config.json names.

    Raises:
        ConfigError: it is a decoder, with causal attention.
        DataError, StorageError: see `open_model`.
    """
    return exported(encoder_source(model, seed))


@contextmanager
def exported(source: Source) -> Iterator[Path]:
    """Export an opened model, with its head, to a temporary folder of transformers, in fp32."""
    from modernbert_train.weights.export import export_source

    with tempfile.TemporaryDirectory() as folder:
        yield export_source(source, Path(folder) / "model")


def encoder_source(model: str, seed: int = SEED) -> Source:
    """Find the weights of an encoder; see `open_model`. `untrained:` draws new ones by the seed, as `finetune` does.

    Raises:
        ConfigError: it is a decoder, with causal attention.
        DataError, StorageError: see `open_model`.
    """
    from modernbert_train.weights.source import open_model

    named = encoder_named(model)
    source = open_model(named.source, untrained=seed if named.baseline else None)
    if source.order == "causal":
        raise ConfigError(f"--model={model}: a decoder, whose states do not see later tokens. Name an encoder.")
    return source
