"""One reader, two policies: of the same odd lines a corpus counts each by its reason, a task refuses the first."""

from __future__ import annotations

import gc
import itertools
import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from data_prep.read.documents import read_source
from modernbert_train.__main__ import main
from modernbert_train.config.tools.prepare import SourceConfig
from tests.support.corpora import Command
from tests.support.tiny_run import TinyRun

GOOD = '{{"text": "some words of text {0}", "label": {1}}}'


class Odd(NamedTuple):
    """A line, the reason that a corpus counts (None: it is a document), and the message of a task (None: a row)."""

    line: bytes
    reason: str | None
    message: str | None


NOT_JSON = "line 5: not JSON"
ODD = {
    "cut short": Odd(b'{"text": "cut', "not_json", NOT_JSON),
    "two objects": Odd(b'{"text": "a", "label": 1} {"text": "b", "label": 1}', "not_json", NOT_JSON),
    "words after it": Odd(b'{"text": "a", "label": 1} words', "not_json", NOT_JSON),
    "a comma too many": Odd(b'{"text": "a", "label": 1,}', "not_json", NOT_JSON),
    "no comma": Odd(b'{"text": "a" "label": 1}', "not_json", NOT_JSON),
    "Python's quotes": Odd(b"{'text': 'a', 'label': 1}", "not_json", NOT_JSON),
    "bare keys": Odd(b'{text: "a", label: 1}', "not_json", NOT_JSON),
    "a comment": Odd(b"// a comment", "not_json", NOT_JSON),
    "a row of CSV": Odd(b"a,1", "not_json", NOT_JSON),
    "a control character": Odd(b'{"text": "a\x01b", "label": 1}', "not_json", NOT_JSON),
    "a bad escape": Odd(b'{"text": "a\\x41", "label": 1}', "not_json", NOT_JSON),
    "deeply nested": Odd(b"[" * 100_000, "not_json", NOT_JSON),
    "a number of 5,000 digits": Odd(b'{"text": "a", "label": 1%s}' % (b"0" * 5_000), "not_json", NOT_JSON),
    "an array": Odd(b'["a", 1]', "not_json", "line 5: list, not an object"),
    "a text": Odd(b'"a"', "not_json", "line 5: str, not an object"),
    "a number": Odd(b"7", "not_json", "line 5: int, not an object"),
    "null": Odd(b"null", "not_json", "line 5: NoneType, not an object"),
    "an empty object": Odd(b"{}", "no_text", "line 5: no column 'text' among none"),
    "another key": Odd(b'{"body": "a", "label": 1}', "no_text", "line 5: no column 'text' among 'body', 'label'"),
    "a key in capitals": Odd(b'{"Text": "a", "label": 1}', "no_text", "line 5: no column 'text' among 'Text', 'label'"),
    "no text": Odd(b'{"text": null, "label": 1}', "no_text", "line 5: text is None, and not a text"),
    "a number for a text": Odd(b'{"text": 5, "label": 1}', "no_text", "line 5: text is 5, and not a text"),
    "a list for a text": Odd(b'{"text": ["a"], "label": 1}', "no_text", "line 5: text is a list, and not a text"),
    "an object for a text": Odd(b'{"text": {"a": 1}, "label": 1}', "no_text", "line 5: text is a dict, and not a text"),
    "Latin-1": Odd('{"text": "caf\xe9", "label": 1}'.encode("latin-1"), "not_utf8", "line 5: not UTF-8: byte 0xe9"),
    "a gzip file": Odd(b"\x1f\x8b\x08\x00\x00\x00", "not_utf8", "line 5: not UTF-8: byte 0x8b"),
    "half a pair": Odd(b'{"text": "\\ud83d", "label": 1}', "not_utf8", "line 5: half of a surrogate pair"),
    "a NUL": Odd(b'{"text": "a\\u0000b", "label": 1}', "nul_byte", None),
    "only blanks": Odd(b'{"text": "  ", "label": 1}', "empty", None),
    "no label": Odd(b'{"text": "one", "label": null}', None, "line 5: label is None, and not a class"),
    "a label that is no number": Odd(b'{"text": "two", "label": NaN}', None, NOT_JSON),
    "an infinite label": Odd(b'{"text": "three", "label": 1e999}', None, NOT_JSON),
    "a key twice": Odd(
        b'{"text": "four", "label": 1, "label": 0}', None, f"{NOT_JSON} (duplicate key label in one object"
    ),
    "an empty line": Odd(b"", None, None),
    "a line of blanks": Odd(b" \t", None, None),
    "a carriage return": Odd(b'{"text": "five", "label": 1}\r', None, None),
    "a byte order mark": Odd(b'\xef\xbb\xbf{"text": "six", "label": 1}', None, None),
    "blanks around it": Odd(b'  {"text" : "seven" , "label" : 1}  ', None, None),
    "other keys": Odd(b'{"text": "eight", "label": 1, "text ": 3, "": null}', None, None),
    "a paragraph separator": Odd('{"text": "nine\u2029 \x85 ten", "label": 1}'.encode(), None, None),
}


@pytest.mark.runs
def test_a_corpus_counts_each_odd_line_by_its_reason(command: Command, texts: list[str], tmp_path: Path) -> None:
    """A line that ends the program costs the corpus; one that is dropped without a word costs trust."""
    good = [json.dumps({"text": text}).encode() for text in texts]
    content = b"\n".join([*good, *(odd.line for odd in ODD.values())])
    (tmp_path / "a.jsonl").write_bytes(content)
    words = ["sources.mine.kind=jsonl", f"sources.mine.path={tmp_path / 'a.jsonl'}", "max_left_out=1"]
    assert command(*words) == 0
    report = json.loads((tmp_path / "out/prepare_report.json").read_text())
    assert report["dropped"] == dict(sorted(Counter(odd.reason for odd in ODD.values() if odd.reason).items()))
    blank = sum(not odd.line.strip() for odd in ODD.values())
    assert report["documents_read"] == len(good) + len(ODD) - blank
    places = dict(zip(ODD, range(len(good) + 1, len(good) + len(ODD) + 1), strict=True))
    listed = "\n".join(each for found in report["first_dropped"].values() for each in found)
    assert all(f"a.jsonl:{places[name]}: " in listed for name, odd in ODD.items() if odd.reason)
    at = content.index(ODD["Latin-1"].line) + ODD["Latin-1"].line.index(0xE9)
    assert f"a.jsonl:{places['Latin-1']}: not UTF-8: byte 0xe9 at offset {at}" in listed


@pytest.mark.parametrize("name", ODD)
def test_a_task_refuses_an_odd_line_or_takes_it(name: str, tiny_run: TinyRun, tmp_path: Path, capsys: Any) -> None:
    """By `check`, before anything is trained: with the line, the fault and a remedy."""
    odd = ODD[name]
    good = [GOOD.format(i, i % 2).encode() for i in range(8)]
    (tmp_path / "t.jsonl").write_bytes(b"\n".join([*good[:4], odd.line, *good[4:]]))
    probe = json.dumps({"name": "probe", "train": str(tmp_path / "t.jsonl")})
    code = main(["check", *tiny_run(f"evals.x={probe}")])
    error = capsys.readouterr().err
    assert (code == 0) == (odd.message is None), error
    assert (odd.message or "") in error
    assert code == 0 or error.rstrip().endswith("."), error


CELLS = {
    "too many": ("a,1,2\n", "line 3: 3 cells in a row, the header names 2"),
    "too few": ("a\n", "line 3: 1 cell in a row, the header names 2"),
    "quotes within": ('"a"b,1\n', "line 3: ',' expected after"),
    "never closed": ('"a,1\n', "unexpected end of data"),
    "two lines": ('"a\nb",1\n', None),
    "doubled quotes": ('"a ""b""",1\n', None),
    "an empty line": ("\n", None),
    "a label that is missing": ("a,nan\n", "line 3: label is 'nan', and not a class"),
}


@pytest.mark.parametrize("name", CELLS)
def test_a_task_refuses_an_odd_row_of_a_csv_or_takes_it(
    name: str, tiny_run: TinyRun, tmp_path: Path, capsys: Any
) -> None:
    row, message = CELLS[name]
    (tmp_path / "t.csv").write_text("text,label\nb,0\n" + row + "".join(f"words {i},{i % 2}\n" for i in range(8)))
    code = main(["check", *tiny_run(f"evals.x={json.dumps({'name': 'probe', 'train': str(tmp_path / 't.csv')})}")])
    error = capsys.readouterr().err
    assert (code == 0) == (message is None) and (message or "") in error, error


OPENED = {
    "a.csv": b"text\na\nb\n",
    "empty.csv": b"",
    "other.csv": b"other\nx\n",
    "cut.csv": b'text\n"never closed\n',
    "damaged.csv.gz": b"\x1f\x8b\x08no",
    "a.jsonl": b'{"text": "a"}\n{"text": "b"}\n',
    "damaged.jsonl.zst": b"no",
    "damaged.parquet": b"no",
    "a.fasta": b">a\nAC\n>b\nGT\n",
}


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize("items", [1, None], ids=["the first row", "all rows"])
def test_every_file_is_closed_by_its_reader(name: str, items: int | None, tmp_path: Path) -> None:
    """A corpus of a million files reaches the limit of open files otherwise; Python warns of each."""
    (tmp_path / name).write_bytes(OPENED[name])
    source = SourceConfig(kind=name.split(".")[1], path=str(tmp_path / name))  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        assert list(itertools.islice(read_source("mine", source, 1000), items))
        gc.collect()
    assert not [str(each.message) for each in found]
