"""A segmenter's words of a text: check that they spell it, and find the tokens that continue one.

White space, between words or within, is not compared: segmenters drop it, keep it, or turn it into words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = list[str]  # without white space, none of them empty
_SHOWN = 20  # characters of a text in an error


def words_of(value: Any) -> Words | None:
    """Return a row's words, from a list or from a text with white space between them; None if it is neither."""
    if isinstance(value, str):
        return value.split()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        return None
    return list(filter(None, map(_bare, value)))


def differs(words: Words, text: str) -> str | None:
    """Describe where words do not spell a text; None if they do."""
    joined, here = "".join(words), _bare(text)
    if joined == here:
        return None
    at = next((i for i, (a, b) in enumerate(zip(joined, here, strict=False)) if a != b), min(len(joined), len(here)))
    return f"it has {here[at : at + _SHOWN]!r} where they have {joined[at : at + _SHOWN]!r}"


def inside_words(words: Words, text: str, offsets_T2: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Find the tokens that continue a word of an earlier token.

    A token with the end of one word and the beginning of another joins the two. White space before a character belongs
    to that character.

    Args:
        words: they must spell the text.
        text: the tokenised text.
        offsets_T2: characters of the text at which each token begins and ends.

    Returns:
        1 for each such token, 0 for others.
    """
    is_text = ~np.fromiter(map(str.isspace, text + " "), bool, len(text) + 1)
    begins = np.zeros(int(is_text.sum()) + 1, bool)  # of the characters other than white space, and of the end
    begins[np.cumsum([0, *map(len, words)])] = True
    starts_T, ends_T = offsets_T2.T
    number_T = np.cumsum(is_text)[starts_T] - is_text[starts_T]  # index of each token's first such character
    is_part_T = starts_T < np.concatenate([[0], ends_T])[:-1]  # tokens that share a character with the one before
    return (is_part_T | ~begins[number_T]).astype(np.uint8)


def _bare(text: str) -> str:
    return "".join(text.split())
