"""A BEIR folder as a task of mteb, without a network: the reference for our figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Encode = Callable[[Sequence[str]], NDArray[np.float32]]


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def mteb_figures(folder: Path, model: Any, split: str = "test") -> dict[str, float]:
    """Return mteb's figures before rounding; `model` is a SentenceTransformer or an `Encode`."""
    mteb = pytest.importorskip("mteb")
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    corpus = [{"id": e["_id"], "title": e.get("title", ""), "text": e["text"]} for e in _lines(folder / "corpus.jsonl")]
    queries = [{"id": each["_id"], "text": each["text"]} for each in _lines(folder / "queries.jsonl")]
    qrels: dict[str, dict[str, int]] = {}
    for line in (folder / f"qrels/{split}.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query, document, score = line.split("\t")
        qrels.setdefault(query, {})[document] = int(score)
    kept: dict[str, Any] = {}

    class Local(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name="Local", dataset={"path": "local/local", "revision": "1"}, description="a folder", type="Retrieval",
            category="t2t", modalities=["text"], eval_splits=[split], eval_langs=["eng-Latn"], main_score="ndcg_at_10",
            reference=None, date=None, domains=None, task_subtypes=None, license=None, annotations_creators=None,
            dialect=None, sample_creation=None, bibtex_citation=None,
        )  # fmt: skip

        def load_data(self, *_: Any, **__: Any) -> None:
            data = {"corpus": Dataset.from_list(corpus), "queries": Dataset.from_list(queries)}
            self.dataset = {"default": {split: {**data, "relevant_docs": qrels, "top_ranked": None}}}  # type: ignore[dict-item]
            self.data_loaded = True

    import mteb._evaluators.retrieval_metrics as metrics

    real = metrics.calculate_retrieval_scores

    def keep(*args: Any, **more: Any) -> Any:
        found = real(*args, **more)
        kept["scores"] = found.all_scores
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mteb._evaluators.retrieval_evaluator.calculate_retrieval_scores", keep)
        if not hasattr(model, "encode_query"):
            model = _model(mteb, model)
        result = mteb.evaluate(model, [Local()], cache=None, show_progress_bar=False)
    (rounded,) = result.task_results[0].scores[split]
    each = kept["scores"].values()
    mean = {ours: sum(one[name] for one in each) / len(each) for ours, name in _NAMES.items()}
    assert all(rounded[name] == pytest.approx(value, abs=6e-6) for name, value in mean.items())
    return mean | {"mrr_at_10": rounded["mrr_at_10"]}  # not rounded by mteb


_NAMES = {"ndcg_at_10": "ndcg_cut_10", "recall_at_100": "recall_100", "map_at_10": "map_cut_10"}


def _model(mteb: Any, encode: Encode) -> Any:
    from mteb.models import ModelMeta
    from mteb.models.abs_encoder import AbsEncoder

    class Bag(AbsEncoder):
        mteb_model_meta = ModelMeta.create_empty({"name": "local/bag", "revision": "1"})

        def __init__(self) -> None:
            pass

        def encode(self, inputs: Any, **_: Any) -> Any:
            return np.concatenate([encode(batch["text"]) for batch in inputs])

        def similarity(self, first: Any, second: Any) -> Any:
            import torch

            return torch.as_tensor(first) @ torch.as_tensor(second).T

    return Bag()
