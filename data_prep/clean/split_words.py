"""Split text into words by Unicode's rules (UAX 29), as the `regex` package finds word boundaries.

A vowel sign or an accent belongs to its letter, even if it is a separate character. In scripts without spaces between
words (Chinese, Japanese but for Katakana, Thai, Lao, Khmer, Burmese) each character with its signs is a word.
"""

from __future__ import annotations

import unicodedata

import regex

_WORD = regex.compile(r"(?w)\b[\p{L}\p{N}].*?\b", regex.DOTALL)


def split_words(text: str) -> list[str]:
    """Return the words of a text in order, without punctuation; an underscore separates words, as in `_emphasis_`."""
    return _WORD.findall(text.replace("_", " "))


def folded(text: str) -> str:
    """Return a text in the form for comparing spellings: compatibility composed (NFKC), without case."""
    return unicodedata.normalize("NFKC", text).casefold()
