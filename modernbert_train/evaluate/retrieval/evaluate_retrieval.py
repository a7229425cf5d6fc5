"""`retrieval evaluate`: measure a model on sets of BEIR and tasks of mteb; result.json is written last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

from modernbert_train.checkpoints.run_folder import held
from modernbert_train.config.load import load_typed
from modernbert_train.config.tools.retrieval import MTEB, EvaluateConfig, MeasureConfig, retrieval_problems
from modernbert_train.core.files import errors_to
from modernbert_train.core.installed import require
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.evaluate.finetune.result import DATA_FILES, RESULT, hashed, write_figures
from modernbert_train.evaluate.finetune.task import run_name
from modernbert_train.evaluate.retrieval.bm25 import check_searching, open_searching
from modernbert_train.evaluate.retrieval.rerank import RUN_ENDS, WITHOUT_CANDIDATES, is_candidates
from modernbert_train.evaluate.retrieval.runs import MODEL
from modernbert_train.evaluate.retrieval.sets import (
    SHOWN,
    Figures,
    Set,
    find_tasks,
    identity_of,
    mean_of,
    measure,
    measured_once,
    open_set,
)

TRAINED = "retrieval.yaml"  # of `retrieval train`


def evaluate(names: Sequence[str], model: str, overrides: Sequence[str]) -> Path:
    """Measure a model on sets.

    Args:
        names: see `open_set`.
        model: see `open_searching`; with `rerank` see `open_reranker`.
        overrides: keys of `MeasureConfig`.

    Returns:
        Path of result.json.

    Raises:
        RunError: anything that the user has to fix. If a task's data is not available, the others are measured first.
    """
    config = load_typed(MeasureConfig, [], overrides)
    if problems := [*retrieval_problems(config), *_set_problems(names, config)]:
        raise ConfigError("\n".join(problems))
    require("retrieval", "sentence_transformers", "mteb")
    check_searching(model, config)
    if config.rerank is not None and not is_candidates(config.rerank):
        check_searching(config.rerank, EvaluateConfig())
    sets = [open_set(name, config) for name in names]
    if len({each.name for each in sets}) < len(sets):
        raise ConfigError(f"{', '.join(names)}: two sets have the same name in results. Rename a folder.")
    task = sets[0].name if len(sets) == 1 else f"{sets[0].name}-and-{len(sets) - 1}"
    folder = Path(config.runs_folder) / (config.name or run_name(task, _naming(model), config.split))
    with held(folder, "Wait for it, or name another with name=."):
        if (folder / TRAINED).exists():
            raise ConfigError(
                f"{folder}: a run of `retrieval train`, whose {RESULT} would be lost. Name another with name=."
            )
        find_tasks(sets)
        figures, about, lost = measure_sets(sets, model, config, folder)
        if figures:
            write_figures(
                folder / RESULT,
                task=task,
                source=model,
                seed=None,
                run=folder.name,
                figures=figures,
                counts={each.name: each.counts for each in sets if each.counts},
                settings={**asdict(config), **about},
                begun=None,
                **{DATA_FILES: _files_read(sets, config)},
            )
            print(in_words(folder.name, figures, folder / RESULT))
    if lost:
        raise DataError("\n".join(lost))
    return folder / RESULT


def _files_read(sets: Sequence[Set], config: MeasureConfig) -> dict[str, dict[str, str]]:
    """Return path and SHA-256 of the files that determine the figures: of the sets, and of candidates."""
    candidates = config.rerank is not None and is_candidates(config.rerank)
    hashes = hashed({"rerank": Path(str(config.rerank))} if candidates else {})
    return hashes | {name: file for each in sets for name, file in each.files.items()}


def measure_sets(
    sets: Sequence[Set], model: str, config: EvaluateConfig, out: Path
) -> tuple[Figures, dict[str, Any], list[str]]:
    """Return figures by set, how texts became vectors or scores, and problems of tasks whose data is missing.

    Raises:
        ConfigError, DataError, StorageError: see `open_searching` and `Reranking`.
    """
    figures, lost = Figures(), list[str]()
    if config.rerank is not None:
        from modernbert_train.evaluate.retrieval.rerank import Reranking

        reranking = Reranking(model, cast(MeasureConfig, config))
        of_set, about, identity = reranking.measure, reranking.about, reranking.identity
    else:
        opened = open_searching(model, config, config.index)
        of_set, about = partial(measure, model=opened, config=config, out=out), asdict(opened.about)
        identity = identity_of(opened)
    for each in sets:
        with errors_to(lost.append, DataError):
            figures[each.name], of_data = measured_once(each, config, identity, out, of_set)
            about |= {f"{MTEB}{each.task}": of_data} if of_data else {}
    return figures, about, lost


def measure_trained(
    model: Path, sets: Sequence[Set], config: EvaluateConfig, out: Path
) -> tuple[Figures, dict[str, Any], list[str]]:
    """Measure a trained model, which has its own pooling, prompts and lengths; see `measure_sets`."""
    if not sets:
        return {}, {}, []
    own = {key: getattr(config, key) for key in ("device", "split", "encode_batch", "ignore_identical_ids")}
    return measure_sets(sets, str(model), EvaluateConfig(**own), out)


def in_words(name: str, figures: Figures, result: Path) -> str:
    """Return figures, and their mean, as a line for the terminal."""
    lines = [
        f"{split} "
        + ", ".join(f"{metric} {figures_of_split[metric]:.4f}" for metric in SHOWN if metric in figures_of_split)
        for split, figures_of_split in (figures | mean_of(figures)).items()
    ]
    lines += [
        f"{int(figures_of_split[WITHOUT_CANDIDATES]):,} judged queries of {split} lack candidates and count as 0"
        for split, figures_of_split in figures.items()
        if WITHOUT_CANDIDATES in figures_of_split
    ]
    return "; ".join([f"{name}: {lines[0]}" if lines else name, *lines[1:], str(result)])


def read_sets(sets: Mapping[str, str], config: EvaluateConfig) -> list[Set]:
    """Read the sets of a recipe.

    Raises:
        ConfigError: the extra `retrieval` is not installed; see `find_task`.
        DataError: see `open_set`.
    """
    if sets:
        require("retrieval", "sentence_transformers", "mteb")
    opened = [open_set(each, config, f"evaluate.{name}", name) for name, each in sets.items()]
    find_tasks(opened)
    return opened


def _set_problems(names: Sequence[str], config: MeasureConfig) -> Iterator[str]:
    if len({*names}) < len(names):
        yield f"{' '.join(names)}: names a set twice. Name it once."
    if config.rerank is None:
        return
    for key in ("pooling", "normalize", "query_max_tokens", "index"):
        if (value := getattr(config, key)) is not None:
            yield f"{key}={value}: a reranker reads query and document together. Leave it out, or leave out rerank."
    if tasks := [name for name in names if name.startswith(MTEB)]:
        yield f"rerank={config.rerank}: is for sets of BEIR; mteb reranks in its own way. Leave out {tasks[0]}."
    if not Path(config.rerank).exists() and Path(config.rerank).suffix in RUN_ENDS:
        yield f"rerank={config.rerank}: no such file. Correct the path."
    if is_candidates(config.rerank) and len(names) > 1:
        yield f"rerank={config.rerank}: candidates belong to one set. Name one, or a model to search with."


def _naming(model: str) -> str:
    return str(Path(model).parent) if Path(model).name == MODEL else model
