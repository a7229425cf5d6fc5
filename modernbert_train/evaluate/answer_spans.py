"""Extractive answers from the logits of windows, and SQuAD's metrics (arXiv 1606.05250; version 2: 1806.03822).

The answer is the span with the largest sum of start and end logits over all windows of a question, up to a maximum
number of tokens. Where a context may hold no answer, the answer is empty if the sum of [CLS] (the smallest of all
windows) exceeds the best span's by more than a threshold. As in transformers' example, except that all spans are
searched, not only the twenty likeliest starts and ends.

Shape legend: W windows of all questions, N tokens of a window's context, T tokens of all windows.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.schema import AnswerConfig

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_MARKS = str.maketrans("", "", string.punctuation)


class PredictedAnswer(NamedTuple):
    """The predicted answer of one question.

    Attributes:
        text: the answer; empty for no answer.
        start: index of its first character in the context; None for no answer.
        score, null_score: sums of two logits, of the best span and of [CLS]; None where there is no window.
    """

    text: str
    start: int | None
    score: float | None
    null_score: float | None


def predicted_answers(
    texts: Sequence[Mapping[str, Any]], logits_T2: NDArray[Any], objective: AnswerConfig
) -> Iterator[PredictedAnswer]:
    """Yield the predicted answer of each question.

    Args:
        texts: lines of `label_sidecar.read_texts`.
        logits_T2: start and end logits of each token of each window, [CLS] first and [SEP] last.
        objective: the settings of the prediction, such as the longest answer.
    """
    at = 0
    for text in texts:
        best, null_score = PredictedAnswer("", None, None, None), None
        for first, number in text["windows"]:
            null = float(logits_T2[at].sum())
            null_score = null if null_score is None else min(null, null_score)
            at += text["question_tokens"] + 2
            own = [np.asarray(text[key][first : first + number]) for key in ("starts", "ends")]
            span = _best_span(logits_T2[at : at + number], own[0], own[1], objective.max_answer_tokens)
            at += number + 1
            if span is not None and (best.score is None or span[2] > best.score):
                start, end, score = int(own[0][span[0]]), int(own[1][span[1]]), span[2]
                chosen = text["context"][start:end]
                best = PredictedAnswer(chosen.strip(), start + len(chosen) - len(chosen.lstrip()), score, None)
        best = best._replace(null_score=null_score)
        above = 0.0 if best.score is None or null_score is None else null_score - best.score
        if objective.unanswerable and above > objective.null_threshold:
            best = best._replace(text="", start=None)
        yield best


def _best_span(
    logits_N2: NDArray[Any], starts_N: NDArray[Any], ends_N: NDArray[Any], max_span_tokens: int
) -> tuple[int, int, float] | None:
    """Return first and last token and score of the likeliest span that holds a character; the first of ties."""
    best: tuple[int, int, float] | None = None
    for longer in range(min(max_span_tokens, len(logits_N2))):
        upto = len(logits_N2) - longer
        sums = np.where(ends_N[longer:] > starts_N[:upto], logits_N2[:upto, 0] + logits_N2[longer:, 1], -np.inf)
        start = int(sums.argmax())
        if sums[start] > (-np.inf if best is None else best[2]):
            best = start, start + longer, float(sums[start])
    return best


def normalised(text: str) -> list[str]:
    """Return the words that SQuAD compares: lower case, without ASCII punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_MARKS)).split()


def exact(prediction: str, answer: str) -> float:
    """Return 1 if both have the same words in the same order, else 0."""
    return float(normalised(prediction) == normalised(answer))


def f1(prediction: str, answer: str, *, empty_equal: bool) -> float:
    """Return F1 of words; without words in both, 1 if `empty_equal` (SQuAD 2), else 0 (SQuAD 1)."""
    mine, theirs = normalised(prediction), normalised(answer)
    if not mine or not theirs:
        return float(empty_equal and mine == theirs)
    common = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * common / (len(mine) + len(theirs))


def answer_figures(
    predictions: Sequence[str], answers: Sequence[Sequence[str]], *, unanswerable: bool
) -> dict[str, float]:
    """Return SQuAD's metrics, as shares; NaN for a kind of question that does not occur.

    Args:
        predictions: the predicted answer of each question; empty for no answer.
        answers: the correct answers of each question; empty if it is unanswerable.
        unanswerable: True to score as SQuAD 2, else as SQuAD 1.
    """
    values = []
    for mine, theirs in zip(predictions, answers, strict=True):
        right = [each for each in theirs if normalised(each)] or [""] if unanswerable else theirs
        both = [(exact(mine, each), f1(mine, each, empty_equal=unanswerable)) for each in right]
        values.append(tuple(max(each) for each in zip(*both, strict=True)))
    values_N2, has_N = np.array(values).reshape(-1, 2), np.array([bool(each) for each in answers], dtype=bool)
    has_answer, no_answer = (
        values_N2[kept].mean(axis=0) if kept.any() else (np.nan, np.nan) for kept in (has_N, ~has_N)
    )
    return {
        "exact": float(values_N2[:, 0].mean()),
        "f1": float(values_N2[:, 1].mean()),
        "has_answer_exact": float(has_answer[0]),
        "has_answer_f1": float(has_answer[1]),
        "no_answer_exact": float(no_answer[0]),
    }
