"""Tasks of mteb by name: every kind runs on packed embeddings, with the same figures as sentence-transformers.

The tasks are mteb's classes, with generated data and without a network.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modernbert_train.config.tools.retrieval import EvaluateConfig
from tests.support.beir import TWINS, WORDS, recipe, result_of, words_about
from tests.support.front_door import Cli
from tests.support.needs import needs

needs("mteb", "the extra retrieval is not installed")
pytestmark = pytest.mark.slow  # mteb imports many packages
TEXTS = [words_about(seed, 5) for seed in range(40)]


class _Made:
    """Data in memory, replacing mteb's mock."""

    made: Any = None

    def load_data(self, *_: Any, **__: Any) -> None:
        self.dataset = self.made()
        self.data_loaded = True


def _splits(**columns: Any) -> Any:
    from datasets import Dataset, DatasetDict

    return DatasetDict({split: Dataset.from_dict(columns) for split in ("train", "test")})


def _retrieval() -> Any:
    from datasets import Dataset

    found = {
        "corpus": Dataset.from_list([{"id": f"d{n}", "title": "", "text": text} for n, (_, text) in enumerate(TEXTS)]),
        "queries": Dataset.from_list([{"id": f"q{n}", "text": query} for n, (query, _) in enumerate(TEXTS)]),
        "relevant_docs": {f"q{n}": {f"d{n}": 1, f"d{n - 1}": 1} for n in range(1, len(TEXTS))},
        "top_ranked": None,
    }
    return {"default": {"test": found}}


def _sts() -> Any:
    first, second = map(list, zip(*TEXTS, strict=True))
    return _splits(sentence1=first, sentence2=second, score=[float(n % 5) for n in range(len(TEXTS))])


def _classes() -> Any:
    return _splits(text=[text for pair in TEXTS for text in pair], label=[n % 2 for n in range(2 * len(TEXTS))])


def _clusters() -> Any:
    words = [*WORDS[:30], *(TWINS[word] for word in WORDS[:30])]
    return _splits(sentences=[words], labels=[[0] * 30 + [1] * 30])


def _lost() -> Any:
    raise ConnectionError("the hub is far away")


DATA = {
    "Retrieval": ("MockRetrievalTask", _retrieval),
    "STS": ("MockSTSTask", _sts),
    "Classification": ("MockClassificationTask", _classes),
    "Clustering": ("MockClusteringTask", _clusters),
    "Lost": ("MockSTSTask", _lost),
}


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Register them in mteb by name."""
    from mteb import mocks
    from mteb.get_tasks import _TASKS_REGISTRY

    found = {}
    for name, (base, made) in DATA.items():
        data = {"path": f"made/{name}", "revision": "1a2b"}
        about = getattr(mocks, base).metadata.model_copy(
            update={"name": f"Made{name}", "dataset": data, "eval_splits": ["test"]}
        )
        own = type(name, (_Made, getattr(mocks, base)), {"metadata": about, "made": staticmethod(made)})
        monkeypatch.setitem(_TASKS_REGISTRY, f"Made{name}", own)
        found[f"Made{name}"] = own
    return found


@pytest.mark.timeout(280)
def test_a_task_of_each_kind_has_the_figures_of_padded_batches(
    tasks: dict[str, type], encoder: Path, tmp_path: Path, cli: Cli
) -> None:
    """A comparison with a leaderboard needs mteb's figure, and another task's missing data must not prevent it."""
    import mteb
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize

    from modernbert_train.evaluate.retrieval.vectors import open_vectors

    keys = ['query_prompt="ask "', 'document_prompt="told "', "max_tokens=24", "query_max_tokens=12", "device=cpu"]
    words = ["retrieval", "evaluate", *(f"mteb:{name}" for name in tasks), "--model", encoder]
    said = cli(*words, *keys, f"runs_folder={tmp_path}/runs", "name=made", code=65)
    assert "mteb:MadeLost: its data, made/Lost, is not available (the hub is far away)" in said.err
    assert "mean main_score" in said.out
    found = result_of(tmp_path / "runs/made")
    assert found["figures"].keys() == tasks.keys() - {"MadeLost"}
    assert found["settings"]["mteb:MadeSTS"] == {"mteb": mteb.__version__, "dataset": "made/STS", "revision": "1a2b"}

    config = EvaluateConfig(
        query_prompt="ask ", document_prompt="told ", max_tokens=24, query_max_tokens=12, device="cpu"
    )
    padded, packed = SentenceTransformer(str(encoder), device="cpu"), open_vectors(str(encoder), config).inner
    padded.append(Normalize())
    padded.prompts = {"query": "ask ", "document": "told "}
    padded.max_seq_length, padded[0].query_length = 24, 12
    texts = [text for pair in TEXTS for text in pair] + ["aba " * 50, ""]
    for kind, theirs in ((None, padded.encode), ("query", padded.encode_query), ("document", padded.encode_document)):
        ours = packed.encode([{"text": texts[:7]}, {"text": texts[7:]}], prompt_type=kind)
        assert np.allclose(ours, theirs(texts), atol=2e-5)
    for name, figures in found["figures"].items():
        own = mteb.evaluate(padded, tasks[name](), cache=None, show_progress_bar=False)
        assert figures["main_score"] == pytest.approx(own.task_results[0].get_score(), abs=1e-3), name
        assert json.loads((tmp_path / f"runs/made/mteb-{name}.json").read_text())["task_name"] == name


def test_a_name_that_mteb_has_not_is_reported_with_the_nearest(encoder: Path, tmp_path: Path, cli: Cli) -> None:
    words = ["--model", encoder, f"runs_folder={tmp_path}/runs"]
    said = cli("retrieval", "evaluate", "mteb:STS1234", *words, code=78).err
    assert "has no such task" in said and "Did you mean" in said
    said = cli("retrieval", "evaluate", "mteb:CIFAR10", *words, code=78).err
    assert "mteb:CIFAR10: is of image, and the model reads text" in said


@pytest.mark.timeout(280)
def test_a_set_without_data_costs_training_none_of_the_others(
    tasks: dict[str, type], encoder: Path, toy: Path, tmp_path: Path, cli: Cli
) -> None:
    """An unknown task is refused before the training; missing data leaves the other sets' figures."""
    sets = {"toy": str(toy), "own": "mteb:NoSuchTask"}
    said = cli("retrieval", "train", recipe(tmp_path, toy, evaluate=sets), "--model", encoder, code=78).err
    assert "mteb:NoSuchTask: mteb " in said and not (tmp_path / "runs").exists()
    file = recipe(tmp_path, toy, epochs=1, evaluate=sets | {"own": "mteb:MadeLost"}, name="mine")
    said = cli("retrieval", "train", file, "--model", encoder, code=65).err
    assert "mteb:MadeLost: its data, made/Lost, is not available" in said
    assert {*result_of(tmp_path / "runs/mine")["figures"]} == {"toy"}
