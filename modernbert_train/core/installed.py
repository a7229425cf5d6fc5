"""Find where this package is installed: a checkout, or a wheel, which also contains the recipes and two libraries."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from modernbert_train.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]  # the folder modernbert_train
_IN_WHEEL = PACKAGE / "yamls"  # put there by requirements/bundle.py, like BUNDLED
BUNDLED = PACKAGE / "bundled"  # Composer and Streaming, invisible to other programs of the environment
CHECKOUT = None if _IN_WHEEL.is_dir() else PACKAGE.parent  # the repository's folder
YAMLS = _IN_WHEEL if CHECKOUT is None else CHECKOUT / "yamls"


def import_as_here(*, is_program: bool) -> None:
    """Keep the current folder out of the import path of children started as `python -m`, if this process does so.

    The installed command does not import from it, and a user's own random.py or queue.py must not reach the processes
    of a run either.

    Args:
        is_program: True for the installed command; False in other programs, where only their own `python -P` counts.
    """
    if sys.flags.safe_path or (is_program and not {"", os.getcwd()} & set(sys.path)):
        os.environ["PYTHONSAFEPATH"] = "1"


def path_of_children() -> str:
    """Return the PYTHONPATH with which child processes import this very package from any folder.

    It never has an empty entry, which would be the current folder, whatever PYTHONSAFEPATH says.
    """
    return os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))


def require(extra: str, *libraries: str, key: str = "") -> None:
    """Raise if a library of an extra is not installed; libraries are looked up without import.

    Raises:
        ConfigError: names the missing libraries, and the key that needs them, with the command that installs them.
    """
    if missing := [name for name in libraries if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"{key or extra}: needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            f"installed. pip install 'modernbert-train[{extra}]'"
        )


def library_version(name: str) -> str:
    """Return the version of a package; a package bundled in our wheel lacks its metadata.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    return bundled_versions().get(name) or importlib.metadata.version(name)


def bundled_versions() -> dict[str, str]:
    """Return the versions of the packages that a wheel bundles, by name; empty in a checkout."""
    file = BUNDLED / "versions.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def commit() -> tuple[str, bool] | None:
    """Return the checkout's commit, and True if files differ from it; None in a wheel or without git."""
    if CHECKOUT is None or not (CHECKOUT / ".git").exists():
        return None
    sha = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain")
    return None if sha is None or status is None else (sha, status != "")


def _git(*words: str) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(CHECKOUT), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None
