"""Answers from logits, and SQuAD's metrics: compared with other code, and spans with all possible ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modernbert_train.config.schema import AnswerConfig
from modernbert_train.evaluate.answer_spans import answer_figures, predicted_answers
from tests.support.labelled import squad2

WORDS = ["the", "a", "An", "cat", "Cat,", "dog", "sat.", "“the", "die-hard", "1,000", "été", "…", "!", "  "]
TEXT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(" ".join)
ONE = st.tuples(TEXT, st.lists(TEXT, min_size=1, max_size=3))


@pytest.mark.runs
@given(st.lists(ONE, min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_version_1_is_torchmetrics_squad(asked: list[tuple[str, list[str]]]) -> None:
    """Figures comparable with published ones; for texts without a word torchmetrics follows version 2."""
    from torchmetrics.functional.text import squad

    asked = [(told, rights) for told, rights in asked if any(c.isalnum() and c not in "aAnthe" for c in told)]
    if not asked:
        return
    answers = [{"text": rights, "answer_start": [0] * len(rights)} for _, rights in asked]
    theirs = squad(
        [{"prediction_text": told, "id": str(n)} for n, (told, _) in enumerate(asked)],
        [{"answers": each, "id": str(n)} for n, each in enumerate(answers)],
    )
    ours = answer_figures([told for told, _ in asked], [rights for _, rights in asked], unanswerable=False)
    assert 100 * ours["exact"] == pytest.approx(float(theirs["exact_match"]), abs=1e-4)
    assert 100 * ours["f1"] == pytest.approx(float(theirs["f1"]), abs=1e-4)


def test_version_1_has_no_words_in_common_with_a_text_without_words() -> None:
    """SQuAD 1's own script: exact, and an F1 of 0."""
    figures = answer_figures(["The", "cat"], [["a"], ["a cat", "dog"]], unanswerable=False)
    assert (figures["exact"], figures["f1"]) == (1.0, 0.5)
    assert math.isnan(figures["no_answer_exact"])


@pytest.mark.runs
@given(st.lists(st.tuples(TEXT | st.just(""), st.lists(TEXT, max_size=3)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_version_2_is_the_official_evaluation(asked: list[tuple[str, list[str]]]) -> None:
    """As in transformers, also for questions with and without an answer separately."""
    told, rights = zip(*asked, strict=True)
    ours, theirs = answer_figures(told, rights, unanswerable=True), squad2(told, rights)
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs, abs=1e-11)


def asked_of(draw: np.random.Generator, windows: list[tuple[int, int]]) -> tuple[dict[str, Any], np.ndarray]:
    """Return a question of three tokens whose context has the words w0 w1 ..., and logits of its windows."""
    words = [f"w{number}" for number in range(max(first + number for first, number in windows))]
    ends = (np.cumsum([len(word) + 1 for word in words]) - 1).tolist()
    starts = [end - len(word) for end, word in zip(ends, words, strict=True)]
    text = {"context": " ".join(words), "starts": starts, "ends": ends, "question_tokens": 3, "windows": windows}
    rows = sum(number + 3 + 3 for _, number in windows)
    return text, draw.normal(size=(rows, 2)).astype(np.float32)


@pytest.mark.parametrize("most", [1, 3, 30])
@pytest.mark.parametrize("unanswerable", [False, True])
def test_the_likeliest_span_of_all_windows_is_predicted(most: int, unanswerable: bool) -> None:
    """By trying all of them; question tokens, special tokens and tokens outside a window are excluded."""
    draw = np.random.default_rng(most)
    texts, logits = zip(*(asked_of(draw, [(0, 6), (4, 6), (8, 3)]) for _ in range(40)), strict=True)
    texts = (*texts, texts[0] | {"windows": []}, texts[1])
    threshold = 0.3
    objective = AnswerConfig(max_answer_tokens=most, unanswerable=unanswerable, null_threshold=threshold)
    told = list(predicted_answers(texts, np.concatenate([*logits, logits[1]]), objective))
    nulls = 0
    for text, own, found in zip(texts[:40], logits, told, strict=False):
        spans, null, at = [], [], 0
        for first, number in text["windows"]:
            null.append(own[at].sum())
            for start in range(number):
                for end in range(start, min(number, start + most)):
                    score = own[at + 5 + start, 0] + own[at + 5 + end, 1]
                    spans.append((score, " ".join(f"w{first + n}" for n in range(start, end + 1))))
            at += number + 6
        score, said = max(spans)
        assert found.score == pytest.approx(score) and found.null_score == pytest.approx(min(null))
        none = unanswerable and min(null) - score > threshold
        nulls += none
        assert found.text == ("" if none else said)
        assert none or text["context"][found.start :].startswith(said)
    assert told[40] == ("", None, None, None) and told[41] == told[1]
    assert unanswerable or not nulls
