"""Exit codes and interruptions of the commands that make datasets."""

from __future__ import annotations

from collections.abc import Callable

from modernbert_train.errors import exit_code_of, interrupts_as


def finish(work: Callable[[], str]) -> int:
    """Do the work and print its result; return the exit code (see modernbert_train/errors.py)."""

    def interruptible() -> None:
        with interrupts_as("stopped; the same command resumes."):
            print(work())

    return exit_code_of(interruptible)
