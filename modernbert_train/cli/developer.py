"""Verbs for people who look after an installation: `doctor` and `completion`."""

from __future__ import annotations

import argparse

from modernbert_train.cli.parser import Call


def doctor(parser: argparse.ArgumentParser) -> Call:
    """Arguments and call of `doctor`."""
    return _doctor


def _doctor(options: argparse.Namespace) -> None:
    from modernbert_train.doctor import lines

    for line in lines():  # as they come: the last ones take a minute
        print(line, flush=True)


def completion(parser: argparse.ArgumentParser) -> Call:
    """Arguments and call of `completion`."""
    from modernbert_train.cli.completion import SHELLS

    parser.add_argument("shell", choices=SHELLS, help="for which shell")
    return _completion


def _completion(options: argparse.Namespace) -> None:
    from modernbert_train.cli.completion import script

    print(script(options.shell), end="")
