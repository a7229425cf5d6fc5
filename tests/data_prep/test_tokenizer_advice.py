"""Each error of `tokenizer` that names an option leads to a command that works, and names none that it lacks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from data_prep.tokenizer import main
from tests.support.advice import follow_advice

RUSSIAN = "счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. "
SMALL = ("--entries", "384", "--spare", "0")


def write(folder: Path, end: str, texts: list[str], encoding: str = "utf-8") -> str:
    for i, text in enumerate(texts):
        (folder / f"{i}.{end}").write_bytes(text.encode(encoding))
    return str(folder)


def write_rows(folder: Path, texts: list[str]) -> list[str]:
    rows = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    return ["train", "OUT", f"{write(folder, 'jsonl', [rows])}/0.jsonl", "--kind", "jsonl", *SMALL]


def write_bare(folder: Path, texts: list[str]) -> list[str]:
    """Write a tokenizer without special tokens."""
    Tokenizer(models.BPE({chr(ord("a") + i): i for i in range(20)}, [])).save(f"{folder}/bare.json")
    return ["adapt", "OUT", f"{folder}/bare.json"]


def train(end: str, *words: str, encoding: str = "utf-8", form: str = "{}") -> Callable[[Path, list[str]], list[str]]:
    return lambda folder, texts: [
        "train", "OUT", write(folder, end, [form.format(text) for text in texts], encoding), *SMALL, *words,
    ]  # fmt: skip


# mistake -> its command, the advice in the message, and the options that a user adds for it
CASES: dict[str, tuple[Callable[[Path, list[str]], list[str]], str, str]] = {
    "too little text": (train("txt", "--entries", "32768"), r"Set (--entries)=(\d+) or less", "{0} {1}"),
    "an odd size": (train("txt", "--entries", "500"), r"(--entries)=500: .* nearest is (\d+)", "{0} {1}"),
    "a share": (train("txt", "--superbpe", "0"), r"(--superbpe) 0: .* Give ([\d.]+)\.\n", "{0} {1}"),
    "another column": (write_rows, r"Set (--text-field) to the one", "{0} body"),
    "another encoding": (train("txt", encoding="cp1251", form=RUSSIAN + "{}"), r"Set (--encoding=cp1251)\.", "{0}"),
    "pages": (train("txt", form="<!DOCTYPE html><html>{}</html>"), r"Set (--strip)=html .* or =(nothing)", "{0} {1}"),
    "no special tokens": (write_bare, r"has no \[.* Add (--extend)", "{0}"),
    "an alphabet": (lambda *_: ["letters", "OUT", "--alphabet", "a"], r"(--alphabet) a: give (\w+),", "{0} {1}"),
    "a k": (
        lambda *_: ["letters", "OUT", "--alphabet", "dna", "--kmer", "99"],
        r"(--kmer) 99: .* Give (1) or more",
        "{0} {1}",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_advice_of_an_error_leads_to_a_tokenizer(texts: list[str], tmp_path: Path, capsys: Any, case: str) -> None:
    write_case, advice, taken = CASES[case]
    (tmp_path / "in").mkdir()
    words = [str(tmp_path / "out") if word == "OUT" else word for word in write_case(tmp_path / "in", texts)]
    error = follow_advice(main, words, advice, taken, capsys)
    assert not re.search(r"sources\.|tokenizer\.\w+[= ]|max_left_out|max_characters", error), error


def test_a_folder_without_the_usual_files_is_read_by_a_pattern(texts: list[str], tmp_path: Path, capsys: Any) -> None:
    """A folder of .md files used to end in advice to set sources.text0.glob, which no option sets."""
    folder = write(tmp_path, "md", texts)
    assert main(["train", f"{tmp_path}/out", folder, *SMALL]) == 65
    error = capsys.readouterr().err
    assert (found := re.search(r"or name a pattern of your files, such as (\S+)\.\n", error)), error
    assert main(["train", f"{tmp_path}/out", f"{folder}/{found[1]}", *SMALL]) == 0
