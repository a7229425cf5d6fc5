"""Small encoders and packed batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.batches import lay_out, mlm_batch
from modernbert_train.batch import IGNORED_LABEL, Batch
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.attention import choose_kernel, flash, flex, tiles, varlen
from tests.support import encoders
from tests.support.encoders import MODERNBERT, PAD, with_dropout

# a CUDA build queries the GPUs once, on first use, and some tests fake one
torch.backends.cudnn.version()


@pytest.fixture
def small() -> Callable[..., ModernBertConfig]:
    """A narrow encoder with the real pattern of layers; weights large enough for attention to matter."""

    return partial(replace, with_dropout(MODERNBERT, 0.1), num_layers=7)


@pytest.fixture
def build() -> Callable[..., Any]:
    return encoders.build


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[tuple[int, int]], torch.device]]:
    """Make kernels believe in a GPU of a given capability, with all that they need but FlashAttention 2 and 3."""

    def pretend(capability: tuple[int, int]) -> torch.device:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
        monkeypatch.setattr(varlen, "missing_in_torch", lambda *_, **__: None)  # a CPU build lacks FlashAttention
        for kernel in (flex, tiles):
            monkeypatch.setattr(kernel, "missing_on_gpu", list)
        for name in ("flash2", "flash3"):
            monkeypatch.setattr(flash, name, None)
        return torch.device("cuda")

    choose_kernel.cache_clear()
    yield pretend
    choose_kernel.cache_clear()  # of this machine nothing is known


@pytest.fixture
def sequences() -> Callable[..., list[Tensor]]:
    """Random token ids above the special ones, one tensor for each length."""

    def make(lengths: Sequence[int], vocab_size: int = 160) -> list[Tensor]:
        generator = torch.Generator().manual_seed(5)
        return [torch.randint(4, vocab_size, (n,), generator=generator) for n in lengths]

    return make


@pytest.fixture
def pack() -> Callable[..., Batch]:
    """Lay rows of sequences end to end, as the loader does: each tail a sequence of pads, boundaries padded with T."""

    def make(rows: list[list[Tensor]], row_tokens: int, predict_every: int = 3, spare: int = 4) -> Batch:
        chunks: list[Tensor] = []
        predicted: list[int] = []
        start = 0
        for row in rows:
            tail = row_tokens - sum(len(ids) for ids in row)
            assert tail >= 0
            for ids in row:
                predicted += range(start, start + len(ids), predict_every) if predict_every else ()
                start += len(ids)
                chunks.append(ids)
            if tail:
                chunks.append(torch.full((tail,), PAD))
                start += tail
        ids_T = torch.cat(chunks)
        lengths = [len(chunk) for chunk in chunks]
        boundaries = [0, *torch.tensor(lengths).cumsum(0).tolist(), *[len(ids_T)] * spare]
        positions = torch.tensor(predicted + [0] * spare, dtype=torch.int64)
        labels = ids_T[positions]
        labels[len(predicted) :] = IGNORED_LABEL
        return mlm_batch(
            lay_out(ids_T, boundaries, row_tokens),
            positions,
            labels,
            num_tokens=sum(len(ids) for row in rows for ids in row),
            num_rows=len(rows),
        )

    return make
