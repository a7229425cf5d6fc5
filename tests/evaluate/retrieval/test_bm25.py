"""`--model bm25`: the baseline that a user compares an encoder with."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from tests.support.beir import WriteBeir, result_of
from tests.support.needs import needs

needs("bm25s", "the extra retrieval is not installed")


def scores(documents: list[list[str]], query: list[str], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """BM25 as Lucene computes it, written out."""
    frequency = Counter(word for words in documents for word in {*words})
    mean = sum(map(len, documents)) / len(documents)
    found = []
    for words in documents:
        counts, norm = Counter(words), k1 * (1 - b + b * len(words) / mean)
        idf = {word: math.log(1 + (len(documents) - n + 0.5) / (n + 0.5)) for word, n in frequency.items()}
        found.append(sum(idf[word] * counts[word] / (counts[word] + norm) for word in query if counts[word]))
    return found


def test_its_figures_are_those_of_the_formula_and_its_candidates_can_be_reranked(
    tmp_path: Path, write_beir: WriteBeir, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the words, as a user sees them: running and runs are one, and `the` is none."""
    texts = {
        "d1": "the fox runs over the hill",
        "d2": "a fox is running, running and running",
        "d3": "the hill over the town",
        "d4": "the town of the foxes by a river in the long valley",
    }
    queries = {"q1": "the running fox", "q2": "town hill", "q3": "rivers"}
    folder = write_beir(texts, queries, test=[("q1", "d1", 1), ("q2", "d4", 1), ("q3", "d4", 1)])
    words = [["fox", "run", "hill"], ["fox", "run", "run", "run"], ["hill", "town"],
             ["town", "fox", "river", "long", "valley"]]  # fmt: skip
    expected = 0.0
    for query, right in ((["run", "fox"], 0), (["town", "hill"], 3), (["river"], 3)):
        own = scores(words, query)
        expected += 1 / math.log2(2 + sum(each > own[right] for each in own)) / 3
    asked = ["retrieval", "evaluate", str(folder), "--model", "bm25", f"runs_folder={tmp_path}/runs"]
    assert main([*asked, "name=a"]) == 0
    said = capsys.readouterr()
    assert f"ndcg_at_10 {expected:.4f}" in said.out and "%|" not in said.err
    found = result_of(tmp_path / "runs/a")
    assert found["figures"]["beir"]["ndcg_at_10"] == pytest.approx(expected, abs=1e-5) and expected < 1
    assert found["settings"]["k1"] == 1.5 and found["settings"]["bm25s"]


def test_a_folder_may_have_the_longest_name(tmp_path: Path, write_beir: WriteBeir) -> None:
    """Its figures were computed, and their file had a name that no disk takes."""
    folder = write_beir({"d1": "a red fox", "d2": "a hen"}, {"q1": "foxes"}, name="n" * 253, test=[("q1", "d1", 1)])
    words = ["retrieval", "evaluate", str(folder), "--model", "bm25", f"runs_folder={tmp_path}/runs", "name=a"]
    assert main(words) == 0
    assert result_of(tmp_path / "runs/a")["figures"][folder.name]["ndcg_at_10"] == 1


def test_a_key_of_encoders_is_refused(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures would not be of what was asked."""
    assert main(["retrieval", "evaluate", str(toy), "--model", "bm25", "pooling=cls"]) == 78
    assert "pooling=cls: is for encoders, and bm25 is none. Leave it out." in capsys.readouterr().err
