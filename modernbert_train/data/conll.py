"""CoNLL files: a word a line with its tag in the last column, a blank line between sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from modernbert_train.read_json import MOST_BYTES
from modernbert_train.text import shorten

_TAG = re.compile(r"O|[BIES]-\S+")
_NO_TEXT = "-DOCSTART-"  # begins a line between documents


class Sentence(NamedTuple):
    """Words and their tags.

    Attributes:
        line: of its first word.
        words, tags: one tag for each word.
        loose: tags I-x and E-x that go on with no entity of type x; read as its beginning.
    """

    line: int
    words: tuple[str, ...]
    tags: tuple[str, ...]
    loose: int


def read_sentences(path: Path) -> Iterator[Sentence]:
    """The sentences of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: a line has no tag, or one that is none of O, B-x, I-x, E-x, S-x; names the line.
    """
    if path.stat().st_size >= MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES:,} bytes. Give a part of it.")
    words: list[str] = []
    tags: list[str] = []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8. Convert it.") from None
    lines = text.split("\n")
    for number, line in enumerate([*lines, ""], start=1):
        line = line.strip("\r")
        if not line.strip() or line.startswith(_NO_TEXT):
            if words:
                yield Sentence(number - len(words), tuple(words), tuple(tags), _loose(tags))
            words, tags = [], []
            continue
        columns = line.split("\t") if "\t" in line else line.split()
        if len(columns) < 2 or not columns[0].strip():
            raise ValueError(f"line {number}: {shorten(line, 40)!r} is no word with a tag. Write both, a tab between.")
        if not _TAG.fullmatch(columns[-1]):
            raise ValueError(
                f"line {number}: the tag {shorten(columns[-1], 40)!r} is none of O, B-x, I-x, E-x, S-x. Correct it."
            )
        words.append(columns[0])
        tags.append(columns[-1])


def _loose(tags: list[str]) -> int:
    before = ["O", *tags[:-1]]
    return sum(
        tag[0] in "IE" and (last[0] not in "BI" or last[2:] != tag[2:]) for last, tag in zip(before, tags, strict=True)
    )
