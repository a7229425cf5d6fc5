"""What is done with a run's newest checkpoint: measuring it, and giving it away as a Hugging Face model."""

from __future__ import annotations

from pathlib import Path

from modernbert_train import __version__
from modernbert_train.clock import position_at
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.dataset_card import read_card
from modernbert_train.errors import ConfigError, StorageError
from modernbert_train.export.hf import export
from modernbert_train.models.init import count_parameters
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.train.build import build_validation, choose_device, resolve_precision
from modernbert_train.train.checkpoint import CONFIG, Checkpoint, newest_valid
from modernbert_train.train.evaluate import Evaluation
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


def evaluate_run(config: RunConfig) -> Evaluation:
    """Measure the newest checkpoint on the held-out text, print the figures and record them.

    Raises:
        ConfigError: the run names no held-out text.
    """
    if config.data.validation is None:
        raise ConfigError("data.validation: not set, so there is nothing to measure on. Name held-out shards.")
    found = newest_checkpoint(config)
    tokens = int(found.state()["tokens"])
    phase = position_at(config, max(0, tokens - 1)).phase
    device = choose_device(config)
    model = ModernBertForMaskedLM(config.model)
    load_weights(model, found.weights())
    model.set_global_rope_theta(phase.global_rope_theta)
    with joined(device, config.distributed.timeout_seconds):
        validation = build_validation(config, read_vocabulary(config.data.tokenizer))
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


def export_run(config: RunConfig, out: Path | None = None) -> Path:
    """Write the newest checkpoint as a Hugging Face model.

    Args:
        config: the run.
        out: where to; None is the run's folder/hf.

    Returns:
        The model's folder.
    """
    found = newest_checkpoint(config)
    trained = load_run([found.folder / CONFIG])  # the architecture is the checkpoint's, whatever the YAML says today
    tokens = int(found.state()["tokens"])
    position = position_at(trained, max(0, tokens - 1))
    folder = out or Path(config.folder) / "hf"
    export(
        found.weights(),
        trained.model,
        global_rope_theta=position.phase.global_rope_theta,
        max_tokens=position.phase.row_tokens,
        tokenizer_folder=Path(config.data.tokenizer),
        out=folder,
        card=_model_card(trained, config, found, tokens),
    )
    print(folder)
    return folder


def _model_card(trained: RunConfig, config: RunConfig, found: Checkpoint, tokens: int) -> str:
    card = read_card(config.data.train)
    model = ModernBertForMaskedLM(trained.model)
    metrics = [entry for entry in RunFolder(config).read_metrics() if entry.get("kind") == "validation"]
    evaluation = "No held-out text was named."
    if metrics:
        last = metrics[-1]
        evaluation = (
            f"At {last['tokens']:,} tokens, {trained.objective.eval_mask_rate:.0%} of held-out tokens masked: loss "
            f"{last['loss']:.3f} nats, accuracy {last['accuracy']:.1%} (unigram baseline {last['unigram_loss']:.3f} "
            f"nats, {last['unigram_accuracy']:.1%})."
        )
    phases = "\n".join(
        f"| {name} | {phase.tokens:,} | {phase.row_tokens:,} | {phase.batch_rows:,} | "
        f"{trained.optim.lr * phase.lr_ratio:.2e} | {phase.global_rope_theta:,.0f} |"
        for name, phase in trained.phases.items()
    )
    return f"""---
library_name: transformers
pipeline_tag: fill-mask
tags:
- modernbert
- fill-mask
---

# {trained.name}

A ModernBERT encoder ([arXiv 2412.13663](https://arxiv.org/abs/2412.13663)) with {count_parameters(model):,} parameters,
pretrained by masked-language modelling with modernbert-train {__version__}.

## Data

{card.documents:,} documents, {card.tokens:,} tokens of text, tokenizer with {card.vocab_size:,} entries. Say here what
the text is, where it comes from and under which licence; the model inherits its limits.

## Training

{tokens:,} tokens, {found.step:,} steps, {trained.objective.mask_rate:.0%} of the tokens masked, optimizer
{trained.optim.name}, checkpoint {found.folder.name}.

| phase | tokens | context | rows in a batch | peak learning rate | global RoPE theta |
| --- | --- | --- | --- | --- | --- |
{phases}

## Evaluation

{evaluation}

## Use

```python
from transformers import AutoModelForMaskedLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForMaskedLM.from_pretrained("PATH")
```

## Licence

Not chosen yet: set it here and as `license:` in the header before publishing.
"""
