"""The verbs of this folder for `python -m modernbert_train`: arguments in, one call out, and nothing heavy imported."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modernbert_train.errors import ConfigError

Add = Callable[[str, Callable[[argparse.Namespace], None], str], argparse.ArgumentParser]
_OF_LIBRARY = "by the library of that name, on a trained encoder"
_MODEL = "a run's folder, a checkpoint, a Hugging Face folder or hub id, a Composer checkpoint FILE.pt"


def add_verbs(add: Add) -> None:
    """Add all of them; `add` makes a verb of a name, what it calls, and a summary."""
    for each in VERBS:
        each(add)


def _retrieval(add: Add) -> None:
    verb = add("retrieval", _retrieval_call, "train a model for retrieval on pairs of texts, or measure one")
    actions = verb.add_subparsers(dest="action", required=True, metavar="train|evaluate")
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
        action.add_argument("--model", required=True, help=f"{_MODEL}; or a folder of sentence-transformers")
        action.add_argument(
            "run", nargs="*", metavar="KEY=VALUE", help="keys of modernbert_train/config/tools/retrieval.py"
        )


def _retrieval_call(options: argparse.Namespace) -> None:
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


def _gliner(add: Add) -> None:
    _recipe(add("gliner", _recipe_call, f"entities of any types that are named, {_OF_LIBRARY}"), "gliner")


def _setfit(add: Add) -> None:
    _recipe(add("setfit", _recipe_call, f"classes of texts from a few of each, {_OF_LIBRARY}"), "setfit")


def _recipe(verb: argparse.ArgumentParser, name: str) -> None:
    """`train`, `evaluate` and `predict` of modernbert_train/downstream/NAME.py."""
    steps = verb.add_subparsers(dest="step", required=True, metavar="STEP")

    def add(step: str, summary: str) -> argparse.ArgumentParser:
        made = steps.add_parser(step, help=summary, description=summary)
        made.set_defaults(call=_recipe_call)
        return made

    step = add("train", "train it, measure it, and store it with its figures")
    step.add_argument("recipe", metavar="RECIPE", help=f"YAML file, such as those of yamls/{name}")
    step.add_argument("--model", required=True, help=_MODEL)
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


def _recipe_call(options: argparse.Namespace) -> None:
    require_keys(getattr(options, "run", []))
    recipe: Any
    if options.verb == "gliner":
        from modernbert_train.downstream import gliner as recipe
    else:
        from modernbert_train.downstream import setfit as recipe
    if options.step == "train":
        recipe.train(options.recipe, options.model, options.run)
    elif options.step == "evaluate":
        recipe.evaluate(options.folder, options.run)
    else:
        more = (options.labels,) if options.verb == "gliner" else ()
        for found in recipe.predict(options.folder, options.texts, *more):
            print(json.dumps(found, ensure_ascii=False))


def _onnx(add: Add) -> None:
    verb = add("onnx", _onnx_call, "write an exported model for ONNX Runtime, and compare both on texts")
    verb.add_argument("model", type=Path, metavar="HF_FOLDER", help="as `export` and `finetune` leave it")
    verb.add_argument("--texts", type=Path, required=True, metavar="FILE", help="a text a line, to compare on")
    verb.add_argument("--int8", action="store_true", help="also with INT8 weights")
    verb.add_argument("--out", type=Path, metavar="FOLDER", help="default: beside the model's, hf-onnx of hf")


def _onnx_call(options: argparse.Namespace) -> None:
    from modernbert_train.downstream.onnx import write_onnx

    try:
        lines = options.texts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--texts={options.texts}: cannot be read ({error}). Give a file with a text a line."
        ) from error
    texts = [line for line in lines if line.strip()]
    print(write_onnx(options.model, texts, out=options.out, int8=options.int8))


VERBS = (_retrieval, _gliner, _setfit, _onnx)
