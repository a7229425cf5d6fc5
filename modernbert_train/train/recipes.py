"""Turn a recipe (texts, epochs, learning rate) into a run, for `finetune` and `retrieval train`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from modernbert_train.checkpoints.run_folder import BUSY, RunFolder, held
from modernbert_train.config.load import load_run
from modernbert_train.config.read_yaml import literal
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.claim import START_OVER
from modernbert_train.core.files import write_whole
from modernbert_train.core.own_files import require_own_files
from modernbert_train.data.packing import WINDOW
from modernbert_train.distributed.launched import speaks_for_all
from modernbert_train.errors import ConfigError, in_words_of
from modernbert_train.evaluate.finetune.task import UNTRAINED, Named
from modernbert_train.train.session import train
from modernbert_train.train.start import FIRST_HASH
from modernbert_train.weights.names import weights_hash
from modernbert_train.weights.source import Source

_MICROBATCH_TOKENS = 16_384


def held_for_all(folder: Path) -> AbstractContextManager[None]:
    """Lock the folder of a recipe's run while a verb runs, on the rank that writes there.

    Raises:
        ConfigError, RunError, StorageError: see `held`.
        DataError: a file in it is a link to elsewhere.
    """
    if not speaks_for_all():
        return nullcontext()
    require_own_files(folder)
    return held(folder, BUSY)


def first_weights(config: RunConfig) -> str:
    """Return the source of the run's initial weights, from its record; newer checkpoints may exist by now."""
    return str(_beginning(config).get("from", ""))


def first_hash(config: RunConfig) -> str | None:
    """Return the hash of the run's initial weights, from its record; None if they are random, or of an old run."""
    return _beginning(config).get(FIRST_HASH)


def _beginning(config: RunConfig) -> dict[str, Any]:
    return next((entry for entry in RunFolder(config).read_metrics() if entry.get("kind") == "start"), {})


def train_recipe(config: RunConfig) -> None:
    """Train a recipe's run, or resume it; see `train`.

    Raises:
        ConfigError: the weights that it began with have changed since.
    """
    over = f"remove {config.folder}"
    words = {r" and start\.checkpoint=.*?, or start over": ", or start over", re.escape(START_OVER): over}
    with in_words_of((pattern, text.replace("\\", r"\\")) for pattern, text in words.items()):
        source = first_weights(config).partition(";")[0].removeprefix("weights.init_from=")
        then, now = first_hash(config), weights_hash(source)  # None: an old record, or weights that are gone
        if RunFolder(config).has_checkpoints() and None not in (then, now) and then != now:
            raise ConfigError(
                f"{config.folder}: the weights that it began with, {source}, have changed since. Restore them, give "
                f"this run another name=, or {START_OVER}."
            )
        train(config)


def run_of(
    file: Path,
    source: Source,
    named: Named,
    sections: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    train: Path,
    tokenizer: Path,
    texts: int,
) -> RunConfig:
    """Write a recipe's run into a YAML file, on the rank that holds its folder, and return it.

    Args:
        file: in the folder of the run.
        source, named: the model that it starts from.
        sections: sections of the run; the others follow from the model and the texts.
        overrides: apply to every key.
        train, tokenizer: folders of the shards and their tokenizer.
        texts: number of documents in the shards.
    """
    tree = {
        "plugins": [] if source.checkpoint is None else source.checkpoint.config.plugins,
        "data": {"train": str(train), "tokenizer": str(tokenizer), "packing_window": _packing_window(texts)},
        "model": asdict(source.model),
        "weights": {"init_from": None if UNTRAINED in named.baseline else named.source},
        "compute": {"compile": False},  # compiling takes a minute, in a run of a few minutes
    }
    with TemporaryDirectory() as own:
        file = file if speaks_for_all() else Path(own, file.name)
        write_whole(file, yaml.safe_dump(literal(tree | dict(sections)), sort_keys=False))
        return load_run([file], overrides)


def training_of(config: RunConfig) -> dict[str, Any]:
    """Return facts of a recipe's training, for result.json."""
    (only,) = config.phases.values()
    return {"tokens": config.total_tokens, "row_tokens": only.row_tokens, "batch_rows": only.batch_rows}


def phase(
    *,
    tokens: int,
    batch_tokens: float,
    longest: int,
    positions: int | None,
    warmup: float,
    microbatch_tokens: float = _MICROBATCH_TOKENS,
) -> dict[str, Any]:
    """Return the only phase of a recipe's run, with a linear decay to zero.

    Args:
        tokens: length of the training.
        batch_tokens: mean size of a batch.
        longest: tokens of the longest document, special ones included.
        positions: longest sequence that the architecture reads; None: any.
        warmup: share of the training.
        microbatch_tokens: size of a microbatch, rounded down to whole rows; at least a row.
    """
    row_tokens, batch_rows = _rows(batch_tokens, max(longest, 16), positions)
    rows = max(1, min(batch_rows, int(microbatch_tokens / row_tokens)))
    rising = math.ceil(warmup * tokens)
    return {
        "tokens": tokens,
        "row_tokens": row_tokens,
        "batch_rows": batch_rows,
        "microbatch_tokens": rows * row_tokens,
        "schedule": {"warmup_tokens": rising, "decay_tokens": tokens - rising, "decay": "linear"},
    }


def _rows(batch: float, longest: int, positions: int | None) -> tuple[int, int]:
    """Return row length and rows of a batch of about `batch` tokens.

    The number of rows divides among 8 ranks, or 2. A row fits the longest text, and is longer if fewer rows are used.
    """
    rows = max(1, int(batch / longest))
    rows -= rows % (8 if rows >= 8 else 2 if rows >= 2 else 1)
    length = max(-(-longest // 8), round(batch / rows / 8)) * 8
    return min(length, max(longest, positions or length)), rows


def _packing_window(texts: int) -> int:
    """Return data.packing_window for a small dataset: few texts wait for the next epoch."""
    return max(4, min(WINDOW, texts // 32))


def adamw(lr: float, weight_decay: float, max_grad_norm: float | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the section `optim`; `weight_decay` is torch's, which is multiplied by the rate."""
    settings = {"name": "adamw", "lr": lr, "weight_decay": weight_decay}
    other = [each for each in overrides if each.startswith("optim.name=") and each != "optim.name=adamw"]
    return (
        settings if other else settings | {"max_grad_norm": max_grad_norm}
    )  # other optimizers bound updates themselves
