"""Find documents that share words with an evaluation set; training on them would measure memorisation.

Words are compared without case, punctuation and spaces. A run of words is first looked up by its hash and then compared
itself, so nothing is dropped by chance. A text shorter than a run is compared as a whole, with a document and with each
of its lines. Nothing of the corpus is stored: memory is only for the sets.

Source: Brown et al. 2020, arXiv:2005.14165, appendix C, with runs of 13 words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.clean.split_words import folded, split_words
from data_prep.read.documents import read_source
from modernbert_train.config.tools.prepare import PrepareConfig, SourceConfig
from modernbert_train.data.read.rows import LeftOut
from modernbert_train.errors import DataError

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no word's weight in a hash becomes 0
_SHOWN_WORDS = 13
_NOT_AT_ALL = "not at all, having no words"
_LINE_WORDS = 4  # "See also" and the like are lines of many documents; a whole document may be shorter


class Overlap(NamedTuple):
    """The words that a document shares with an evaluation set, and the set's name."""

    name: str
    words: str


class Evaluations:
    """Runs of words of evaluation sets, and their short texts.

    Args:
        texts: of each set, by name.
        words: number of words in a run.

    Attributes:
        looked_for: for each set, kind of search -> number of texts.
    """

    def __init__(self, texts: Mapping[str, Sequence[str]], words: int) -> None:
        self._words = words
        self.looked_for = {name: Counter[str]() for name in texts}
        self._short: dict[tuple[int, ...], int] = {}  # words of a short text -> number of its set
        self._numbers: dict[str, int] = {}  # word -> its number; words outside the sets have none
        self._names = list(texts)
        lines, sets = [], []
        for number, name in enumerate(texts):
            for text in texts[name]:
                line = [self._numbers.setdefault(word, len(self._numbers)) for word in words_of(text)]
                self.looked_for[name][self._how(line, number)] += 1
                if len(line) >= words:
                    lines.append(np.array([*line, -1], np.int64))
                    sets.append(np.full(len(line) + 1, number, np.int32))
        self._spelled = list(self._numbers)
        self._line = np.concatenate(lines) if lines else np.zeros(0, np.int64)
        self._sets = np.concatenate(sets) if sets else np.zeros(0, np.int32)
        hashes, is_known = self._hashes(self._line)
        positions = np.flatnonzero(is_known)
        self._hashes_sorted, first = np.unique(hashes[positions], return_index=True)
        self._places = positions[first]

    def overlap(self, text: str) -> Overlap | None:
        """Return the first run of words that a text shares with a set, or a line that is a short text of a set."""
        numbers = self._numbers
        lines = [[numbers.get(word, -1) for word in words_of(each)] for each in self._parts(text)]
        if (short := self._whole(lines)) is not None:
            return short
        line = np.array(list(chain.from_iterable(lines)), np.int64)
        hashes, is_known = self._hashes(line)
        if not len(self._hashes_sorted) or not is_known.any():
            return None
        starts = np.flatnonzero(is_known)
        ranks = np.searchsorted(self._hashes_sorted, hashes[starts])
        ranks[ranks == len(self._hashes_sorted)] = 0
        same = self._hashes_sorted[ranks] == hashes[starts]
        for at, rank in zip(starts[same].tolist(), ranks[same].tolist(), strict=True):
            position = int(self._places[rank])
            if np.array_equal(line[at : at + self._words], self._line[position : position + self._words]):
                words = words_of(text)[at : at + min(self._words, _SHOWN_WORDS)]
                return Overlap(self._names[int(self._sets[position])], " ".join(words))
        return None

    def _how(self, line: list[int], number: int) -> str:
        """Return how a text is searched; a short text is stored."""
        if len(line) >= self._words:
            return f"by {self._words} words in a row"
        if not line:
            return _NOT_AT_ALL
        self._short.setdefault(tuple(line), number)
        return "as a whole line or document" if len(line) >= _LINE_WORDS else "as a whole document"

    def _parts(self, text: str) -> list[str]:
        """Split a text into lines if short texts are compared; a word never crosses a line end."""
        return text.split("\n") if self._short else [text]

    def _whole(self, lines: list[list[int]]) -> Overlap | None:
        """Return a short text of a set that is one of these lines, or all of them together."""
        if not self._short:
            return None
        together = tuple(chain.from_iterable(lines)) if sum(map(len, lines)) < self._words else ()
        for words in (together, *(tuple(line) for line in lines if _LINE_WORDS <= len(line) < self._words)):
            if (number := self._short.get(words)) is not None:
                return Overlap(self._names[number], " ".join(self._spelled[word] for word in words))
        return None

    def _hashes(self, line: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Return a hash of each run of words in a line, and whether all its words are known."""
        runs = max(0, len(line) - self._words + 1)
        hashes, is_known = np.zeros(runs, np.uint64), np.ones(runs, np.bool_)
        mixed = (line.astype(np.uint64) + np.uint64(1)) * _FACTOR
        mixed ^= mixed >> np.uint64(29)
        for offset in range(self._words):
            hashes = hashes * _FACTOR + mixed[offset : offset + runs]
            is_known &= line[offset : offset + runs] >= 0
        return hashes, is_known


def looked_for_line(how: Mapping[str, int]) -> str:
    """Describe how the texts of a set were searched."""
    shown = ", ".join(f"{number:,} {words}" for words, number in how.items())
    return f"{sum(how.values()):,} texts looked for: {shown}"


def words_of(text: str) -> list[str]:
    """Return the words of a text in the form for comparison."""
    return split_words(folded(text))


def evaluations_of(config: PrepareConfig) -> Evaluations | None:
    """Return the evaluation sets of a spec, read once per process; None without any.

    Raises:
        DataError: a set cannot be read whole, or lacks a text with words.
    """
    identity = (config.decontaminate, config.overlap_words, config.max_characters)
    if not _kept or _kept[0][0] != identity:
        _kept[:] = [(identity, _read(*identity))]
    return _kept[0][1]


_kept: list[tuple[tuple[Any, ...], Evaluations | None]] = []  # the last arguments, and their result


@contextmanager
def set_named(name: str) -> Iterator[None]:
    """Make errors in the files of an evaluation set name its key instead of a source's."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace(f"sources.{name}", f"decontaminate.{name}")) from None


def _read(sets: Mapping[str, SourceConfig], words: int, max_characters: int) -> Evaluations | None:
    if not sets:
        return None
    texts: dict[str, list[str]] = {}
    for name, source in sets.items():
        texts[name] = []
        with set_named(name):
            for item in read_source(name, source, max_characters):
                if isinstance(item, LeftOut):
                    raise DataError(
                        f"decontaminate.{name}: {item.id}: {item.detail}. Only a whole set can be kept out of the "
                        "text; correct it."
                    )
                texts[name].append(item.text)
    evaluations = Evaluations(texts, words)
    for name, each in evaluations.looked_for.items():
        if each.total() == each[_NOT_AT_ALL]:
            raise DataError(
                f"decontaminate.{name}: none of its {each.total():,} texts has a word to compare. Name "
                "another text_field."
            )
    return evaluations
