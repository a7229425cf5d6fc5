"""XLNet as transformers writes it. A matrix turned the wrong way would load, and compute something else."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from torch import Tensor

from modernbert_train.__main__ import main
from modernbert_train.config.objective import Order
from modernbert_train.config.schema import PermutationLmConfig, XLNetConfig
from modernbert_train.errors import DataError
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.models.masked_lm import ForMaskedLM
from modernbert_train.vocabulary import read_vocabulary
from modernbert_train.weights.fill import fill
from modernbert_train.weights.formats import xlnet
from modernbert_train.weights.formats.tensors import from_hf, to_hf
from modernbert_train.weights.hf_folder import export
from tests.weights.formats.test_bert import VOCABULARY, assert_equal

XLNET = XLNetConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, init_std=0.1, dropout=0.2
)
SHAPE = {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}


def built(config: XLNetConfig) -> ForMaskedLM:
    model = build_model(config, PermutationLmConfig())
    initialize(model, config, seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def described(config: XLNetConfig = XLNET, order: Order = "all") -> dict[str, Any]:
    return xlnet.describe(config, order, {"model", "decoder"}, 40, VOCABULARY)


@pytest.mark.parametrize("order", ["all", "causal", "given"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_a_config_is_read_as_it_was_written(order: Order, activation: Any) -> None:
    """And as transformers writes it again."""
    config = replace(XLNET, activation=activation)
    again = transformers.XLNetConfig(**described(config, order)).to_dict()
    for raw in (described(config, order), again | {"architectures": ["XLNetLMHeadModel"]}):
        assert xlnet.read(raw, "file")[:3] == (config, 40, order)


def test_what_transformers_saves_comes_back_from_us_bit_by_bit(tmp_path: Path) -> None:
    """Import and export of a model that began there, all its shapes too."""
    transformers.XLNetLMHeadModel(transformers.XLNetConfig(**SHAPE)).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    said = xlnet.read(json.loads((tmp_path / "config.json").read_text()), "config.json")
    assert isinstance(said.model, XLNetConfig) and said.order == "given", "as XLNet was published"
    weights = from_hf(xlnet, stored, said.model, "file")
    assert_equal(to_hf(xlnet, weights, said.model), stored)
    model = build_model(said.model, PermutationLmConfig())
    assert_equal(weights, {name: weights[name] for name in model.state_dict()})
    model.load_state_dict(weights, strict=True)


def test_there_and_back_keeps_every_bit() -> None:
    weights = built(XLNET).state_dict()
    there = to_hf(xlnet, weights, XLNET)
    assert there["transformer.mask_emb"].shape == (1, 1, 32)
    assert there["transformer.layer.0.rel_attn.q"].shape == (32, 4, 8) and "lm_loss.weight" not in there
    assert_equal(from_hf(xlnet, there, XLNET, "file"), weights)
    copied = there | {"lm_loss.weight": there["transformer.word_embedding.weight"]}
    assert_equal(from_hf(xlnet, copied, XLNET, "file"), weights)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("transformer.mask_emb", torch.ones(1, 32), r"mask_emb has the shape \(1, 32\) and not \(1, 1, 32\)"),
        ("transformer.layer.1.rel_attn.k", torch.ones(32, 32), r"rel_attn\.k has the shape \(32, 32\) and not"),
        ("lm_loss.weight", torch.ones(64, 32), r"lm_loss\.weight is not tied"),
        ("transformer.layer.1.rel_attn.r", None, "1 of 37 tensors are missing, the first is transformer"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name: str, tensor: Tensor | None, message: str) -> None:
    stored = {**to_hf(xlnet, built(XLNET).state_dict(), XLNET), name: tensor}
    with pytest.raises(DataError, match=f"^file: .*{message}"):
        from_hf(xlnet, {key: each for key, each in stored.items() if each is not None}, XLNET, "file")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["XLNetForSequenceClassification"]}, "only model_type=xlnet, architectures="),
        ({"untie_r": False}, "untie_r=False; this encoder only knows True"),
        ({"bi_data": True}, "bi_data=True"),
        ({"clamp_len": 400}, "clamp_len=400"),
        ({"same_length": True}, "same_length=True"),
        ({"attn_type": "both"}, "attn_type='both'; of these bi, uni are known"),
        ({"ff_activation": "relu"}, "ff_activation='relu'"),
        ({"n_layer": 10**9}, "n_layer=1000000000, not a whole number above 0 and up to 1,000"),
        ({"d_model": 33}, "d_model=33 is not a multiple of n_head=4"),
        ({"d_head": 16}, "d_head=16; with d_model=32 and n_head=4 this encoder only knows 8"),
        ({"dropout": 1}, "dropout=1"),
    ],
)
def test_another_architecture_is_refused(changes: dict[str, Any], message: str) -> None:
    """Its weights might even load, and mean something else."""
    with pytest.raises(DataError, match=f"^there: .*{message}"):
        xlnet.read(described() | changes, "there")


@pytest.mark.parametrize("odd", [None, [], {}, "x", True, -1, 0, 1e300, float("nan"), 10**30], ids=repr)
def test_no_value_of_any_key_ends_in_a_traceback(odd: Any) -> None:
    """Whatever a fetched file says, it is read or refused."""
    for key in described():
        with contextlib.suppress(DataError):
            assert isinstance(xlnet.read(described() | {key: odd}, "there").model, XLNetConfig)


def test_the_config_of_a_released_model_is_read() -> None:
    """With the memory and the summary of its time, which the weights do not depend on."""
    raw = {"architectures": ["XLNetLMHeadModel"], "attn_type": "bi", "bi_data": False, "clamp_len": -1, "d_head": 64}
    raw |= {"d_inner": 3072, "d_model": 768, "dropout": 0.1, "ff_activation": "gelu", "initializer_range": 0.02}
    raw |= {"layer_norm_eps": 1e-12, "mem_len": 384, "model_type": "xlnet", "n_head": 12, "n_layer": 12}
    raw |= {"reuse_len": 256, "same_length": False, "summary_type": "last", "untie_r": True, "vocab_size": 32000}
    assert xlnet.read(raw, "file")[:3] == (XLNetConfig(), 512, "given")


@pytest.mark.parametrize(("order", "objective"), [("all", "mlm"), ("causal", "causal"), ("given", "permutation")])
def test_import_config_goes_on_with_what_it_was_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: Order, objective: str
) -> None:
    """Of a config.json of ours; a published one is of permuted orders."""
    (tmp_path / "config.json").write_text(json.dumps(described(order=order)))
    assert main(["import-config", str(tmp_path / "config.json")]) == 0
    ours = yaml.safe_load(capsys.readouterr().out)
    settings = {key: value for key, value in ours["model"].items() if key != "name"}
    assert ours["model"]["name"] == "xlnet" and XLNetConfig(**settings) == XLNET
    assert ours["objective"] == {"name": objective}


def test_a_mask_is_filled_by_what_was_trained_to(tiny_data: Path, tmp_path: Path) -> None:
    """After permuted orders by a query token, after masks where [MASK] stands: the other was never trained."""
    config = replace(XLNET, vocab_size=512)
    model, vocabulary = built(config), read_vocabulary(tiny_data / "tokenizer")
    words = "the day was [MASK] and long"
    said = {}
    for order in ("all", "given"):
        folder = tmp_path / order
        export(
            model.state_dict(), config, order=order, max_tokens=64, tokenizer_folder=tiny_data / "tokenizer",
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
