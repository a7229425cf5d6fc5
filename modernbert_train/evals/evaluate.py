"""`python -m modernbert_train eval`: a run's newest checkpoint, or one named, is measured on the held-out text."""

from __future__ import annotations

import sys

from modernbert_train.compute import Compute
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.check import check_data
from modernbert_train.data.fingerprint import data_fingerprint, differences
from modernbert_train.errors import ConfigError
from modernbert_train.evals.heldout import Evaluation, open_validation
from modernbert_train.models.build import build_model
from modernbert_train.ranks.group import joined
from modernbert_train.run.checkpoint import Checkpoint, newest_checkpoint
from modernbert_train.weights.gather import load_weights
from modernbert_train.weights.source import (
    check_same_architecture,
    check_same_tokenizer,
    last_phase,
    phase_objective,
    source_of,
)


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
    facts = check_data(config)
    found = checkpoint or newest_checkpoint(config)
    source = source_of(found)
    check_same_architecture(source, config.model, str(found.folder))
    check_same_tokenizer(source, config, str(found.folder))
    for each in differences(found.state.data, data_fingerprint(facts)):
        print(f"warning: other data than the run had when it was saved: {each}", file=sys.stderr)
    phase = last_phase(found)
    compute = Compute.of(config)
    model = build_model(source.model, found.config.objective, config.compute)
    load_weights(model, found.weights())
    with joined(compute.device, config.distributed.timeout_seconds):
        validation = open_validation(config, facts)
        objective = phase_objective(found)
        result = validation.evaluate(model.to(compute.device), phase, compute, objective)
    print(describe(result, objective.for_validation().predicted_share, found.folder.name))
    return result


def describe(result: Evaluation, predicted_share: float, checkpoint: str) -> str:
    """The figures as a small table."""
    return (
        f"held-out text, {predicted_share:.0%} predicted, {result.predicted:,} predictions, {checkpoint}\n"
        f"            loss (nats)  accuracy\n"
        f"  model     {result.loss:11.3f}  {result.accuracy:8.1%}\n"
        f"  unigram   {result.unigram_loss:11.3f}  {result.unigram_accuracy:8.1%}\n"
        f"  better by {result.unigram_loss - result.loss:11.3f}  {result.accuracy - result.unigram_accuracy:8.1%}"
    )
