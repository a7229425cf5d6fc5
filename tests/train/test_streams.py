"""Runs on several streams: recorded, validated, resumed, always with the same mixture.

If this breaks, a mixture cannot be checked afterwards, or changes when a job is restarted.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from modernbert_train.__main__ import main, read_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.dataset_card import TOKEN_COUNTS, read_card
from modernbert_train.data.facts import read_facts
from modernbert_train.data.fingerprint import data_fingerprint
from modernbert_train.data.unigram import TokenCounts, Unigram, unigram_of
from modernbert_train.errors import DataError
from tests.support.make_shards import make_documents, make_shards
from tests.support.runs import records
from tests.support.tiny_run import TinyRun


@pytest.fixture(scope="module")
def folders(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write folders of shards, a and b."""
    folder = tmp_path_factory.mktemp("streams")
    for seed, (name, lengths) in enumerate({"a": [60] * 40, "b": [300, 500]}.items(), start=41):
        make_shards(folder / name, make_documents(tiny_data / "tokenizer", lengths, seed), tiny_data / "tokenizer")
    return folder


@pytest.fixture
def words(tiny_run: TinyRun, folders: Path) -> TinyRun:
    """Return tiny_run on a and b; the second phase reads four times as much of b."""

    def mixed(*overrides: str) -> list[str]:
        return tiny_run(
            "data.train=null",
            f"data.streams={{a: {{path: {folders}/a, proportion: 0.8}}, b: {{path: {folders}/b, proportion: 0.2}}}}",
            "phases.long.streams={a: {proportion: 0.2}, b: {proportion: 0.8}}",
            *overrides,
        )

    return mixed


@pytest.mark.runs
def test_a_run_records_its_mixture(words: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The record must show the mixture that was really trained on."""
    assert main(["train", *words("name=whole")]) == 0
    assert "tokens of text were waiting for a row and are not trained on" in capsys.readouterr().out
    whole = records(tmp_path / "runs/whole")
    for phase, share in (("short", 0.8), ("long", 0.2)):
        mine = [entry["stream_tokens"] for entry in whole if entry["phase"] == phase]
        found = sum(entry["a"] for entry in mine) / sum(sum(entry.values()) for entry in mine)
        assert abs(found - share) < 0.12  # some 5,000 tokens; a few hundred are still with the packer
    assert whole[0]["epochs"] == {"a": 0, "b": 0} and whole[-1]["epochs"]["b"] >= 2
    assert sum(entry["stream_documents"]["b"] for entry in whole) >= 4 and "epoch" not in whole[0]


@pytest.mark.runs
def test_a_stopped_mixture_resumes_to_the_same_losses_and_never_over_another(
    words: TinyRun, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a checkpoint in each phase; a folder may move, but its contents must not change."""
    often = (
        "checkpoint.interval_steps=1",
        "checkpoint.keep=99",
        "phases.short.batch_warmup=null",
        "phases.short.tokens=2500",
    )
    assert main(["train", *words("name=whole", *often)]) == 0
    whole = records(tmp_path / "runs/whole")
    for kept in (3, len(whole) - 2):
        copy = tmp_path / f"runs/kept{kept}"
        shutil.copytree(tmp_path / "runs/whole", copy)
        for number, checkpoint in enumerate(sorted((copy / "checkpoints").glob("step-*")), start=1):
            if number > kept:
                shutil.rmtree(checkpoint)
        swapped = words(f"name=kept{kept}", *often, f"data.streams.b.path={folders}/a")
        capsys.readouterr()
        assert main(["train", *swapped]) == 65
        assert "trained on other data: its hash of lengths of b is" in capsys.readouterr().err
        assert main(["train", *words(f"name=kept{kept}", *often)]) == 0
        assert records(copy) == whole


@pytest.mark.runs
def test_the_fingerprint_covers_every_stream(words: TinyRun, tiny_run: TinyRun, folders: Path) -> None:
    config = read_run(words())
    mixed = data_fingerprint(read_facts(config.data))
    own = {f"{kind} of {name}" for kind in ("shards", "lengths", "token counts") for name in "ab"}
    assert mixed.keys() >= own | {"tokenizer"}
    swapped = data_fingerprint(
        read_facts(read_run(words(f"data.streams.a.path={folders}/b", f"data.streams.b.path={folders}/a")).data)
    )
    assert all(swapped[key] != value for key, value in mixed.items() if " of " in key)
    assert data_fingerprint(read_facts(read_run(tiny_run()).data)).keys() == {
        *("tokenizer", "shards", "lengths", "token counts", "validation shards", "validation lengths")
    }


@pytest.mark.runs
def test_the_unigram_baseline_counts_streams_by_their_shares(words: TinyRun, tiny_run: TinyRun, folders: Path) -> None:
    """Of 6,000 tokens 0.8 * 4,000 + 0.2 * 2,000 come from a. A single folder counts as before."""

    def baseline(config: RunConfig) -> Unigram:
        return unigram_of(config.data, config.phases.values(), config.model.vocab_size, read_facts(config.data))

    found = baseline(read_run(words()))
    counts = {name: np.load(folders / name / TOKEN_COUNTS) for name in "ab"}
    share = {"a": 0.6, "b": 0.4}
    total = sum(each.sum() for each in counts.values())
    expected = 1 + total * sum(share[name] * each / each.sum() for name, each in counts.items())
    assert np.allclose(np.exp(found.log_probability_V[: len(expected)]) * (total + 512), expected)
    config = read_run(tiny_run())
    assert config.data.train is not None
    folder = Path(config.data.train)
    plain = Unigram.from_counts([TokenCounts(folder / TOKEN_COUNTS, read_card(folder).tokens, 1.0)], 512)
    assert np.array_equal(baseline(config).log_probability_V, plain.log_probability_V)
    with pytest.raises(DataError, match="no dataset.json"):
        read_facts(read_run(words(f"data.streams.b.path={folders}/none")).data)
