"""The verb `retrieval train`: prepare pairs, train `objective: contrastive` on them, export the model and measure it.

The run is saved as retrieval.yaml in its folder, and is trained, guarded, saved and resumed like any other. Its folder
also holds pairs/ (the spec of `prepare` and its shards), st/ (the model) and result.json, written last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from modernbert_train.checkpoints.checkpoint import newest_checkpoint
from modernbert_train.config.read_yaml import literal
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.claim import changes, refuse
from modernbert_train.core.files import ending, lock, os_errors_as, write_whole
from modernbert_train.core.read_json import read_json
from modernbert_train.data.dataset_card import LABELS, DatasetCard, read_card
from modernbert_train.distributed.launched import speaks_for_all
from modernbert_train.errors import ConfigError, DataError, StorageError, in_words_of
from modernbert_train.evaluate.finetune.result import DATA_FILES, RESULT, hashed, write_figures
from modernbert_train.evaluate.retrieval.beir import files_of_beir, training_pairs
from modernbert_train.evaluate.retrieval.evaluate_retrieval import in_words, measure_trained
from modernbert_train.evaluate.retrieval.retrieval_recipe import Recipe
from modernbert_train.evaluate.retrieval.runs import MODEL, encoder_named, encoder_source
from modernbert_train.evaluate.retrieval.sentence_model import own_settings, sentence_folder
from modernbert_train.train.recipes import (
    adamw,
    first_hash,
    first_weights,
    held_for_all,
    phase,
    run_of,
    train_recipe,
    training_of,
)
from modernbert_train.vocabulary import copy_tokenizer
from modernbert_train.weights.export import export_run, own_prompts
from modernbert_train.weights.source import Source

RUN_YAML, PAIRS, SHARDS, SPEC, PHASE = "retrieval.yaml", "pairs", "shards", "prepare.yaml", "pairs"
_REPORT = "pairs_report.json"  # of `prepare`
_MAX_GRAD_NORM, _BETAS, _EPS = 1.0, [0.9, 0.999], 1e-8  # defaults of sentence-transformers' trainer
_SPECIAL_TOKENS = 2  # that the loader adds to a document
Prepare = Callable[[Path], None]


def train_retrieval(recipe: Recipe, prepare: Prepare) -> Path | None:
    """Train a model on pairs of texts, or resume it, and measure it.

    Args:
        recipe: see `open_recipe`.
        prepare: the verb `prepare`; takes the file of a spec.

    Returns:
        Path of result.json; None on ranks other than the first.

    Raises:
        RunError: anything that the user has to fix; StoppedEarly when a signal ended the run after a checkpoint.
    """
    source = encoder_source(recipe.model, recipe.config.seed)
    recipe = replace(recipe, config=replace(recipe.config, **_own(recipe, source)))
    config, folder = recipe.config, recipe.folder
    limit = min(source.max_tokens, source.model.max_positions or source.max_tokens)
    if (max_tokens := config.max_tokens or limit) > limit:
        raise ConfigError(
            f"max_tokens={max_tokens}: {recipe.model} reads {limit:,} at most. Lower it, or leave it out."
        )
    with held_for_all(folder):
        card = _prepare(recipe, source, max_tokens, folder / PAIRS, prepare)
        files = hashed(_files_of_pairs(recipe)) if speaks_for_all() else {}  # before training: files may change later
        files |= {name: file for each in recipe.sets for name, file in each.files.items()}
        run = _run(recipe, source, card, max_tokens)
        with in_words_of(_advice_as_typed(recipe)):
            train_recipe(run)
        if not speaks_for_all():
            return None
        export_run(run, out=folder / MODEL, quiet=True)
        return _measure(recipe, card, run, files)


def _files_of_pairs(recipe: Recipe) -> dict[str, Path]:
    """Return the files that the entries of `train` name, also those within a BEIR folder, by their name in results."""
    return {
        f"train[{index}]/{file.name}": file
        for index, paths in enumerate(recipe.pairs)
        for path in paths
        for file in (files_of_beir(path, recipe.config.train_split) if path.is_dir() else [path])
    }


def _measure(recipe: Recipe, card: DatasetCard, run: RunConfig, files: dict[str, dict[str, str]]) -> Path:
    """Measure the exported model, and write its result with the hashes of the files that were read.

    Raises:
        DataError: the data of a set is not available; the others are measured and written.
    """
    config, folder = recipe.config, recipe.folder
    result = folder / RESULT
    figures, about, lost = measure_trained(folder / MODEL, recipe.sets, config, folder)
    if lost and not figures:
        raise DataError("\n".join(lost))
    counts = read_json(folder / PAIRS / SHARDS / _REPORT)["counts"]
    write_figures(
        result,
        task=recipe.name,
        source=recipe.model,
        weights=first_weights(run),
        begun=first_hash(run),
        seed=config.seed,
        run=folder.name,
        figures=figures,
        counts={
            "train": {"pairs": card.documents, **counts},
            **{each.name: each.counts for each in recipe.sets},
        },
        settings={**asdict(config), **about},
        training={"steps": newest_checkpoint(run.folder).step} | training_of(run),
        **{DATA_FILES: files},
    )
    print(in_words(folder.name, figures, result))
    if lost:
        raise DataError("\n".join(lost))
    return result


def _own(recipe: Recipe, source: Source) -> dict[str, Any]:
    """Return the pooling and prompts that the model was trained with, where the recipe names none.

    Raises:
        ConfigError: the model cannot be trained further.
    """
    if recipe.config.is_late:
        return {}
    saved: dict[str, Any] = {}
    if (folder := sentence_folder(encoder_named(recipe.model).source)) is not None:
        saved = own_settings(folder)
    elif source.objective is not None and source.objective.compares:
        prompts = own_prompts(source) or {}
        saved = {"pooling": source.objective.pooling}
        saved |= {f"{kind}_prompt": prompts.get(kind) for kind in ("query", "document")}
    if (pooling := recipe.config.pooling or saved.get("pooling") or "mean") not in ("cls", "mean", "sparse"):
        raise ConfigError(f"--model={recipe.model}: its pooling is {pooling}. Set pooling=mean, or name the encoder.")
    return {key: value for key, value in saved.items() if getattr(recipe.config, key) is None}


# --- pairs -------------------------------------------------------------------------------------------------------


def _prepare(recipe: Recipe, source: Source, max_tokens: int, home: Path, prepare: Prepare) -> DatasetCard:
    """Prepare the pairs of a recipe unless they exist; ranks take turns.

    Raises:
        ConfigError: the folder holds the pairs of another recipe.
        DataError: a file cannot be used, or the pairs give no batch to learn from.
    """
    shards, config = home / SHARDS, recipe.config
    with os_errors_as(StorageError, f"{home}: cannot be written", "Free the disk, or name another runs_folder."):
        home.mkdir(parents=True, exist_ok=True)
        with (home / ".lock").open("w") as file:
            lock(file)
            if speaks_for_all() or not shards.exists():
                if not (home / "tokenizer").exists():
                    with source.tokenizer_folder() as tokenizer:
                        copy_tokenizer(tokenizer, home / "tokenizer")
                spec = _write_spec(recipe, max_tokens, home)
                with in_words_of(_as_typed(recipe, home)):
                    prepare(spec)
    card = read_card(shards / "train")
    texts = len(np.unique(np.load(shards / "train" / LABELS, mmap_mode="r")[:, 2::2]))  # 0: an example with fewer
    remedy = "Give more pairs, or lower batch_size."
    if card.documents < config.batch_size:
        raise DataError(
            f"train: {card.documents:,} pairs are left, which is no batch of batch_size={config.batch_size}. {remedy}"
        )
    if texts < 2:
        raise DataError(f"train: all {card.documents:,} pairs have one answer, so no query has a negative. {remedy}")
    return card


def _write_spec(recipe: Recipe, max_tokens: int, home: Path) -> Path:
    """Write the spec of `prepare`.

    Raises:
        ConfigError: another spec is there; names the differences.
    """
    config = recipe.config
    spec: dict[str, Any] = {
        "out": str(home / SHARDS),
        "sources": dict(_sources(recipe, home)),
        "pairs": {
            "query": config.query_column,
            "positive": config.positive_column,
            "negatives": config.negative_columns,
            "query_prefix": config.query_prompt or "",
            "document_prefix": config.document_prompt or "",
            "max_tokens": max_tokens,
            "query_max_tokens": min(config.query_max_tokens or max_tokens, max_tokens),
        },
        "tokenizer": {"path": str(home / "tokenizer")},
        "validation_share": 0.0,
    }
    file, spec = home / SPEC, literal(spec)
    if file.exists():
        written = yaml.safe_load(file.read_text(encoding="utf-8"))
        changed = changes({key: written.get(key) for key in spec}, spec)
        refuse(f"{file}: the pairs of another recipe", changed, f"Name another run with name=, or remove {home}.")
    else:
        write_whole(file, yaml.safe_dump(spec, sort_keys=False, allow_unicode=True))
    return file


def _as_typed(recipe: Recipe, home: Path) -> Iterator[tuple[str, str]]:
    """Yield pairs that replace keys and advice in errors of `prepare` by a recipe's; see `in_words_of`."""
    correct = r" Fix or remove it, or set on_error=skip to drop and count damaged documents\."
    columns = "query_column, positive_column or negative_columns"
    yield rf"(no (?:column|field) .*\.){correct}", rf"\1 Set {columns} to columns that are there."
    yield correct, " Correct it, or remove it; text that is not UTF-8: iconv -f ENCODING -t UTF-8."
    yield r" To drop these documents, set \S+ to the share that may be dropped\.", ""
    yield from _advice_as_typed(recipe)
    for name, source in _sources(recipe, home):
        yield rf"sources\.{name}:", source["path"].replace("\\", r"\\") + ":"


def _advice_as_typed(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield pairs that replace advice in errors of `prepare` and `train` by a recipe's; read no texts."""
    another = f"Name another run with name=, or remove {recipe.folder}.".replace("\\", r"\\")
    yield r"\bout=(.*?: (?:holds|exists and) )", r"\1"
    yield r"(Replace it|Discard it) with --overwrite, or give another folder with out=\.\.\.", another
    yield r"Give another folder with out=\.\.\., or remove it yourself\.", another
    yield r"(--overwrite writes the dataset again|Prepare the data again with --overwrite)\.", another
    yield r"prepare the data again with `prepare --overwrite`\.", f"n{another[1:]}"
    yield r"prepare the pairs again with a lower pairs\.max_tokens", "start another run with a lower max_tokens"
    yield r"Raise batch_rows(?: or row_tokens of the phase)?\.", f"Raise batch_size={recipe.config.batch_size}."


def _sources(recipe: Recipe, home: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the sources of `prepare`; a BEIR folder is written as a file of pairs."""
    config = recipe.config
    for index, files in enumerate(recipe.pairs):
        for number, path in enumerate(files):
            file = path
            if path.is_dir():
                file = home / f"beir-{index}.jsonl"
                columns = (config.query_column, config.positive_column)
                rows = (dict(zip(columns, each, strict=True)) for each in training_pairs(path, config.train_split))
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                if not file.exists() or file.read_text(encoding="utf-8") != text:
                    write_whole(file, text)
            yield f"train_{index}_{number}", {"kind": ending(file).removeprefix("."), "path": str(file)}


# --- the run -----------------------------------------------------------------------------------------------------


def _run(recipe: Recipe, source: Source, card: DatasetCard, max_tokens: int) -> RunConfig:
    """Return the run's configuration, written into its folder; overrides apply to every key."""
    config, folder, named = recipe.config, recipe.folder, encoder_named(recipe.model)
    all_tokens = card.tokens + _SPECIAL_TOKENS * card.documents
    mean, texts = all_tokens / card.documents, 2 + len(config.negative_columns)
    batch_tokens = config.batch_size * mean
    # rows of several examples: with fewer, packing leaves more of each row empty, and a batch has too few pairs
    several = min(8 * mean, batch_tokens / (8 if config.batch_size >= 64 else 2))
    microbatch = {} if config.mini_batch is None else {"microbatch_tokens": config.mini_batch * mean / texts}
    assert card.longest is not None
    only = phase(
        tokens=math.ceil(config.epochs * all_tokens),
        batch_tokens=batch_tokens,
        longest=max(card.longest, math.ceil(several)),
        positions=None,  # each text is one sequence
        warmup=config.warmup,
        **microbatch,
    )
    objective: dict[str, Any] = {"name": "contrastive", "max_tokens": max_tokens}
    if config.query_max_tokens is not None and config.query_max_tokens < max_tokens:
        objective["query_max_tokens"] = config.query_max_tokens
    if config.is_late:
        objective |= {"pooling": "late", "token_vectors": config.vector_width}
    else:
        objective["pooling"] = config.pooling or "mean"
    if config.scale is not None:
        objective["temperature"] = 1 / config.scale
    optim = adamw(config.lr, config.weight_decay, _MAX_GRAD_NORM, recipe.run)
    sections: dict[str, Any] = {
        "objective": objective,
        "compute": {"compile": False, "device": config.device, "precision": config.precision},
        "optim": optim | {"betas": _BETAS, "eps": _EPS},
        "phases": {PHASE: only},
        "checkpoint": {"keep": 2, "interval_steps": config.save_every_steps},
    }
    own = [f"name={folder.name}", f"runs_folder={literal(config.runs_folder)}", f"seed={config.seed}"]
    shards = folder / PAIRS / SHARDS
    of_data: dict[str, Any] = {"train": shards / "train", "tokenizer": shards / "tokenizer", "texts": card.documents}
    return run_of(folder / RUN_YAML, source, named, sections, [*own, *recipe.run], **of_data)
