"""Arguments and call of the verb `retrieval`, with nothing heavy imported; its row is in `cli/verbs.py`."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from modernbert_train.cli.arguments import MODEL, is_override, many_imports
from modernbert_train.cli.parser import Call
from modernbert_train.cli.verbs import BY_NAME
from modernbert_train.errors import ConfigError

_MODEL = f"{MODEL}; untrained:MODEL; or a folder of sentence-transformers"


def retrieval(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `retrieval`, and return its call."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="train|evaluate|mine")
    summary = "contrastive training on pairs of texts, then figures"
    train = actions.add_parser("train", help=summary, description=summary)
    train.add_argument("what", metavar="RECIPE", help="a YAML file, such as yamls/retrieval/modernbert.yaml")
    train.add_argument("--model", required=True, help=_MODEL)
    words = "keys of the recipe, such as train= or seed=, and of the run, such as compute.compile="
    train.add_argument("run", nargs="*", metavar="KEY=VALUE", help=words)
    summary = "nDCG@10 and others on sets of BEIR, and tasks of MTEB"
    evaluate = actions.add_parser("evaluate", help=summary, description=summary)
    words = "a folder with corpus.jsonl, queries.jsonl and qrels; a public set of BEIR, such as scifact; or mteb:TASK"
    evaluate.add_argument("what", metavar="SET", nargs="+", help=words)
    evaluate.add_argument("--model", required=True, help=f"{_MODEL}; or bm25")
    words = "keys of the measurement, such as split= or max_tokens="
    evaluate.add_argument("run", nargs="*", metavar="KEY=VALUE", help=words)
    summary = "hard negatives of pairs by a model, as a .jsonl for `prepare`"
    mine = actions.add_parser("mine", help=summary, description=summary)
    words = "a .jsonl, .tsv, .csv or .parquet of pairs, or a folder of BEIR"
    mine.add_argument("what", metavar="PAIRS", nargs="+", help=words)
    mine.add_argument("--model", required=True, help=_MODEL)
    words = "keys of the mining, such as out= or num_negatives="
    mine.add_argument("run", nargs="*", metavar="KEY=VALUE", help=words)
    return _retrieval


def _retrieval(options: argparse.Namespace) -> None:
    if options.action == "train":
        _train(options)
        return
    words = [*options.what, *options.run]
    keys = [word for word in words if is_override(word)]
    names = [word for word in words if word not in keys]
    if options.action == "mine":
        from modernbert_train.evaluate.retrieval.mine import mine

        mine(names, options.model, keys)
        return
    from modernbert_train.evaluate.retrieval.evaluate_retrieval import evaluate

    evaluate(names, options.model, keys)


def _train(options: argparse.Namespace) -> None:
    require_keys(options.run)
    from modernbert_train.evaluate.retrieval.retrieval_recipe import open_recipe
    from modernbert_train.report.progress import stage

    recipe = open_recipe(options.what, options.model, options.run)
    stage("loading torch and Composer")
    with many_imports():
        from modernbert_train.train.retrieval import train_retrieval

    train_retrieval(recipe, _prepare)


def _prepare(spec: Path) -> None:
    """Prepare pairs, as `prepare SPEC` does; loaded by name, since this package must not import its package."""
    print(importlib.import_module(BY_NAME["prepare"].home).run_spec([str(spec)], [], False, (1, 1)), flush=True)


def require_keys(words: list[str]) -> None:
    """Raise unless all words are keys with values.

    Raises:
        ConfigError: names the first that is not.
    """
    if wrong := [word for word in words if "=" not in word]:
        raise ConfigError(f"{wrong[0]}: neither a key with a value nor another argument. Write KEY=VALUE.")
