"""Files of pairs become shards: their contents, counted omissions, and refusals before training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.pairs import text_hash
from modernbert_train.__main__ import main
from modernbert_train.config.contrastive import SCORE_UNIT
from modernbert_train.data.dataset_card import CARD, file_sha256, read_card
from modernbert_train.vocabulary import read_vocabulary
from tests.support.pairs import ContrastiveRun, as_source, documents, prepare_pairs, write_rows
from tests.support.runs import metrics

RANGE = [-1, 1]


@pytest.mark.runs
@pytest.mark.parametrize("end", ["jsonl", "parquet", "hub"])
def test_a_row_becomes_one_document_with_hashes_of_its_texts(pairs: Path, tmp_path: Path, end: str) -> None:
    """With prefixes and cut queries; useless pairs are dropped, by reason."""
    rows: list[dict[str, Any]] = [
        {"query": "one two three four five six", "positive": "ett", "negative": ["tva", "tre", ""]},
        {"query": "one two three four five six", "positive": "ett", "negative": ["tva", "tre", ""]},
        {"query": "uno", "positive": " ", "negative": []},
        {"query": "same", "positive": "same", "negative": []},
        {"query": "due", "positive": "deux", "negative": ["deux", "due", "zwei"]},
        {"query": " ", "positive": "tom", "negative": []},
        {"query": "tio", "positive": "deux", "negative": ["due"]},
    ]
    if end == "jsonl":
        file = write_rows(tmp_path / "rows.jsonl", rows)
    else:
        import pyarrow
        import pyarrow.parquet

        file = tmp_path / "rows/rows.parquet"  # whose folder is a dataset to the library that reads the hub's
        file.parent.mkdir()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    out, tokenizer_folder, source = tmp_path / "out", pairs / "tokenizer", as_source(file)
    if end == "hub":
        source = {"kind": "hub", "path": str(file.parent)}
        assert prepare_pairs(out, source, tokenizer_folder, negatives=["other"]) == 65
    texts = {"negatives": ["negative"], "max_negatives": 2, "query_max_tokens": 6}
    texts |= {"query_prefix": "q: ", "document_prefix": "d: "}
    assert prepare_pairs(out, source, tokenizer_folder, "validation_share=0", **texts) == 0
    counts = json.loads((tmp_path / "out/pairs_report.json").read_text())["counts"]
    assert {key: n for key, n in counts.items() if n} == {
        "train": 3, "negatives": 4, "truncated": 3, "empty": 2, "same": 1, "duplicates": 1, "contradictions": 2,
        "repeated": 2,
    }  # fmt: skip
    folder = tmp_path / "out/train"
    assert read_card(folder).sides == 4 and not (tmp_path / "out/validation").exists()
    labels = np.load(folder / "labels.npy")
    hashes = labels[:, ::2]
    assert not labels[:, 1::2].any(), "nobody gave scores"
    first = [text_hash(text) for text in ("one two three four five six", "ett", "tva", "tre")]
    assert hashes.tolist() == [first, [text_hash("due"), text_hash("deux"), text_hash("zwei"), 0],
                               [text_hash("tio"), text_hash("deux"), text_hash("due"), 0]]  # fmt: skip
    from tokenizers import Tokenizer

    tokenizer, vocabulary = (
        Tokenizer.from_file(str(pairs / "tokenizer/tokenizer.json")),
        read_vocabulary(pairs / "tokenizer"),
    )
    query, *others = (tokenizer.encode(text, add_special_tokens=False).ids for text in
                      ("q: one two three four five six", "d: ett", "d: tva", "d: tre"))  # fmt: skip
    between = [vocabulary.sep_id, vocabulary.cls_id]
    assert documents(folder)[0] == [*query[:4], *(id for ids in others for id in (*between, *ids))]


@pytest.mark.runs
def test_scores_are_shares_of_their_range_and_follow_their_texts(pairs: Path, tmp_path: Path) -> None:
    """An empty negative, one that is there twice and one that is the positive are left out with their scores."""
    rows = [
        {"query": "uno", "positive": "ett", "s": 2, "n": ["tva", "", "ett", "tre", "tva"], "m": [-2, 9, 9, 4, 8]},
        {"query": "due", "positive": "deux", "s": 10, "n": [], "m": []},
    ]
    texts = {"negatives": ["n"], "max_negatives": 3, "scores": ["s", "m"], "score_range": [-10, 10]}
    source = as_source(write_rows(tmp_path / "rows.jsonl", rows))
    assert prepare_pairs(tmp_path / "out", source, pairs / "tokenizer", "validation_share=0", **texts) == 0
    labels = np.load(tmp_path / "out/train/labels.npy")
    assert labels[0, ::2].tolist() == [text_hash(text) for text in ("uno", "ett", "tva", "tre")] + [0]
    assert (labels[:, 1::2] / SCORE_UNIT).round(5).tolist() == [[0, 0.6, 0.4, 0.7, 0], [0, 1.0, 0, 0, 0]]
    assert read_card(tmp_path / "out/train").scored


@pytest.mark.parametrize(
    ("rows", "texts", "message"),
    [
        ([{"query": "a"}], {}, "rows.jsonl:1: no field 'positive' among 'query'"),
        ([{"query": "a", "positive": 3}], {}, "positive is 3, and not a text"),
        ([{"query": "a", "positive": ""}], {}, "none of its 1 documents is left (empty 1"),
        ([{"query": "a", "positive": "b", "negative": 3}], {"negatives": ["negative"]}, "neither a text nor a list"),
        ([{"query": "a", "positive": "b"}], {"positive": "query"}, "Name each column once"),
        ([{"query": "a", "positive": "b"}], {"max_tokens": 2}, "pairs.max_tokens=2"),
        ([{"query": "a", "positive": "b"}], {"most_tokens": 2}, "unknown key. Did you mean pairs.max_tokens?"),
        (
            [{"query": "a", "positive": "b", "s": 1.5}],
            {"scores": ["s"], "score_range": RANGE},
            "1.5 lies outside",
        ),
        ([{"query": "a", "positive": "b", "s": "x"}], {"scores": ["s"], "score_range": RANGE}, "['x'] is no score"),
        ([{"query": "a", "positive": "b", "s": None}], {"scores": ["s"], "score_range": RANGE}, "1 text, and 0 scores"),
        (
            [{"query": "a", "positive": "b", "s": 1}],
            {"scores": ["s"]},
            "pairs.score_range need each other",
        ),
        (
            [{"query": "a", "positive": "b", "s": 1}],
            {"scores": ["s", "s"], "score_range": RANGE},
            "name 1, for pairs.positive",
        ),
    ],
)
def test_bad_rows_are_named(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]], texts: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    source = as_source(write_rows(tmp_path / "rows.jsonl", rows))
    assert prepare_pairs(tmp_path / "out", source, pairs / "tokenizer", **texts) in (65, 78)
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.runs
def test_a_finished_dataset_is_kept_and_another_spec_is_not_taken_for_it(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `prepare` does with text: repeating the command is free, and nothing is replaced without --overwrite."""
    rows = [{"query": "uno", "positive": "ett"}]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    asked = (tmp_path / "out", as_source(file), pairs / "tokenizer", "validation_share=0")
    assert prepare_pairs(*asked) == 0
    assert "1 examples to train, 0 held out" in capsys.readouterr().out
    assert prepare_pairs(*asked) == 0 and "already complete" in capsys.readouterr().out
    assert prepare_pairs(*asked, max_tokens=8) == 78
    assert "pairs.max_tokens: 256 -> 8" in capsys.readouterr().err
    write_rows(file, [*rows, {"query": "due", "positive": "deux"}])
    assert prepare_pairs(*asked) == 78 and "of other files" in capsys.readouterr().err
    assert prepare_pairs(*asked, "--overwrite") == 0 and "2 examples to train" in capsys.readouterr().out
    assert prepare_pairs(tmp_path / "other", {"kind": "csv", "path": str(file)}, pairs / "tokenizer") == 78
    assert "does not end in .csv" in capsys.readouterr().err


@pytest.mark.runs
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.train={text}"], "its documents are no pairs of texts"),
        (["objective.score_weight=1"], "lacks the scores that objective.score_weight weighs"),
        (["objective.score_weight=1", "objective.pooling=late"], "compared with cosines of one vector a text"),
        (["objective.matryoshka=[32]"], "32 is not below 32"),
        (["phases.main.row_tokens=32", "phases.main.microbatch_tokens=64"], "has examples of up to 36 tokens"),
        (["phases.main={row_tokens: 48, batch_rows: 1, microbatch_tokens: 48}"], "holds about one example"),
        (["phases.main.objective={name: mlm}"], "Set objective.mlm_head=true"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_training(
    contrastive_run: ContrastiveRun, text: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], said: str
) -> None:
    assert (
        main(["check", *contrastive_run(*(each.format(text=text) if "{text}" in each else each for each in overrides))])
        != 0
    )
    assert said in capsys.readouterr().err


@pytest.mark.runs
def test_shards_that_an_earlier_version_wrote_train_as_before(
    pairs: Path, contrastive_run: ContrastiveRun, tmp_path: Path
) -> None:
    """Their labels are hashes alone, and their card says nothing of scores and of single texts."""
    before = shutil.copytree(pairs / "shards", tmp_path / "before")
    for split in ("train", "validation"):
        np.save(before / split / "labels.npy", np.ascontiguousarray(np.load(before / split / "labels.npy")[:, ::2]))
        card = json.loads((before / split / CARD).read_text())
        del card["scored"], card["text_lengths"]
        card["labels_sha256"] = file_sha256(before / split / "labels.npy")
        (before / split / CARD).write_text(json.dumps(card))
    short = ("phases.main.tokens=6000", f"data.tokenizer={before}/tokenizer")
    assert main(["train", *contrastive_run("name=now", *short)]) == 0
    old = (f"data.train={before}/train", f"data.validation={before}/validation")
    assert main(["train", *contrastive_run("name=before", *short, *old)]) == 0
    one, other = (metrics(tmp_path / "runs" / name, "step") for name in ("now", "before"))
    assert [step["loss"] for step in one] == [step["loss"] for step in other] and len(one) > 2
