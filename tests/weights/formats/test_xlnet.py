"""XLNet as transformers writes it. A transposed matrix would load, and compute something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from modernbert_train.__main__ import main
from modernbert_train.config.objective import Order
from modernbert_train.config.schema import PermutationLmConfig, XLNetConfig
from modernbert_train.vocabulary import read_vocabulary
from modernbert_train.weights.fill import fill
from modernbert_train.weights.hf_folder import export
from tests.support.encoders import XLNET
from tests.weights.formats.models import describe, weights_of


@pytest.mark.parametrize(("order", "objective"), [("all", "mlm"), ("causal", "causal"), ("given", "permutation")])
def test_import_config_continues_with_what_it_was_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: Order, objective: str
) -> None:
    """For our config.json; a published one means permuted orders."""
    (tmp_path / "config.json").write_text(json.dumps(describe(XLNET, order)))
    assert main(["init", "from", str(tmp_path / "config.json")]) == 0
    ours = yaml.safe_load(capsys.readouterr().out)
    settings = {key: value for key, value in ours["model"].items() if key != "name"}
    assert ours["model"]["name"] == "xlnet" and XLNetConfig(**settings) == XLNET
    assert ours["objective"] == {"name": objective}


@pytest.mark.runs
def test_a_mask_is_filled_by_what_was_trained_to(tiny_data: Path, tmp_path: Path) -> None:
    """After permuted orders by a query token, after masks at [MASK]: the other was never trained."""
    config = replace(XLNET, vocab_size=512)
    weights, vocabulary = weights_of(config, PermutationLmConfig()), read_vocabulary(tiny_data / "tokenizer")
    words = "the day was [MASK] and long"
    said = {}
    for order in ("all", "given"):
        folder = tmp_path / order
        export(
            weights, config, order=order, max_tokens=64, tokenizer_folder=tiny_data / "tokenizer",
            out=folder, card="",
        )  # fmt: skip
        said[order] = fill(folder, [words], top=3)
    twin = transformers.XLNetLMHeadModel.from_pretrained(tmp_path / "given")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "given")
    ids = tokenizer(words, return_tensors="pt")["input_ids"]
    place = (ids[0] == vocabulary.mask_id).float()[None, None]
    with torch.no_grad():
        plain = twin(ids).logits[0, int(place.argmax())]
        asked = twin(ids, perm_mask=place.expand(1, ids.shape[1], -1), target_mapping=place).logits[0, 0]
    for order, logits in (("all", plain), ("given", asked)):
        assert json.dumps(tokenizer.decode([int(logits.argmax())]), ensure_ascii=False) in said[order].split("\n")[1]
    assert said["all"] != said["given"]
