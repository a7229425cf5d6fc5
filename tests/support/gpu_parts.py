"""Common parts of the tests on a GPU: the device, a mark, models, and batches of fixed shape.

`MODERNBERT_TEST_DEVICE=cpu pytest -m gpu tests/gpu` runs the tests that are meaningful without a GPU, with a CPU's
kernels and at smaller sizes: to try a test before a GPU is available.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

pytest.importorskip("omegaconf", reason="the configuration needs omegaconf")

from benchmarks.batches import labels_of_line, lay_out, mean_loss, mlm_batch
from modernbert_train.batch import IGNORED_LABEL, Batch
from modernbert_train.config.schema import ComputeConfig, ModernBertConfig
from modernbert_train.models.attention import KERNELS
from modernbert_train.models.init import initialize
from modernbert_train.models.modernbert import ModernBertForMaskedLM

DEVICE = torch.device(os.environ.get("MODERNBERT_TEST_DEVICE", "cuda"))
ON_GPU = DEVICE.type == "cuda" and torch.cuda.is_available()
GPU_TEST = [pytest.mark.gpu, pytest.mark.skipif(DEVICE.type == "cuda" and not ON_GPU, reason="needs a CUDA device")]
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")

PAD = 1
Seen = tuple[Tensor, Tensor, dict[str, Tensor]]  # hidden states, loss, gradients


def small(**changes: Any) -> ModernBertConfig:
    """A narrow encoder with the real pattern of layers and, on a GPU, the real width of heads; no dropout."""
    size = {"hidden_size": 256, "num_heads": 4, "intermediate_size": 384, "num_layers": 7}
    if not ON_GPU:
        size = {"hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "num_layers": 4}
    given: dict[str, Any] = {"vocab_size": 512, "init_std": 0.05, "attention_out_dropout": 0.0, **size}
    return ModernBertConfig(**(given | changes))


def build(config: ModernBertConfig, **compute: Any) -> ModernBertForMaskedLM:
    """A model on the device with weights that follow from the configuration alone, in training mode."""
    model = ModernBertForMaskedLM(config, ComputeConfig(**compute))
    initialize(model, config, seed=3)
    return model.to(DEVICE).train()


def precision(bf16: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(DEVICE.type, torch.bfloat16) if bf16 else contextlib.nullcontext()


def need_kernel(name: str, bf16: bool) -> None:
    """Skip the test, with the kernel's own reason, where it cannot serve."""
    reason = KERNELS[name].support(DEVICE, torch.bfloat16 if bf16 else torch.float32)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")


def make_batch(
    documents: Sequence[int], row_tokens: int, vocab_size: int, *, boundaries: int = 64, seed: int = 0, rows: int = 1
) -> Batch:
    """Return a microbatch on the device whose shape depends on the buffer alone; 30 % of it may be predicted.

    Args:
        documents: their lengths; each stays whole, and the rest of the buffer is a sequence of pads.
        row_tokens: of a row, which no document exceeds.
        vocab_size: ids are drawn from it.
        boundaries: length of cu_seqlens.
        seed: of the ids.
        rows: in the buffer.
    """
    total = rows * row_tokens
    generator = torch.Generator().manual_seed(seed)
    tail = total - sum(documents)
    lengths = [*documents, *([tail] if tail else [])]
    assert max(lengths) <= row_tokens and tail >= 0
    cu_seqlens = torch.full((boundaries,), total, dtype=torch.int32)
    cu_seqlens[: len(lengths) + 1] = torch.tensor([0, *lengths]).cumsum(0)
    ids_T = torch.randint(4, vocab_size, (total,), generator=generator)
    ids_T[sum(documents) :] = PAD
    most = round(0.3 * total)
    predicted = min(most, sum(documents) // 2)
    positions = torch.randperm(sum(documents), generator=generator)[:predicted].sort().values
    spare = most + 8 - predicted
    return mlm_batch(
        lay_out(ids_T, cu_seqlens, row_tokens),
        torch.cat([positions, torch.zeros(spare, dtype=torch.int64)]),
        torch.cat([ids_T[positions], torch.full((spare,), IGNORED_LABEL)]),
        num_tokens=sum(documents),
        num_rows=rows,
    ).to(DEVICE)


def training_step(model: ModernBertForMaskedLM, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Forward, backward and update in mixed precision."""
    with precision(True):
        loss = mean_loss(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def see(model: ModernBertForMaskedLM, batch: Batch, bf16: bool) -> Seen:
    """Hidden states, loss and all gradients of one microbatch, in fp32."""
    model.zero_grad()
    with precision(bf16):
        hidden_TD = model.encode(batch.packed)
        loss = mean_loss(model, batch)
    loss.backward()
    grads = {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(grads) == len(list(model.parameters()))
    return hidden_TD.detach().float(), loss.detach().float(), grads


def apart(found: Seen, exact: Seen) -> dict[str, float]:
    """Relative distance of hidden states, loss and each gradient."""
    pairs = {"hidden": (found[0], exact[0]), "loss": (found[1], exact[1])}
    pairs |= {name: (found[2][name], exact[2][name]) for name in exact[2]}
    return {name: float((one - other).norm() / other.norm()) for name, (one, other) in pairs.items()}


def see_twin(twin: Any, batch: Batch, documents: Sequence[int], bf16: bool) -> Seen:
    """The same of transformers' model, which gets the documents padded; hidden states in the order of the line."""
    used = sum(documents)
    split = [tensor[:used].split(list(documents)) for tensor in (batch.packed.input_ids_T, labels_of_line(batch))]
    ids = pad_sequence(list(split[0]), batch_first=True, padding_value=PAD)
    labels = pad_sequence(list(split[1]), batch_first=True, padding_value=IGNORED_LABEL)
    mask = pad_sequence([torch.ones_like(part) for part in split[0]], batch_first=True)
    twin.zero_grad()
    with precision(bf16):
        hidden = twin.model(input_ids=ids, attention_mask=mask).last_hidden_state
        loss = twin(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    line = torch.cat([hidden[index, :length] for index, length in enumerate(documents)])
    return line.detach().float(), loss.detach().float(), {n: p.grad.float().clone() for n, p in twin.named_parameters()}
