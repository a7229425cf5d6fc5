"""An index of late interaction on disk: the same vectors, exact search, and a kill costs at most one part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from modernbert_train.errors import ConfigError, StorageError
from modernbert_train.evaluate.retrieval.index import make_index
from modernbert_train.evaluate.retrieval.ranking import Search

WIDTH, ABOUT = 16, {"weights": "a", "max_tokens": 64}
SIZES = [int(size) for size in np.random.default_rng(3).integers(1, 40, size=300)]


def encode(texts: list[str]) -> list[Tensor]:
    """Return a matrix for each text, determined by its number; its length is one of SIZES."""
    found = []
    for text in texts:
        draw = torch.Generator().manual_seed(int(text))
        found.append(torch.nn.functional.normalize(torch.randn(SIZES[int(text)], WIDTH, generator=draw), dim=1))
    return found


def parts(at_once: int = 32) -> Iterator[list[str]]:
    names = [str(number) for number in range(len(SIZES))]
    yield from (names[start : start + at_once] for start in range(0, len(names), at_once))


@pytest.mark.runs
def test_search_over_an_index_is_that_of_every_token_with_every_token(tmp_path: Path) -> None:
    """For any parts: scores and ranks equal a loop over the stored vectors."""
    maxsim = pytest.importorskip("sentence_transformers").util.maxsim
    index = make_index(tmp_path / "index", ABOUT, parts(), encode)
    stored = [matrix.half().float() for matrix in encode([str(number) for number in range(len(SIZES))])]
    draw = torch.Generator().manual_seed(1)
    queries = [torch.nn.functional.normalize(torch.randn(size, WIDTH, generator=draw), dim=1) for size in (3, 9, 1, 17)]
    brute = torch.tensor([[float((q @ d.T).max(dim=1).values.sum()) for d in stored] for q in queries])
    for most in (64, 1000, 1 << 20):
        kept = [each for part in index.parts(most=most) for each in part]
        assert all(torch.equal(one, other) for one, other in zip(kept, stored, strict=True))
        scores = torch.cat([maxsim(queries, part) for part in index.parts(most=most)], dim=1)
        assert torch.allclose(scores, brute, atol=1e-6, rtol=1e-6)
        found = Search(queries, [f"{number:03}" for number in range(len(SIZES))], maxsim, 10)
        for part in index.parts(most=most):
            assert sum(map(len, part)) <= max(most, max(SIZES))
            found.add(part)
        assert found.ranks() == brute.topk(10, dim=1).indices.tolist()


def test_a_killed_index_is_resumed(tmp_path: Path) -> None:
    """A partially written part is truncated; complete parts are not embedded again."""
    whole = make_index(tmp_path / "whole", ABOUT, parts(), encode)
    calls: list[int] = []

    def killed(texts: list[str]) -> list[Tensor]:
        calls.append(len(texts))
        if len(calls) == 5:
            raise KeyboardInterrupt
        return encode(texts)

    with pytest.raises(KeyboardInterrupt):
        make_index(tmp_path / "cut", ABOUT, parts(), killed)
    for name in ("vectors.f16", "ends.i64"):
        with (tmp_path / "cut" / name).open("ab") as file:
            file.write(b"half of what")
    index = make_index(tmp_path / "cut", ABOUT, parts(50), killed)
    assert sum(calls[5:]) == len(SIZES) - 4 * 32
    assert np.array_equal(index.vectors_TD, whole.vectors_TD) and np.array_equal(index.ends_N, whole.ends_N)
    again = make_index(tmp_path / "cut", ABOUT, parts(), lambda texts: pytest.fail("it is whole"))
    assert np.array_equal(again.vectors_TD, whole.vectors_TD)


def test_an_index_of_something_else_or_damaged_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    make_index(folder, ABOUT, parts(), encode)
    with pytest.raises(ConfigError, match=r"has vectors of another corpus, model or length \(weights\)"):
        make_index(folder, ABOUT | {"weights": "b"}, parts(), encode)
    whole = (folder / "vectors.f16").read_bytes()
    (folder / "vectors.f16").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StorageError, match="its vectors are not those that were written"):
        make_index(folder, ABOUT, parts(), encode)
    (folder / "vectors.f16").write_bytes(b"")
    with pytest.raises(StorageError, match="vectors.f16: has 0 of .* bytes. Remove the folder"):
        make_index(folder, ABOUT, parts(), encode)
    (folder / "index.json").write_text(json.dumps({"about": 3}))
    with pytest.raises(StorageError, match="index.json: is damaged"):
        make_index(folder, ABOUT, parts(), encode)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").touch()
    with pytest.raises(ConfigError, match="holds thesis.txt, and no index"):
        make_index(tmp_path / "mine", ABOUT, parts(), encode)
