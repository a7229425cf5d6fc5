"""The verbs of this folder: their arguments and calls, with nothing heavy imported. `cli/verbs.py` has their rows."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from modernbert_train.cli.arguments import MODEL
from modernbert_train.cli.parser import Call
from modernbert_train.errors import ConfigError


def retrieval(parser: argparse.ArgumentParser) -> Call:
    """Arguments and call of `retrieval`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="train|evaluate")
    for name, what, words, summary in (
        (
            "train",
            "RECIPE",
            "a YAML file, such as yamls/retrieval/modernbert.yaml",
            "contrastive training, then figures",
        ),
        (
            "evaluate",
            "BEIR_FOLDER",
            "with corpus.jsonl, queries.jsonl and qrels",
            "nDCG@10 and others on a BEIR folder",
        ),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        action.add_argument("what", metavar=what, help=words)
        action.add_argument("--model", required=True, help=f"{MODEL}; or a folder of sentence-transformers")
        action.add_argument("run", nargs="*", metavar="KEY=VALUE", help="keys of the recipe, such as train= or seed=")
    return _retrieval


def _retrieval(options: argparse.Namespace) -> None:
    require_keys(options.run)
    from modernbert_train.downstream import retrieval

    call = retrieval.train if options.action == "train" else retrieval.evaluate
    call(options.what, options.model, options.run)


def require_keys(words: list[str]) -> None:
    """What follows the arguments must be keys with values.

    Raises:
        ConfigError: names the first that is not.
    """
    if wrong := [word for word in words if "=" not in word]:
        raise ConfigError(f"{wrong[0]}: neither a key with a value nor an argument of its own. Write KEY=VALUE.")


def gliner(parser: argparse.ArgumentParser) -> Call:
    """Arguments and call of `gliner`."""
    return _recipe(parser, "gliner")


def setfit(parser: argparse.ArgumentParser) -> Call:
    """Arguments and call of `setfit`."""
    return _recipe(parser, "setfit")


def _recipe(parser: argparse.ArgumentParser, name: str) -> Call:
    """`train`, `evaluate` and `predict` of modernbert_train/downstream/NAME.py."""
    steps = parser.add_subparsers(dest="step", required=True, metavar="train|evaluate|predict")

    def add(step: str, summary: str) -> argparse.ArgumentParser:
        return steps.add_parser(step, help=summary, description=summary)

    step = add("train", "train it, measure it, and store it with its figures")
    step.add_argument("recipe", metavar="RECIPE", help=f"YAML file, such as those of yamls/{name}")
    step.add_argument("--model", required=True, help=MODEL)
    step.add_argument("run", nargs="*", metavar="KEY=VALUE", help="keys of the recipe, such as train= or seed=")
    step = add("evaluate", "measure a stored one again")
    step.add_argument("folder", metavar="RUN", help="folder that `train` left")
    words = "keys of its recipe, such as validation.other=FILE"
    step.add_argument("run", nargs="*", metavar="KEY=VALUE", help=words)
    step = add("predict", "what a stored one says of texts, a line of JSON for each")
    step.add_argument("folder", metavar="RUN", help="folder that `train` left")
    step.add_argument("texts", nargs="+", metavar="TEXT")
    if name == "gliner":
        words = "types to look for, of the training or any others; default: those of the training"
        step.add_argument("--labels", nargs="+", default=[], metavar="LABEL", help=words)
        words = "a span that is likelier is an entity, from 0 to 1; default: that of the recipe"
        step.add_argument("--threshold", type=float, metavar="SHARE", help=words)
    return partial(_recipe_call, name)


def _recipe_call(name: str, options: argparse.Namespace) -> None:
    require_keys(getattr(options, "run", []))
    recipe: Any
    if name == "gliner":
        from modernbert_train.downstream import gliner as recipe
    else:
        from modernbert_train.downstream import setfit as recipe
    if options.step == "train":
        recipe.train(options.recipe, options.model, options.run)
    elif options.step == "evaluate":
        recipe.evaluate(options.folder, options.run)
    else:
        more = (options.labels, options.threshold) if name == "gliner" else ()
        for found in recipe.predict(options.folder, options.texts, *more):
            print(json.dumps(found, ensure_ascii=False))


def onnx(parser: argparse.ArgumentParser) -> Call:
    """Arguments and call of `onnx`."""
    parser.add_argument("model", type=Path, metavar="HF_FOLDER", help="as `export` and `finetune` leave it")
    parser.add_argument("--texts", type=Path, required=True, metavar="FILE", help="a text a line, to compare on")
    parser.add_argument("--int8", action="store_true", help="also with INT8 weights")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: beside the model's, hf-onnx of hf")
    return _onnx


def _onnx(options: argparse.Namespace) -> None:
    from modernbert_train.downstream.onnx import write_onnx

    try:
        lines = options.texts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--texts={options.texts}: cannot be read ({error}). Give a file with a text a line."
        ) from error
    texts = [line for line in lines if line.strip()]
    print(write_onnx(options.model, texts, out=options.out, int8=options.int8))
