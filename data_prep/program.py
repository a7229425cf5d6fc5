"""Endings of the commands that make datasets."""

from __future__ import annotations

import sys
from collections.abc import Callable

from modernbert_train.errors import RunError, StoppedEarly


def finish(work: Callable[[], str]) -> int:
    """Do the work and print what came of it; returns the exit code (see modernbert_train/errors.py)."""
    try:
        print(work())
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; the same command resumes.", file=sys.stderr)
        return StoppedEarly.exit_code
    return 0
