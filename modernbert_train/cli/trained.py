"""Verbs for a trained model: measure, average, export, publish."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.cli.arguments import (
    MODEL,
    is_override,
    named_checkpoint,
    named_model,
    read_sound,
    with_licence,
    with_run,
)
from modernbert_train.cli.parser import Call, positive, whole
from modernbert_train.config.read_yaml import literal
from modernbert_train.core.text import printable
from modernbert_train.distributed.launched import refuse_ranks
from modernbert_train.errors import ConfigError
from modernbert_train.plan.resolve import resolve


def evaluate(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `eval`, and return its call."""
    words = f"YAML files or a run's folder, overrides; with --suite models: {MODEL}, frozen:MODEL or untrained:MODEL"
    parser.add_argument("run", nargs="+", metavar="RUN [KEY=VALUE]", help=words)
    words = "fine-tune each model on the tasks of a suite from yamls/suites, such as quick, or of your own YAML file"
    parser.add_argument("--suite", metavar="NAME", help=words)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="with --suite: folder of all runs and their table")
    words = "with --suite: override its seeds; results of other seeds are kept"
    parser.add_argument("--seeds", nargs="+", type=whole, metavar="N", help=words)
    words = "with --suite: parallel runs; default: one for each GPU, or one"
    parser.add_argument("--jobs", type=positive, metavar="N", help=words)
    parser.add_argument("--retry", action="store_true", help="with --suite: repeat runs that failed before")
    parser.add_argument(
        "--dry-run", action="store_true", help="with --suite: print the number of runs and missing data, and exit"
    )

    def call(options: argparse.Namespace) -> None:
        of_suites = [word for word in ("out", "seeds", "jobs", "retry", "dry_run") if getattr(options, word)]
        if options.suite is None and of_suites:
            parser.error(f"--{of_suites[0].replace('_', '-')} needs --suite. Add it, such as --suite quick.")
        if options.suite is not None and options.out is None:
            parser.error("--suite needs a folder for its runs and their table. Add --out, such as --out runs/judged.")
        (_evaluate if options.suite is None else _evaluate_suite)(options)

    return call


def _evaluate_suite(options: argparse.Namespace) -> None:
    overrides = [word for word in options.run if is_override(word)]
    models = [word for word in options.run if word not in overrides]
    if not models:
        raise ConfigError(f"eval {' '.join(overrides)}: names no model. Name a run, a checkpoint or a folder.")
    refuse_ranks("eval --suite")
    from modernbert_train.evaluate.suite.run_suite import evaluate_suite

    own = {"dry_run": options.dry_run, "retry": options.retry}
    evaluate_suite(models, options.suite, options.out, options.seeds, options.jobs, overrides, **own)


def _evaluate(options: argparse.Namespace) -> None:
    from modernbert_train.evaluate.finetune.task import named_model as with_baseline

    for word in options.run:
        if with_baseline(word).baseline:
            raise ConfigError(
                f"eval {word}: frozen: and untrained: name baselines of a suite's tasks. Add --suite, such as --suite "
                "quick, and --out, or leave the prefix out."
            )
    model, words = named_model(options.run), options.run
    checkpoint = named_checkpoint(model)
    is_other = model is not None and checkpoint is None
    if is_other:
        words = [word for word in words if word != model]
        if all(map(is_override, words)):
            raise ConfigError(f"eval {model}: names no text to measure. Add a run's YAML file: eval {model} RUN.yaml.")
        words += [
            f"weights.init_from={json.dumps(literal(model))}",
            "weights.grow_from=null",
            "weights.shrink_from=null",
        ]
    config = read_sound(words, "measure")
    if is_other or (checkpoint is None and config.weights.named and not RunFolder(config).has_checkpoints()):
        from modernbert_train.evaluate.first_weights import describe_first

        print(describe_first(config))
        return
    from modernbert_train.evaluate.evaluate import evaluate_run

    evaluate_run(config, checkpoint=checkpoint)


def fill(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `fill`, and return its call."""
    parser.add_argument("model", help=MODEL)
    parser.add_argument("text", nargs="+", help="text with one [MASK]")
    return _fill


def _fill(options: argparse.Namespace) -> None:
    from modernbert_train.weights.fill import fill

    print(fill(options.model, options.text))


def embed(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `embed`, and return its call."""
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument(
        "texts", type=Path, metavar="TEXTS", help=".txt with a text a line, .jsonl, .tsv, .csv or .parquet"
    )
    words = ".npy, an array; or .parquet, a column `embedding`; a row for each text"
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=words)
    parser.add_argument("--column", default="text", help="column of .jsonl and .parquet; default: text")
    words = "mean of all tokens, or the state of [CLS]; default: mean"
    parser.add_argument("--pooling", choices=("mean", "cls"), default="mean", help=words)
    words = "tokens in one forward pass; default: 16384"
    parser.add_argument("--batch-tokens", type=positive, default=16_384, metavar="N", help=words)
    words = "precision of the computation, as compute.precision of a run; default: auto"
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto", help=words)
    words = "type of the written numbers; default: float32"
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32", help=words)
    return _embed


def _embed(options: argparse.Namespace) -> None:
    if options.texts.is_dir():
        raise ConfigError(f"{options.texts}: a folder. Give one file of texts, or embed its files one by one.")
    from modernbert_train.evaluate.embed_file import embed_file

    line = embed_file(
        options.model,
        options.texts,
        options.out,
        column=options.column,
        pooling=options.pooling,
        batch_tokens=options.batch_tokens,
        precision=options.precision,
        dtype=options.dtype,
    )
    print(printable(line))


def average(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `average`, and return its call."""
    words = "checkpoints, or runs (their newest checkpoint is used); with --last one run"
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=words)
    parser.add_argument("--last", type=positive, metavar="K", help="the K newest checkpoints of the run's decay")
    parser.add_argument(
        "--weights", nargs="+", type=float, metavar="W", help="one weight per checkpoint; default: equal"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the average")
    parser.add_argument("--how", choices=("mean", "slerp", "ties"), default="mean", help="default: mean")
    parser.add_argument("--base", metavar="CHECKPOINT", help="for ties: the checkpoint that all of them started from")
    words = "for ties: share of each difference to keep (0.2)"
    parser.add_argument("--keep", type=float, default=0.2, metavar="SHARE", help=words)
    return _average


def _average(options: argparse.Namespace) -> None:
    from modernbert_train.weights.average import average_checkpoints

    average_checkpoints(
        options.checkpoints,
        options.out,
        last=options.last,
        weights=options.weights,
        how=options.how,
        base=options.base,
        keep=options.keep,
    )


def export(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `export`, and return its call."""
    with_run(parser)
    parser.add_argument("--out", type=Path, help="folder of the model; default: the run's folder/hf")
    words = "the generator that was trained with the model, into hf-generator; see objective.name=rtd"
    parser.add_argument("--generator", action="store_true", help=words)
    with_licence(parser)
    return _export


def _export(options: argparse.Namespace) -> None:
    model = named_model(options.run)
    checkpoint = named_checkpoint(model)
    if model is not None and checkpoint is None:
        if options.out is None or len(options.run) > 1 or options.generator:
            raise ConfigError(f"{' '.join(options.run)}: such a model is exported alone, as MODEL --out FOLDER.")
        from modernbert_train.weights.export import convert_model

        convert_model(model, options.out, options.licence)
        return
    config = read_sound(options.run, "use")
    resolve(config, purpose="use")
    from modernbert_train.weights.export import export_run

    export_run(config, options.out, checkpoint=checkpoint, licence=options.licence, generator=options.generator)


def push(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `push`, and return its call."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("repo_id", metavar="OWNER/MODEL", help="on the hub; created if it does not exist")
    parser.add_argument("--private", action="store_true", help="make it visible to its owner only")
    words = "also each checkpoint as a revision of its name; step-00000000 has the weights before the first step"
    parser.add_argument("--every-checkpoint", action="store_true", help=words)
    words = "list the files that would be sent, and send nothing; needs neither an account nor a network"
    parser.add_argument("--dry-run", action="store_true", help=words)
    with_licence(parser)
    return _push


def _push(options: argparse.Namespace) -> None:
    if not (options.folder / "config.yaml").is_file():
        raise ConfigError(f"push {options.folder}: not the folder of a run. Name one, such as runs/quickstart.")
    config = read_sound([str(options.folder)], "use")
    resolve(config, purpose="use")
    from modernbert_train.weights.push import push_run

    push_run(
        config,
        options.repo_id,
        private=options.private,
        every_checkpoint=options.every_checkpoint,
        licence=options.licence,
        dry_run=options.dry_run,
    )
