"""Version requirements of packages, and the releases of torch that were tested; for messages and `doctor`.

pyproject.toml is the only list of requirements; it is read from the installed package's metadata.
"""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

OLDEST = "2.11"  # of torch, also in pyproject.toml; a test compares the two
TESTED = ("2.11", "2.13", "2.14", "2.15")  # of torch, ascending: a GPU had 2.11, the test suites the others


def untested(version: str) -> str | None:
    """Return a sentence if this torch is newer than every tested release, else None.

    Args:
        version: torch's version string, such as 2.16.0+cu132.
    """
    if Version(version).release[:2] <= Version(TESTED[-1]).release:
        return None
    return f"torch {version} is newer than {TESTED[-1]}, the newest that this program was tested with"


def required(name: str) -> str:
    """Return the version specifier of a package in pyproject.toml, such as `<6,>=5`; empty if any version will do.

    Raises:
        importlib.metadata.PackageNotFoundError: this program runs from a folder without metadata.
    """
    for text in importlib.metadata.requires("modernbert-train") or ():
        requirement = Requirement(text)
        # packages of an extra bind only environments with that extra
        if requirement.name == name and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            return str(requirement.specifier)
    return ""


def is_allowed(name: str, version: str) -> bool:
    """Return True if pyproject.toml allows a version; pre-releases and local builds count as their release.

    Raises:
        importlib.metadata.PackageNotFoundError: see `required`.
    """
    return Version(version).base_version in SpecifierSet(required(name))
