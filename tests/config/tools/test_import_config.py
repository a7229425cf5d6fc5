"""A run file of AnswerDotAI's repository is converted, or refused; otherwise keys are lost silently."""

from __future__ import annotations

from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from modernbert_train.config.check import check
from modernbert_train.config.load import load_run
from modernbert_train.config.tools.import_config import FIXED, SAME, import_config
from modernbert_train.errors import ConfigError
from tests.support.configurations import THEIRS
from tests.support.paths import ROOT


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    file = tmp_path / "theirs.yaml"
    file.write_text(THEIRS)
    return file


def test_base_pretraining_becomes_our_recipe(theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ours.yaml"
    assert main(["init", "from", str(theirs), "--out", str(out)]) == 0
    config = load_run([out])
    check(config, 8)
    recipe = load_run([ROOT / "yamls/recipes/modernbert-base/1-stable.yaml"])
    assert config.model == recipe.model
    assert config.optim == recipe.optim and config.objective == recipe.objective
    ours, published = config.phases["main"], recipe.phases["stable"]
    for key in ("tokens", "row_tokens", "batch_rows", "microbatch_tokens", "batch_warmup"):
        assert getattr(ours, key) == getattr(published, key), key
    assert ours.schedule.warmup_tokens == published.schedule.warmup_tokens and ours.schedule.decay_tokens == 0
    assert config.model.local_rope_theta == 10_000, "-1 there means the global one"
    assert config.name == "base-pretrain" and config.checkpoint.interval_steps == 4000
    notes = capsys.readouterr().err
    assert "made_up: not known here, not carried over" in notes
    assert "autoresume: the same command always resumes" in notes
    assert config.data.train == "/data/train" and config.data.validation == "data/my_text/validation"
    assert "data.train: first python -m modernbert_train adopt /data/train --tokenizer data/my_text/tokenizer" in notes
    assert "train_loader.dataset.shuffle_seed: seed keys the order too" in notes
    assert "made_up" in notes and "train_loader.name: text is the only kind" in notes
    assert main(["init", "from", str(theirs), "--out", str(out)]) == 78, "existing files are kept"


def test_another_architecture_is_refused_with_every_difference(theirs: Path) -> None:
    """Their defaults are another model, so a missing key counts as well."""
    text = THEIRS.replace("    normalization: layernorm\n", "").replace("mlp_layer: glu", "mlp_layer: parallel_glu")
    theirs.write_text(text.replace("1_719_000_000_000tok", "1ep"))
    with pytest.raises(ConfigError) as error:
        import_config(theirs)
    assert "normalization=rmsnorm" in str(error.value) and "mlp_layer=parallel_glu" in str(error.value)
    assert "max_duration=1ep" in str(error.value)


def test_a_run_of_this_program_is_named_as_such() -> None:
    """It would be told of keys that it does not have, since their defaults are another architecture."""
    file = ROOT / "yamls/recipes/modernbert-base/1-stable.yaml"
    with pytest.raises(ConfigError) as error:
        import_config(file)
    assert str(error.value).endswith(f"is a run of it already. Train it: python -m modernbert_train train {file}")


def test_tiling_and_decay_are_understood(theirs: Path) -> None:
    keys = "checkpoint_load_path: ckpts, checkpoint_run_name: base, mode: tile_weights_from_middle"
    grown = f"init_from_checkpoint: {{{keys}}}\n"
    decay = THEIRS.replace("name: warmup_stable_decay, t_warmup: 3_000_000_000tok, alpha_f: 0.0, t_decay: 0tok", "X")
    decay = decay.replace("{X}", "{name: one_minus_sqrt, t_decay: 50_000tok, alpha_f: 0.001}")
    theirs.write_text(decay + grown)
    text, _ = import_config(theirs)
    assert "grow_from: ckpts/base/latest-rank0.pt" in text and "grow_mode: paper" in text
    assert "decay: one_minus_sqrt" in text and "final_lr_ratio: 0.001" in text


def test_where_the_shards_are_is_carried_over(theirs: Path) -> None:
    """mmBERT's files have lengths and mask rate only in the loader; Streaming's streams are converted."""
    text = THEIRS.replace("data_remote:\n", "data_remote: s3://bucket/corpus/\n").replace("max_seq_len: 1024\n", "")
    text = text.replace("mlm_probability: 0.3\n", "").replace("${mlm_probability}", "0.3\n    max_seq_len: 512")
    text = text.replace("    batch_size_warmup_min_size: 768\n", "").replace(
        "num_workers: 6", "batch_size_warmup_min_size: 768"
    )
    theirs.write_text(text.replace("mlm_probability: 0.15", "local: /data, split: val, mlm_probability: 0.15"))
    ours, notes = import_config(theirs)
    told = "\n".join(notes)
    assert "train: data/adopted/train" in ours and "validation: /data/val" in ours and "row_tokens: 512" in ours
    assert "mask_rate: 0.3" in ours and "start_rows: 768" in ours
    assert "adopt s3://bucket/corpus/train --tokenizer data/my_text/tokenizer --out data/adopted/train" in told
    assert "tokenizer.json of some/tokenizer" in told
    streams = "streams: {web: {local: /web, proportion: 3}, code: {remote: 's3://b/code', split: train, proportion: 1}}"
    theirs.write_text(THEIRS.replace("shuffle_seed: 21", streams))
    out = theirs.with_name("ours.yaml")
    out.write_text(import_config(theirs)[0])
    config = load_run([out])
    assert {name: (each.path, each.proportion) for name, each in config.data.streams.items()} == {
        "web": ("/web", 0.75),
        "code": ("data/adopted/code", 0.25),
    }


def test_intervals_in_tokens_and_beyond_the_run(theirs: Path) -> None:
    """Ettin's and mmBERT's files save by tokens, and switch evaluation off by an unreachable number."""
    theirs.write_text(
        THEIRS.replace("4000ba", "8_500tok", 2).replace("eval_interval: 8_500tok", f"eval_interval: {9**40}ba")
    )
    ours, notes = import_config(theirs)
    assert "interval_tokens: 8500" in ours and "interval_steps" not in ours and "\neval:" not in ours
    assert any("eval_interval=" in note and "beyond the end of any run" in note for note in notes)


def test_the_page_has_every_key() -> None:
    """Keys without a counterpart are in the command's output, each with its reason."""
    page = (ROOT / "docs/moving.md").read_text(encoding="utf-8")
    missing = [key for key in (*SAME, *(f"model.model_config.{key}" for key in FIXED)) if f"`{key}`" not in page]
    assert not missing
