"""The source of a run's initial weights. A wrong one trains without an error, from other weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch.testing import assert_close

from modernbert_train.__main__ import main, read_run
from modernbert_train.models.tiling import grow
from modernbert_train.weights.formats import read_folder
from tests.support import sources
from tests.support.make_shards import make_texts, make_tokenizer
from tests.support.matrix import system
from tests.support.runs import records, weights
from tests.support.sources import LARGER, first_weights
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


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_every_name_of_the_same_weights_starts_from_the_same_weights(
    tiny_run: TinyRun, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run, one of its checkpoints, its export, and transformers' copy of that: bit for bit, in a run of its own."""
    transformers.AutoModelForMaskedLM.from_pretrained(teacher / "hf").save_pretrained(tmp_path / "theirs")
    checkpoint = max((teacher / "checkpoints").glob("step-*"))
    for number, origin in enumerate((teacher, checkpoint, teacher / "hf", tmp_path / "theirs")):
        words, folder = tiny_run(*STILL, f"name=from{number}", f"weights.init_from={origin}"), f"runs/from{number}"
        assert_close(first_weights(words, tmp_path / folder), weights(teacher), rtol=0, atol=0)
        (step, *_), (start,) = (records(tmp_path / folder, kind) for kind in ("step", "start"))
        assert (step["step"], step["epoch"], step["phase"]) == (1, 0, "short"), "it is not resumed"
        assert start["from"].startswith(f"weights.init_from={origin}")
    said = capsys.readouterr().out
    assert f"from    weights.init_from={teacher / 'hf'}; attention_out_dropout 0, as there\n" in said
    assert "RoPE base" not in said, "it has the model's"


@pytest.mark.parametrize("mode", [pytest.param("fitted", marks=pytest.mark.slow), "paper"])
def test_a_grown_start_is_far_below_a_random_one(tiny_run: TinyRun, teacher: Path, tmp_path: Path, mode: str) -> None:
    """The purpose of growing: weights are tiled, and the first loss is near the smaller model's."""
    words = tiny_run(*STILL, *LARGER, "name=grown", f"weights.grow_from={teacher}", f"weights.grow_mode={mode}")
    found = first_weights(words, tmp_path / "runs/grown")
    config = read_folder(teacher / "hf").model
    expected = grow(weights(teacher), config, read_run(words).model, "paper" if mode == "paper" else "fitted")
    del expected["decoder.weight"]
    assert_close(found, expected, rtol=0, atol=0)
    random = tiny_run(*STILL, *LARGER, "name=random")
    first_weights(random, tmp_path / "runs/random")
    gain = records(tmp_path / "runs/random")[0]["loss"] - records(tmp_path / "runs/grown")[0]["loss"]
    assert gain > (1.2 if mode == "paper" else 1.7)


def another_tokenizer(source: Path) -> None:
    other = make_tokenizer(source.with_name("other"), make_texts(40, seed=5))
    shutil.copyfile(other / "tokenizer.json", source / "tokenizer.json")


def as_bert(source: Path) -> None:
    edit(source / "config.json", model_type="bert")


def truncate(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


INIT, GROW = "weights.init_from={source}", "weights.grow_from={source}"


@pytest.mark.parametrize(
    ("damage", "words", "code", "message"),
    [
        (None, (INIT, "model.local_attention=32"), 78, r"model\.local_attention=32 here, 16 there"),
        (None, (INIT, "model.vocab_size=576"), 78, r"model\.vocab_size=576 here, 512 there"),
        (another_tokenizer, (INIT,), 78, r"tokens differ, as .*: id \S+ there, \S+ here"),
        (as_bert, (INIT,), 65, r"config\.json: model_type='bert'"),
        (truncate, (INIT,), 65, r"model\.safetensors: cannot be read"),
        (None, (GROW, "model.hidden_size=16", "model.num_heads=1"), 78,
         r"model\.hidden_size=16, grown from 32: cannot shrink"),
    ],
)  # fmt: skip
def test_a_start_that_does_not_fit_is_refused_before_anything_is_built(
    tiny_run: TinyRun,
    teacher: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None] | None,
    words: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    """Both values are named, the exit code is right, and the corrected start can use the same name."""
    source = shutil.copytree(teacher / "hf", tmp_path / "source")
    if damage is not None:
        damage(source)
    assert main(["train", *tiny_run(*STILL, *(word.format(source=source) for word in words))]) == code
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "runs/tiny").exists()


def test_the_same_tokenizer_written_differently_is_the_same(tiny_run: TinyRun, teacher: Path, tmp_path: Path) -> None:
    """transformers formats tokenizer.json differently; only the ids of tokens count."""
    source = shutil.copytree(teacher / "hf", tmp_path / "source")
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
    assert_close(found, weights(teacher), rtol=0, atol=0)
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
