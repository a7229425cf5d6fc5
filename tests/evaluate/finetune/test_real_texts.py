"""Public labelled texts, if available: read completely, counted as their authors count, learned a little."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.__main__ import main
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.evaluate.finetune.shards import prepare
from tests.support.labelled import export_masked_lm
from tests.support.make_shards import make_tokenizer

DATA = Path(os.environ.get("MODERNBERT_LABELLED", Path(__file__).parents[4] / "shared" / "data"))
pytestmark = pytest.mark.skipif(
    not (DATA / "glue").is_dir(), reason="no labelled texts here: MODERNBERT_LABELLED=FOLDER"
)

# task -> its keys, its texts by split, and its number of classes
TASKS: dict[str, tuple[dict[str, Any], dict[str, int], int]] = {
    "qnli": (
        {"train": "glue/QNLI/dev.tsv", "dev": "glue/QNLI/dev.tsv", "text_columns": ["question", "sentence"]},
        {"train": 5463, "dev": 5463}, 2,
    ),
    "stsb": (
        {"kind": "regression", "train": "glue/STS-B-open/train.tsv", "dev": "glue/STS-B-open/dev.tsv",
         "text_columns": ["sentence1", "sentence2"], "label_column": "score"},
        {"train": 2999, "dev": 1000}, 0,
    ),
    "wnli": (
        {"train": "glue/WNLI/train.tsv", "dev": "glue/WNLI/dev.tsv", "text_columns": ["sentence1", "sentence2"]},
        {"train": 635, "dev": 71}, 2,
    ),
    "banking77": (
        {"train": "other_tasks/banking77_train.csv", "dev": "other_tasks/banking77_test.csv",
         "label_column": "category"},
        {"train": 10003, "dev": 3080}, 77,
    ),
    "wnut17": (
        {"kind": "tokens", "train": "other_tasks/wnut17_train.conll", "dev": "other_tasks/wnut17_dev.conll"},
        {"train": 3394, "dev": 1009}, 13,
    ),
    "xquad": (
        {"kind": "question-answering", "train": "other_tasks/xquad_en.json", "dev": "other_tasks/xquad_en.json"},
        {"train": 1190, "dev": 1190}, 2,
    ),
}  # fmt: skip


def keys_of(name: str) -> dict[str, Any]:
    about = {"kind": "single-label"} | TASKS[name][0]
    return about | {"train": f"{DATA}/{about['train']}", "validation": {"dev": f"{DATA}/{about.pop('dev')}"}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = (DATA / "other_tasks/banking77_train.csv").read_text(encoding="utf-8").splitlines()
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer", texts, 1024)


@pytest.mark.weekly
@pytest.mark.runs
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ("qnli", "wnut17") else name for name in TASKS]
)
def test_every_text_is_read(name: str, tokenizer: Path, tmp_path: Path) -> None:
    prepared = prepare(TaskConfig(**keys_of(name)), tokenizer, 256, tmp_path / "run" / "task")
    _, texts, classes = TASKS[name]
    assert {split: counts.texts + counts.empty for split, counts in prepared.counts.items()} == texts
    assert len(prepared.labels) == classes
    assert not any(counts.unseen or counts.misplaced for counts in prepared.counts.values())
    assert prepared.longest <= 256


@pytest.mark.weekly
@pytest.mark.slow
def test_intents_are_learned_from_scratch(tokenizer: Path, tmp_path: Path) -> None:
    """77 classes, an untrained encoder of four layers: single words identify most of them."""
    config = ModernBertConfig(vocab_size=1024, hidden_size=64, num_layers=4, num_heads=2, intermediate_size=96)
    export_masked_lm(config, tokenizer, tmp_path / "tiny", max_tokens=256)
    (tmp_path / "banking77.yaml").write_text(json.dumps(keys_of("banking77") | {"lr": 1e-3, "epochs": 1}))
    words = ["compute.device=cpu", "data.num_workers=0", f"runs_folder={tmp_path}", "name=banking"]
    assert main(["finetune", f"{tmp_path}/banking77.yaml", "--model", f"{tmp_path}/tiny", *words]) == 0
    assert json.loads((tmp_path / "banking/result.json").read_text())["figures"]["dev"]["accuracy"] > 0.5
