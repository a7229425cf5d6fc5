"""`python -m modernbert_train export`: a run's newest checkpoint, one named, or a Composer file, for transformers."""

from __future__ import annotations

from pathlib import Path

from modernbert_train.config.schema import RunConfig
from modernbert_train.run.checkpoint import Checkpoint, newest_checkpoint
from modernbert_train.run.run_folder import RunFolder
from modernbert_train.weights.formats import export_format
from modernbert_train.weights.formats.tensors import without_place
from modernbert_train.weights.hf_folder import export
from modernbert_train.weights.model_card import model_card, run_card, what
from modernbert_train.weights.source import check_same_tokenizer, open_source, source_of


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
    source = source_of(found)
    check_same_tokenizer(source, config, str(found.folder))
    folder = out or Path(config.folder) / ("hf" if checkpoint is None else f"hf-{found.folder.name}")
    streams, metrics = config.data.all_streams, RunFolder(config).read_metrics()
    weights = found.weights()
    left_out = without_place(export_format(source.model, source.order), weights, source.model)
    export(
        weights,
        source.model,  # the architecture is the checkpoint's, whatever the YAML says today
        order=source.order,
        max_tokens=source.max_tokens,
        tokenizer_folder=Path(config.data.tokenizer),
        out=folder,
        card=run_card(
            found.config,
            streams,
            phase=found.state.phase,
            left_out=left_out,
            step=found.step,
            tokens=found.state.tokens,
            metrics=metrics,
            licence=licence,
            average=found.state.average,
        ),
    )
    for head in left_out:
        print(f"left out: {head}, for which transformers' {source.model.name} has no place")
    print(folder)
    return folder


def convert_model(name: str, out: Path, licence: str | None = None) -> Path:
    """Write a checkpoint file of Composer, its weights unchanged, as transformers loads them.

    Args:
        name: see `open_source`.
        out: the folder; an earlier export there is replaced, anything else refused.
        licence: see `model_card`.

    Returns:
        The folder.

    Raises:
        DataError, StorageError: see `open_source` and `export`.
    """
    source = open_source(name)
    sections = {
        "": f"{what(source.model, source.order)}, converted from {Path(name).name}, a checkpoint of its training.",
        "Data, training and evaluation": "Not recorded in that file; ask who trained it. Nor is the longest sequence: "
        f"{source.max_tokens:,} tokens is what a configuration states or transformers assumes.",
    }
    card = model_card(Path(name).stem, sections, model=source.model, order=source.order, licence=licence)
    with source.tokenizer_folder() as tokenizer:
        export(
            source.weights(),
            source.model,
            max_tokens=source.max_tokens,
            tokenizer_folder=tokenizer,
            out=out,
            card=card,
        )
    print(out)
    return out
