"""Reranking: a fine-tuned model of pairs ranks candidates like sentence-transformers' CrossEncoder."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from modernbert_train.errors import DataError
from modernbert_train.evaluate.retrieval.beir import read_beir
from modernbert_train.evaluate.retrieval.rerank import by_score, read_candidates
from tests.support.beir import BERT, WriteBeir, make_encoder, result_of, trec_eval, write_lines
from tests.support.finetuning import finetune
from tests.support.front_door import Cli
from tests.support.needs import needs

needs("sentence_transformers", "the extra retrieval is not installed")


def texts_of(folder: Path) -> dict[str, str]:
    beir = read_beir(folder, "test")
    return dict(zip(beir.document_ids, next(beir.texts(1000)), strict=True))


def reranker(toy: Path, encoder: Path, out: Path, **keys: object) -> Path:
    """Fine-tune a model on queries with the text that answers them, and with another."""
    beir, texts = read_beir(toy, "train"), texts_of(toy)
    rows = []
    for number, (query, judged) in enumerate(beir.qrels.items()):
        (right,) = judged
        wrong = beir.document_ids[(7 * number) % len(beir.document_ids)]
        rows += [(beir.queries[query], texts[right], 1), (beir.queries[query], texts[wrong], 0)]
    file = write_lines(out / "pairs.jsonl", ({"query": q, "text": t, "score": s} for q, t, s in rows))
    task = {
        "kind": "regression", "train": str(file), "validation": {"dev": str(file)}, "text_columns": ["query", "text"],
        "label_column": "score", "lr": 3e-3, "epochs": 2, "batch_texts": 20, "max_tokens": 64,
    }  # fmt: skip
    (out / "pairs.yaml").write_text(json.dumps(task | keys), encoding="utf-8")
    finetune(out / "pairs.yaml", encoder, out / "tuned")
    return out / "tuned/tone"


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("two_classes", [False, True])
def test_candidates_are_ranked_as_by_a_cross_encoder(
    two_classes: bool, encoder: Path, tokenizer: Path, toy: Path, write_beir: WriteBeir, tmp_path: Path, cli: Cli
) -> None:
    from sentence_transformers import CrossEncoder
    from torch.nn import Identity

    keys = {"kind": "single-label", "labels": ["0", "1"]} if two_classes else {}
    bert = make_encoder(tmp_path / "bert", tokenizer, BERT, init_std=0.1)
    model, beir, texts = reranker(toy, bert, tmp_path, **keys), read_beir(toy, "test"), texts_of(toy)
    theirs = CrossEncoder(str(model / "hf"), device="cpu")

    def scored(query: str, names: Sequence[str]) -> dict[str, float]:
        scores = theirs.predict([(beir.queries[query], texts[name]) for name in names], activation_fn=Identity())
        return {name: float(s[1] - s[0] if two_classes else s) for name, s in zip(names, scores, strict=True)}

    lists = {query: beir.document_ids[number : number + 40] for number, query in enumerate(beir.qrels)}
    ranks = {query: {name: -float(place) for place, name in enumerate(names)} for query, names in lists.items()}
    run = "".join(f"{query} Q0 {name} 1 {score} bm25\n" for query in ranks for name, score in ranks[query].items())
    (tmp_path / "bm25.trec").write_text(run + "999999 Q0 d1 1 0.5 bm25\n", encoding="utf-8")
    where = [f"runs_folder={tmp_path}/runs", "device=cpu"]
    asked = ["retrieval", "evaluate", toy, "--model"]
    words = [*asked, model, *where, f"rerank={tmp_path}/bm25.trec"]
    cli(*words, "name=file", "rerank_top=30")
    found = result_of(tmp_path / "runs/file")["figures"]["toy"]
    expected = trec_eval(beir.qrels, {query: scored(query, names[:30]) for query, names in lists.items()})
    assert found["ndcg_at_10"] == pytest.approx(expected["ndcg_at_10"], abs=1e-5)
    assert found["first_stage_ndcg_at_10"] == pytest.approx(trec_eval(beir.qrels, ranks)["ndcg_at_10"], abs=1e-5)

    # BM25 as the first stage, of queries with words of their texts
    queries = {query: " ".join(texts[name].split()[:2]) for query, (name,) in beir.qrels.items()}
    plain = write_beir(texts, queries, "plain", test=[(query, name, 1) for query, (name,) in beir.qrels.items()])
    asking = ["retrieval", "evaluate", plain, f"runs_folder={tmp_path}/runs", "--model"]
    cli(*asking, model, "name=words", "device=cpu", "rerank=bm25")
    cli(*asking, "bm25", "name=bm25")
    by_words, baseline = (result_of(tmp_path / "runs" / name)["figures"]["plain"] for name in ("words", "bm25"))
    assert by_words["first_stage_ndcg_at_10"] == pytest.approx(baseline["ndcg_at_10"])

    # the exported folder is the same model; a first stage with a large top finds all documents
    said = cli(*asked, model / "hf", *where, "name=search", f"rerank={encoder}", "rerank_top=120").out
    assert "runs/search/result.json" in said
    whole = trec_eval(beir.qrels, {query: scored(query, [*texts]) for query in beir.qrels})
    searched = result_of(tmp_path / "runs/search")["figures"]["toy"]
    assert searched["ndcg_at_10"] == pytest.approx(whole["ndcg_at_10"], abs=1e-5)
    if not two_classes:
        return

    # a model without a head for pairs is refused
    said = cli(*asked, encoder, *where, f"rerank={tmp_path}/bm25.trec", code=78).err
    assert "scores no pairs of texts. Name a model of `finetune`" in said
    assert "no such file" in cli(*asked, model, "rerank=bm26.trec", code=78).err
    assert "no such folder" in cli(*asked, model, "rerank=bm26", code=65).err
    said = cli(*words, "pooling=cls", code=78).err
    assert "pooling=cls: a reranker reads query and document together" in said


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_a_set_that_was_reranked_before_a_stop_is_not_reranked_again(
    encoder: Path, toy: Path, write_beir: WriteBeir, tmp_path: Path, cli: Cli
) -> None:
    """Of several sets each takes hours; other candidates, or more of them, are measured again."""
    model = reranker(toy, encoder, tmp_path, epochs=1)
    other = write_beir({"d1": "a red fox", "d2": "a blue hen"}, {"q1": "fox"}, "other", test=[("q1", "d1", 1)])
    words = ["--model", str(model), f"runs_folder={tmp_path}/runs", "name=both", "device=cpu", "rerank=bm25"]
    cli("retrieval", "evaluate", other, *words)
    first = result_of(tmp_path / "runs/both")["figures"]["other"]
    (tmp_path / "runs/both/result.json").unlink()  # a kill during the second set leaves this
    said = cli("retrieval", "evaluate", other, toy, *words).out
    assert "other: measured before, see" in said and "other: pairs" not in said and "toy: measured" not in said
    figures = result_of(tmp_path / "runs/both")["figures"]
    assert figures["other"] == first and figures.keys() == {"other", "toy"}
    for key in ("rerank_top=1", f"rerank={encoder}"):
        assert "measured before" not in cli("retrieval", "evaluate", other, *words, key).out
    hf, words[1] = model / "hf/tokenizer.json", f"{model}/hf"
    cli("retrieval", "evaluate", other, *words)
    content = json.loads(hf.read_text())
    hf.write_text(json.dumps(content | {"model": content["model"] | {"merges": content["model"]["merges"][:10]}}))
    # the same weights with another tokenizer
    assert "measured before" not in cli("retrieval", "evaluate", other, *words).out


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_only_a_model_that_was_trained_on_pairs_reranks(encoder: Path, toy: Path, tmp_path: Path, cli: Cli) -> None:
    """sentence-transformers would give an embedding model a classifier with random weights, and rank with it."""
    from sentence_transformers import CrossEncoder, SentenceTransformer

    CrossEncoder(str(encoder), num_labels=1, device="cpu").save_pretrained(str(tmp_path / "cross"))
    SentenceTransformer(str(encoder), device="cpu").save_pretrained(str(tmp_path / "st"))
    one = reranker(toy, encoder, tmp_path, epochs=1, text_columns=["text"])
    where = [f"runs_folder={tmp_path}/runs", "device=cpu", "name=a"]
    words = ["retrieval", "evaluate", toy, *where, "rerank=bm25", "rerank_top=2", "--model"]
    for model in (tmp_path / "st", one, one / "hf"):
        message = f"--model={model}(/checkpoints/.*)?: scores no pairs of texts. Name a model of `finetune`"
        assert re.search(message, cli(*words, model, code=78).err)
    cli(*words, tmp_path / "cross")
    (query, (right,)), *others = read_beir(toy, "test").qrels.items()
    (tmp_path / "one.trec").write_text(f"{query} Q0 {right} 1 1 bm25\n", encoding="utf-8")
    for _ in range(2):  # the second time the kept figures are read
        said = cli(*words, tmp_path / "cross", f"rerank={tmp_path}/one.trec").out.splitlines()[-1]
        assert f"{len(others)} judged queries of toy lack candidates and count as 0" in said
    assert result_of(tmp_path / "runs/a")["figures"]["toy"]["ndcg_at_10"] == pytest.approx(1 / (1 + len(others)))
    said = cli("retrieval", "evaluate", toy, *where, "--model", tmp_path / "cross", code=78).err
    assert "scores pairs of texts, and gives no vectors" in said


BROKEN = {
    "columns": ("q1 Q0 d1 1 0.5\n", "line 1 has 5 columns"),
    "score": ("q1 Q0 d1 1 high bm25\n", "line 1: the score 'high' is no number"),
    "NaN": ("q1 Q0 d1 1 nan bm25\n", "line 1: the score 'nan' is no number"),
    "document": ("q1 Q0 d9 1 1 bm25\n", "line 1: d9 is no document of"),
    "twice": ("q1 Q0 d1 1 1 bm25\nq1 Q0 d1 2 0 bm25\n", "line 2: d1 is there twice for q1"),
    "others": ("q7 Q0 d1 1 1 bm25\n", "lacks every query that .* judges"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_is_refused_with_its_line(name: str, write_beir: WriteBeir, tmp_path: Path) -> None:
    beir = read_beir(write_beir({"d1": "one", "d2": "two"}, {"q1": "which"}, test=[("q1", "d1", 1)]), "test")
    text, message = BROKEN[name]
    (tmp_path / "run.trec").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_candidates(tmp_path / "run.trec", {*beir.document_ids}, beir.qrels, "beir")


def test_a_run_is_read_by_score_in_both_formats(write_beir: WriteBeir, tmp_path: Path) -> None:
    """trec_eval sorts by scores and not by the column of ranks, ties by id in descending order."""
    corpus = {f"d{number}": "text" for number in range(4)}
    beir = read_beir(write_beir(corpus, {"q1": "which"}, test=[("q1", "d1", 1)]), "test")
    scores = {"d0": 1.0, "d1": 3.5, "d2": 1.0, "d3": -2.0}
    (tmp_path / "run.json").write_text(json.dumps({"q1": scores, "q2": {"x": 1}}), encoding="utf-8")
    lines = "".join(f"q1 Q0 {name} 1 {score} bm25\n\n" for name, score in scores.items())
    (tmp_path / "run.trec").write_text(lines, encoding="utf-8")
    for name in ("run.json", "run.trec"):
        found = read_candidates(tmp_path / name, {*beir.document_ids}, beir.qrels, "beir")
        assert found == {"q1": scores} and by_score(found["q1"]) == ["d1", "d2", "d0", "d3"]
    (tmp_path / "bad.json").write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match="bad.json: is no run"):
        read_candidates(tmp_path / "bad.json", {*beir.document_ids}, beir.qrels, "beir")
