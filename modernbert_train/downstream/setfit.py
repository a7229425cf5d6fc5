"""SetFit over an encoder: classes of texts from a few of each, by the library of that name.

The library trains the encoder on pairs of texts, of one class or of two, by the cosine of their means, and then fits a
logistic regression. What is decided here is which texts are drawn, what is counted, and what is stored: the
regression as tensors, where the library would write a pickle, which runs code when it is read.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modernbert_train.config.tools.setfit import SetfitConfig, setfit_problems
from modernbert_train.data.labelled import class_name
from modernbert_train.data.tables import read_rows, some
from modernbert_train.downstream.runs import (
    MODEL,
    choose_device,
    exported_encoder,
    has_letter,
    in_words,
    new_folder,
    open_run,
    print_warnings,
    quiet,
    read_settings,
    require,
    require_one_process,
    whole_run,
)
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.finetune.result import RESULT, write_figures
from modernbert_train.keyed_random import derive, permutation
from modernbert_train.own_files import require_own_files
from modernbert_train.read_json import read_json
from modernbert_train.tensor_files import read_tensors, write_tensors
from modernbert_train.tokenizer_threads import tokenizer_threads

SETTINGS = "setfit.yaml"
TRAIN = "train"
HEAD, LABELS = "head.safetensors", "config_setfit.json"  # the second is the library's
METRICS = ("accuracy", "macro_f1", "baseline/accuracy", "baseline/macro_f1")
MOST_TEXTS = 3_000  # drawn; the library lists all their pairs, 4.5 million then, before it takes some
_DRAW = 1
_AT_ONCE = 64  # texts that are read together


class Example(NamedTuple):
    """A text and its class."""

    text: str
    label: str


@dataclass
class Counts:
    """What became of the texts of a split."""

    texts: int = 0  # drawn and learned from, or measured on
    left: int = 0  # of the training file, not drawn
    empty: int = 0  # without a letter, left out
    truncated: int = 0  # of those learned from or measured on cut to max_tokens
    few: int = 0  # classes with fewer texts than shots, all of which are taken
    unseen: int = 0  # with a class that training has not, which cannot be predicted correctly


_SAID = {
    "empty": "texts without a letter, left out",
    "truncated": "texts cut at the end to max_tokens",
    "few": "classes with fewer texts than shots, all of which are taken",
    "unseen": "texts of classes that training has not, which cannot be predicted correctly",
}


@dataclass(frozen=True)
class Corpus:
    """What was read.

    Attributes:
        splits: examples by split; of the training one those that were drawn.
        classes: names, sorted.
        counts: of each split.
        unseen: of each split, classes that training has not.
    """

    splits: Mapping[str, list[Example]]
    classes: tuple[str, ...]
    counts: Mapping[str, Counts]
    unseen: Mapping[str, tuple[str, ...]]


def train(recipe: str, model: str, overrides: Sequence[str] = ()) -> Path:
    """Train a SetFit on an encoder, measure it beside the frozen encoder, and store it.

    Args:
        recipe: YAML file of a `SetfitConfig`.
        model: the encoder; see `open_source`.
        overrides: keys of the recipe.

    Returns:
        result.json of the run.

    Raises:
        RunError: anything that the user has to fix.
    """
    config = read_settings(SetfitConfig, setfit_problems, Path(recipe), overrides)
    require("setfit", "setfit", "sentence_transformers", "sklearn", "accelerate")
    require_one_process("setfit")
    folder = new_folder(config.runs_folder, config.name, recipe, model, config.seed)
    corpus = read_corpus(config)
    device = choose_device(config.device)
    with ExitStack() as stack:
        stack.enter_context(tokenizer_threads(True))
        stack.enter_context(quiet())
        encoder = stack.enter_context(exported_encoder(model))
        setfit = build(encoder, corpus.classes, config.max_tokens, device, config.seed)
        for name, counts in corpus.counts.items():
            counts.truncated = _cut(setfit, [each.text for each in corpus.splits[name]])
        print_warnings(corpus.counts, _SAID)
        _fit_head(setfit, corpus)
        frozen = {name: measure(setfit, corpus, name) for name in config.validation}
        loss, pairs = _fit(setfit, config, corpus, device)
        figures = {
            name: measure(setfit, corpus, name) | {f"baseline/{key}": value for key, value in frozen[name].items()}
            for name in config.validation
        }
        staging = stack.enter_context(whole_run(folder, SETTINGS, config))
        save(setfit, staging)
    result = folder / RESULT
    write_figures(
        result,
        task=Path(recipe).stem,
        source=model,
        seed=config.seed,
        run=folder.name,
        figures=figures,
        counts={name: asdict(each) for name, each in corpus.counts.items()},
        settings=asdict(config),
        labels=list(corpus.classes),
        unseen={name: list(each) for name, each in corpus.unseen.items() if each},
        training={"pairs": pairs, "loss": loss, "device": device},
    )
    print(in_words(folder.name, figures, METRICS, result))
    return result


def evaluate(run: str, overrides: Sequence[str] = ()) -> dict[str, dict[str, float]]:
    """Measure a stored model again, on its own splits or others; prints a line.

    Args:
        run: folder of a run.
        overrides: keys of its recipe, such as validation.other=FILE.

    Raises:
        RunError: anything that the user has to fix.
    """
    folder = open_run(run, SETTINGS, "setfit")
    config = read_settings(SetfitConfig, setfit_problems, folder / SETTINGS, overrides)
    setfit = load(folder, choose_device(config.device))
    corpus = read_corpus(config, tuple(setfit.labels))
    for name, counts in corpus.counts.items():
        counts.truncated = _cut(setfit, [each.text for each in corpus.splits[name]])
    print_warnings(corpus.counts, _SAID)
    figures = {name: measure(setfit, corpus, name) for name in config.validation}
    print(in_words(folder.name, figures, METRICS, None))
    return figures


def predict(run: str, texts: Sequence[str]) -> list[dict[str, Any]]:
    """The class of each text, and how likely the regression takes it to be.

    Args:
        run: folder of a run.
        texts: any.
    """
    folder = open_run(run, SETTINGS, "setfit")
    config = read_settings(SetfitConfig, setfit_problems, folder / SETTINGS)
    setfit = load(folder, choose_device(config.device))
    shares_NC = setfit.predict_proba(list(texts), as_numpy=True, show_progress_bar=False)
    best = shares_NC.argmax(axis=1)
    return [
        {"text": text, "label": setfit.labels[int(setfit.model_head.classes_[place])], "score": float(shares[place])}
        for text, place, shares in zip(texts, best, shares_NC, strict=True)
    ]


# --- what is read --------------------------------------------------------------------------------------------------


def read_corpus(config: SetfitConfig, classes: tuple[str, ...] = ()) -> Corpus:
    """Texts of all splits, of the training one those that the seed draws.

    Args:
        config: files, and how many.
        classes: of a model that is measured again; (): those of the training file, which is read.

    Raises:
        ConfigError: more texts would be drawn than the library can pair.
        DataError: a file cannot be read, lacks a column or names no class; or all texts are of one class.
    """
    splits: dict[str, list[Example]] = {}
    counts: dict[str, Counts] = {}
    if not classes:
        every, counts[TRAIN] = _read(TRAIN, Path(config.train), config)
        there = Counter(each.label for each in every)
        if len(there) < 2:
            raise DataError(
                f"train={config.train}: all {len(every):,} texts are of one class ({some([*there])}), so there is "
                "nothing to learn. Give texts of at least two, or name another label_column."
            )
        classes = tuple(sorted(there))
        splits[TRAIN] = draw(every, config.shots, config.seed)
        counts[TRAIN].texts, counts[TRAIN].left = len(splits[TRAIN]), len(every) - len(splits[TRAIN])
        counts[TRAIN].few = sum(number < config.shots for number in there.values())
        if len(splits[TRAIN]) > MOST_TEXTS:
            raise ConfigError(
                f"shots={config.shots}: {len(splits[TRAIN]):,} texts of {len(classes)} classes, and the library lists "
                f"all pairs of them: {MOST_TEXTS:,} texts at most. Lower shots; `finetune` learns from all texts."
            )
    unseen = {}
    for name, file in config.validation.items():
        splits[name], counts[name] = _read(f"validation.{name}", Path(file), config)
        counts[name].texts = len(splits[name])
        unseen[name] = tuple(sorted({each.label for each in splits[name]} - {*classes}))
        counts[name].unseen = sum(each.label in unseen[name] for each in splits[name])
    return Corpus(splits, classes, counts, unseen)


def _read(key: str, path: Path, config: SetfitConfig) -> tuple[list[Example], Counts]:
    counts, found = Counts(), []
    try:
        for row in read_rows(path, (config.text_column,), (config.label_column,)):
            try:
                label = class_name(row.values[0], config.label_column)
            except ValueError as error:
                raise ValueError(f"line {row.line}: {error}") from None
            if has_letter(row.texts[0]):
                found.append(Example(row.texts[0], label))
            else:
                counts.empty += 1
    except OSError as error:
        raise DataError(f"{key}={path}: cannot be read ({error.strerror}). Name a file of labelled texts.") from None
    except ValueError as error:
        text = str(error).replace("text_columns and label_column", "text_column and label_column")
        raise DataError(f"{key}={path}: {text}") from None
    if not found:
        raise DataError(f"{key}={path}: holds no text with a letter. Name another file, or another text_column.")
    return found, counts


def draw(every: Sequence[Example], shots: int, seed: int) -> list[Example]:
    """So many texts of each class, or all where there are fewer: class by class, in an order of the seed.

    What is drawn of a class depends on the seed, on the class's place and on its own texts alone.
    """
    by_class: dict[str, list[Example]] = {}
    for example in every:
        by_class.setdefault(example.label, []).append(example)
    drawn = []
    for place, label in enumerate(sorted(by_class)):
        order = permutation(len(by_class[label]), derive(seed, _DRAW, place))
        drawn += [by_class[label][number] for number in order[:shots]]
    return drawn


def _cut(setfit: Any, texts: Sequence[str]) -> int:
    tokenizer, most = setfit.model_body.tokenizer, setfit.model_body.max_seq_length
    found = tokenizer(list(texts), truncation=True, max_length=most, padding=False)
    return sum(bool(each.overflowing) for each in found.encodings)


# --- the model -------------------------------------------------------------------------------------------------------


def build(encoder: Path, classes: Sequence[str], max_tokens: int, device: str, seed: int = 0) -> Any:
    """A SetFit model on an encoder's folder: the mean of its states, and a logistic regression.

    What transformers' class has beyond the encoder, BERT's pooler, is drawn by the seed; nothing reads it.
    """
    from sentence_transformers import SentenceTransformer
    from setfit import SetFitModel
    from sklearn.linear_model import LogisticRegression
    from transformers import set_seed

    set_seed(seed)
    body = SentenceTransformer(str(encoder), device=device, local_files_only=True)
    body.max_seq_length = min(max_tokens, body.max_seq_length or max_tokens)
    return SetFitModel(body, LogisticRegression(), labels=list(classes))


def _fit_head(setfit: Any, corpus: Corpus) -> None:
    """The regression on the states of an encoder as it is."""
    numbers = {label: number for number, label in enumerate(corpus.classes)}
    setfit.fit([each.text for each in corpus.splits[TRAIN]], [numbers[each.label] for each in corpus.splits[TRAIN]], 1)


def _fit(setfit: Any, config: SetfitConfig, corpus: Corpus, device: str) -> tuple[float, int]:
    """Train encoder and regression in place; returns the mean loss and the number of pairs."""
    from datasets import Dataset
    from setfit import Trainer, TrainingArguments

    numbers = {label: number for number, label in enumerate(corpus.classes)}
    texts = Dataset.from_dict(
        {
            "text": [each.text for each in corpus.splits[TRAIN]],
            "label": [numbers[each.label] for each in corpus.splits[TRAIN]],
        }
    )
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            batch_size=config.batch_size,
            num_epochs=config.epochs,
            max_steps=config.max_steps or -1,
            num_iterations=config.num_iterations,
            body_learning_rate=config.lr,
            warmup_proportion=config.warmup,
            l2_weight=config.weight_decay,
            seed=config.seed,
            report_to="none",  # else whatever is installed
            save_strategy="no",
            show_progress_bar=sys.stderr.isatty(),
        )
        # a metric by its name would be fetched from the hub
        trainer = Trainer(model=setfit, args=arguments, train_dataset=texts, metric=accuracy)
        inner = trainer.st_trainer
        inner.args._n_gpu = min(inner.args.n_gpu, 1)  # of several GPUs one
        inner.args.disable_tqdm = not sys.stderr.isatty()
        if inner.args.device.type != device:  # the library knows no way to ask for the CPU beside a GPU
            raise ConfigError(
                "device=cpu: the library trains on the GPU that it sees. Start it with CUDA_VISIBLE_DEVICES="
            )
        trainer.train()
        return float(inner.state.log_history[-1]["train_loss"]), len(inner.train_dataset)


def accuracy(told: Any, labels: Any) -> dict[str, float]:
    """Share of texts whose class was told."""
    return {"accuracy": float(np.mean(np.asarray(told) == np.asarray(labels)))}


def save(setfit: Any, folder: Path) -> None:
    """Write a model: the encoder as sentence-transformers has it, names of classes, and the regression as tensors.

    coef [K, D], intercept [K] with K classes, or 1 of two, and classes, numbers of the names.
    """
    import torch

    head = setfit.model_head
    setfit.model_body.save(str(folder), create_model_card=False)
    about = {"normalize_embeddings": setfit.normalize_embeddings, "labels": setfit.labels}
    (folder / LABELS).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    tensors = {"coef": head.coef_, "intercept": head.intercept_, "classes": head.classes_.astype(np.int64)}
    write_tensors(
        folder / HEAD, {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in tensors.items()}
    )


def load(run: Path, device: str = "cpu") -> Any:
    """The model of a run, of the library's class; nothing that could run code is read.

    Raises:
        ConfigError: the library is not installed.
        DataError: the folder is damaged, or holds links out of it.
    """
    require("setfit", "setfit", "sentence_transformers", "sklearn", "accelerate")
    folder = run / MODEL
    require_own_files(folder)
    try:
        tensors = {name: tensor.numpy() for name, tensor in read_tensors(folder / HEAD, floating=False).items()}
        labels = read_json(folder / LABELS)["labels"]
        coef, intercept, classes = tensors["coef"], tensors["intercept"], tensors["classes"]
        if len(coef) != len(intercept) or len(coef) != (1 if len(classes) == 2 else len(classes)):
            raise ValueError(f"{HEAD} has {len(coef)} rows for {len(classes)} classes")
        if not all(0 <= number < len(labels) for number in classes):
            raise ValueError(f"{HEAD} has classes that {LABELS} does not name")
        with quiet():
            setfit = build(folder, labels, sys.maxsize, device)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: cannot be loaded ({error}). Restore it from a copy, or train it again.") from None
    head = setfit.model_head
    head.coef_, head.intercept_, head.classes_ = coef, intercept, classes
    head.n_features_in_ = coef.shape[1]
    return setfit


def measure(setfit: Any, corpus: Corpus, split: str) -> dict[str, float]:
    """Accuracy, and the mean F1 of classes; a text of a class that training has not is never told right."""
    import torch

    from modernbert_train.evals.metrics import macro_f1

    examples = corpus.splits[split]
    names = (*corpus.classes, *corpus.unseen[split])
    numbers = {label: number for number, label in enumerate(names)}
    told = setfit.predict(
        [each.text for each in examples], batch_size=_AT_ONCE, use_labels=False, as_numpy=True, show_progress_bar=False
    )
    labels = np.array([numbers[each.label] for each in examples])
    return accuracy(told, labels) | {
        "macro_f1": macro_f1(torch.from_numpy(told.astype(np.int64)), torch.from_numpy(labels))
    }
