"""ALBERT as transformers writes it. A bit that is lost here makes another model, without a word."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.batches import lay_out
from modernbert_train.__main__ import main
from modernbert_train.config.albert import AlbertConfig
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import ComputeConfig
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.models.albert import AlbertForMaskedLM
from modernbert_train.models.init import initialize
from modernbert_train.models.pairs import PairHead
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import albert, export_format
from modernbert_train.weights.formats.albert import PAIR_HEAD
from modernbert_train.weights.formats.tensors import from_hf, to_hf
from modernbert_train.weights.hf_folder import load_weights

ALBERT = AlbertConfig(
    vocab_size=64, embedding_size=16, hidden_size=32, num_layers=4, num_heads=2, intermediate_size=48,
    max_positions=40, init_std=0.1,
)  # fmt: skip
SAID: dict[str, AlbertConfig] = {
    "all": ALBERT,
    "version 1": replace(ALBERT, activation="gelu", dropout=0.1),
    "groups": replace(ALBERT, groups=2),
    "turns": replace(ALBERT, group_layers=2),
    "groups and turns": replace(ALBERT, groups=2, group_layers=2),
    "none": replace(ALBERT, sharing="none"),
}
UNSAID: dict[str, AlbertConfig] = {
    "attention": replace(ALBERT, sharing="attention"),
    "attention in groups": replace(ALBERT, sharing="attention", groups=2),
    "ffn": replace(ALBERT, sharing="ffn"),
    "ffn in turns": replace(ALBERT, sharing="ffn", group_layers=2),
}
VOCABULARY = Vocabulary(64, cls_id=2, sep_id=3, pad_id=1, mask_id=4, ordinary=np.arange(5, 64), sha256="")
LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.{}."


def weights_of(config: AlbertConfig, pair_head: bool = False) -> dict[str, Tensor]:
    """Of a model, and of a pair head where asked for; no two values alike, biases too."""
    model = AlbertForMaskedLM(config)
    initialize(model, config, seed=1)
    modules: dict[str, torch.nn.Module] = {"": model}
    if pair_head:
        modules[f"{PAIR_HEAD}."] = PairHead(config.hidden_size)
    generator = torch.Generator().manual_seed(2)
    for module in modules.values():
        for parameter in module.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return {
        f"{start}{name}": tensor for start, module in modules.items() for name, tensor in module.state_dict().items()
    }


def describe(config: AlbertConfig, modules: tuple[str, ...] = ("model", "head", "decoder")) -> dict[str, Any]:
    return albert.describe(config, "all", modules, 40, VOCABULARY)


def read(raw: dict[str, Any], where: str = "there") -> AlbertConfig:
    model = albert.read(raw, where).model
    assert isinstance(model, AlbertConfig)
    return model


def write(folder: Path, config: AlbertConfig, weights: dict[str, Tensor]) -> Path:
    """As an export: the tensors and config.json."""
    folder.mkdir()
    modules = tuple({name.partition(".")[0] for name in weights})
    save_file(to_hf(albert, weights, config), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(describe(config, modules)))
    return folder


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("config", [*SAID.values(), *UNSAID.values()], ids=[*SAID, *UNSAID])
def test_transformers_loads_the_export_and_computes_the_same(config: AlbertConfig, tmp_path: Path) -> None:
    """AutoModelForMaskedLM and AutoModel, without remote code, compute what we trained, whatever layers share."""
    weights = weights_of(config)
    folder = write(tmp_path / "hf", config, weights)
    twin, report = transformers.AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    encoder = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    model = AlbertForMaskedLM(config, ComputeConfig(attention="sdpa"))
    model.load_state_dict(weights, strict=True)
    ids = torch.randint(5, 64, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden_TD = model.eval().encode(lay_out(ids, [0, 40]))
        torch.testing.assert_close(encoder(ids[None]).last_hidden_state[0], hidden_TD, atol=1e-5, rtol=0)
        logits_TV = model.logits(hidden_TD, torch.arange(40))
        torch.testing.assert_close(twin.eval()(ids[None]).logits[0], logits_TV, atol=1e-5, rtol=0)
    # there and back, through our file and through transformers', which loads it and saves its own
    twin.save_pretrained(tmp_path / "theirs")
    for each in (folder, tmp_path / "theirs"):
        said = read(json.loads((each / "config.json").read_text()))
        assert said == (
            config if config in SAID.values() else replace(config, sharing="none", groups=1, group_layers=1)
        )
        assert said.stored == config.stored
        assert_equal(from_hf(albert, load_file(each / "model.safetensors"), config, "file"), weights)


@pytest.mark.parametrize("kind", [transformers.AlbertForMaskedLM, transformers.AlbertForPreTraining])
@pytest.mark.parametrize("shape", [{}, {"num_hidden_groups": 2}, {"num_hidden_groups": 4}, {"inner_group_num": 3}])
def test_what_transformers_saves_comes_back_from_us_bit_by_bit(
    kind: Any, shape: dict[str, int], tmp_path: Path
) -> None:
    """Import and export of a model that began there, with its pair head if it has one."""
    settings = {"vocab_size": 64, "embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 4, **shape}
    settings |= {"num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 42}
    kind(transformers.AlbertConfig(**settings)).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    config = read(raw)
    assert config.num_layers == 4 * shape.get("inner_group_num", 1)
    weights = from_hf(albert, stored, config, "file")
    assert_equal(to_hf(albert, weights, config), stored)
    modules = tuple({name.partition(".")[0] for name in weights})
    assert (PAIR_HEAD in modules) is (kind is transformers.AlbertForPreTraining)
    written = describe(config, modules)
    assert {key: written[key] for key in settings} == {key: raw[key] for key in settings}
    assert written["architectures"] == [kind.__name__]
    # half a head is none: a masked-LM model may be stored with the pooler that it does not use
    half = {name: tensor for name, tensor in stored.items() if "sop_classifier" not in name}
    alone = {name: tensor for name, tensor in weights.items() if not name.startswith(PAIR_HEAD)}
    assert_equal(from_hf(albert, half, config, "file"), alone)


def test_pooler_and_classifier_are_the_pair_head(tmp_path: Path) -> None:
    weights = weights_of(ALBERT, pair_head=True)
    folder = write(tmp_path / "hf", ALBERT, weights)
    twin, report = transformers.AutoModelForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert isinstance(twin, transformers.AlbertForPreTraining)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(twin.albert.pooler.weight, weights["pair_head.dense.weight"])
    assert torch.equal(twin.sop_classifier.classifier.bias, weights["pair_head.classifier.bias"])


def test_what_is_shared_is_stored_once_a_group() -> None:
    """Three of four layers' copies of the feed-forward are the first's; attentions are four, not one."""
    stored = to_hf(albert, weights_of(UNSAID["ffn"]), UNSAID["ffn"])
    groups = [LAYER.format(group, 0) for group in range(4)]
    for name in ("ffn.weight", "ffn.bias", "ffn_output.weight", "full_layer_layer_norm.bias"):
        assert all(torch.equal(stored[group + name], stored[groups[0] + name]) for group in groups), name
    for name in ("attention.query.weight", "attention.LayerNorm.weight"):
        assert not any(torch.equal(stored[group + name], stored[groups[0] + name]) for group in groups[1:]), name
    said = describe(UNSAID["ffn"])
    assert (said["num_hidden_layers"], said["num_hidden_groups"], said["inner_group_num"]) == (4, 4, 1)
    whole = describe(SAID["groups and turns"])
    assert (whole["num_hidden_layers"], whole["num_hidden_groups"], whole["inner_group_num"]) == (2, 2, 2)


def test_copies_that_differ_are_not_one_tensor() -> None:
    """By one number in one of them: the run would begin with another model than it names."""
    config = UNSAID["ffn"]
    stored = to_hf(albert, weights_of(config), config)
    name = LAYER.format(2, 0) + "ffn_output.weight"
    stored[name] = stored[name].clone()
    stored[name][3, 5] += 1e-6
    with pytest.raises(DataError, match=rf"^file: {name} differs from .*groups\.0\..*layers of this model share them"):
        from_hf(albert, stored, config, "file")
    assert len(from_hf(albert, stored, SAID["none"], "file")) > 60
    with pytest.raises(DataError, match=r"\d+ tensors are unknown"):  # another number of groups
        from_hf(albert, stored, ALBERT, "file")


def test_import_config_reads_an_albert_and_sees_what_it_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the weights beside it; without them config.json alone speaks."""
    for way, config in {**SAID, "attention": UNSAID["attention"], "ffn": UNSAID["ffn"]}.items():
        folder = write(tmp_path / way, config, weights_of(config))
        assert main(["import-config", str(folder / "config.json"), "--out", str(tmp_path / f"{way}.yaml")]) == 0
        ours = yaml.safe_load((tmp_path / f"{way}.yaml").read_text())
        assert ours["weights"] == {"init_from": str(folder)} and ours["objective"] == {"name": "mlm"}
        assert load_run([tmp_path / f"{way}.yaml"], ["name=x", "data.tokenizer=x", "optim.lr=1"]).model == config
        (folder / "model.safetensors").unlink()
        capsys.readouterr()
        assert main(["import-config", str(folder / "config.json")]) == 0
        out = capsys.readouterr()
        model = yaml.safe_load(out.out)["model"]
        assert model["sharing"] == ("none" if way in UNSAID else config.sharing)
        assert "weights.init_from: no model.safetensors" in out.err


def test_old_files_are_read() -> None:
    """Buffers as tensors, and the decoder a second time."""
    weights = weights_of(ALBERT, pair_head=True)
    stored = to_hf(albert, weights, ALBERT)
    old = dict(stored)
    old["albert.embeddings.position_ids"] = torch.arange(40)
    old["predictions.decoder.weight"] = stored["albert.embeddings.word_embeddings.weight"]
    old["predictions.decoder.bias"] = old.pop("predictions.bias")
    assert_equal(from_hf(albert, old, ALBERT, "file"), weights)


def test_what_a_file_leaves_out_is_xxlarge() -> None:
    """transformers' defaults, which are not ours."""
    xxlarge = AlbertConfig(hidden_size=4096, num_heads=64, intermediate_size=16384)
    assert read({"model_type": "albert", "architectures": ["AlbertForMaskedLM"]}) == xxlarge
    theirs = transformers.AlbertConfig()
    assert read({**theirs.to_dict(), "model_type": "albert", "architectures": ["AlbertForMaskedLM"]}) == xxlarge


def test_configs_of_the_released_models_are_read() -> None:
    """albert-base-v1 and -v2 as published, with keys of their time."""
    common = {
        "model_type": "albert", "architectures": ["AlbertForMaskedLM"], "embedding_size": 128, "hidden_size": 768,
        "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "inner_group_num": 1,
        "num_hidden_groups": 1, "net_structure_type": 0, "gap_size": 0, "num_memory_blocks": 0, "down_scale_factor": 1,
        "vocab_size": 30000, "type_vocab_size": 2, "max_position_embeddings": 512, "layer_norm_eps": 1e-12,
    }  # fmt: skip
    v1 = {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    v2 = {"hidden_act": "gelu_new", "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    assert read(common | v1) == AlbertConfig(activation="gelu", dropout=0.1)
    assert read(common | v2) == AlbertConfig()


def test_in_causal_order_there_is_nothing_to_export_to() -> None:
    with pytest.raises(ConfigError, match=r"model\.name=albert: transformers has no such model .* in order causal"):
        export_format(ALBERT, "causal")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"predictions.bias": None}, r"1 of \d+ tensors are missing, the first is predictions\.bias"),
        ({LAYER.format(0, 0) + "attention.key.bias": None}, r"the first is albert\.encoder\.albert_layer_groups\.0"),
        ({LAYER.format(1, 0) + "ffn.bias": torch.ones(48)}, r"unknown, the first is albert\.encoder\.albert_layer_gr"),
        ({"predictions.dense.weight": torch.ones(32, 32)}, r"has the shape \(32, 32\) and not \(16, 32\)"),
        ({"predictions.decoder.weight": torch.ones(64, 16)}, r"decoder\.weight is not tied to albert\.embeddings"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changes: dict[str, Tensor | None], message: str) -> None:
    stored = to_hf(albert, weights_of(ALBERT), ALBERT) | changes
    with pytest.raises(DataError, match=f"^weights.bin: .*{message}.*Name weights that fit"):
        from_hf(albert, {name: tensor for name, tensor in stored.items() if tensor is not None}, ALBERT, "weights.bin")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["AlbertForSequenceClassification"]}, "AlbertForSequenceClassification"),
        ({"architectures": None}, "architectures=None"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads="),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"hidden_act": ["gelu"]}, "hidden_act="),
        ({"hidden_size": "32"}, "hidden_size='32', not a whole number above 0"),
        ({"num_hidden_groups": 3}, "num_hidden_layers=4 is not a multiple of num_hidden_groups=3"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, not a whole number"),
        ({"inner_group_num": 999}, "num_hidden_layers=4 times inner_group_num=999 is above 1,000"),
        ({"embedding_size": 0}, "embedding_size=0"),
        ({"num_attention_heads": 3}, "hidden_size=32 is not a multiple of num_attention_heads=3"),
    ],
)
def test_another_architecture_is_refused(changes: dict[str, Any], message: str) -> None:
    """Its weights might even load, and mean something else."""
    with pytest.raises(DataError, match=f"^there: .*{message}"):
        read(describe(ALBERT) | changes)


@pytest.mark.parametrize("odd", [None, [], {}, "x", True, -1, 0, 1e300, float("nan"), 10**30], ids=repr)
def test_no_value_of_any_key_ends_in_a_traceback(odd: Any) -> None:
    """Whatever a fetched file says, it is read or refused."""
    described = describe(ALBERT)
    for key in described:
        with contextlib.suppress(DataError):
            assert isinstance(read(described | {key: odd}), AlbertConfig)


def test_weights_are_read_as_the_run_shares(tmp_path: Path) -> None:
    """The folder says one group a layer; a run that shares the feed-forward takes it as one."""
    config = UNSAID["ffn"]
    weights = weights_of(config)
    folder = write(tmp_path / "hf", config, weights)
    assert_equal(load_weights(folder, config), weights)
    assert len(load_weights(folder)) > len(weights)
