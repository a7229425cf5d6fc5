"""Where this package is installed: from a checkout, or from a wheel, which brings recipes and two libraries with it."""

from __future__ import annotations

import importlib.metadata
import json
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
