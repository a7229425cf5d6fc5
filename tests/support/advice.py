"""Follow the advice of an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any


def follow_advice(
    main: Callable[[Sequence[str]], int], words: Sequence[str], advice: str, taken: str, capsys: Any
) -> str:
    """Run a command that fails, add the words that its message advises, and assert that it succeeds.

    Args:
        main: the command.
        words: its arguments.
        advice: pattern of the message.
        taken: the words that a user adds, with the groups of the pattern in braces.
        capsys: of pytest.

    Returns:
        The message.
    """
    assert main(words) in (65, 78)
    error: str = capsys.readouterr().err
    found = re.search(advice, error)
    assert found, error
    assert main([*words, *taken.format(*found.groups()).split()]) == 0, capsys.readouterr().err
    return error
