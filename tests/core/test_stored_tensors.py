"""Files of tensors that are hashed while they are written, and tensors whose slices are in several of them.

If this breaks, a checkpoint's hash does not match its contents, or a run continues with rows from the wrong place.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from modernbert_train.checkpoints.manifest import FileHash
from modernbert_train.core.tensor_files import StoredTensors, write_hashed


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "table": torch.randn(10, 3, generator=draw),
        "half": torch.randn(5, generator=draw).half(),
        "bf16": torch.randn(7, 2, generator=draw).bfloat16(),
        "double": torch.randn(2, 2, 2, generator=draw).double(),
        "step": torch.tensor(7),
        "counts": torch.arange(3, dtype=torch.int32),
        "none": torch.empty(0, 4),
    }


def test_what_is_written_is_safetensors_with_the_reported_hash(tmp_path: Path) -> None:
    """More than one chunk of 4 MiB as well."""
    given = tensors() | {"large": torch.arange(3 << 19, dtype=torch.float32).reshape(3, -1)}
    found = write_hashed(tmp_path / "file", given)
    assert FileHash(found.bytes, found.xxh3_128) == FileHash.of(tmp_path / "file") and found.not_finite == []
    back = safetensors.torch.load_file(tmp_path / "file")
    assert back.keys() == given.keys()
    for name, tensor in given.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name


@pytest.mark.parametrize("name", ["table", "half", "bf16", "double"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_every_number_that_is_none_is_seen_while_it_is_written(tmp_path: Path, name: str, value: float) -> None:
    given = tensors()
    given[name].view(-1)[-1] = value
    assert write_hashed(tmp_path / "file", given).not_finite == [name]


def test_slices_in_several_files_are_one_tensor(tmp_path: Path) -> None:
    """Any rows can be read, for any cuts."""
    whole = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    cuts = {"a": (6, 10), "b": (0, 4), "c": (4, 6)}
    for file, (first, end) in cuts.items():
        write_hashed(tmp_path / file, {"table": whole[first:end]} | ({"step": torch.tensor(3)} if file == "c" else {}))
    stored = StoredTensors(
        tmp_path, {file: {"table": (first, 10)} for file, (first, _) in cuts.items()}, floating=False
    )
    assert stored.shapes == {"table": (10, 3), "step": ()} and set(stored) == {"table", "step"}
    assert torch.equal(stored["table"], whole) and stored["step"] == 3
    for first in range(10):
        for end in range(first, 11):
            assert torch.equal(stored.rows("table", first, end - first), whole[first:end]), (first, end)


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ({"a": {"t": (0, 8)}, "b": {"t": (5, 8)}}, "the slices of t do not join: 4 rows, then one from row 5"),
        ({"a": {"t": (0, 8)}, "b": {"t": (3, 8)}}, "the slices of t do not join: 4 rows, then one from row 3"),
        ({"a": {"t": (0, 9)}, "b": {"t": (4, 9)}}, "the slices of t have 8 rows of 9"),
        ({"a": {"t": (0, 8)}, "b": {"t": (4, 9)}}, "b: t is a slice of"),
        ({"a": {"t": (0, 8), "u": (0, 1)}, "b": {"t": (4, 8)}}, "a lacks u"),
        ({"a": {}, "b": {}}, "the slices of t do not join"),
    ],
)
def test_slices_that_make_no_whole_are_refused(
    tmp_path: Path, slices: dict[str, dict[str, tuple[int, int]]], message: str
) -> None:
    for file in ("a", "b"):
        write_hashed(tmp_path / file, {"t": torch.zeros(4, 2)})
    with pytest.raises(ValueError, match=message):
        StoredTensors(tmp_path, slices)
