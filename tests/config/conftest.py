"""A small run, a second file merged over it, and the lines of the error of loading."""

from __future__ import annotations

from pathlib import Path

import pytest

from modernbert_train.config.load import load_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.errors import ConfigError
from tests.support.configurations import BASE, Load, Refused
from tests.support.verbs import says

__all__ = ["load", "refused", "says"]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Return a function that loads BASE, then a second file with the given text, then overrides."""

    def call(text: str = "", *overrides: str) -> RunConfig:
        base, extra = tmp_path / "base.yaml", tmp_path / "extra.yaml"
        base.write_text(BASE, encoding="utf-8")
        extra.write_text(text, encoding="utf-8")
        return load_run([base, extra], overrides)

    return call


@pytest.fixture
def refused(load: Load, tmp_path: Path) -> Refused:
    """Return a function that returns the lines of the error of loading, without the folder of the files."""

    def call(text: str = "", *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            load(text, *overrides)
        return str(error.value).replace(f"{tmp_path}/", "").splitlines()

    return call
