"""Search and figures: they must be counted like the published ones they are compared with."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from modernbert_train.evaluate.retrieval.beir import read_beir
from modernbert_train.evaluate.retrieval.ranking import FIGURES, RECALL_CUT, figures, search
from tests.evaluate.retrieval.mteb_task import bag_of_words, mteb_figures
from tests.support.beir import WriteBeir


def random_ranks(seed: int) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, int]]]:
    """Return scores that are often equal, and judgements: graded, negative, none relevant, of documents not found."""
    draw = random.Random(seed)
    documents = [f"d{number}" for number in range(150)]
    run = {f"q{q}": {name: draw.randrange(6) / 4 for name in draw.sample(documents, 120)} for q in range(12)}
    qrels = {query: {name: draw.choice((0, 1, 1, 2, 3)) for name in draw.sample(documents, 9)} for query in run}
    qrels["q3"] = {"d1": 0, "d2": 0}
    qrels["q4"]["d7"] = -1
    return run, qrels


@pytest.mark.parametrize("seed", range(3))
def test_figures_are_those_of_trec_eval(seed: int) -> None:
    pytrec_eval = pytest.importorskip("pytrec_eval")
    run, qrels = random_ranks(seed)
    measures = {"ndcg_cut.10", "recall.100", "map_cut.10"}
    theirs = pytrec_eval.RelevanceEvaluator(qrels, measures).evaluate(run)
    ranked = {q: sorted(found, key=lambda name: (found[name], name), reverse=True) for q, found in run.items()}
    ours = figures(ranked, qrels)
    names = {"ndcg_at_10": "ndcg_cut_10", "recall_at_100": "recall_100", "map_at_10": "map_cut_10"}
    for name, their_name in names.items():
        assert ours[name] == pytest.approx(sum(each[their_name] for each in theirs.values()) / len(theirs), abs=1e-9)


def test_figures_worked_by_hand() -> None:
    ranked = {"a": ["x", "y", "z"], "b": ["x", "y"]}
    found = figures(ranked, {"a": {"y": 1, "w": 1}, "b": {"x": 2, "y": 1}})
    ndcg = (1 / 1.584962500721156) / (1 + 1 / 1.584962500721156)
    assert found == pytest.approx({FIGURES[0]: (ndcg + 1) / 2, FIGURES[1]: 0.75, FIGURES[2]: 0.75, FIGURES[3]: 0.625})


@pytest.mark.parametrize("part", [7, 25, 1000])
def test_search_is_the_same_however_the_corpus_is_cut_and_ties_go_by_id(part: int) -> None:
    """Many documents have the same score: the one with the last id wins, as in trec_eval."""
    torch.manual_seed(5)
    documents_CD, queries_QD = torch.randint(0, 2, (60, 3)).float(), torch.randint(0, 2, (260, 3)).float()
    ids = [str(number) for number in torch.randperm(60).tolist()]
    scores_QC = queries_QD @ documents_CD.T
    parts = (documents_CD[start : start + part] for start in range(0, 60, part))
    found = search(queries_QD, parts, ids, lambda q, d: q @ d.T, top=20)
    for row, names in zip(scores_QC.tolist(), found, strict=True):
        by_id = dict(zip(ids, row, strict=True))
        assert names == sorted(ids, key=lambda name: (by_id[name], name), reverse=True)[:20]


def test_search_of_few_documents_gives_all_of_them() -> None:
    parts = iter([torch.ones(1, 1), torch.ones(2, 1)])
    assert search(torch.ones(2, 1), parts, ["a", "b", "c"], lambda q, d: q @ d.T) == [["c", "b", "a"]] * 2


@pytest.mark.slow  # mteb imports many packages
@pytest.mark.timeout(280)
def test_figures_are_those_of_mteb_with_ties(write_beir: WriteBeir) -> None:
    """The same folder, the same vectors, many equal scores; mteb rounds to 5 digits, its parts do not."""
    draw = random.Random(2)
    words = ["red", "green", "blue", "old", "new", "cold", "warm"]
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 4))) for _ in range(140)]
    queries = {f"q{number}": " ".join(draw.choices(words, k=2)) for number in range(9)}
    test = [(q, f"d{n}", draw.randrange(3)) for q in queries for n in draw.sample(range(140), 12)]
    folder = write_beir({f"d{number}": text for number, text in enumerate(texts)}, queries, test=test)
    assert ours(folder) == pytest.approx(mteb_figures(folder, bag_of_words(words)), abs=1e-6)


def ours(folder: Path) -> dict[str, float]:
    beir = read_beir(folder, "test")
    encode: Any = bag_of_words(["red", "green", "blue", "old", "new", "cold", "warm"])
    queries_QD = torch.tensor(encode(list(beir.queries.values())))
    parts = (torch.tensor(encode(texts)) for texts in beir.texts(33))
    found = search(queries_QD, parts, beir.document_ids, lambda q, d: q @ d.T, RECALL_CUT)
    return figures(dict(zip(beir.queries, found, strict=True)), beir.qrels)
