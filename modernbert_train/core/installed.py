"""Find where this package is installed: a checkout, or a wheel, which brings recipes and two libraries with it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]  # the folder modernbert_train
_IN_WHEEL = PACKAGE / "yamls"  # put there by requirements/bundle.py, as is the next
BUNDLED = PACKAGE / "bundled"  # Composer and Streaming, of which nobody else in the environment sees anything
CHECKOUT = None if _IN_WHEEL.is_dir() else PACKAGE.parent  # the repository's folder
YAMLS = _IN_WHEEL if CHECKOUT is None else CHECKOUT / "yamls"


def import_as_here(*, is_program: bool) -> None:
    """Have programs that this one starts as `python -m` leave the current folder out, where this one does.

    The installed command does not import from there, and a user's own random.py or queue.py must not reach the
    processes of a run either.

    Args:
        is_program: True for the installed command; False for code of others, whose `python -P` alone counts.
    """
    if sys.flags.safe_path or (is_program and not {"", os.getcwd()} & set(sys.path)):
        os.environ["PYTHONSAFEPATH"] = "1"


def library_version(name: str) -> str:
    """The version of a package, which may have come in our wheel and then has no record of its own.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not there.
    """
    return bundled_versions().get(name) or importlib.metadata.version(name)


def bundled_versions() -> dict[str, str]:
    """Releases that a wheel brings, by package; none of a checkout."""
    file = BUNDLED / "versions.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def commit() -> tuple[str, bool] | None:
    """The checkout's commit, and whether files differ from it; None of a wheel, and where git does not say."""
    if CHECKOUT is None or not (CHECKOUT / ".git").exists():
        return None
    found = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain")
    return None if found is None or status is None else (found, status != "")


def _git(*words: str) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(CHECKOUT), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None
