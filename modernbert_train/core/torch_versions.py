"""The releases of torch that this program was tested with, for messages and `doctor`."""

from __future__ import annotations

OLDEST = "2.11"  # also in pyproject.toml, and a test compares the two
TESTED = ("2.11", "2.13", "2.14", "2.15")  # ascending; the newest ones by `make test-cuda` and the weekly job


def untested(version: str) -> str | None:
    """Say that a version of torch is newer than any that was tested; None if it is not.

    Args:
        version: as torch says it, such as 2.16.0+cu132.
    """
    if _release(version) <= _release(TESTED[-1]):
        return None
    return f"torch {version} is newer than {TESTED[-1]}, the newest this program was tested with"


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
