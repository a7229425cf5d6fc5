"""`python -m modernbert_train export`: write a checkpoint of a run, or a Composer file, for transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import Tensor

from modernbert_train.checkpoints.checkpoint import Checkpoint, newest_checkpoint
from modernbert_train.checkpoints.evaluations import Result, read_results, run_of
from modernbert_train.checkpoints.provenance import read_starts
from modernbert_train.checkpoints.resume_rules import check_same_run
from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.config.contrastive import TOKEN_PROJECTION
from modernbert_train.config.schema import (
    BertConfig,
    ContrastiveConfig,
    LabelledConfig,
    MaskedLmConfig,
    ModelConfig,
    RunConfig,
)
from modernbert_train.data.statistics import prompts_of
from modernbert_train.errors import ConfigError
from modernbert_train.models.build import shapes_of
from modernbert_train.models.init import module_of
from modernbert_train.models.replaced import PROJECTION, generator_of
from modernbert_train.weights.formats import DISCRIMINATORS, HubFormat, electra, export_format, read_content
from modernbert_train.weights.formats.classifiers import classifier_format
from modernbert_train.weights.formats.config_json import BEFORE, PREDICTS_FROM
from modernbert_train.weights.formats.electra import TOKEN_HEAD
from modernbert_train.weights.formats.headless import Headless
from modernbert_train.weights.formats.sentence_encoder import SentenceEncoder, read_own
from modernbert_train.weights.formats.tensors import (
    DECODER,
    MASKED_LM,
    positions_from_zero,
    unsupported_heads,
)
from modernbert_train.weights.hf_folder import export
from modernbert_train.weights.model_card import Part, architecture_title, model_card, run_card
from modernbert_train.weights.names import EXPORT
from modernbert_train.weights.source import Source, check_same_tokenizer, open_model, phase_objective, source_of


def export_run(
    config: RunConfig,
    out: Path | None = None,
    *,
    checkpoint: Checkpoint | None = None,
    licence: str | None = None,
    generator: bool = False,
    quiet: bool = False,
) -> Path:
    """Write a checkpoint as a Hugging Face model.

    Args:
        config: the run.
        out: the folder; None: hf in the run's folder, or hf-step-... if a checkpoint is named.
        checkpoint: None: the run's newest.
        licence: see `model_card`.
        generator: write the generator that was trained with the model, to hf-generator if no folder is named.
        quiet: do not print the folder.

    Returns:
        The model's folder.

    Raises:
        ConfigError: the configuration or data.tokenizer is not that of the checkpoint, there is no generator, or
            transformers lacks such a model.
        StorageError: there is no checkpoint, or the folder cannot be written.
    """
    chosen = newest_checkpoint(config.folder) if checkpoint is None else checkpoint
    source = source_of(chosen)
    check_same_run(chosen, config)
    check_same_tokenizer(source, config.data.tokenizer, str(chosen.folder))
    own = f"{EXPORT}-generator" if generator else EXPORT
    folder = out or Path(config.folder) / (own if checkpoint is None else f"{own}-{chosen.folder.name}")
    streams, metrics = config.data.all_streams, RunFolder(config).read_metrics()
    part = _generator(chosen, source) if generator else _model(source, own_prompts(source))
    left_out = unsupported_heads(part.hub, part.weights, part.model)
    card = run_card(
        chosen.config,
        streams,
        phase=chosen.state.phase,
        part=part.kind,
        model=part.model,  # the architecture is the checkpoint's; the YAML may have changed since
        shapes=part.shapes,
        left_out=left_out,
        step=chosen.step,
        tokens=chosen.state.tokens,
        metrics=metrics,
        licence=licence,
        average=chosen.state.average,
        averaged_by=chosen.state.averaged_by,
        starts=read_starts(_trained_in(chosen, config)),
        results=_results(chosen, config),
    )
    _write(part, source, Path(config.data.tokenizer), folder, card)
    for head in left_out:
        print(f"left out: {head}, which transformers' {source.model.name} cannot store")
    if not quiet:
        print(f"of {chosen.folder.name}, {chosen.state.tokens:,} tokens:")
        print(folder)
    return folder


def _trained_in(checkpoint: Checkpoint, config: RunConfig) -> Path:
    """Return the folder of the run that trained a checkpoint; for an average, the run of its last checkpoint."""
    trained = Path(checkpoint.state.average[-1].checkpoint) if checkpoint.state.average else checkpoint.folder
    return run_of(trained) or Path(config.folder)


def _results(checkpoint: Checkpoint, config: RunConfig) -> list[Result]:
    """Return the evaluations of these weights after training."""
    weights = checkpoint.weights_hash
    kept = read_results(run_of(checkpoint.folder) or Path(config.folder))
    return [result for result in kept if result.weights == weights]


def export_source(source: Source, out: Path, card: str = "") -> Path:
    """Write weights from anywhere, in fp32, as transformers' AutoModel and AutoTokenizer load them.

    Args:
        source: see `open_model`; heads that transformers cannot store are left out.
        out: the folder.
        card: text of README.md.

    Returns:
        The folder.

    Raises:
        DataError, StorageError: see `export`.
    """
    part = _model(source, own_prompts(source))
    with source.tokenizer_folder() as tokenizer:
        _write(part, source, tokenizer, out, card)
    return out


# head -> kind of exported model
_CLASSIFIERS: dict[str, Part] = {"class": "classifier", "tag": "tagger", "answer": "answerer", "choice": "chooser"}


def _reads_pairs(source: Source) -> bool:
    """Return True if the two texts of a pair had different token types in training."""
    return source.objective is not None and source.objective.segments > 1


def own_prompts(source: Source) -> dict[str, str] | None:
    """Return the prefixes that queries and documents had in training; None without any."""
    if source.checkpoint is not None:
        return prompts_of(_trained_in(source.checkpoint, source.checkpoint.config))
    return (read_own(source.folder)[0] if source.folder.is_dir() else {}) or None


def _predicts_from(source: Source) -> dict[str, str]:
    """Return the config.json key for models that predict a token from the position before it; empty for others."""
    before = source.objective is not None and source.objective.predict_from == BEFORE
    if source.checkpoint is None and source.folder.is_dir():
        before = read_content(source.folder).get(PREDICTS_FROM) == BEFORE
    return {PREDICTS_FROM: BEFORE} if before else {}


@dataclass(frozen=True)
class _Part:
    """The exported model of a checkpoint; its shapes were checked when it was opened.

    Attributes:
        kind: which model of a run it is.
        model: its architecture.
        weights: whole tensors by name.
        hub: their format.
    """

    kind: Part
    model: ModelConfig
    weights: dict[str, Tensor]
    hub: HubFormat

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights; a tied decoder has none."""
        tied = {DECODER} if self.model.tied else set()
        return {name: tuple(tensor.shape) for name, tensor in self.weights.items() if name not in tied}


def _write(part: _Part, source: Source, tokenizer: Path, out: Path, card: str) -> None:
    export(
        part.weights,
        part.model,
        hub=part.hub,
        shapes=part.shapes,
        order=source.order,
        max_tokens=source.max_tokens,
        tokenizer_folder=tokenizer,
        out=out,
        card=card,
        pairs=_reads_pairs(source),
        extra=_predicts_from(source),
    )


def _model(source: Source, prompts: Mapping[str, str] | None = None) -> _Part:
    model, weights = source.model, source.weights()
    objective = source.objective
    if objective is not None and objective.is_labelled:
        hub: HubFormat = classifier_format(model, cast(LabelledConfig, objective))
        return _Part(_CLASSIFIERS[objective.heads[0]], model, weights, hub)
    if objective is not None and objective.compares:  # an idle masked-LM head belongs to another phase
        kept = {"model", TOKEN_PROJECTION} | ({*MASKED_LM} if "tokens" in objective.heads else set())
        weights = {name: tensor for name, tensor in weights.items() if module_of(name) in kept}
        hub = SentenceEncoder(export_format(model, source.order), cast(ContrastiveConfig, objective), prompts)
        return _Part("embedder", model, weights, hub)
    modules = {module_of(name) for name in weights}
    if {TOKEN_HEAD, "decoder"} <= modules:  # if a run has both heads, export the one of its last phase
        detects = objective is not None and "replaced" in objective.heads
        idle = {*MASKED_LM} - {"model"} if detects else {TOKEN_HEAD}
        weights = {name: tensor for name, tensor in weights.items() if module_of(name) not in idle}
        modules -= idle
    hub = export_format(model, source.order, modules)
    if TOKEN_HEAD not in modules:
        is_whole = not {module_of(name) for name in shapes_of(model, MaskedLmConfig())} - modules
        return _Part("model", model, weights, hub if is_whole else Headless(hub))
    if hub is electra.FORMAT:
        model, weights = positions_from_zero(cast(BertConfig, model), weights)
    return _Part("detector", model, weights, hub)


def _generator(checkpoint: Checkpoint, source: Source) -> _Part:
    objective = phase_objective(checkpoint)
    model, weights = objective.generator_of(source.model), generator_of(checkpoint.weights())
    if model is None and checkpoint.config.objective.generator_of(source.model) is not None:
        raise ConfigError(
            f"--generator: {checkpoint.folder} was trained last by objective.name={objective.name}, in phase "
            f"{checkpoint.state.phase}, which leaves the generator idle. Name a checkpoint of a phase that trains it."
        )
    if model is None:
        raise ConfigError(
            f"--generator: {checkpoint.folder} was trained by objective.name={objective.name}, without a generator. "
            "Leave --generator out."
        )
    wide = PROJECTION in weights
    if DISCRIMINATORS.get(type(model)) is electra.FORMAT:
        hub = electra.generator_format(cast(BertConfig, model), weights[PROJECTION].shape[1] if wide else None)
        return _Part("generator", *positions_from_zero(cast(BertConfig, model), weights), hub)
    if wide:
        raise ConfigError(
            f"--generator: its embeddings are wider than its layers, and transformers cannot store such a "
            f"{model.name}. Export only the model; or train with objective.sharing=none, or with "
            "objective.generator_width=1."
        )
    return _Part("generator", model, weights, export_format(model, source.order))


def convert_model(name: str, out: Path, licence: str | None = None) -> Path:
    """Write any model but a run's as a folder for transformers, with unchanged weights in fp32.

    Args:
        name: see `open_model`.
        out: the folder; an earlier export there is replaced, anything else refused.
        licence: see `model_card`.

    Returns:
        The folder.

    Raises:
        DataError, StorageError: see `open_model` and `export`.
    """
    source = open_model(name)
    title, is_file = architecture_title(source.model, source.order), source.folder.is_file()
    path = Path(os.path.abspath(name))  # `.` has no name
    sections = {
        "": f"{title}, converted from {path.name}{', a checkpoint of its training' * is_file}.",
        "Data, training and evaluation": "Not recorded there; ask its authors. The longest sequence is not "
        f"recorded either: {source.max_tokens:,} tokens is the configuration's or transformers' default.",
    }
    titled = path.stem if is_file else path.name
    card = model_card(titled, sections, model=source.model, order=source.order, licence=licence, base=name)
    export_source(source, out, card)
    print(out)
    return out
