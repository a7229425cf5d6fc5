"""Arguments and call of the verb `retrieval`, without heavy imports; its row is in `cli/verbs.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from modernbert_train.cli.arguments import MODEL
from modernbert_train.cli.parser import Call
from modernbert_train.errors import ConfigError


def retrieval(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `retrieval`, and return its call."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="train|evaluate|mine")
    for name, what, words, summary in (
        (
            "train",
            "RECIPE",
            "a YAML file, such as yamls/retrieval/modernbert.yaml",
            "contrastive training, then figures",
        ),
        (
            "evaluate",
            "SET",
            "a folder with corpus.jsonl, queries.jsonl and qrels; a public set of BEIR, such as scifact; or mteb:TASK",
            "nDCG@10 and others on sets of BEIR, and tasks of MTEB",
        ),
        (
            "mine",
            "PAIRS",
            "a .jsonl, .tsv, .csv or .parquet of pairs, or a folder of BEIR",
            "hard negatives of pairs by a model, as a .jsonl for `prepare`",
        ),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        action.add_argument("what", metavar=what, nargs=None if name == "train" else "+", help=words)
        action.add_argument(
            "--model", required=True, help=f"{MODEL}; untrained:MODEL; or a folder of sentence-transformers"
        )
        action.add_argument("run", nargs="*", metavar="KEY=VALUE", help="keys of the recipe, such as train= or seed=")
    return _retrieval


def _retrieval(options: argparse.Namespace) -> None:
    words = [options.what, *options.run] if isinstance(options.what, str) else [*options.what, *options.run]
    keys = [word for word in words if "=" in word and not Path(word).exists()]
    if options.action == "mine":
        from modernbert_train.evaluate.retrieval.mine import mine

        mine([word for word in words if word not in keys], options.model, keys)
        return
    from modernbert_train.evaluate.retrieval import retrieval

    if options.action == "train":
        require_keys(options.run)
        retrieval.train(options.what, options.model, options.run)
        return
    retrieval.evaluate([word for word in words if word not in keys], options.model, keys)


def require_keys(words: list[str]) -> None:
    """Check that all remaining words are keys with values.

    Raises:
        ConfigError: names the first that is not.
    """
    if wrong := [word for word in words if "=" not in word]:
        raise ConfigError(f"{wrong[0]}: neither a key with a value nor an argument of this verb. Write KEY=VALUE.")
