"""Words and a language model for datatrove's filters, which would use spaCy and download models.

Imports datatrove, so it is only imported if a spec has filters or near duplicates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datatrove.utils.lid import FastTextLID
from datatrove.utils.word_tokenizers import WhitespaceTokenizer

from data_prep.clean.split_words import split_words


class PlainWords(WhitespaceTokenizer):
    """Words by Unicode's rules and sentences by punctuation: enough for ratios and shingles, in any script.

    All instances are equal, so that datatrove's filters share one cache of words.
    """

    def word_tokenize(self, text: str) -> list[str]:
        return split_words(text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlainWords)

    def __hash__(self) -> int:
        return hash(PlainWords)


class LocalLanguageModel(FastTextLID):
    """A fastText model for language identification, opened at first use.

    Args:
        path: the model file.
        languages: the languages to detect; None: all.
    """

    def __init__(self, path: Path, languages: list[str] | None) -> None:
        super().__init__(languages)
        self._model: Any = None
        self._path = path

    @property
    def model(self) -> Any:
        if self._model is None:
            from fasttext.FastText import _FastText

            self._model = _FastText(str(self._path))
        return self._model
