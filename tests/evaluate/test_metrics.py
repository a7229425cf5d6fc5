"""The metrics, on values computed by hand or by the libraries that define them."""

from __future__ import annotations

import math
import random

import pytest
import torch

from modernbert_train.config.task_kinds import KINDS, metrics_of_objective
from modernbert_train.evaluate.metrics import OF_CLASSES, OF_SCORES, OF_SEVERAL, entity_figures, spans

METRICS = {"single-label": OF_CLASSES, "multi-label": OF_SEVERAL, "regression": OF_SCORES}


@pytest.mark.parametrize(
    ("name", "told", "so", "expected"),
    [
        ("f1", [1, 1, 0, 0], [1, 2, 0, 1], 0.5),  # 2: a class that training has not
        ("matthews", [1, 1, 1, 1], [1, 1, 1, 1], 0.0),  # as scikit-learn
        ("macro_f1", [0, 1, 3], [0, 1, 1], (1 + 2 / 3 + 0) / 3),
    ],
)
def test_classes_that_only_some_texts_have(name: str, told: list[int], so: list[int], expected: float) -> None:
    """Models are chosen by a table of these."""
    assert OF_CLASSES[name](torch.tensor(told), torch.tensor(so)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", OF_SCORES)
def test_a_correlation_with_one_score_is_no_number(name: str) -> None:
    assert math.isnan(OF_SCORES[name](torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0])))


def test_spans_are_exact_with_their_type() -> None:
    """seqeval's own example: an entity predicted one word too early is wrong."""
    so = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    told = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    assert entity_figures(told, so) == {"entity_f1": 0.5, "entity_precision": 0.5, "entity_recall": 0.5}
    assert entity_figures([["O"]], [["O"]])["entity_f1"] == 0.0


def test_seqeval_counts_the_same_entities() -> None:
    """Published figures of CoNLL and WNUT are computed by it; random tags contain every possible broken order."""
    judge = pytest.importorskip("seqeval.metrics", reason="seqeval is not installed: pip install seqeval")
    draw = random.Random(3)
    for prefixes in ("BI", "BIES"):
        names = ["O", *(f"{prefix}-{kind}" for prefix in prefixes for kind in ("x", "y"))]
        for _ in range(100):
            told, so = ([draw.choices(names, k=9) for _ in range(3)] for _ in range(2))
            if prefixes == "BI":
                expected = [judge.f1_score(so, told), judge.precision_score(so, told), judge.recall_score(so, told)]
                assert list(entity_figures(told, so).values()) == pytest.approx(expected, abs=1e-9)
            starts = [(span.kind, span.first, span.end - 1) for span in spans(told[0])]
            assert starts == judge.sequence_labeling.get_entities(told[0])


@pytest.mark.runs
def test_scikit_learn_and_scipy_measure_the_same() -> None:
    """GLUE's own figures are computed by them."""
    judge = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    relations = {"labels": [1, 2, 3, 4], "average": "micro"}
    theirs = {
        ("single-label", "accuracy"): judge.accuracy_score,
        ("single-label", "f1"): judge.f1_score,
        ("single-label", "macro_f1"): lambda so, told: judge.f1_score(so, told, average="macro"),
        ("single-label", "matthews"): judge.matthews_corrcoef,
        ("multi-label", "accuracy"): judge.accuracy_score,
        ("multi-label", "micro_f1"): lambda so, told: judge.f1_score(so, told, average="micro"),
        ("multi-label", "macro_f1"): lambda so, told: judge.f1_score(so, told, average="macro", zero_division=0),
        ("single-label", "relation_f1"): lambda so, told: judge.f1_score(so, told, **relations),
        ("regression", "pearson"): lambda so, told: stats.pearsonr(so, told).statistic,
        ("regression", "spearman"): lambda so, told: stats.spearmanr(so, told).statistic,
    }
    assert all({*metrics_of_objective(kind)} == {*names} for kind, names in METRICS.items())
    assert {*KINDS["multiple-choice"].metrics} <= {*OF_CLASSES}
    assert {*theirs} == {(kind, name) for kind, names in METRICS.items() for name in names}
    generator = torch.Generator().manual_seed(1)
    for (kind, name), judged in theirs.items():
        for _ in range(20):
            size = (23, 4) if kind == "multi-label" else (23,)
            most = 2 if kind == "multi-label" or name == "f1" else 5  # few scores, so that many are equal
            told, so = (torch.randint(0, most, size, generator=generator) for _ in range(2))
            if kind == "regression":
                told, so = told.double(), so.double()
            assert METRICS[kind][name](told, so) == pytest.approx(float(judged(so.numpy(), told.numpy())), abs=1e-6)
