"""Read sentences of tagged words: CoNLL files, a word a line with its tag in the last column; or pairs of lists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from modernbert_train.core.text import shorten, shown_value
from modernbert_train.data.read.task_rows import lines_of

_TAG = re.compile(r"O|[BIES]-\S+")
_BLANK = re.compile(r"[ \t\r\n]")  # other Unicode white space is part of a word
_WORD_ID = re.compile(r"\d+([-.]\d+)?")
_CONLLU = 10  # columns
_LOOKED_AT = 1000  # lines examined to decide whether tabs separate columns
_NO_TEXT = "-DOCSTART-"  # starts a line between documents


class Sentence(NamedTuple):
    """Words and their tags.

    Attributes:
        line: line of its first word.
        words, tags: one tag for each word; no tags if they are not read.
        loose: number of tags I-x and E-x that follow no entity of type x; they are read as its beginning.
        id: its name, if it has one.
    """

    line: int
    words: tuple[str, ...]
    tags: tuple[str, ...]
    loose: int
    id: Any = None


def read_sentences(path: Path, *, tagged: bool = True, spans: bool = True) -> Iterator[Sentence]:
    """Yield the sentences of a CoNLL file.

    Args:
        path: the file.
        tagged: True if every line has a tag; otherwise only the first column is read.
        spans: True if tags are O, B-x, I-x, E-x, S-x; otherwise they are any text without spaces.

    Raises:
        ValueError: the file cannot be read, or a line lacks a tag or has an invalid one; names the line.
    """
    words: list[str] = []
    tags: list[str] = []
    first = 0  # line of the first word
    tabs = any("\t" in line for _, line in islice(lines_of(path), _LOOKED_AT))
    width = 0  # columns of the first line with a word
    for number, line in chain(lines_of(path), [(0, "")]):
        if tabs and not words and line.startswith("#") and "\t" not in line:  # a comment
            continue
        if not line.strip() or line.startswith(_NO_TEXT):
            if words:
                yield Sentence(first, tuple(words), tuple(tags), loose_tags(tags) if spans else 0)
            words, tags = [], []
            continue
        columns = line.split("\t") if "\t" in line else re.split(" +", line.strip(" "))  # other spaces belong to words
        if (tagged and len(columns) < 2) or not columns[0].strip():
            raise ValueError(f"line {number}: {shorten(line, 40)!r} is no word with a tag. Write both, a tab between.")
        width = width or len(columns)
        if tagged and len(columns) != width:
            raise ValueError(
                f"line {number}: {shorten(line, 40)!r} has {len(columns)} columns, and the first word has {width}. "
                "Correct it; a comment begins with # before a sentence, in a file with tabs between its columns."
            )
        if width == _CONLLU and tabs and _WORD_ID.fullmatch(columns[0]):
            raise ValueError(
                f"line {number}: the first of {width} columns is a number, as in CoNLL-U, and not the word. Keep the "
                r"word and its tag: grep -vP '^\d+[-.]' FILE | cut -f 2,4 > FILE.conll."
            )
        first = first if words else number
        words.append(columns[0])
        if tagged:
            if spans:
                require_span_tag(columns[-1], f"line {number}")
            tags.append(columns[-1])


def token_lists(
    values: tuple[Any, Any], columns: tuple[str, str | None], where: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words and tags of a row.

    Raises:
        ValueError: they are not lists of texts with equal lengths.
    """
    words, tags = values
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word.strip() for word in words):
        raise ValueError(f"{where}: {columns[0]} is {shown_value(words)}, and not a list of words. Correct it.")
    if any(_BLANK.search(word) for word in words):
        raise ValueError(f"{where}: {columns[0]} has a word with a space in it. Make it two, each with a tag.")
    if columns[1] is None:
        return tuple(words), ()
    if not isinstance(tags, list) or len(tags) != len(words):
        number = f"{len(tags)} tags" if isinstance(tags, list) else shown_value(tags)
        raise ValueError(f"{where}: {columns[1]} is {number} for {len(words)} words. Give each word a tag.")
    if not all(isinstance(tag, str | int) and not isinstance(tag, bool) and str(tag).strip() for tag in tags):
        raise ValueError(f"{where}: {columns[1]} has a tag that is neither a text nor a whole number. Correct it.")
    return tuple(words), tuple(str(tag).strip() for tag in tags)


def require_span_tag(tag: str, where: str) -> None:
    """Raise ValueError for a tag other than O, B-x, I-x, E-x, S-x."""
    if not _TAG.fullmatch(tag):
        raise ValueError(
            f"{where}: the tag {shorten(tag, 40)!r} is none of O, B-x, I-x, E-x, S-x. Correct it"
            + (", L- and U- of BILOU as E- and S-" if tag[:2] in ("L-", "U-") else "")
            + "; or if tags are no spans, such as parts of speech, set metrics to [accuracy] or [macro_f1]."
        )


def loose_tags(tags: Sequence[str]) -> int:
    """Count tags I-x and E-x that follow no entity of type x."""
    before = ["O", *tags][: len(tags)]
    return sum(
        tag[0] in "IE" and (last[0] not in "BI" or last[2:] != tag[2:]) for last, tag in zip(before, tags, strict=True)
    )
