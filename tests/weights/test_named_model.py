"""Settings that a run takes from the model it continues. With another RoPE base every distance would change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from modernbert_train.__main__ import main, read_run
from modernbert_train.config.schema import LlamaConfig
from tests.support.front_door import Cli
from tests.support.runs import records
from tests.support.tiny_run import TinyRun


def settings(words: list[str]) -> tuple[float, float, float]:
    model = read_run(words).in_phase["short"].modernbert
    return model.global_rope_theta, model.local_rope_theta, model.attention_out_dropout


@pytest.mark.runs
def test_rope_bases_and_dropout_come_from_the_model_unless_they_are_given(
    tiny_run: TinyRun, tmp_path: Path, cli: Cli
) -> None:
    """For a run, a checkpoint of its first phase, an export; the banner says so. Later the run keeps those it began
    with."""
    begun = tiny_run("name=first", "model.local_rope_theta=5000", "model.attention_out_dropout=0.3")
    cli("train", *begun)
    cli("export", *begun, "--out", tmp_path / "hf")
    first = tmp_path / "runs/first"
    (early,) = first.glob("checkpoints/step-00000010")

    def following(name: Path, *overrides: str) -> list[str]:
        words = tiny_run(f"weights.init_from={name}", "name=next", *overrides)
        file = Path(words[0])
        file.write_text(file.read_text().replace("  attention_out_dropout: 0.0\n", ""))
        return words

    found = {name: settings(following(name)) for name in (first, early, tmp_path / "hf")}
    late = (160_000, 5_000, 0.3)
    assert found == {first: late, early: (10_000, 5_000, 0.3), tmp_path / "hf": late}

    continued = following(tmp_path / "hf", "phases.long=null")
    given = [*continued, "model.global_rope_theta=20_000", "model.attention_out_dropout=0"]
    assert settings(given) == (20_000, 5_000, 0)
    of_phase = [*continued, "phases.short.model.global_rope_theta=30_000"]
    assert settings(of_phase) == (30_000, 5_000, 0.3), "the phase's value"

    said = cli("train", *continued).out
    assert "RoPE base" not in said and "attention_out_dropout 0.3, as there" in said, "no difference to report"
    said = cli("train", *given, "name=given").out
    assert "global RoPE base 160,000 there, 20,000 here" in said and "attention_out_dropout 0.3 there, 0 here" in said
    shutil.rmtree(tmp_path / "hf")
    assert main(["train", *continued]) == 0, "the run keeps the values it began with"
    assert len(records(tmp_path / "runs/next")) > 5


@pytest.mark.runs
def test_scaled_positions_come_from_the_model_unless_the_run_scales(
    tiny_run: TinyRun, tmp_path: Path, cli: Cli
) -> None:
    """A phase may change the scaling; the run after it begins with the same, or with all of its own."""
    yarn = (
        "phases.long.model={global_rope_theta: 160_000, rope_scaling: yarn, rope_factor: 2, rope_original_tokens: 64}"
    )
    cli("train", *tiny_run("name=first", yarn))
    cli("export", *tiny_run("name=first", yarn), "--out", tmp_path / "hf")
    for name in (tmp_path / "runs/first", tmp_path / "hf"):
        words = tiny_run(f"weights.init_from={name}", "name=next", "phases.long=null")
        model = read_run(words).modernbert
        assert (model.rope_scaling, model.rope_factor, model.rope_original_tokens) == ("yarn", 2, 64)
        plain = read_run([*words, "model.rope_scaling=none"]).modernbert
        assert (plain.rope_scaling, plain.rope_factor, plain.global_rope_theta) == ("none", 1, 160_000)
    assert (
        "global RoPE base 160,000, yarn by 2 there, 160,000 here" in cli("train", *words, "model.rope_scaling=none").out
    )
    assert "160,000, yarn by 2" in (tmp_path / "hf/README.md").read_text(), "the card's table of phases"


def test_a_model_that_is_not_there_is_reported_by_who_reads_it(tiny_run: TinyRun, tmp_path: Path, cli: Cli) -> None:
    """A misspelt name must not be taken for a model without bases."""
    assert "none" in cli("check", *tiny_run(f"weights.init_from={tmp_path}/none"), code=65).err


def test_a_llama_takes_the_base_and_the_scaling_of_its_folder(tmp_path: Path) -> None:
    """As of Llama 3.2; with this program's own base every distance would be another."""
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    raw = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 500_000.0,
        "rope_scaling": scaling,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    run = tmp_path / "run.yaml"
    run.write_text(f"""
name: next
data: {{train: a, validation: b, tokenizer: c}}
weights: {{init_from: {tmp_path}}}
model: {{name: llama}}
phases: {{one: {{tokens: 1000, row_tokens: 64, batch_rows: 1, microbatch_tokens: 64}}}}
optim: {{name: adamw, lr: 1e-3}}
""")
    model = read_run([str(run)]).model
    assert isinstance(model, LlamaConfig)
    assert (model.rope_theta, model.rope_scaling, model.rope_factor, model.rope_low_freq) == (500_000, "llama3", 32, 1)
    given = read_run([str(run), "model.rope_theta=10_000", "model.rope_scaling=linear", "model.rope_factor=2"]).model
    assert isinstance(given, LlamaConfig)
    assert (given.rope_theta, given.rope_scaling, given.rope_factor) == (10_000, "linear", 2)
