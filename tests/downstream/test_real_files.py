"""The worked examples, WNUT-17 and Banking77, where their files are at hand: read whole, counted, learned a little."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.__main__ import main
from modernbert_train.config.schema import MaskedLmConfig, ModernBertConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.weights.hf_folder import export
from tests.data.make_shards import make_tokenizer

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("MODERNBERT_LABELLED", ROOT.parent / "shared" / "data")) / "other_tasks"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not DATA.is_dir(), reason="no labelled texts here: MODERNBERT_LABELLED=FOLDER"),
]
KEYS = ["device=cpu", "name=run"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained, of two layers; its tokenizer knows the words of both."""
    home = tmp_path_factory.mktemp("encoder")
    texts = [line.partition("\t")[0] for line in (DATA / "wnut17_train.conll").read_text(encoding="utf-8").splitlines()]
    lines = [" ".join(texts[at : at + 20]) for at in range(0, len(texts), 20)]
    lines += (DATA / "banking77_train.csv").read_text(encoding="utf-8").splitlines()
    tokenizer = make_tokenizer(home / "tokenizer", lines, 4096)
    config = ModernBertConfig(vocab_size=4096, hidden_size=64, num_layers=2, num_heads=1, intermediate_size=96)
    model = build_model(config, MaskedLmConfig())
    initialize(model, config, 3)
    state = {key: value for key, value in model.state_dict().items() if key != "decoder.weight"}
    export(state, config, max_tokens=512, tokenizer_folder=tokenizer, out=home / "small", card="")
    return home / "small"


def result_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "runs/run/result.json").read_text(encoding="utf-8"))
    print(json.dumps({key: result[key] for key in ("figures", "counts", "training")}))
    return result


def test_rare_entities_are_read_and_some_are_found(encoder: Path, tmp_path: Path) -> None:
    """Those seen in training are rare in the other file, so that an untrained encoder finds few."""
    words = [
        f"train={DATA}/wnut17_train.conll",
        f"validation.dev={DATA}/wnut17_dev.conll",
        f"validation.seen={DATA}/wnut17_train.conll",
        f"runs_folder={tmp_path}/runs",
    ]
    quick = ["max_steps=1200", "lr=1e-3", "others_lr=2e-3", "hidden_size=64", "dropout=0.1", "max_width=6"]
    recipe = f"{ROOT}/yamls/gliner/wnut17.yaml"
    assert main(["gliner", "train", recipe, "--model", str(encoder), *words, *quick, *KEYS]) == 0
    result = result_of(tmp_path)
    assert result["labels"] == ["corporation", "creative work", "group", "location", "person", "product"]
    assert result["counts"]["train"]["texts"] + result["counts"]["train"]["empty"] == 3394
    assert result["counts"]["dev"]["texts"] + result["counts"]["dev"]["empty"] == 1009
    assert result["counts"]["train"]["entities"] == 1975
    assert result["figures"]["seen"]["f1"] > 0.1
    assert result["figures"]["dev"]["f1"] > 0.02


def test_eight_questions_of_each_of_77_intents(encoder: Path, tmp_path: Path) -> None:
    words = [f"train={DATA}/banking77_train.csv", f"validation.test={DATA}/banking77_test.csv"]
    quick = ["num_iterations=5", "lr=5e-4", f"runs_folder={tmp_path}/runs"]
    recipe = f"{ROOT}/yamls/setfit/banking77.yaml"
    assert main(["setfit", "train", recipe, "--model", str(encoder), *words, *quick, *KEYS]) == 0
    result = result_of(tmp_path)
    assert (result["counts"]["train"]["texts"], result["counts"]["train"]["left"]) == (616, 10_003 - 616)
    assert (result["counts"]["test"]["texts"], result["counts"]["test"]["unseen"]) == (3080, 0)
    assert len(result["labels"]) == 77
    figures = result["figures"]["test"]
    assert figures["accuracy"] > figures["baseline/accuracy"] > 5 / 77
