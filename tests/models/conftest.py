"""A GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from modernbert_train.models.attention import choose_kernel, flash, flex, tiles, varlen

# a CUDA build queries the GPUs once, on first use, and some tests fake one
torch.backends.cudnn.version()


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
