"""`python -m modernbert_train VERB`, `modernbert-train VERB`: arguments in, one call out.

The verbs are rows of `cli/verbs.py`. Nothing heavy is imported before the configuration has been checked, so a mistake
is reported within a second.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from typing import Any, NoReturn

from modernbert_train.distributed import stop_signals

if __name__ == "__main__":  # before the slower imports
    stop_signals.take_over()

from modernbert_train.cli import parser
from modernbert_train.cli.verbs import BY_NAME, help_page, make_parser, replaced, unknown_verb
from modernbert_train.core.installed import import_as_here
from modernbert_train.core.lasting_output import lasting_output
from modernbert_train.core.redact import redact
from modernbert_train.core.version import __version__
from modernbert_train.distributed import orphans, scratch
from modernbert_train.distributed.launched import speaks_for_all
from modernbert_train.distributed.visible_gpus import use_expandable_segments
from modernbert_train.errors import RunError, exit_code_of


def __getattr__(name: str) -> Any:
    """Import `read_run` on first use: verbs that are separate programs do not need the schema of a run."""
    if name == "read_run":
        from modernbert_train.cli.arguments import read_run

        return read_run
    raise AttributeError(name)


def program() -> NoReturn:
    """Run `main` as the command `modernbert-train`, a program that handles the stop signals."""
    stop_signals.take_over()
    import_as_here(is_program=True)
    _program()


def _program() -> NoReturn:
    import_as_here(is_program=False)
    words = replaced(sys.argv[1:])
    verb = BY_NAME.get((words or [""])[0])
    if verb is not None and verb.is_program:  # run it as if started directly, with its own signal handlers
        os.execv(sys.executable, [sys.executable, "-m", verb.home, *words[1:]])
    if not orphans.follow_launcher():
        scratch.use_for_temporary_files()
    stop_signals.end(main(words))


@lasting_output()
def main(arguments: list[str] | None = None) -> int:
    """Run one verb; return the process's exit code."""
    import_as_here(is_program=False)
    words = sys.argv[1:] if arguments is None else [*arguments]
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    words = replaced(words)
    if not words or words[0] in ("--help", "-h"):
        print(help_page(), file=sys.stdout if words else sys.stderr)
        return 0 if words else parser.EXIT_CODE
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] not in BY_NAME:
        sys.stderr.write(unknown_verb(words[0]))
        return parser.EXIT_CODE
    verb = BY_NAME[words[0]]
    _spin_briefly()
    if verb.is_program:
        return int(importlib.import_module(verb.home).main(words[1:]))
    options = parse(make_parser(verb), words[1:])
    use_expandable_segments()  # for this process and its children
    try:
        return exit_code_of(lambda: options.call(options), speaks=speaks_for_all())
    except Exception as error:  # a bug, reported as one
        if not getattr(error, "shown", False):  # a rank has printed it before it informed the others
            print(redact(traceback.format_exc()), end="", file=sys.stderr)
        print("error: this is a bug. Report it with the lines above and the output of `doctor`.", file=sys.stderr)
        return RunError.exit_code


def _spin_briefly() -> None:
    """Let torch's CPU threads spin only briefly when they wait for each other, in this process and its children.

    By default libgomp spins 300,000 times before a thread sleeps, and 1,000 times if it has more threads than there are
    cores. It counts its own threads only: next to another busy process a spinning thread holds the core that the others
    need, and steps take longer (docs/speed.md).
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def parse(of_verb: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Parse the options; overrides may also follow an option."""
    options, rest = of_verb.parse_known_args(words)
    if rest and (any(word.startswith("-") for word in rest) or not hasattr(options, "run")):
        of_verb.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.run += rest
    return options


if __name__ == "__main__":
    _program()
