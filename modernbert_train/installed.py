"""Find where this package is installed: a checkout, or a wheel, which brings recipes and two libraries with it."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_IN_WHEEL = _PACKAGE / "yamls"  # put there by requirements/bundle.py
CHECKOUT = None if _IN_WHEEL.is_dir() else _PACKAGE.parent  # the repository's folder
YAMLS = _IN_WHEEL if CHECKOUT is None else CHECKOUT / "yamls"


def library_version(name: str) -> str:
    """The version of a package, which may have come in our wheel and then has no record of its own.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not there.
    """
    bundled = _PACKAGE / "bundled.json"
    if bundled.is_file() and name in (versions := json.loads(bundled.read_text(encoding="utf-8"))):
        return str(versions[name])
    return importlib.metadata.version(name)


def commit() -> tuple[str, bool] | None:
    """The checkout's commit, and whether files differ from it; None of a wheel, and where git does not say."""
    if CHECKOUT is None or not (CHECKOUT / ".git").exists():
        return None
    found = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain")
    return None if found is None or status is None else (found, status != "")


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(CHECKOUT), *words], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
