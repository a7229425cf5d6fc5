"""Versions of packages. If this breaks, a run starts with packages that fail in its middle, and `doctor` is silent."""

from __future__ import annotations

import importlib.metadata
import tomllib

import pytest

from modernbert_train.core import versions
from tests.support.paths import ROOT

REQUIRES = ["torch>=2.11", "transformers<6,>=5", "numpy", 'wandb>=99; extra == "wandb"']


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRES)


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        ("2.11.0", False),
        ("2.15.9+cu132", False),
        ("2.15.0a0+git1234567", False),
        ("2.16.0+cu132", True),
        ("2.16.0.dev20261101+cu132", True),
        ("3.0.0", True),
        ("2.100.0", True),
    ],
)
def test_a_torch_that_is_newer_than_all_that_were_tested_is_named(version: str, newer: bool) -> None:
    expected = f"torch {version} is newer than 2.15, the newest that this program was tested with"
    assert versions.untested(version) == (expected if newer else None)


@pytest.mark.usefixtures("metadata")
@pytest.mark.parametrize(
    ("name", "version", "allowed"),
    [
        ("transformers", "4.57.1", False),
        ("transformers", "5.0.0", True),
        ("transformers", "6.0.0", False),
        ("torch", "2.11.0+cu130", True),
        ("torch", "2.15.0a0+git1234567", True),
        ("torch", "2.10.2", False),
        ("numpy", "1.0", True),
        ("wandb", "0.1", True),
    ],
)
def test_what_the_package_asks_for_is_compared_with_what_is_there(name: str, version: str, allowed: bool) -> None:
    """Packages of an extra are not required of others; a nightly build counts as its release."""
    assert versions.is_allowed(name, version) == allowed


def test_the_oldest_torch_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>={versions.OLDEST}" in project["dependencies"]
    assert versions.TESTED[0] == versions.OLDEST
