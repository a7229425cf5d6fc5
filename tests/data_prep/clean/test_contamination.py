"""Evaluation sets kept out of the text. If this breaks, a benchmark measures memorisation."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from data_prep.clean.contamination import Evaluations, Overlap, looked_for_line, words_of
from data_prep.prepare import main

QUESTION = "Which of the two rivers that meet in Passau is the longer one, the Inn or the Danube?"


def test_a_run_of_words_is_found_whatever_stands_around_it() -> None:
    sets = Evaluations({"rivers": [QUESTION]}, 5)
    for text in (
        QUESTION,
        f"He asked: {QUESTION.upper()}",
        "a the Two RIVERS, that\n meet! in b",
        "x in passau is the longer y",
    ):
        shared = sets.overlap(text)
        assert shared is not None and shared.name == "rivers" and len(shared.words.split()) == 5, text
    for text in (
        "",
        "two words",
        "rivers that meet in",
        "that rivers two the of which",
        "the rivers that in Passau meet",
    ):
        assert sets.overlap(text) is None, text


def test_texts_shorter_than_a_run_are_found_as_whole_documents_and_lines() -> None:
    """Otherwise a set of short texts, such as SNLI's hypotheses, would not be filtered, and figures measure memory."""
    sets = Evaluations({"snli": ["A man sleeps.", "A dog runs in the park.", "?", QUESTION]}, 13)
    for text, words in (
        ("a man sleeps", "a man sleeps"),
        ("A man\nsleeps", "a man sleeps"),
        ("Heading\nA DOG runs in the park!\nMore.", "a dog runs in the park"),
        (f"Before. {QUESTION}\nAfter.", " ".join(words_of(QUESTION)[:13])),
    ):
        assert sets.overlap(text) == Overlap("snli", words), text
    for text in (
        "Heading\nA man sleeps.\nMore.",
        "A dog runs in the park today",
        "A dog runs\nin the park\nnow",
        "",
        "?",
    ):
        assert sets.overlap(text) is None, text
    assert looked_for_line(sets.looked_for["snli"]) == (
        "4 texts looked for: 1 as a whole document, 1 as a whole line or document, 1 not at all, having no words, 1 by "
        "13 words in a row"
    )


def test_words_of_any_script_and_spelling_are_compared() -> None:
    """Vowel signs belong to their words, emphasis does not, and a letter may be encoded in several ways."""
    hindi = "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है"
    korean = "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다"
    emphasis = "it was _never_ the __case__ that they had met before"
    for text, other in (
        (hindi, hindi),
        (korean, unicodedata.normalize("NFD", korean)),
        (unicodedata.normalize("NFD", korean), korean),
        (emphasis, emphasis.replace("_", "")),
        (
            "the \N{LATIN SMALL LIGATURE FI}rst \N{FULLWIDTH LATIN SMALL LETTER F}ull width and STRASSE five",
            "the first full width and straße five",
        ),
    ):
        assert Evaluations({"a": [text]}, 7).overlap(f"x {other} y") is not None, text
    shares_signs_alone = "यह एक दूसरा वाक्य है जिसमें उन शब्दों में से कोई नहीं जो ऊपर थे"
    assert Evaluations({"a": [hindi]}, 4).overlap(shares_signs_alone) is None


def test_as_a_search_without_hashes_would_find_it() -> None:
    """Random lines of few words, so that they share many short runs and few long ones."""
    draw = np.random.default_rng(5)
    lines = [[f"w{i}" for i in draw.integers(0, 12, 40)] for _ in range(60)]
    theirs, ours, found = lines[:5], lines[5:], []
    for words in (1, 3, 4, 5):
        sets = Evaluations({"a": [" ".join(line) for line in theirs]}, words)
        runs = {tuple(line[at : at + words]) for line in theirs for at in range(41 - words)}
        for line in ours:
            expected = any(tuple(line[at : at + words]) in runs for at in range(41 - words))
            assert (sets.overlap(" ".join(line)) is not None) == expected
            found.append(expected)
    assert True in found and False in found


@pytest.mark.runs
def test_contaminated_documents_are_left_out_counted_and_listed(
    tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": text} for text in texts]
    rows[7]["text"] += QUESTION
    rows[9]["text"] = QUESTION.lower().replace("?", "") + " " + rows[9]["text"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rivers.jsonl").write_text(json.dumps({"question": QUESTION, "empty": "?"}) + "\n")
    words = [f"sources.mine={{kind: jsonl, path: {tmp_path}/a.jsonl}}", "tokenizer.vocab_size=384"]
    words += ["validation_share=0.2"]
    asked = f"decontaminate.rivers={{kind: jsonl, path: {tmp_path}/rivers.jsonl, text_field: question}}"
    assert main([f"out={tmp_path}/out", *words, asked]) == 0
    printed = capsys.readouterr().out
    assert "2 contaminated: rivers" in printed
    assert "decontaminate.rivers: 1 texts looked for: 1 by 13 words in a row" in printed
    report = json.loads((tmp_path / "out/prepare_report.json").read_text())
    assert report["sources"]["mine"]["dropped"] == {"contaminated: rivers": 2}
    first, second = report["first_dropped"]["contaminated: rivers"]
    assert "a.jsonl:8" in first and "a.jsonl:10" in second and "which of the two rivers that meet in passau" in second
    assert main([f"out={tmp_path}/out", *words, asked]) == 0, "the same spec is complete"
    (tmp_path / "rivers.jsonl").write_text(json.dumps({"question": f"{QUESTION} {QUESTION}", "empty": "?"}) + "\n")
    assert main([f"out={tmp_path}/out", *words, asked]) == 78, "another set is another dataset"
    capsys.readouterr()
    for change, message in (
        ("decontaminate.rivers.text_field=empty", "none of its 1 texts has a word"),
        (f"decontaminate.rivers.path={tmp_path}/gone", "decontaminate.rivers.path="),
        ("decontaminate.rivers.text_field=gone", "decontaminate.rivers: "),
    ):
        assert main([f"out={tmp_path}/new", *words, asked, change]) == 65
        assert message in capsys.readouterr().err and not (tmp_path / "new").exists()
