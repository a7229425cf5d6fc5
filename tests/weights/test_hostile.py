"""Untrusted model folders: any contents lead to an error message that names the file.

If this breaks, a damaged or hostile folder ends in "this is a bug", fills the memory, or runs its code; an archive from
the internet publishes a file from a user's home with the next export, by a symlink; or the hub's cache, which consists
of symlinks, cannot be read.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.__main__ import main
from modernbert_train.core.own_files import require_own_files
from modernbert_train.errors import DataError
from modernbert_train.weights.composer_file import _from_flexbert
from modernbert_train.weights.export import export_source
from modernbert_train.weights.formats.modernbert import FORMAT
from modernbert_train.weights.hf_folder import load_weights
from modernbert_train.weights.source import open_model
from tests.support.exported import edit
from tests.support.front_door import Cli
from tests.support.tiny_run import TinyRun
from tests.weights.formats.models import WEIRD

NO_CONFIGS = {
    "nothing": "",
    "no JSON": "model_type: bert",
    "cut short": '{"model_type": ',
    "a list": '[{"model_type": "modernbert"}]',
    "deep": '{"model_type": ' + "[" * 100_000,
    "unknown kind": '{"model_type": "perceptron"}',
    "kind of a wrong type": '{"model_type": ["modernbert"]}',
}


@pytest.mark.parametrize("case", NO_CONFIGS)
def test_whatever_opens_the_folder_says_what_is_wrong_with_it(
    exported: Path, case: str, tiny_run: TinyRun, tmp_path: Path, cli: Cli
) -> None:
    """`fill`, weights.init_from and weights.grow_from; `average` and `export` open models by the same function."""
    (exported / "config.json").write_text(NO_CONFIGS[case])
    with pytest.raises(DataError) as refused:
        open_model(exported)
    message = str(refused.value)
    assert message.startswith(f"{exported}/config.json: ")
    error = cli("fill", exported, "a [MASK]", code=65).err
    assert f"{exported}/config.json: " in error and error.count("\n") == 1 and len(error) < 600
    for key in ("init_from", "grow_from"):
        assert message in cli("train", *tiny_run(f"weights.{key}={exported}"), code=65).err


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 100),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "tokenizer.json").write_text("[" * 100_000),
        lambda folder: edit(folder, vocab_size=5),
        lambda folder: edit(folder, num_hidden_layers=10**9),
        lambda folder: edit(folder, vocab_size=10**12),
        lambda folder: edit(folder, hidden_size="wide"),
        lambda folder: edit(folder, rope_parameters=3),
        lambda folder: edit(folder, layer_types=[[]]),
    ],
)
def test_fill_names_a_folder_that_transformers_cannot_open(
    exported: Path, harm: Callable[[Path], object], cli: Cli
) -> None:
    harm(exported)
    assert str(exported) in cli("fill", exported, "a [MASK]", code=65).err


def test_fill_runs_no_code_of_the_folder_and_asks_nothing(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers would offer to run it, and wait 15 s for an answer that a job cannot give."""
    ran = exported / "ran"
    (exported / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    edit(exported, model_type="perceptron", auto_map={"AutoConfig": "own.C", "AutoModelForMaskedLM": "own.M"})
    assert main(["fill", str(exported), "a [MASK]"]) == 65
    edit(exported, model_type="modernbert")
    main(["fill", str(exported), "a [MASK]"])
    assert not ran.exists() and "Do you wish to run" not in capsys.readouterr().out


def test_whatever_a_configuration_of_the_reference_says_it_is_read_or_refused() -> None:
    good: dict[str, Any] = {
        "attention_layer": "rope", "bert_layer": "prenorm", "embedding_layer": "sans_pos", "encoder_layer": "base",
        "mlp_layer": "glu", "normalization": "layernorm", "embed_norm": True, "final_norm": True,
        "skip_first_prenorm": True, "head_pred_act": "gelu", "head_pred_norm": True, "vocab_size": 64,
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 48,
        "global_attn_every_n_layers": 2, "sliding_window": 8, "rotary_emb_base": 1e4, "hidden_act": "gelu",
        "decoder_bias": True, "init_std": 0.02, "init_cutoff_factor": 2.0, "local_attn_rotary_emb_base": -1,
        "rotary_emb_dim": None, "attn_qkv_bias": False, "norm_kwargs": {"eps": 1e-5, "bias": False},
    }  # fmt: skip
    assert FORMAT.read(_from_flexbert(good, "here"), "here").model.num_layers == 4
    refused = 0
    for key in good:
        for value in WEIRD:
            try:
                FORMAT.read(_from_flexbert(good | {key: value}, "here"), "here")
            except DataError:
                refused += 1
    assert refused > 300


def test_a_weight_map_that_is_none_is_refused(exported: Path) -> None:
    (exported / "model.safetensors").rename(exported / "other.safetensors")
    index = exported / "model.safetensors.index.json"
    for content in ("[" * 100_000, "[]", "3", '{"weight_map": []}', '{"weight_map": {"a": "../x"}}'):
        index.write_text(content)
        with pytest.raises(DataError, match=r"model\.safetensors\.index\.json: "):
            load_weights(exported)


@pytest.mark.runs
def test_a_damaged_configuration_is_read_or_refused(exported: Path) -> None:
    path = exported / "config.json"
    content, draw = path.read_bytes(), random.Random(3)
    outcomes = set()
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            open_model(exported)
            outcomes.add("read")
        except DataError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
    assert json.loads(content)["model_type"] == "modernbert"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "special_tokens_map.json"])
def test_a_model_folder_has_no_links_to_elsewhere(exported: Path, tmp_path: Path, name: str, cli: Cli) -> None:
    (exported / "special_tokens_map.json").write_text("{}")
    shutil.move(exported / name, tmp_path / name)
    (exported / name).symlink_to(tmp_path / name)
    with pytest.raises(DataError, match="outside its folder"):
        open_model(exported)
    with pytest.raises(DataError, match="outside its folder"):
        load_weights(exported)
    assert f"{exported / name}: a link to " in cli("fill", exported, "a [MASK]", code=65).err


def test_an_export_publishes_no_file_that_a_tokenizer_folder_links_to(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    source = open_model(exported)
    (exported / "special_tokens_map.json").symlink_to(tmp_path / "key")
    with pytest.raises(DataError, match="outside its folder"):
        export_source(source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_the_cache_of_the_hub_is_one_folder(exported: Path, tmp_path: Path) -> None:
    """Every file of a model in it is a symlink."""
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(exported.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert open_model(snapshot).folder == snapshot
    assert load_weights(snapshot).keys() == load_weights(exported).keys()
    (snapshot / "own.json").symlink_to("../../../hf/config.json")
    with pytest.raises(DataError, match="outside its folder"):
        require_own_files(snapshot)
