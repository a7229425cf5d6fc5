"""Endings of the commands that make datasets."""

from __future__ import annotations

import sys
from collections.abc import Callable

from modernbert_train.errors import StoppedEarly, exit_code_of


def finish(work: Callable[[], str]) -> int:
    """Do the work and print what came of it; returns the exit code (see modernbert_train/errors.py)."""
    try:
        return exit_code_of(lambda: print(work()))
    except KeyboardInterrupt:
        print("stopped; the same command resumes.", file=sys.stderr)
        return StoppedEarly.exit_code
