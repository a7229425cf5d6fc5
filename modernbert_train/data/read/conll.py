"""Read sentences of tagged words: CoNLL files, a word a line with its tag in the last column; or pairs of lists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

from modernbert_train.config.tools.prepare import RowSourceConfig
from modernbert_train.core.text import shorten, shown_value
from modernbert_train.data.read.lines import read_lines
from modernbert_train.data.read.rows import TEXT, Columns, LeftOut, Row, Span

WORDS, TAGS = "words", "tags"  # columns of a CoNLL file
_TAG = re.compile(r"O|[BIES]-\S+")
_BLANK = re.compile(r"[ \t\r\n]")  # other Unicode white space is part of a word
_WORD_ID = re.compile(r"\d+([-.]\d+)?")
_CONLLU = 10  # columns
_LOOKED_AT = 1000  # lines examined to decide whether tabs separate columns
_NO_TEXT = "-DOCSTART-"  # starts a line between documents


def read_conll(span: Span, source: RowSourceConfig, columns: Columns, max_characters: int) -> Iterator[Row | LeftOut]:
    """Yield the sentences of a CoNLL file: lists of WORDS and, if they are required, of TAGS, at their first line."""
    words: list[str] = []
    tags: list[str] = []
    first = width = 0  # line and columns of the first word
    tagged = TAGS in columns.required
    lines = partial(read_lines, span, source, columns, max_characters)
    tabs = any("\t" in item.fields[TEXT] for item in islice(lines(), _LOOKED_AT) if isinstance(item, Row))
    for item in chain(lines(), [Row("", {TEXT: ""})]):
        if isinstance(item, LeftOut):
            yield item
            return
        line = item.fields[TEXT]
        if tabs and not words and line.startswith("#") and "\t" not in line:  # a comment
            continue
        if not line.strip() or line.startswith(_NO_TEXT):
            if words:
                yield Row(f"{span.path}:{first}", {WORDS: words, TAGS: tags}, line=first)
            words, tags = [], []
            continue
        cells = line.split("\t") if "\t" in line else re.split(" +", line.strip(" "))  # other spaces belong to words
        width = width or len(cells)
        if problem := _problem(line, cells, width, tagged, tabs):
            yield LeftOut(item.id, "not_conll", problem, line=item.line)
            continue
        first = first if words else item.line
        words.append(cells[0])
        tags.append(cells[-1])


def _problem(line: str, cells: list[str], width: int, tagged: bool, tabs: bool) -> str | None:
    """Describe why the cells of a line are no word with a tag; None if they are one."""
    shown = repr(shorten(line, 40))
    if (tagged and len(cells) < 2) or not cells[0].strip():
        return f"{shown} is no word with a tag; write both, a tab between"
    if tagged and len(cells) != width:
        return (
            f"{shown} has {len(cells)} columns, and the first word has {width}; a comment begins with # before a "
            "sentence, in a file with tabs between its columns"
        )
    if width == _CONLLU and tabs and _WORD_ID.fullmatch(cells[0]):
        return (
            f"the first of {width} columns is a number, as in CoNLL-U, and not the word; keep the word and its tag: "
            r"grep -vP '^\d+[-.]' FILE | cut -f 2,4 > FILE.conll"
        )
    return None


def token_lists(
    values: tuple[Any, Any], columns: tuple[str, str | None], where: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words and tags of a row.

    Raises:
        ValueError: they are not lists of texts with equal lengths.
    """
    words, tags = values
    if not isinstance(words, list):
        raise ValueError(f"{where}: {columns[0]} is {shown_value(words)}, and not a list of words. Correct it.")
    if not words:
        raise ValueError(f"{where}: {columns[0]} is an empty list. Remove the row, or write its words.")
    for number, word in enumerate(words, start=1):
        if not isinstance(word, str) or not word.strip():
            raise ValueError(f"{where}: word {number} of {columns[0]} is {shown_value(word)}. Correct it.")
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
