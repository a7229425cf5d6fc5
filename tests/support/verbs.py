"""Call verbs in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from modernbert_train.__main__ import main

Says = Callable[..., str]


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Says:
    """Return a function that calls a verb, compares its exit code, and returns its output, or its error."""

    def call(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*words]) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return call
