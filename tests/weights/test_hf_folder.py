"""Export and import. If these break, users cannot load a trained model, or silently load something else."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.batches import lay_out, mlm_batch
from modernbert_train.batch import Batch
from modernbert_train.config.schema import BertConfig, ModernBertConfig
from modernbert_train.errors import ConfigError, DataError, StorageError
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.weights.formats import read_folder
from modernbert_train.weights.hf_folder import export, load_weights
from tests.support.encoders import BERT, ROBERTA
from tests.support.exported import CONFIG, edit, write
from tests.support.small_checkpoint import BAD_TENSORS
from tests.weights.formats.models import weights_of


def one_sequence(ids: Tensor) -> Batch:
    count = len(ids)
    return mlm_batch(lay_out(ids, [0, count]), torch.arange(count))


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.runs
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": YARN | {"rope_type": "yarn"}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": "absent"},
        {"rope_parameters": {"full_attention": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8}}},
        {"rope_parameters": {kind: YARN | {"beta_fast": 8} for kind in ("full_attention", "sliding_attention")}},
    ],
    ids=["older", "older, linear", "mscale", "attention factor", "all layers"],
)
def test_positions_are_scaled_as_the_folder_says(
    model: ModernBertForMaskedLM, exported: Path, tokenizer_folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """transformers computes the same from the folder, and from what we export of it."""
    edit(exported, **changes)
    config = read_folder(exported).model
    assert isinstance(config, ModernBertConfig) and config.rope_scaling != "none"
    ids = torch.randint(0, 8, (100,), generator=torch.Generator().manual_seed(0))
    model.set_phase(config)
    written = write(model, tokenizer_folder, tmp_path / "written", config)
    assert read_folder(written).model == config
    with torch.no_grad():
        hidden_TD = model.encode(one_sequence(ids).packed)
        for folder in (exported, written):
            encoder = transformers.AutoModel.from_pretrained(folder).eval()
            torch.testing.assert_close(encoder(ids[None]).last_hidden_state[0], hidden_TD, atol=1e-5, rtol=1e-5)
        model.set_phase(CONFIG)
        assert not torch.allclose(model.encode(one_sequence(ids).packed), hidden_TD, atol=1e-2)


def test_config_speaks_to_old_and_new_transformers(exported: Path) -> None:
    """Version 5 reads layer_types and rope_parameters, 4.48 to 4.57 the other three; both must mean the same."""
    raw = json.loads((exported / "config.json").read_text())
    assert (raw["global_rope_theta"], raw["local_rope_theta"]) == (80_000.0, 5_000.0)
    assert raw["global_attn_every_n_layers"] == 2
    config = transformers.AutoConfig.from_pretrained(exported)
    assert config.rope_parameters["full_attention"]["rope_theta"] == 80_000.0
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 5_000.0
    assert config.layer_types == ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
    assert config.max_position_embeddings == 512
    ids = (config.cls_token_id, config.bos_token_id, config.sep_token_id, config.eos_token_id, config.pad_token_id)
    assert ids == (9, 9, 10, 10, 11)


def test_servers_find_the_keys_that_they_require(exported: Path) -> None:
    """candle's ModernBERT and text-embeddings-inference, which uses it, refuse a config.json without one of them."""
    raw = json.loads((exported / "config.json").read_text())
    whole = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
             "max_position_embeddings", "pad_token_id", "global_attn_every_n_layers", "local_attention")  # fmt: skip
    assert all(type(raw[key]) is int for key in whole)
    assert all(type(raw[key]) is float for key in ("layer_norm_eps", "global_rope_theta", "local_rope_theta"))
    assert raw["layer_norm_eps"] == raw["norm_eps"] == 1e-4 and raw["hidden_activation"] == "gelu"
    assert raw["architectures"] == ["ModernBertForMaskedLM"] and raw["model_type"] == "modernbert"


def test_tokenizer_and_card_travel_along(exported: Path, tokenizer_folder: Path) -> None:
    """A model without its tokenizer is useless; one that truncates beyond the trained length is worse than it could."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert tokenizer("a b [MASK]").input_ids == [9, 0, 1, 12, 10]
    assert tokenizer.model_max_length == 512
    tokenizer_config = json.loads((exported / "tokenizer_config.json").read_text())
    assert tokenizer_config["tokenizer_class"] == "PreTrainedTokenizerFast", "transformers 4 lacks TokenizersBackend"
    assert (exported / "tokenizer.json").read_bytes() == (tokenizer_folder / "tokenizer.json").read_bytes()
    assert (exported / "README.md").read_text() == "# A model\n"


def test_the_special_tokens_of_an_older_tokenizer_travel_along(
    model: ModernBertForMaskedLM, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """transformers 4 keeps them in a separate file; without it [MASK] is not a mask there."""
    older = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_folder, older)
    (older / "special_tokens_map.json").write_text('{"mask_token": "[MASK]"}')
    exported = write(model, older, tmp_path / "hf")
    assert (exported / "special_tokens_map.json").read_text() == '{"mask_token": "[MASK]"}'
    write(model, older, exported)  # it is recognised as our export when it is replaced


def test_an_old_config_can_be_read(exported: Path) -> None:
    """The released models have only the keys of transformers 4; a null local base means the global one."""
    edit(exported, rope_parameters="absent", layer_types="absent", local_rope_theta=None)
    assert read_folder(exported).model == replace(CONFIG, local_rope_theta=80_000.0)


def test_a_new_config_without_the_old_keys_can_be_read(exported: Path) -> None:
    """The period of global layers is then only in layer_types."""
    edit(exported, global_attn_every_n_layers="absent", global_rope_theta="absent", local_rope_theta="absent")
    assert read_folder(exported).model == CONFIG


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_become_fp32(exported: Path, model: ModernBertForMaskedLM, dtype: torch.dtype) -> None:
    """Many models are published in bf16; training on these tensors would round every update away."""
    path = exported / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    weights = load_weights(exported)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert all(torch.equal(weights[name], tensor.to(dtype).float()) for name, tensor in model.state_dict().items())


def test_weights_in_several_files_are_read(exported: Path, tmp_path: Path, model: ModernBertForMaskedLM) -> None:
    """transformers splits files above a limit; a missing part must not pass for a smaller model."""
    sharded = tmp_path / "sharded"
    transformers.AutoModelForMaskedLM.from_pretrained(exported).save_pretrained(sharded, max_shard_size="60KB")
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 2 and not (sharded / "model.safetensors").exists()
    weights = load_weights(sharded)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[:-8])
    with pytest.raises(DataError, match=rf"{shards[1].name}: cannot be read"):
        load_weights(sharded)
    shards[1].unlink()
    with pytest.raises(DataError, match=rf"{shards[1].name}: cannot be read"):
        load_weights(sharded)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../elsewhere"}}))
    with pytest.raises(DataError, match=r"index\.json: its weight_map names no files of this folder"):
        load_weights(sharded)


@pytest.mark.parametrize("theta", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_senseless_theta_is_not_exported(
    model: ModernBertForMaskedLM, tokenizer_folder: Path, tmp_path: Path, theta: float
) -> None:
    """The reference's converter wrote -1, and the published model gave NaN."""
    with pytest.raises(ConfigError, match="global_rope_theta="):
        write(model, tokenizer_folder, tmp_path / "hf", replace(CONFIG, global_rope_theta=theta))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", BAD_TENSORS)
def test_tensors_that_are_none_are_named(exported: Path, what: str) -> None:
    """Any header of a downloaded file leads to an error with the file's name and not to a traceback."""
    (exported / "model.safetensors").write_bytes(BAD_TENSORS[what])
    with pytest.raises(DataError, match=r"model\.safetensors: "):
        load_weights(exported)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, "0o644"), (0o077, "0o600")])
def test_an_export_is_readable_by_whom_the_umask_says(
    model: ModernBertForMaskedLM, tokenizer_folder: Path, tmp_path: Path, mask: int, mode: str
) -> None:
    """In a shared folder others must be able to open the model's weights."""
    before = os.umask(mask)
    try:
        out = write(model, tokenizer_folder, tmp_path / "hf")
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in out.iterdir()} == dict.fromkeys(
        os.listdir(out), mode
    )


def test_a_state_of_another_model_is_not_exported(
    model: ModernBertForMaskedLM, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """A folder whose config.json does not match its weights would load with some random ones."""
    state = model.state_dict()
    del state["model.final_norm.weight"]
    with pytest.raises(ConfigError, match=r"1 of \d+ tensors are missing, the first is model\.final_norm\.weight"):
        export(state, CONFIG, max_tokens=8, tokenizer_folder=tokenizer_folder, out=tmp_path / "hf", card="")


def test_a_tokenizer_larger_than_the_embedding_is_refused(
    model: ModernBertForMaskedLM, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Its last tokens would index past the embedding when a user runs the model."""
    large = tmp_path / "tokenizer"
    large.mkdir()
    content = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["beyond"] = 64
    (large / "tokenizer.json").write_text(json.dumps(content))
    (large / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.vocab_size=64.*65 entries"):
        write(model, large, tmp_path / "hf")


def test_only_an_earlier_export_is_replaced(
    model: ModernBertForMaskedLM, tokenizer_folder: Path, exported: Path
) -> None:
    """A mistyped --out must never overwrite a folder."""
    write(model, tokenizer_folder, exported, card="# Newer\n")
    assert (exported / "README.md").read_text() == "# Newer\n"
    (exported / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not an export"):
        write(model, tokenizer_folder, exported)
    assert (exported / "notes.txt").read_text() == "mine"
    assert [path.name for path in exported.parent.iterdir()] == ["hf"]


@pytest.mark.runs
def test_a_failed_export_leaves_nothing_behind(
    model: ModernBertForMaskedLM, tokenizer_folder: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk must leave the previous export in place, and no partial new one."""
    before = {path.name: path.read_bytes() for path in exported.iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("modernbert_train.weights.hf_folder.shutil.copyfile", full)
    with pytest.raises(StorageError, match="No space left on device"):
        write(model, tokenizer_folder, exported, card="# Newer\n")
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    assert [path.name for path in exported.parent.iterdir()] == ["hf"]


@pytest.mark.parametrize("config", [BERT, replace(ROBERTA, position_offset=12)], ids=["bert", "roberta"])  # [PAD]: 11
def test_an_export_is_read_as_long_as_its_run(config: BertConfig, tokenizer_folder: Path, tmp_path: Path) -> None:
    """config.json has the positions; longer texts than in training would be cut elsewhere than by the run."""
    export(weights_of(config), config, max_tokens=24, tokenizer_folder=tokenizer_folder, out=tmp_path / "hf", card="")
    found = read_folder(tmp_path / "hf")
    assert (found.model.max_positions, found.max_tokens) == (config.max_positions, 24)
