"""GLiNER over an encoder: entities of any types that are named with the sentence, by the library of that name.

The library trains, scores and stores the model. What is decided here is what it reads: words with the space before
them that the encoder knows, sentences and types in an order that is a function of the seed, and what is counted.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from modernbert_train.config.tools.gliner import GlinerConfig, gliner_problems
from modernbert_train.downstream.entities import (
    SAID,
    TRAIN,
    Corpus,
    Counts,
    Entity,
    Item,
    of_labels,
    read_corpus,
    tags_of,
)
from modernbert_train.downstream.runs import (
    MODEL,
    choose_device,
    exported_encoder,
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
from modernbert_train.keyed_random import derive, hash64, permutation, uniform
from modernbert_train.own_files import require_own_files
from modernbert_train.tokenizer_threads import tokenizer_threads

SETTINGS = "gliner.yaml"
METRICS = ("f1", "precision", "recall", "zero_shot_f1", "zero_shot_precision", "zero_shot_recall")
_ORDER, _TYPES, _SHUFFLE = 1, 2, 3
_AT_ONCE = 32  # sentences that are scored together


def train(recipe: str, model: str, overrides: Sequence[str] = ()) -> Path:
    """Train a GLiNER on an encoder, measure it and store it.

    Args:
        recipe: YAML file of a `GlinerConfig`.
        model: the encoder; see `open_source`.
        overrides: keys of the recipe.

    Returns:
        result.json of the run.

    Raises:
        RunError: anything that the user has to fix.
    """
    config = read_settings(GlinerConfig, gliner_problems, Path(recipe), overrides)
    require("gliner", "gliner", "accelerate", "sklearn")
    require_one_process("gliner")
    folder = new_folder(config.runs_folder, config.name, recipe, model, config.seed)
    corpus = read_corpus(config)
    device = choose_device(config.device)
    with ExitStack() as stack:
        stack.enter_context(tokenizer_threads(True))
        stack.enter_context(quiet())
        encoder = stack.enter_context(exported_encoder(model))
        with_leading_space(encoder)
        gliner = build(config, encoder)
        for name, items in corpus.items.items():
            _count_cuts(gliner, items, (*corpus.labels, *corpus.zero_shot[name]), config, corpus.counts[name])
        print_warnings(corpus.counts, SAID)
        loss = _fit(gliner, config, corpus, device)
        figures = {name: measure(gliner, corpus, name, config.threshold) for name in config.validation}
        staging = stack.enter_context(whole_run(folder, SETTINGS, config))
        _save(gliner, staging, Path(model).name)
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
        labels=list(corpus.labels),
        unseen={name: list(each) for name, each in corpus.zero_shot.items() if each},
        training={"steps": config.max_steps, "loss": loss, "device": device},
    )
    print(in_words(folder.name, figures, METRICS, result))
    return result


def evaluate(run: str, overrides: Sequence[str] = ()) -> dict[str, dict[str, float]]:
    """Measure a stored model again, on its own splits or others; prints a line.

    Args:
        run: folder of a run.
        overrides: keys of its recipe, such as validation.other=FILE or threshold=0.3.

    Raises:
        RunError: anything that the user has to fix.
    """
    folder = open_run(run, SETTINGS, "gliner")
    config = read_settings(GlinerConfig, gliner_problems, folder / SETTINGS, overrides)
    gliner = load(folder, choose_device(config.device))
    labels = tuple(json.loads((folder / RESULT).read_text(encoding="utf-8"))["labels"])
    corpus = read_corpus(config, labels)
    for name, items in corpus.items.items():
        _count_cuts(gliner, items, (*labels, *corpus.zero_shot[name]), config, corpus.counts[name])
    print_warnings(corpus.counts, SAID)
    figures = {name: measure(gliner, corpus, name, config.threshold) for name in config.validation}
    print(in_words(folder.name, figures, METRICS, None))
    return figures


def predict(
    run: str, texts: Sequence[str], labels: Sequence[str], threshold: float | None = None
) -> list[list[dict[str, Any]]]:
    """Entities of texts.

    Args:
        run: folder of a run.
        texts: any; the library cuts them into words.
        labels: types to look for, those of the training or others; none: those of the training.
        threshold: None: the recipe's.

    Returns:
        Of each text its entities by place: start and end in letters, text, label, score.

    Raises:
        ConfigError: a label names nothing, or is a setting.
    """
    folder = open_run(run, SETTINGS, "gliner")
    config = read_settings(GlinerConfig, gliner_problems, folder / SETTINGS)
    asked = list(labels) or json.loads((folder / RESULT).read_text(encoding="utf-8"))["labels"]
    if not all(label.strip() for label in asked):
        raise ConfigError("--labels: one names nothing. Write types of entities, such as: --labels person location")
    if settings := [label for label in asked if "=" in label]:
        raise ConfigError(
            f"--labels {settings[0]}: no type of entities. `predict` takes --threshold SHARE, and no keys."
        )
    if threshold is not None and not 0 <= threshold <= 1:
        raise ConfigError(f"--threshold {threshold}: a share from 0 to 1 is expected.")
    gliner = load(folder, choose_device(config.device))
    found: list[list[dict[str, Any]]] = gliner.inference(
        list(texts), asked, flat_ner=True, threshold=config.threshold if threshold is None else threshold
    )
    return found


def _count_cuts(
    gliner: Any, items: Sequence[Item], labels: Sequence[str], config: GlinerConfig, counts: Counts
) -> None:
    """Count what does not fit, with all labels before the sentence; training asks for fewer at a time."""
    processor, tokenizer = gliner.data_processor, gliner.data_processor.transformer_tokenizer
    counts.truncated = counts.lost = 0
    for at in range(0, len(items), _AT_ONCE * 32):
        some_items = items[at : at + _AT_ONCE * 32]
        inputs, prompts = processor.prepare_inputs([item.words[: config.max_len] for item in some_items], list(labels))
        told = tokenizer(inputs, is_split_into_words=True, truncation=True)
        for number, (item, prompt) in enumerate(zip(some_items, prompts, strict=True)):
            kept = max((word for word in told.word_ids(number) if word is not None), default=-1) + 1 - prompt
            if told.encodings[number].overflowing or len(item.words) > config.max_len:
                counts.truncated += 1
                counts.lost += sum(entity.last >= kept for entity in item.entities)


# --- the encoder's words ---------------------------------------------------------------------------------------------


def with_leading_space(folder: Path) -> bool:
    """Have a tokenizer read each of a list of words with the space that stands before it in a text.

    Words are given to the tokenizer one by one. A byte-level one that adds no space would read "Angela", "lives" as the
    insides of words, "Ang ela l ives", which an encoder hardly saw in such places. What changes is tokenizer.json of
    this folder, a copy that goes with the model.

    Returns:
        Whether it is byte-level; others mark the beginning of a word by themselves.
    """
    require_own_files(folder)
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    steps = tokenizer.get("pre_tokenizer") or {}
    every = steps.get("pretokenizers", []) if steps.get("type") == "Sequence" else [steps]
    places = [number for number, step in enumerate(every) if step.get("type") == "ByteLevel"]
    if not places:
        return False
    if places[0] == 0:
        every[0]["add_prefix_space"] = True
        told = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
        settings.write_text(json.dumps(told | {"add_prefix_space": True}, indent=2) + "\n", encoding="utf-8")
    else:  # it gets the parts of words that another step has cut, and would put a space before each
        space = {"type": "Prepend", "prepend": " "}
        before = tokenizer.get("normalizer")
        within = before["normalizers"] if before and before.get("type") == "Sequence" else [before] if before else []
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [*within, space]}
    file.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    return True


# --- the model -------------------------------------------------------------------------------------------------------


def build(config: GlinerConfig, encoder: Path) -> Any:
    """A GLiNER on an encoder's folder; what is new is drawn by the seed.

    The library adds three tokens to the tokenizer, and has the table of embeddings as long as that. A vocabulary that
    was padded loses its padding, and those three begin as rows that no text has used, or as their like.
    """
    from gliner import GLiNER
    from transformers import set_seed

    set_seed(config.seed)
    return GLiNER.from_config(
        {
            "model_name": str(encoder),
            "span_mode": "markerV0",
            "words_splitter_type": "whitespace",
            "max_width": config.max_width,
            "max_len": config.max_len,
            "max_types": config.max_types,
            "hidden_size": config.hidden_size,
            "dropout": config.dropout,
            "num_rnn_layers": config.num_rnn_layers,
            "subtoken_pooling": config.subtoken_pooling,
            "fine_tune": True,
            "class_token_index": -1,  # the library fills these in
            "vocab_size": -1,
        },
        local_files_only=True,
    )


class Visits:
    """Every sentence that training sees, in order, with the types that it is asked for: all a function of the seed.

    The library draws types from a set of texts, whose order is another in every process.
    """

    def __init__(self, items: Sequence[Item], labels: Sequence[str], config: GlinerConfig) -> None:
        self._items, self._labels, self._config = items, labels, config
        self._epoch, self._places = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._config.max_steps * self._config.batch_size

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        epoch, place = divmod(number, len(self._items))
        if epoch != self._epoch:
            self._epoch = epoch
            self._places = permutation(len(self._items), derive(self._config.seed, _ORDER, epoch))
        item = self._items[self._places[place]]
        return {
            "tokenized_text": list(item.words),
            "ner": [list(entity) for entity in item.entities],
            "ner_labels": self.asked(number, item),
        }

    def asked(self, number: int, item: Item) -> list[str]:
        """All types of a sentence, others by chance, at least one and at most so many, in any order."""
        key, places = derive(self._config.seed, _TYPES, number), np.arange(len(self._labels), dtype=np.uint64)
        draws = uniform(hash64(np.asarray(np.uint64(key)), places))
        there = {entity.label for entity in item.entities}
        # its own first, then others by their draw, so that what is cut off is asked for least
        ranked = sorted((label not in there, draw, label) for label, draw in zip(self._labels, draws, strict=True))
        wanted = [label for absent, draw, label in ranked if not absent or draw < self._config.ask_absent]
        wanted = wanted[: self._config.max_types] or [ranked[0][2]]
        return [wanted[place] for place in permutation(len(wanted), derive(self._config.seed, _SHUFFLE, number))]


def _fit(gliner: Any, config: GlinerConfig, corpus: Corpus, device: str) -> float:
    """Train in place; returns the mean loss of a step."""
    import sys

    from gliner.training import TrainingArguments

    # the order is that of `Visits`; earlier versions shuffle it once more, by the seed too
    in_order = {"train_sampling_strategy": "sequential"}
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            max_steps=config.max_steps,
            per_device_train_batch_size=config.batch_size,
            learning_rate=config.lr,
            others_lr=config.others_lr,
            weight_decay=config.weight_decay,
            others_weight_decay=config.others_weight_decay,
            warmup_ratio=config.warmup,
            lr_scheduler_type="cosine",
            max_grad_norm=config.max_grad_norm,
            focal_loss_alpha=config.focal_alpha,
            focal_loss_gamma=config.focal_gamma,
            loss_reduction="sum",
            seed=config.seed,
            use_cpu=device == "cpu",
            dataloader_num_workers=0,
            dataloader_pin_memory=device == "cuda",
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=not sys.stderr.isatty(),
            **{key: value for key, value in in_order.items() if key in TrainingArguments.__dataclass_fields__},
        )
        arguments._n_gpu = min(
            arguments.n_gpu, 1
        )  # of several GPUs one: the library would cut a batch over all of them
        visits = Visits(corpus.items[TRAIN], corpus.labels, config)
        trainer = gliner.train_model(visits, None, training_args=arguments)
    gliner.to(device)
    return float(trainer.state.log_history[-1]["train_loss"])


def _save(gliner: Any, folder: Path, name: str) -> None:
    """Write a model as `GLiNER.from_pretrained` loads it, without a path of this machine."""
    gliner.config.model_name = gliner.config.encoder_config._name_or_path = name
    gliner.save_pretrained(folder, safe_serialization=True)


def load(run: Path, device: str = "cpu") -> Any:
    """The model of a run, of the library's class.

    Raises:
        ConfigError: the library is not installed.
        DataError: the folder is damaged, or holds links out of it.
    """
    require("gliner", "gliner", "accelerate", "sklearn")
    from gliner import GLiNER

    folder = run / MODEL
    require_own_files(folder)
    try:
        with quiet():
            return GLiNER.from_pretrained(str(folder), local_files_only=True, map_location=device)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DataError(f"{folder}: cannot be loaded ({error}). Restore it from a copy, or train it again.") from None


# --- what it finds ---------------------------------------------------------------------------------------------------


def measure(gliner: Any, corpus: Corpus, split: str, threshold: float) -> dict[str, float]:
    """Precision, recall and F1 of exact spans with their types, over all entities; those of unseen types apart.

    Seen types are asked for together, and so are unseen ones. An entity that was cut off or is too wide is missed.
    """
    items = corpus.items[split]
    figures: dict[str, float] = {}
    for prefix, labels in (("", corpus.labels), ("zero_shot_", corpus.zero_shot[split])):
        if not labels:
            continue
        found = _figures([find(gliner, items, labels, threshold), [of_labels(item, labels) for item in items]], items)
        figures |= {f"{prefix}{name.removeprefix('entity_')}": value for name, value in found.items()}
    return figures


def _figures(found: Sequence[Sequence[Sequence[Entity]]], items: Sequence[Item]) -> dict[str, float]:
    from modernbert_train.evals.metrics import entity_figures

    told, labels = ([tags_of(each, len(item.words)) for each, item in zip(of, items, strict=True)] for of in found)
    return entity_figures(told, labels)


def find(gliner: Any, items: Sequence[Item], labels: Sequence[str], threshold: float) -> list[tuple[Entity, ...]]:
    """The entities that a model finds in sentences that are words already."""
    gliner.eval()
    collator, found = gliner.create_collator(), []
    for at in range(0, len(items), _AT_ONCE):
        inputs = [{"tokenized_text": list(item.words), "ner": None} for item in items[at : at + _AT_ONCE]]
        batch = gliner.collate_batch(inputs, list(labels), collator)
        output = gliner.run_batch(batch, threshold=threshold)
        for spans in gliner.decode_batch(output, batch, threshold=threshold, flat_ner=True):
            found.append(tuple(Entity(each.start, each.end, each.entity_type) for each in spans))
    return found
