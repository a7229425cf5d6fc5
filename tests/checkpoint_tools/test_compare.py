"""What differs between two checkpoints. If this breaks, two runs are taken for equal that are not."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modernbert_train.checkpoint_tools import compare as module
from modernbert_train.checkpoint_tools.compare import compare_tensors
from modernbert_train.run.checkpoint import verify
from modernbert_train.tensor_files import StoredTensors
from tests.checkpoint_tools.small_run import SmallRun, write_sharded
from tests.run.small_checkpoint import CONFIG, WEIGHT, edit_state

pytestmark = pytest.mark.runs


def test_the_same_numbers_are_the_same_however_they_were_written(run: SmallRun) -> None:
    """By one rank or by two: the one checkpoint has whole tensors, the other halves."""
    other = write_sharded(run.folder.parent / "other/checkpoints", 500, CONFIG)
    said = run.says("compare", run.at(500), other)
    assert "weights: the same to the bit, 11 tensors" in said
    assert "optimizer state, exp_avg: the same to the bit" in said and "optimizer state, step: the same" in said
    assert "configuration: the same" in said and "clock and place in the data: the same" in said


def test_each_change_is_found_with_its_size(run: SmallRun) -> None:
    def change(name: str, tensor: Tensor) -> Tensor:
        if name == WEIGHT:
            tensor[1, 2] += 3.0
            tensor[3, 0] -= 4.0
        return tensor

    other = write_sharded(run.folder.parent / "other/checkpoints", 500, replace(run.config, seed=3), change)
    (found,) = [each for each in compare_tensors(*(verify(folder).stored_weights() for folder in (run.at(500), other)))
                if not each.equal]  # fmt: skip
    assert found.name == WEIGHT and found.distance == 5.0 and found.largest == 4.0
    assert found.first_norm == pytest.approx(500 * 4.0) and found.relative == pytest.approx(5 / 2000)
    edit_state(other, "training.loader.streams.train.taken", 7)
    said = run.says("compare", run.at(500), other)
    assert re.search(r"weights: 1 of 11 tensors differ; norm of the difference 5, ", said)
    assert re.search(rf"{re.escape(WEIGHT)} +5 +0\.25 % +4\n", said)
    assert "seed: " in said and "taken 3 -> block 0" in said


def test_no_more_than_a_slice_of_each_is_in_memory(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that no machine holds are compared too."""
    sizes: list[int] = []
    real = StoredTensors.rows

    def counted(self: StoredTensors, *args: Any) -> Tensor:
        found = real(self, *args)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(StoredTensors, "rows", counted)
    monkeypatch.setattr(StoredTensors, "__getitem__", lambda self, name: pytest.fail("a whole tensor"))
    monkeypatch.setattr(module, "_MOST_NUMBERS", 6)
    one, other = (verify(run.at(step)).stored_weights() for step in (400, 500))
    found = list(compare_tensors(one, other))
    assert max(sizes) <= 6 and len(sizes) > 4 * len(found)
    for each in found:
        numbers = math.prod(each.shapes[0] or ())
        assert each.distance == pytest.approx(100 * math.sqrt(numbers)) and each.largest == 100


def test_models_of_other_shapes_are_compared_as_far_as_they_go(run: SmallRun) -> None:
    model = replace(run.config.model, num_layers=2, vocab_size=16)
    other = write_sharded(run.folder.parent / "other/checkpoints", 500, replace(run.config, model=model))
    said = run.says("compare", run.at(500), other)
    assert "model.embeddings.tok_embeddings.weight: [8, 4] in A, [16, 4] in B" in said
    assert "model.layers.1.mlp.Wo.weight: in B only" in said and "model.num_layers: 1 -> 2" in said


def test_numbers_that_are_not_finite_are_shown_as_such(run: SmallRun) -> None:
    def change(name: str, tensor: Tensor) -> Tensor:
        return tensor * math.nan if name == WEIGHT else tensor

    other = write_sharded(run.folder.parent / "other/checkpoints", 500, run.config, change)
    said = run.says("compare", run.at(500), other)
    assert "1 of 11 tensors differ; norm of the difference not a number" in said
    assert torch.isnan(verify(other).weights()[WEIGHT]).all()


def test_what_cannot_be_compared_is_said(run: SmallRun) -> None:
    assert "one checkpoint. Name two." in run.says("compare", run.folder, "500", code=78)
    assert "no checkpoint of step 7" in run.says("compare", run.folder, "7", code=74)
    assert "no such folder" in run.says("compare", run.folder, "nowhere/at/all", code=78)
