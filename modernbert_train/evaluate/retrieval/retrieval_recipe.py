"""Recipes of `retrieval train`, read and checked before torch is imported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from modernbert_train.config.load import load_typed
from modernbert_train.config.tools.retrieval import RetrievalConfig, retrieval_problems
from modernbert_train.core.files import ending
from modernbert_train.data.read.task_rows import ENDS
from modernbert_train.distributed.launched import speaks_for_all
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.evaluate.finetune.task import check_run, run_name
from modernbert_train.evaluate.retrieval.beir import BEIR, CORPUS, beir_folder, fetching, find_judgements
from modernbert_train.evaluate.retrieval.evaluate_retrieval import read_sets
from modernbert_train.evaluate.retrieval.runs import MODEL, encoder_named
from modernbert_train.evaluate.retrieval.sets import Set
from modernbert_train.weights.names import look_up

_KEYS = {each.name for each in fields(RetrievalConfig)}
_EARLIER = "retrieval.json"  # of the trainer of versions before 2026-12


@dataclass(frozen=True)
class Recipe:
    """A recipe and its data.

    Attributes:
        name: of its file.
        model: that it trains, as it was named.
        config: its keys.
        run: overrides of the run.
        pairs: for each entry of `train` a BEIR folder, or files of pairs.
        sets: to measure on; only on the first rank.
        folder: of the run.
    """

    name: str
    model: str
    config: RetrievalConfig
    run: tuple[str, ...]
    pairs: tuple[tuple[Path, ...], ...]
    sets: list[Set]
    folder: Path


def read_recipe(file: str, overrides: Sequence[str] = ()) -> tuple[RetrievalConfig, list[str]]:
    """Read a recipe with its overrides; return also the overrides of the run.

    Raises:
        ConfigError: a key is unknown or has a bad value.
    """
    keys = {each: each.partition("=")[0] for each in overrides}
    own = [each for each, key in keys.items() if key.split(".")[0] in _KEYS or "." not in key]
    config = load_typed(RetrievalConfig, [file], own)
    if problems := list(retrieval_problems(config)):
        raise ConfigError("\n".join(f"{file}: {problem}" for problem in problems))
    return config, [each for each in overrides if each not in own]


def open_recipe(file: str, model: str, overrides: Sequence[str]) -> Recipe:
    """Read a recipe, find its data and its model.

    Raises:
        ConfigError: a key is wrong, or the folder holds an earlier version's run.
        DataError: data or model is missing or damaged.
    """
    config, run_overrides = read_recipe(file, overrides)
    name = config.name or run_name(file, model, config.seed)
    folder = Path(check_run([f"name={name}", f"runs_folder={config.runs_folder}", *run_overrides], [model]).folder)
    look_up(encoder_named(model).source, config.runs_folder)
    pairs = tuple(tuple(pair_files(index, name, config)) for index, name in enumerate(config.train))
    _refuse_earlier(folder)
    sets = read_sets(config.evaluate, config) if speaks_for_all() else []
    return Recipe(Path(file).stem, model, config, tuple(run_overrides), pairs, sets, folder)


def pair_files(index: int, name: str, config: RetrievalConfig) -> Iterator[Path]:
    """Yield the BEIR folder or the files of pairs that an entry of `train` names.

    Raises:
        DataError: they are missing, or of no known kind.
    """
    path, named = beir_folder(name, config.beir_folder), f"train[{index}]={name}"
    if (path / CORPUS).exists():
        if config.negative_columns:
            raise DataError(f"{named}: a BEIR folder has no hard negatives. Leave out negative_columns, or name files.")
        find_judgements(path, config.train_split, f"train[{index}]")
        yield path
    elif path.is_dir():
        files = sorted(each for each in path.iterdir() if ending(each) in ENDS)
        if not files:
            raise DataError(f"{named}: holds no {', '.join(ENDS)}, and no {CORPUS}. Name a folder of pairs.")
        yield from files
    else:
        if not path.exists() and name in BEIR:
            raise DataError(f"{named}: not in {config.beir_folder}. {fetching(name, config.beir_folder)}.")
        if not path.exists():
            raise DataError(f"{named}: no such file. Correct the path.")
        if ending(path) not in ENDS:
            raise DataError(f"{named}: unknown file type. Name one of {', '.join(ENDS)}, or a folder.")
        yield path


def _refuse_earlier(folder: Path) -> None:
    if not (folder / _EARLIER).is_file():
        return
    old_checkpoints = sorted(path.name for path in (folder / "checkpoints").glob("checkpoint-*"))
    remains = (
        f"its checkpoints ({', '.join(old_checkpoints)}) cannot be resumed"
        if old_checkpoints
        else "it cannot be resumed"
    )
    measured = f" Its model is measured by `retrieval evaluate SET --model {folder / MODEL}`."
    raise ConfigError(
        f"{folder / _EARLIER}: written by the trainer of an earlier version, and {remains}. Name another run with "
        f"name=, or remove {folder}.{measured if (folder / MODEL).is_dir() else ''}"
    )
