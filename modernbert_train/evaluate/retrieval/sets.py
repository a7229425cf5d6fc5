"""Sets to measure on: folders in BEIR's format, BEIR's public sets and tasks of mteb by name. mteb searches and scores.

The figures of each set are saved in the run's folder as soon as it is measured, so a killed process loses no finished
set: the same command reuses them if weights, settings and data are the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modernbert_train.config.tools.retrieval import MTEB, RANKING, EvaluateConfig
from modernbert_train.core.files import anything_as, os_errors_as, write_whole
from modernbert_train.core.read_json import read_json
from modernbert_train.core.text import file_name, on_one_line
from modernbert_train.errors import ConfigError, DataError, StorageError
from modernbert_train.evaluate.finetune.result import hashed
from modernbert_train.evaluate.retrieval.beir import BEIR, Beir, beir_folder, read_beir
from modernbert_train.evaluate.retrieval.runs import quiet

if TYPE_CHECKING:
    from modernbert_train.evaluate.retrieval.bm25 import Bm25
    from modernbert_train.evaluate.retrieval.vectors import Watched

SHOWN = ("main_score", *RANKING, "query_terms", "document_terms")
_MEAN = "mean"  # in results: of all sets
Figures = dict[str, dict[str, float]]
Measured = tuple[dict[str, float], dict[str, Any]]  # figures of a set, and facts about its data


@dataclass(frozen=True)
class Set:
    """A set to measure on.

    Attributes:
        name: its name in results.
        beir: a folder; None: a task of mteb.
        task: name of a task of mteb; None: a folder.
        ranks: True for the figures of RANKING, False for the task's main score.
    """

    name: str
    beir: Beir | None
    task: str | None
    ranks: bool

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of documents, queries and judgements of a folder."""
        return {} if self.beir is None else self.beir.counts

    @cached_property
    def files(self) -> dict[str, dict[str, str]]:
        """Path and SHA-256 of each file of a folder, when first asked for; mteb's tasks have none."""
        return hashed({f"{self.name}/{file.name}": file for file in (self.beir.files if self.beir else ())})


def open_set(name: str, config: EvaluateConfig, key: str = "", label: str | None = None) -> Set:
    """Find a set by its name, and read a folder whole for mistakes; nothing of mteb is imported.

    Args:
        name: a folder; a public set of BEIR, whose folder in config.beir_folder counts if it is there; or mteb:TASK.
        config: split of a folder.
        key: the configuration key that names it, for messages.
        label: its name in results; None: the name of the folder, set or task.

    Raises:
        ConfigError: its name is one of the results' own.
        DataError: see `read_beir`.
    """
    if (task := task_named(name, config)) is not None:
        ranks = not name.startswith(MTEB)
        return Set(label or name.removeprefix(MTEB).replace("/", "-"), None, task, ranks=ranks)
    folder = beir_folder(name, config.beir_folder)
    label = label or on_one_line(folder.resolve().name)
    if label == _MEAN:
        remedy = "Rename the key." if key else "Rename the folder."
        raise ConfigError(f"{key or name}: results have the mean of all sets under the name {_MEAN}. {remedy}")
    return Set(label, read_beir(folder, config.split, key), None, ranks=True)


def task_named(name: str, config: EvaluateConfig) -> str | None:
    """Return the name of the mteb task that a set's name means; None for a folder."""
    if name.startswith(MTEB):
        return name.removeprefix(MTEB)
    first, _, part = name.partition("/")
    task = f"CQADupstack{part.title()}Retrieval" if first == "cqadupstack" and part else BEIR.get(name)
    return None if beir_folder(name, config.beir_folder).exists() else task


def find_task(name: str) -> Any:
    """Return a task of mteb, without its data.

    Raises:
        ConfigError: mteb knows none, or it is not of text.
    """
    import mteb

    try:
        task = mteb.get_task(name)
    except KeyError as error:
        raise ConfigError(f"mteb:{name}: mteb {mteb.__version__} has no such task ({error.args[0]}).") from None
    if {*task.metadata.modalities} != {"text"}:
        kinds = ", ".join(task.metadata.modalities)
        raise ConfigError(f"mteb:{name}: is of {kinds}, and the model reads text. Leave it out.")
    return task


def parts_of(task: Any) -> list[Any]:
    """Return the subtasks of an mteb task such as CQADupstackRetrieval; of any other, the task itself."""
    return list(getattr(task.metadata, "tasks", None) or [task])


def find_tasks(sets: Sequence[Set]) -> None:
    """Report a wrong name before anything is computed; see `find_task`."""
    for each in sets:
        if each.task is not None:
            find_task(each.task)


def task_of(each: Set, config: EvaluateConfig) -> Any:
    """Return a set as a task of mteb with its data.

    Raises:
        ConfigError: see `find_task`.
        DataError: its data is not available.
    """
    if each.task is None:
        assert each.beir is not None
        task = _folder_task(each.beir)
    else:
        task = find_task(each.task)
        about = task.metadata
        remedy = "Run where there is a network once, or leave the task out."
        with anything_as(DataError, f"mteb:{about.name}: its data, {about.dataset['path']}, is not available", remedy):
            for part in parts_of(task):
                part.load_data()
    if config.ignore_identical_ids:
        task.ignore_identical_ids = True
    return task


def _folder_task(beir: Beir) -> Any:
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    unknown: dict[str, Any] = dict.fromkeys(
        ("reference", "date", "domains", "task_subtypes", "license", "annotations_creators", "dialect",
         "sample_creation", "bibtex_citation")
    )  # fmt: skip

    class Folder(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name="Folder", dataset={"path": str(beir.folder), "revision": "local"}, description="a folder",
            type="Retrieval", category="t2t", modalities=["text"], eval_splits=[beir.split], eval_langs=["eng-Latn"],
            main_score=RANKING[0], **unknown,
        )  # fmt: skip

    task: Any = Folder()
    texts = [text for part in beir.texts(1024) for text in part]
    dataset = {
        "corpus": Dataset.from_dict({"id": beir.document_ids, "text": texts}),
        "queries": Dataset.from_dict({"id": list(beir.queries), "text": list(beir.queries.values())}),
        "relevant_docs": beir.qrels,
        "top_ranked": None,
    }
    task.dataset, task.data_loaded = {"default": {beir.split: dataset}}, True
    return task


def measure(each: Set, model: Watched | Bm25, config: EvaluateConfig, out: Path) -> Measured:
    """Return the figures of a model on a set; `out` receives mteb's own result.

    Raises:
        ConfigError, DataError: see `task_of`.
    """
    import mteb
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    task = task_of(each, config)
    ranks = isinstance(task, AbsTaskRetrieval)
    model.begin(each.name, _totals(task) if ranks else {})
    own = None if each.ranks else out / f"mteb-{each.task}.json"
    scores, about = evaluate_task(model.searcher(ranks=ranks), task, config, own)
    figures = {name: scores[name] for name in RANKING} if each.ranks else {
        "main_score": scores["main_score"],
        task.metadata.main_score: scores["main_score"],
    }  # fmt: skip
    figures |= model.terms() if each.ranks else {}
    return figures, {} if each.task is None else {"mteb": mteb.__version__} | about


def evaluate_task(
    model: Any, task: Any, config: EvaluateConfig, file: Path | None = None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return mteb's scores, each the mean of splits and languages, and the dataset and its revision.

    Args:
        model: with the interface of mteb's models.
        task: with its data.
        config: the batch.
        file: receives mteb's own result.
    """
    import datasets
    import mteb

    datasets.disable_progress_bars()
    batch: Any = {"batch_size": config.encode_batch, "show_progress_bar": False}
    with quiet():
        results = mteb.evaluate(
            model, task, encode_kwargs=batch, cache=None, co2_tracker=False, show_progress_bar=False
        )
    (result,) = results.task_results
    if file is not None:
        result.to_disk(file)
    names = [name for name in SHOWN if all(name in each for split in result.scores.values() for each in split)]
    scores = {name: float(result.get_score(getter=lambda each, name=name: each[name])) for name in names}
    return scores, {"dataset": task.metadata.dataset["path"], "revision": result.dataset_revision}


def determinants_of(each: Set, config: EvaluateConfig) -> dict[str, Any]:
    """Return everything about a set that determines its figures."""
    import mteb

    about: dict[str, Any] = {"mteb": mteb.__version__, "ignore_identical_ids": config.ignore_identical_ids}
    if each.beir is None:
        return about | {"task": each.task, "ranks": each.ranks}
    return about | {"files": [file["sha256"] for file in each.files.values()]}


def identity_of(model: Watched | Bm25) -> dict[str, Any]:
    """Return what determines the scores of a model."""
    return {"weights": model.files_hash, "about": asdict(model.about)}


def measured_once(
    each: Set, config: EvaluateConfig, identity: dict[str, Any], out: Path, measure: Callable[[Set], Measured]
) -> Measured:
    """Return the saved figures of a set; without any, measure it, and save them.

    Args:
        each: the set.
        config: of the evaluation.
        identity: weights and settings that determine the scores.
        out: folder; files are in its `sets`.
        measure: called if no figures of the same set and identity are saved.
    """
    requested, file = determinants_of(each, config) | identity, out / "sets" / file_name(each.name, ".json")
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = read_json(file)
        if record["asked"] == json.loads(json.dumps(requested)):
            kept = record["figures"], record["about"]
            print(f"{each.name}: measured before, see {file}", flush=True)
            return kept
    figures, about = measure(each)
    with os_errors_as(StorageError, f"{file}: cannot be written", "Free the disk; the same command resumes."):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({"asked": requested, "figures": figures, "about": about}, indent=2) + "\n")
    return figures, about


def _totals(task: Any) -> dict[str, int]:
    splits = [split for subset in task.dataset.values() for split in subset.values()]
    return {
        "queries": sum(len(each["queries"]) for each in splits),
        "documents": sum(len(each["corpus"]) for each in splits),
    }


def mean_of(figures: Mapping[str, Mapping[str, float]]) -> Figures:
    """Return the mean of each figure that all of several sets have."""
    if len(figures) < 2:
        return {}
    shared = [name for name in SHOWN if all(name in each for each in figures.values())]
    return {_MEAN: {name: math.fsum(each[name] for each in figures.values()) / len(figures) for name in shared}}
