"""argparse with this project's conventions: wrong arguments exit with 64, see docs/faults.md."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import Any

EXIT_CODE = 64
_LETTERS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
Call = Callable[[argparse.Namespace], None]
# removed actions and options, with their verb -> replacement
REMOVED = {
    "checkpoints copy": "cp -r copies a run, and checkpoint.copy_to sends each checkpoint to a store.",
    "checkpoints compare": "diff -r of both folders says which files differ; load_model opens their weights.",
    "checkpoints show": "`checkpoints list` has step, tokens, phase and size; state.json of its folder has the rest.",
    "checkpoints prune": "training removes what checkpoint.keep does not keep; rm -r removes any other folder.",
    "finetune --watch": "evals of the run measure it while it trains; name a checkpoint of it as --model.",
    "plan --html": "the text has all of it; plan RUN.yaml > plan.txt keeps it.",
    "sweep --wandb-sweep": "W&B's own documentation says how to write its sweep file; `launch` is its program.",
    "inspect --tokenizer": "`tokenizer fertility TOKENIZER TEXT...` counts a tokenizer's tokens in texts.",
}


class Parser(argparse.ArgumentParser):
    """A parser that keeps line breaks in help, never completes an abbreviated option, and exits with 64 on a mistake.

    Attributes:
        implied: for a verb with actions, the default action.
    """

    implied: str | None = None

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, after inserting the implied action."""
        words = list(sys.argv[1:] if args is None else args)
        for word in words:
            if word.startswith("--"):
                self._refuse_removed(word.partition("=")[0])
        if self.implied is not None and words[:1] not in ([], ["-h"], ["--help"]):
            actions = next(each.choices for each in self._actions if isinstance(each, argparse._SubParsersAction))
            self._refuse_removed(words[0])
            words = words if words[0] in actions else [self.implied, *words]
        return super().parse_known_args(words, namespace)

    def _refuse_removed(self, word: str) -> None:
        instead = REMOVED.get(f"{self.prog.split()[-1]} {word}")
        if instead is not None:
            self.error(f"{word} was removed: {instead}")

    def error(self, message: str) -> None:  # type: ignore[override]
        """Print the usage and the error, and end the process."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_CODE, f"error: {message}\n")


def positive(text: str) -> int:
    """Parse a whole number above 0, for `type=`."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: a whole number above 0 is expected")
    return int(text)


def whole(text: str) -> int:
    """Parse a whole number from 0, for `type=`."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: a whole number is expected")
    return int(text)


def token_count(text: str) -> int:
    """Parse a number of tokens such as 2B, 300M or 1.5T, for `type=`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgbt]?)", text.replace("_", "").lower())
    if match is None or not (count := round(float(match[1]) * _LETTERS[match[2]])):
        raise argparse.ArgumentTypeError(f"{text}: a number of tokens is expected, such as 300M, 2B or 1.5T")
    return count
