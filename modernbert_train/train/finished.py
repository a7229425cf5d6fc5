"""What is done with a run's newest checkpoint, or one named: it is measured, or exported as a Hugging Face model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from modernbert_train.config.schema import RunConfig
from modernbert_train.data.check import check_data
from modernbert_train.data.fingerprint import data_fingerprint, differences
from modernbert_train.errors import ConfigError, StorageError
from modernbert_train.export.hf import export
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.train.build import build_validation
from modernbert_train.train.card import run_card
from modernbert_train.train.checkpoint import Checkpoint, newest_valid
from modernbert_train.train.device import choose_device, resolve_precision
from modernbert_train.train.evaluate import Evaluation
from modernbert_train.train.origin import check_same_architecture, check_same_tokenizer, last_phase, source_of
from modernbert_train.train.ranks import joined
from modernbert_train.train.run_folder import RunFolder
from modernbert_train.train.state import load_weights
from modernbert_train.vocabulary import read_vocabulary


def newest_checkpoint(config: RunConfig) -> Checkpoint:
    """The newest whole checkpoint of a run.

    Raises:
        StorageError: there is none.
    """
    folder = RunFolder(config).checkpoints
    found, passed_over = newest_valid(folder)
    for text in passed_over:
        print(f"warning: passed over a damaged checkpoint: {text}")
    if found is None:
        raise StorageError(f"{folder}: no checkpoint yet. Train the run first.")
    return found


def evaluate_run(config: RunConfig, *, checkpoint: Checkpoint | None = None) -> Evaluation:
    """Measure a checkpoint on the held-out text and print the figures; nothing is written.

    Args:
        config: the run; its data, masking rate and eval section are used.
        checkpoint: None is the run's newest.

    Raises:
        ConfigError: the run names no held-out text, or the checkpoint is of another architecture or tokenizer.
        DataError: shards and tokenizer do not belong together.
        StorageError: it has no checkpoint.
    """
    if config.data.validation is None:
        raise ConfigError("data.validation: not set, so there is nothing to measure on. Name held-out shards.")
    check_data(config)
    found = checkpoint or newest_checkpoint(config)
    source = source_of(found)
    check_same_architecture(source, config.model, str(found.folder))
    check_same_tokenizer(source, config, str(found.folder))
    vocabulary = read_vocabulary(config.data.tokenizer)
    for each in differences(found.state.data, data_fingerprint(config, vocabulary)):
        print(f"warning: other data than the run had when it was saved: {each}", file=sys.stderr)
    phase = last_phase(found)
    device = choose_device(config)
    model = ModernBertForMaskedLM(config.model)
    load_weights(model, found.weights())
    model.set_global_rope_theta(phase.global_rope_theta)
    model.set_local_rope_theta(source.model.local_rope_theta)
    with joined(device, config.distributed.timeout_seconds):
        validation = build_validation(config, vocabulary)
        bf16 = resolve_precision(config, device) == "amp_bf16"
        result = validation.evaluate(model.to(device), phase, device, bf16)
    print(describe(result, config.objective.eval_mask_rate, found.folder.name))
    return result


def describe(result: Evaluation, mask_rate: float, checkpoint: str) -> str:
    """The figures as a small table."""
    return (
        f"held-out text, {mask_rate:.0%} masked, {result.predicted:,} predictions, {checkpoint}\n"
        f"            loss (nats)  accuracy\n"
        f"  model     {result.loss:11.3f}  {result.accuracy:8.1%}\n"
        f"  unigram   {result.unigram_loss:11.3f}  {result.unigram_accuracy:8.1%}\n"
        f"  better by {result.unigram_loss - result.loss:11.3f}  {result.accuracy - result.unigram_accuracy:8.1%}"
    )


def export_run(
    config: RunConfig, out: Path | None = None, *, checkpoint: Checkpoint | None = None, licence: str | None = None
) -> Path:
    """Write a checkpoint as a Hugging Face model.

    Args:
        config: the run.
        out: where to; None is hf in the run's folder, or hf-step-... if a checkpoint is named.
        checkpoint: None is the run's newest.
        licence: see `model_card`.

    Returns:
        The model's folder.

    Raises:
        ConfigError: data.tokenizer is not the one that the checkpoint was trained with.
        StorageError: there is no checkpoint, or the folder cannot be written.
    """
    found = checkpoint or newest_checkpoint(config)
    check_same_tokenizer(source_of(found), config, str(found.folder))
    trained = found.config  # the architecture is the checkpoint's, whatever the YAML says today
    phase = last_phase(found)
    folder = out or Path(config.folder) / ("hf" if checkpoint is None else f"hf-{found.folder.name}")
    streams, metrics = config.data.all_streams, RunFolder(config).read_metrics()
    export(
        found.weights(),
        replace(trained.model, local_rope_theta=phase.local_theta(trained.model)),
        global_rope_theta=phase.global_rope_theta,
        max_tokens=phase.row_tokens,
        tokenizer_folder=Path(config.data.tokenizer),
        out=folder,
        card=run_card(
            trained,
            streams,
            step=found.step,
            tokens=found.state.tokens,
            metrics=metrics,
            licence=licence,
            average=found.state.average,
        ),
    )
    print(folder)
    return folder
