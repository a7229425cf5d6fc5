"""The source of a run's initial weights. A wrong one trains without an error, from other weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from modernbert_train.__main__ import main, read_run
from modernbert_train.models.tiling import grow
from modernbert_train.weights.formats import read_folder
from tests.support import sources
from tests.support.make_shards import make_texts, make_tokenizer
from tests.support.matrix import system
from tests.support.runs import records, weights
from tests.support.sources import LARGER
from tests.support.tiny_run import TINY_YAML, TinyRun

pytestmark = pytest.mark.runs

LEARN = ("phases.short.tokens=24_000", "phases.short.microbatch_tokens=512", "model.init_std=0.1")
STILL = (*sources.STILL, "model.init_std=0.1")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """Return the folder of a finished run that has learned something, with its export in hf/."""
    folder = tmp_path_factory.mktemp("teacher")
    file = folder / "tiny.yaml"
    file.write_text(TINY_YAML.format(runs=folder, data=tiny_data), encoding="utf-8")
    for verb in ("train", "export"):
        assert main([verb, str(file), "name=run", *LEARN]) == 0
    return folder / "run"


def first_weights(words: list[str], folder: Path) -> dict[str, Tensor]:
    assert main(["train", *words]) == 0
    assert len(records(folder)) >= 1
    return weights(folder)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_run_starts_from_an_export_where_its_own_run_ended(
    tiny_run: TinyRun, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Continued pretraining: the first loss is near the last run's held-out loss, not a random start's, and falls."""
    for name, origin in (("scratch", []), ("again", [f"weights.init_from={teacher / 'hf'}"])):
        assert (
            main(["train", *tiny_run(*LEARN, "phases.short.tokens=6_000", "phases.long=null", f"name={name}", *origin)])
            == 0
        )
    held_out = records(teacher, "validation")[-1]["loss"]
    scratch, again = (records(tmp_path / "runs" / name) for name in ("scratch", "again"))
    assert (again[0]["step"], again[0]["epoch"], again[0]["phase"]) == (1, 0, "short"), "it is not resumed"
    assert scratch[0]["loss"] > held_out + 2
    assert again[0]["loss"] == pytest.approx(held_out, abs=0.3)
    assert mean(step["loss"] for step in again[-20:]) < mean(step["loss"] for step in scratch[-20:]) - 0.1
    said = capsys.readouterr().out
    assert (
        f"from    weights.init_from={teacher / 'hf'}; attention_out_dropout 0, as there\n" in said
        and "RoPE base" not in said
    ), "it has the model's"
    assert "from    scratch" in said
    (start,) = records(tmp_path / "runs/again", "start")
    assert start["from"].startswith("weights.init_from=")


def test_every_name_of_the_same_weights_starts_from_the_same_weights(
    tiny_run: TinyRun, teacher: Path, tmp_path: Path
) -> None:
    """A run, one of its checkpoints, its export, and transformers' copy of that: bit for bit."""
    transformers.AutoModelForMaskedLM.from_pretrained(teacher / "hf").save_pretrained(tmp_path / "theirs")
    expected = weights(teacher)
    checkpoint = max((teacher / "checkpoints").glob("step-*"))
    for number, origin in enumerate((teacher, checkpoint, teacher / "hf", tmp_path / "theirs")):
        words = tiny_run(*STILL, f"name=from{number}", f"weights.init_from={origin}")
        found = first_weights(words, tmp_path / f"runs/from{number}")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), origin


@pytest.mark.parametrize("mode", [pytest.param("fitted", marks=pytest.mark.slow), "paper"])
def test_a_grown_start_is_far_below_a_random_one(tiny_run: TinyRun, teacher: Path, tmp_path: Path, mode: str) -> None:
    """The purpose of growing: weights are tiled, and the first loss is near the smaller model's."""
    words = tiny_run(*STILL, *LARGER, "name=grown", f"weights.grow_from={teacher}", f"weights.grow_mode={mode}")
    found = first_weights(words, tmp_path / "runs/grown")
    config = read_folder(teacher / "hf").model
    expected = grow(weights(teacher), config, read_run(words).model, "paper" if mode == "paper" else "fitted")
    del expected["decoder.weight"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    random = tiny_run(*STILL, *LARGER, "name=random")
    first_weights(random, tmp_path / "runs/random")
    gain = records(tmp_path / "runs/random")[0]["loss"] - records(tmp_path / "runs/grown")[0]["loss"]
    assert gain > (1.2 if mode == "paper" else 1.7)


def test_a_checkpoint_of_the_run_wins_and_the_origin_is_no_longer_needed(
    tiny_run: TinyRun, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A restart must not lose trained weights, nor need the original weights, which may be gone."""
    source = tmp_path / "source"
    shutil.copytree(teacher / "hf", source)
    short = ("phases.long=null", "checkpoint.interval_steps=2", "model.init_std=0.1")
    words = tiny_run(*short, f"weights.init_from={source}")
    assert main(["train", *words]) == 0
    folder = tmp_path / "runs/tiny"
    expected, recorded = weights(folder), records(folder)
    shutil.rmtree(max((folder / "checkpoints").glob("step-*")))
    shutil.rmtree(source)
    capsys.readouterr()
    assert main(["train", *words]) == 0
    assert "from    step-000000" in capsys.readouterr().out
    assert len(records(folder, "resume")) == 1 and len(records(folder)) == len(recorded)
    found = weights(folder)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # another origin would be another run; and a fresh start needs its origin
    assert main(["train", *tiny_run(*short, f"weights.init_from={teacher}")]) == 78
    assert main(["train", *words, "--fresh"]) == 65
    assert f"{source}: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        ("window", 78, r"model\.local_attention=32 here, 16 there"),
        ("vocabulary", 78, r"model\.vocab_size=576 here, 512 there"),
        ("tokenizer", 78, r"tokens differ, as .*: id \S+ there, \S+ here"),
        ("model_type", 65, r"config\.json: model_type='bert'"),
        ("truncated", 65, r"model\.safetensors: cannot be read"),
        ("smaller", 78, r"model\.hidden_size=16, grown from 32: cannot shrink"),
    ],
)
def test_a_start_that_does_not_fit_is_refused_before_anything_is_built(
    tiny_run: TinyRun,
    teacher: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    case: str,
    code: int,
    message: str,
) -> None:
    """Both values are named, the exit code is right, and the corrected start can use the same name."""
    source = tmp_path / "source"
    shutil.copytree(teacher / "hf", source)
    words = [f"weights.init_from={source}"]
    if case == "window":
        words += ["model.local_attention=32"]
    elif case == "vocabulary":
        words += ["model.vocab_size=576"]
    elif case == "tokenizer":
        other = make_tokenizer(tmp_path / "other", make_texts(40, seed=5))
        shutil.copyfile(other / "tokenizer.json", source / "tokenizer.json")
    elif case == "model_type":
        edit(source / "config.json", model_type="bert")
    elif case == "truncated":
        path = source / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])
    elif case == "smaller":
        words = [f"weights.grow_from={source}", "model.hidden_size=16", "model.num_heads=1"]
    assert main(["train", *tiny_run(*STILL, *words)]) == code
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "runs/tiny").exists()


def test_the_same_tokenizer_written_differently_is_the_same(tiny_run: TinyRun, teacher: Path, tmp_path: Path) -> None:
    """transformers formats tokenizer.json differently; only the ids of tokens count."""
    source = tmp_path / "source"
    shutil.copytree(teacher / "hf", source)
    edit(source / "tokenizer.json", truncation=None, model_extra="another byte")
    assert main(["train", *tiny_run(*STILL, f"weights.init_from={source}")]) == 0


def test_an_id_of_the_hub_is_found_in_the_cache_without_a_network(
    tiny_run: TinyRun,
    teacher: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Compute nodes often lack a network; files fetched on a login node must suffice. A missing model is an error."""
    cached = tmp_path / "hub/models--someone--tiny"
    shutil.copytree(teacher / "hf", cached / "snapshots/abc123")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = first_weights(tiny_run(*STILL, "weights.init_from=someone/tiny"), tmp_path / "runs/tiny")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(teacher).items())
    capsys.readouterr()
    assert main(["train", *tiny_run(*STILL, "name=other", "weights.init_from=someone/else")]) == 65
    assert "someone/else: no such folder here, and the hub does not give it" in capsys.readouterr().err


def test_heads_of_keys_that_equal_the_heads_may_be_left_open(tiny_run: TinyRun, tmp_path: Path) -> None:
    """An export writes their number, and was of another architecture than the run that made it."""
    short = ("phases.long=null", "phases.short.tokens=600", "phases.short.batch_warmup=null")
    words = system(tiny_run(*short), "llama", "mlm")
    hf = tmp_path / "hf"
    assert main(["train", *words, "name=given", "model.key_value_heads=2"]) == 0
    assert main(["export", str(tmp_path / "runs/given"), "--out", str(hf)]) == 0
    assert main(["train", *words, "name=open", "model.key_value_heads=null", f"weights.init_from={hf}"]) == 0
