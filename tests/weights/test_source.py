"""Weights in and out of a run, as a user moves them. If this breaks, another model is published or continued."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from modernbert_train.__main__ import main
from modernbert_train.checkpoints.checkpoint import verify
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.tiling import grow
from modernbert_train.weights.formats import read_folder
from modernbert_train.weights.hf_folder import load_weights
from tests.support.front_door import Cli
from tests.support.make_shards import make_texts, make_tokenizer
from tests.support.reference_checkpoint import write_reference_checkpoint
from tests.support.runs import records
from tests.support.sources import LARGER, MODEL, STILL, first_weights
from tests.support.tiny_run import TINY_YAML, TinyRun


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """Return the folder of a finished run with a RoPE base of 10,000 in its first phase and 160,000 in its second."""
    folder = tmp_path_factory.mktemp("trained")
    file = folder / "tiny.yaml"
    file.write_text(TINY_YAML.format(runs=folder, data=tiny_data), encoding="utf-8")
    assert main(["train", str(file), "name=run", "model.init_std=0.3"]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return a checkpoint of AnswerDotAI's format, and its weights."""
    return write_reference_checkpoint(tmp_path_factory.mktemp("reference"), MODEL, tiny_data / "tokenizer")


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.runs
def test_each_checkpoint_is_exported_with_the_bases_of_its_own_phase(trained: Path, tmp_path: Path) -> None:
    """The last batch of a phase passes its end; by its tokens alone the checkpoint would belong to the next phase."""
    end_of_short, end_of_long = sorted((trained / "checkpoints").glob("step-*"))
    assert verify(end_of_short).state.tokens > 4000
    assert main(["export", str(end_of_short)]) == 0 and main(["export", str(trained)]) == 0
    for folder, theta, tokens in ((trained / f"hf-{end_of_short.name}", 1e4, 64), (trained / "hf", 1.6e5, 128)):
        model = read_folder(folder).model
        assert (model.global_rope_theta, model.local_rope_theta) == (theta, 10_000.0)
        config = transformers.AutoConfig.from_pretrained(folder)
        assert config.max_position_embeddings == tokens
        assert config.rope_parameters["full_attention"]["rope_theta"] == theta
    assert same(load_weights(trained / "hf"), _with_decoder(verify(end_of_long).weights()))


def _with_decoder(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return weights | {"decoder.weight": weights["model.embeddings.tok_embeddings.weight"]}


@pytest.mark.runs
def test_the_base_is_kept_or_changed_as_the_first_phase_says(
    tiny_run: TinyRun, trained: Path, tmp_path: Path, cli: Cli
) -> None:
    """If the base is kept, the function is the same; if it changes, the banner says so."""
    held_out = records(trained, "validation")[-1]["loss"]
    losses = {}
    for theta in (160_000, 10_000):
        name = f"theta{theta}"
        bases = (f"phases.short.model.global_rope_theta={theta}", "eval.row_tokens=128")
        said = cli("train", *tiny_run(*STILL, f"name={name}", f"weights.init_from={trained}", *bases)).out
        assert ("global RoPE base 160,000 there, 10,000 here" in said) is (theta == 10_000)
        losses[theta] = records(tmp_path / "runs" / name, "validation")[-1]["loss"]
    assert losses[160_000] == pytest.approx(held_out, abs=1e-6)
    assert abs(losses[10_000] - held_out) > 1e-3


@pytest.mark.runs
def test_a_checkpoint_of_the_reference_is_a_start(
    tiny_run: TinyRun, reference: tuple[Path, dict[str, Tensor]], tmp_path: Path, cli: Cli
) -> None:
    """Continued from, grown and converted, without an intermediate step."""
    path, expected = reference
    found = first_weights(tiny_run(*STILL, f"weights.init_from={path}"), tmp_path / "runs/tiny")
    assert same(found, expected)
    grown = first_weights(tiny_run(*STILL, *LARGER, "name=grown", f"weights.grow_from={path}"), tmp_path / "runs/grown")
    larger = ModernBertConfig(
        vocab_size=512, hidden_size=48, num_layers=7, num_heads=3, intermediate_size=64, local_attention=16
    )
    assert same(_with_decoder(grown), grow(expected, MODEL, larger))

    assert "MODEL --out FOLDER" in cli("export", path, code=78).err
    cli("export", path, "--out", tmp_path / "hf", "--licence", "apache-2.0")
    assert same(load_weights(tmp_path / "hf"), _with_decoder(expected))
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert model(**tokenizer("a [MASK] b", return_tensors="pt")).logits.isfinite().all()


@pytest.mark.runs
def test_another_tokenizer_inside_the_file_is_noticed(tiny_run: TinyRun, tmp_path: Path, cli: Cli) -> None:
    """The file contains its tokenizer; with another one the weights would be meaningless."""
    make_tokenizer(tmp_path / "other", make_texts(40, seed=5))
    path, _ = write_reference_checkpoint(tmp_path, MODEL, tmp_path / "other")
    said = cli("train", *tiny_run(*STILL, f"weights.init_from={path}"), code=78).err
    assert "trained with another tokenizer than data.tokenizer=" in said


@pytest.mark.runs
def test_weights_without_a_tokenizer_are_taken_and_that_is_reported(
    tiny_run: TinyRun, trained: Path, tmp_path: Path, cli: Cli
) -> None:
    """There is no tokenizer to compare with."""
    cli("export", trained, "--out", tmp_path / "bare")
    (tmp_path / "bare/tokenizer.json").unlink()
    assert "no tokenizer comes with it" in cli("train", *tiny_run(*STILL, f"weights.init_from={tmp_path / 'bare'}")).out


@pytest.mark.runs
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("file", r"model\.safetensors: weights alone. Name the folder"),
        ("bin", r"only pytorch_model\.bin.*from_pretrained\(old\)\.save_pretrained\(new\)"),
        ("shape", r"head\.dense\.weight has the shape \(3, 3\) and not \(32, 32\)"),
        ("pt", r"damaged, or no checkpoint of torch"),
    ],
)
def test_bad_weights_are_refused_before_a_run_is_made(
    tiny_run: TinyRun, trained: Path, tmp_path: Path, cli: Cli, case: str, message: str
) -> None:
    """By name, with both values, as bad data, before the run's folder is created."""
    source = tmp_path / "source"
    cli("export", trained, "--out", source)
    path = source / "model.safetensors"
    origin = source
    if case == "shape":
        save_file(load_file(path) | {"head.dense.weight": torch.ones(3, 3)}, path)
    elif case == "file":
        origin = path
    elif case == "bin":
        shutil.move(path, source / "pytorch_model.bin")
    else:
        origin = tmp_path / "weights.pt"
        origin.write_bytes(b"PK\x03\x04 cut short")
    assert re.search(message, cli("train", *tiny_run(*STILL, f"weights.init_from={origin}"), code=65).err)
    assert not (tmp_path / "runs/tiny").exists()
