"""The verbs of this folder for `python -m modernbert_train`: arguments in, one call out, and nothing heavy imported."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from modernbert_train.errors import ConfigError

Add = Callable[[str, Callable[[argparse.Namespace], None], str], argparse.ArgumentParser]
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


VERBS = (_retrieval,)
