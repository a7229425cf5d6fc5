"""The command line, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modernbert_train.__main__ import main

Cli = Callable[..., Any]  # of the fixture cli


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs a command and returns its `out` and `err`: cli("eval", folder, code=78).err."""

    def run(*words: object, code: int = 0) -> Any:
        capsys.readouterr()
        found, printed = main([str(word) for word in words]), capsys.readouterr()
        assert found == code, printed.out + printed.err
        return printed

    return run
