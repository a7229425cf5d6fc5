"""The adapters around Composer: held-out figures, failing loggers, and the check that sharding is active."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from modernbert_train.__main__ import read_run
from modernbert_train.batch import IGNORED_LABEL, Batch, Sums
from modernbert_train.clock import Clock
from modernbert_train.data.dataset_card import TOKEN_COUNTS, read_card, write_card
from modernbert_train.data.unigram import TokenCounts, Unigram
from modernbert_train.distributed.compute import Compute
from modernbert_train.errors import DataError, RunError
from modernbert_train.evaluate import heldout as evaluating
from modernbert_train.evaluate.heldout import Evaluation
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.train.adapters import ComposerObjective, assert_sharded
from modernbert_train.train.loggers import Harmless
from tests.support.texts import texts_of
from tests.support.tiny_run import TinyRun

CPU = torch.device("cpu")


class Flat(nn.Module):
    """Predicts uniformly, with loss 7; records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[torch.Tensor] = []

    def forward(self, batch: Batch, figures: bool) -> Sums:
        labels_M = batch.targets["labels_M"]
        labels = labels_M[labels_M != IGNORED_LABEL]
        self.labels.append(labels)
        return Sums({"mlm": torch.tensor(math.log(512) * len(labels))}, {"mlm/hits": (labels == 7).sum()})


def evaluate(words: list[str], model: nn.Module) -> Evaluation:
    config = read_run(words)
    validation = texts_of(config).validation()
    return validation.evaluate(model, Clock.of(config).phases[0], Compute(CPU, "fp32"))


def test_validation_is_the_mean_over_predicted_tokens_beside_the_unigram_guess(
    tiny_run: TinyRun, tiny_data: Path
) -> None:
    """The main figure: recomputed here from labels and token counts only."""
    model = Flat()
    found = evaluate(tiny_run(), model)
    labels = torch.cat(model.labels).numpy()
    counts = np.load(tiny_data / "train" / TOKEN_COUNTS).astype(float)
    counts = np.pad(counts, (0, 512 - len(counts))) + 1
    assert found.predicted == len(labels) > 50
    assert found.loss == pytest.approx(math.log(512), rel=1e-6)
    assert found.accuracy == pytest.approx((labels == 7).mean())
    assert found.unigram_loss == pytest.approx(-np.log(counts / counts.sum())[labels].mean(), rel=1e-5)
    assert found.unigram_accuracy == pytest.approx((labels == counts.argmax()).mean())


def test_bits_per_byte_are_there_where_the_bytes_are_known(tiny_run: TinyRun, tiny_data: Path, tmp_path: Path) -> None:
    """Losses of two tokenizers do not compare: longer tokens have a higher loss each."""
    assert "bits_per_byte" not in evaluate(tiny_run(), Flat()).figures
    shutil.copytree(tiny_data / "validation", tmp_path / "held_out")
    card = read_card(tmp_path / "held_out")
    write_card(tmp_path / "held_out", replace(card, text_bytes=3 * card.tokens))
    found = evaluate(tiny_run(f"data.validation={tmp_path}/held_out"), Flat())
    assert found.figures["bits_per_byte"] == pytest.approx(9 / 3)  # 512 equally likely entries: 9 bits a token


def test_validation_asks_the_same_questions_of_every_run(tiny_run: TinyRun) -> None:
    """Figures of runs with other seeds, microbatches or training masks must compare."""
    asked = []
    for words in ((), ("seed=9", "objective.mask_rate=0.5", "phases.short.microbatch_tokens=512")):
        model = Flat()
        evaluate(tiny_run(*words), model)
        asked.append(torch.cat(model.labels))
    assert torch.equal(*asked)


@pytest.mark.runs
def test_each_rank_measures_rows_of_its_own_on_any_number_of_machines(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines with a rank each: both are rank 0 of their machine, and together they measure each row once."""
    model = Flat()
    words = tiny_run("phases.short.microbatch_tokens=64")
    whole = evaluate(words, model)
    monkeypatch.setattr(evaluating, "num_ranks", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "0")
    asked, predicted = [], 0
    for rank in range(2):
        monkeypatch.setattr(evaluating, "this_rank", lambda rank=rank: rank)
        own = Flat()
        predicted += evaluate(words, own).predicted
        asked.append(own.labels)
    assert predicted == whole.predicted
    assert [len(labels) for labels in asked] == [-(-len(model.labels) // 2)] * 2  # equally many microbatches on each
    turns = [labels for pair in zip(*asked, strict=True) for labels in pair][: len(model.labels)]
    assert all(torch.equal(one, other) for one, other in zip(turns, model.labels, strict=True))


def test_validation_stops_at_max_tokens_and_never_divides_by_nothing(tiny_run: TinyRun) -> None:
    assert evaluate(tiny_run("eval.max_tokens=60"), Flat()).predicted < 12
    with pytest.raises(DataError, match=r"not one token to predict.*eval\.max_tokens"):
        evaluate(tiny_run("eval.max_tokens=1", "objective.eval_mask_rate=0.001"), Flat())


def test_missing_token_counts_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"token_counts\.npy: cannot be read"):
        Unigram.from_counts([TokenCounts(tmp_path / TOKEN_COUNTS, 9, 1.0)], 512)


@pytest.mark.parametrize(
    "counts",
    [np.arange(4), -np.arange(5), np.arange(5.0), np.ones((2, 5), int), np.array(10), np.zeros(600, int), np.zeros(0)],
)
def test_token_counts_of_other_shards_are_refused(tmp_path: Path, counts: NDArray[Any]) -> None:
    """They would give a plausible but wrong baseline."""
    np.save(tmp_path / TOKEN_COUNTS, np.arange(5))
    assert Unigram.from_counts([TokenCounts(tmp_path / TOKEN_COUNTS, 10, 1.0)], 512).most_frequent == 4
    np.save(tmp_path / TOKEN_COUNTS, counts)
    with pytest.raises(DataError, match=r"token_counts\.npy: holds .*the card next to it says 10 tokens"):
        Unigram.from_counts([TokenCounts(tmp_path / TOKEN_COUNTS, 10, 1.0)], 512)


def test_a_logger_that_fails_is_switched_off_with_a_warning_and_the_run_continues(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A W&B outage at night must not end a run."""
    failing = Mock()
    failing.log_metrics.side_effect = SystemExit("no network")
    logger = Harmless("wandb", lambda: failing)
    for _ in range(3):
        logger.log_metrics({"loss": 1.0})
    assert failing.log_metrics.call_count == 1
    assert capsys.readouterr().out == "warning: wandb is off for the rest of this run: no network\n"
    Harmless("wandb", Mock(side_effect=RuntimeError("no account"))).log_metrics({"loss": 1.0})
    assert "no account" in capsys.readouterr().out


def test_an_unsharded_model_is_not_taken_for_a_sharded_one(tiny_run: TinyRun) -> None:
    """Composer ignores an FSDP2 setting that it does not understand, and trains with DDP."""
    config = read_run(tiny_run())
    with pytest.raises(RunError, match=r"fsdp2: not in force; \d+ parameters are whole"):
        assert_sharded(ComposerObjective(ModernBertForMaskedLM(config.model)), None)
