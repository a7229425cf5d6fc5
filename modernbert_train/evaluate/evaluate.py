"""`python -m modernbert_train eval`: measure a run's newest checkpoint, or a named one, as training does.

It measures the held-out text and runs the evaluations of the section `evals`.
"""

from __future__ import annotations

import sys

from modernbert_train.checkpoints.checkpoint import Checkpoint, newest_checkpoint
from modernbert_train.checkpoints.evaluations import keep_result
from modernbert_train.checkpoints.resume_rules import check_same_run
from modernbert_train.clock import Clock
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.fingerprint import data_fingerprint, differences
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import joined, this_rank
from modernbert_train.errors import ConfigError
from modernbert_train.evaluate.evaluators import build_evaluators, figures_text
from modernbert_train.evaluate.heldout import Evaluation, HeldOutTexts
from modernbert_train.models.build import build_model
from modernbert_train.plan.resolve import resolve
from modernbert_train.weights.gather import load_weights
from modernbert_train.weights.source import check_same_tokenizer, source_of

HELD_OUT = "heldout"


def evaluate_run(config: RunConfig, *, checkpoint: Checkpoint | None = None) -> dict[str, dict[str, float]]:
    """Measure a checkpoint, print the figures, and save them in its run's folder; see evaluations.py.

    Args:
        config: the run's, whose data and sections eval and evals are used; the checkpoint has the rest.
        checkpoint: None for the run's newest.

    Returns:
        Figures by name: `heldout` for the held-out text, and each evaluation's name in evals.

    Raises:
        ConfigError: the run names nothing to measure on, or the checkpoint has another configuration or tokenizer.
        DataError: shards and tokenizer do not belong together, or labelled texts cannot be used.
        StorageError: the run lacks a checkpoint.
    """
    if config.data.validation is None and not config.evals:
        raise ConfigError(
            "data.validation: not set, and evals is empty, so this run names no text to measure. Name held-out shards."
        )
    facts = resolve(config, purpose="measure").facts
    assert facts is not None
    chosen = newest_checkpoint(config.folder) if checkpoint is None else checkpoint
    source = source_of(chosen)
    check_same_run(chosen, config)
    check_same_tokenizer(source, config.data.tokenizer, str(chosen.folder))
    for each in differences(chosen.state.data, data_fingerprint(facts)):
        if each.is_teacher:
            continue  # no figure uses the teacher
        print(f"warning: other data than the run had when it was saved: {each}", file=sys.stderr)
    compute, now = Compute.of(config.compute), Clock.of(chosen.config).phase(chosen.state.phase)
    model = build_model(source.model, chosen.config.objective, config.compute)
    load_weights(model, chosen.weights())
    texts = HeldOutTexts(config.data, config.eval, Clock.of(config), config.model.vocab_size, facts)
    figures: dict[str, dict[str, float]] = {}
    with joined(compute.device, config.distributed.timeout_seconds):
        model.to(compute.device)
        if facts.validation is not None:
            result = texts.validation().evaluate(model, now, compute)
            figures[HELD_OUT] = result.as_dict()
            print(describe(result, now.objective.for_validation().predicted_share, chosen.folder.name))
        for name, evaluator in build_evaluators(config.evals, texts).items():
            figures[name] = evaluator(model, now, compute)
            print(f"{name}: {figures_text(figures[name])}; {evaluator}; {chosen.folder.name}")
        if this_rank() == 0:
            weights = chosen.weights_hash
            for name, measured in figures.items():
                text, named = facts.validation, _plain(measured) if name == HELD_OUT else measured
                title = name if name != HELD_OUT or text is None else f"{name}, data {text.card.index_sha256[:12]}"
                keep_result(chosen.folder, title, named, step=chosen.step, weights=weights)
    return figures


def _plain(held_out: dict[str, float]) -> dict[str, float]:
    """Rename the figures of held-out text as in `evals`: `num_` for counts, `baseline/` for guessing."""
    names = {"predicted": "num_predicted", "unigram_loss": "baseline/loss", "unigram_accuracy": "baseline/accuracy"}
    return {names.get(name, name): value for name, value in held_out.items()}


def describe(result: Evaluation, predicted_share: float, checkpoint: str) -> str:
    """Return the figures as a small table."""
    gain, more = result.unigram_loss - result.loss, result.accuracy - result.unigram_accuracy
    share, baseline = (f"{predicted_share:.0%} predicted, ", "unigram") if predicted_share else ("", "guessing")
    word, sign = ("better by", 1) if gain >= 0 else ("worse by", -1)
    return (
        f"held-out text, {share}{result.predicted:,} predictions, {checkpoint}\n"
        f"            loss (nats)  accuracy\n"
        f"  model     {result.loss:11.3f}  {result.accuracy:8.1%}\n"
        f"  {baseline:9} {result.unigram_loss:11.3f}  {result.unigram_accuracy:8.1%}\n"
        f"  {word:9} {sign * gain:11.3f}  {sign * more:8.1%}"
        + "".join(f"\n  {name} {value:.4f}" for name, value in result.figures.items())
    )
