"""Checkpoints of AnswerDotAI's training code. If this breaks, its weights cannot be continued."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.errors import DataError
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.vocabulary import token_ids
from modernbert_train.weights.composer_file import open_composer
from modernbert_train.weights.formats.tensors import DECODER, EMBEDDING
from tests.support.reference_checkpoint import write_reference_checkpoint

pytestmark = pytest.mark.runs

CONFIG = ModernBertConfig(
    vocab_size=512, hidden_size=32, num_layers=4, num_heads=2, intermediate_size=48, local_attention=16, norm_eps=1e-4
)

# transformers' config.json of such a model, and the model that it describes
THEIRS = {
    "model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "vocab_size": 512, "hidden_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 48, "local_attention": 16, "norm_eps": 1e-4,
    "global_rope_theta": 40_000.0, "local_rope_theta": 5_000.0,
}  # fmt: skip
READ = replace(CONFIG, global_rope_theta=40_000.0, local_rope_theta=5_000.0, attention_out_dropout=0.0)

Reference = tuple[Path, dict[str, Tensor]]
Edit = Callable[[Callable[[dict[str, Any]], None]], Path]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Reference:
    """Return a file that Composer wrote after two batches, and its weights."""
    return write_reference_checkpoint(tmp_path_factory.mktemp("reference"), CONFIG, tiny_data / "tokenizer")


@pytest.fixture
def edited(reference: Reference, tmp_path: Path) -> Edit:
    """Return a function that writes a copy of the file with an edited state."""

    def edit(change: Callable[[dict[str, Any]], None]) -> Path:
        content = torch.load(reference[0], weights_only=False)
        change(content["state"])
        torch.save(content, tmp_path / "edited.pt")
        return tmp_path / "edited.pt"

    return edit


def settings(state: dict[str, Any]) -> dict[str, Any]:
    return state["integrations"]["huggingface"]["model"]["config"]["content"]


def test_weights_and_architecture_are_read(reference: Reference, tiny_data: Path) -> None:
    """Every tensor, bit for bit, under our names; the architecture and the tokenizer from the file itself."""
    file = open_composer(reference[0])
    assert file.model == replace(CONFIG, global_rope_theta=10_000.0, local_rope_theta=10_000.0)
    weights = file.weights()
    assert weights.keys() == reference[1].keys() | {DECODER}
    assert all(torch.equal(weights[name], tensor) for name, tensor in reference[1].items())
    assert torch.equal(weights[DECODER], weights[EMBEDDING])
    ModernBertForMaskedLM(file.model).load_state_dict(weights, strict=True)
    assert json.loads(file.tokenizer_files["tokenizer.json"])["model"]["vocab"].items() <= (
        token_ids(tiny_data / "tokenizer").items()
    )


@pytest.mark.parametrize(
    ("theta", "local", "expected"),
    [(160_000.0, 10_000.0, 10_000.0), (160_000.0, -1, 160_000.0), (10_000.0, None, 10_000.0)],
)
def test_a_local_base_of_minus_one_is_the_global_one(
    edited: Edit, theta: float, local: float | None, expected: float
) -> None:
    """The reference's converter took it for a base, and the converted model gave NaN."""
    file = open_composer(edited(lambda s: settings(s).update(rotary_emb_base=theta, local_attn_rotary_emb_base=local)))
    assert (file.model.global_rope_theta, file.model.local_rope_theta) == (theta, expected)


def test_what_the_file_leaves_to_torch_is_torchs(edited: Edit) -> None:
    """eps of the norms: a wrong one would change outputs slightly and unnoticed."""

    def leave_out(state: dict[str, Any]) -> None:
        settings(state)["norm_kwargs"] = {"bias": False}

    assert open_composer(edited(leave_out)).model.norm_eps == torch.nn.LayerNorm(1).eps == 1e-5


def test_transformers_own_model_under_composer_is_read(edited: Edit, reference: Reference) -> None:
    """A user who continues a released model under Composer has that class, and other names, in the file."""

    def rename(state: dict[str, Any]) -> None:
        state["model"] = {
            name.replace("bert.encoder.layers.", "model.layers.").replace("bert.", "model."): tensor
            for name, tensor in state["model"].items()
        }
        stored = state["integrations"]["huggingface"]["model"]["config"]
        stored["class"] = "transformers.models.modernbert.modeling_modernbert.ModernBertForMaskedLM"
        stored["content"] = THEIRS | {"architectures": None, "max_position_embeddings": 1024}

    file = open_composer(edited(rename))
    assert file.model == READ
    assert file.max_tokens == 1024
    weights = file.weights()
    assert all(torch.equal(weights[name], tensor) for name, tensor in reference[1].items())


def test_without_its_configuration_a_config_beside_it_counts(
    tmp_path: Path, edited: Edit, reference: Reference
) -> None:
    """Composer stores a configuration only for models in its transformers wrapper; a bare state dict lacks it."""
    path, weights = write_reference_checkpoint(tmp_path, CONFIG, None)
    bare = tmp_path / "bare.pt"
    torch.save(torch.load(path, weights_only=False)["state"]["model"], bare)
    for file in (path, bare):
        with pytest.raises(DataError, match=r"does not record its architecture, and its folder lacks a config\.json"):
            open_composer(file)
    (tmp_path / "config.json").write_text(json.dumps(THEIRS))
    for file in (path, bare):
        opened = open_composer(file)
        assert opened.model == READ and not opened.tokenizer_files
        found = opened.weights()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    (tmp_path / "config.json").write_text(json.dumps(THEIRS | {"num_hidden_layers": 7}))
    with pytest.raises(DataError, match=r"tensors are missing, the first is model\.layers\.4.*config\.json there"):
        open_composer(path).weights()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_layer": "mlp"}, "mlp_layer=mlp; this encoder only knows glu"),
        ({"normalization": "rmsnorm"}, "normalization=rmsnorm"),
        ({"skip_first_prenorm": False}, "skip_first_prenorm=False"),
        ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved=True"),
        ({"rotary_emb_dim": 8}, "rotary_emb_dim=8, hidden_size=32, num_attention_heads=2"),
        ({"norm_kwargs": {"eps": 1e-5}}, "norm_bias=True"),  # torch's default
        ({"sliding_window": -1, "global_attn_every_n_layers": -1}, "sliding_window=-1, global_attn_every_n_layers=-1"),
        ({"sliding_window": None}, "lacks sliding_window"),
    ],
)
def test_another_architecture_is_refused(edited: Edit, changes: dict[str, Any], message: str) -> None:
    """That code trains many; some have the same tensors and compute something else."""
    with pytest.raises(DataError, match=message) as error:
        open_composer(edited(lambda state: settings(state).update(changes)))
    assert "edited.pt" in str(error.value)


class _Runs:
    """When unpickled, it calls a function with an argument."""

    def __init__(self, function: Callable[[str], object], argument: str) -> None:
        self.call = (function, (argument,))

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return self.call


def test_nothing_in_a_file_runs(edited: Edit, reference: Reference, tmp_path: Path) -> None:
    """A pickle from the internet may call anything; only the tensors of the file are read."""
    import os

    victim = tmp_path / "victim"
    victim.mkdir()
    path = edited(lambda state: state.update(callbacks=_Runs(shutil.rmtree, str(victim))))
    weights = open_composer(path).weights()  # other pickled calls are neither executed nor needed
    assert all(torch.equal(weights[name], tensor) for name, tensor in reference[1].items())
    with pytest.raises(DataError, match="no tensors under state, model"):
        open_composer(edited(lambda state: state.update(model=_Runs(shutil.rmtree, str(victim)))))
    with pytest.raises(DataError, match=r"not read, because it could run code \(.*posix"):
        open_composer(edited(lambda state: state.update(callbacks=_Runs(os.rmdir, str(victim)))))
    assert victim.is_dir()


def test_a_file_that_is_no_checkpoint_is_named(reference: Reference, tmp_path: Path) -> None:
    """Truncated, another kind of file, missing."""
    path = tmp_path / "cut.pt"
    path.write_bytes(reference[0].read_bytes()[:-5000])
    with pytest.raises(DataError, match=r"cut\.pt: damaged, or no checkpoint of torch.*Copy it again"):
        open_composer(path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(DataError, match=r"cut\.pt: damaged, or no checkpoint of torch"):
        open_composer(path)
    torch.save(torch.ones(2), path)
    with pytest.raises(DataError, match=r"cut\.pt: holds a Tensor"):
        open_composer(path)
    with pytest.raises(DataError, match=r"absent\.pt: no such file"):
        open_composer(tmp_path / "absent.pt")
