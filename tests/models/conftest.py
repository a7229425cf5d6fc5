"""Small encoders, packed batches, and transformers' ModernBERT with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor
from transformers.initialization import no_init_weights

from benchmarks.batches import lay_out, mlm_batch
from modernbert_train.batch import IGNORED_LABEL, Batch
from modernbert_train.config.schema import ComputeConfig, ModernBertConfig
from modernbert_train.models.init import initialize
from modernbert_train.models.modernbert import ModernBertForMaskedLM

PAD = 1
# a CUDA build queries the GPUs once, on first use, and some tests fake one
torch.backends.cudnn.version()


@pytest.fixture
def small() -> Callable[..., ModernBertConfig]:
    """A narrow encoder with the real pattern of layers; weights large enough for attention to matter."""

    def make(**changes: object) -> ModernBertConfig:
        defaults: dict[str, object] = {
            "vocab_size": 160,
            "hidden_size": 64,
            "num_layers": 7,
            "num_heads": 2,
            "intermediate_size": 48,
            "local_attention": 16,
            "init_std": 0.15,
        }
        return ModernBertConfig(**(defaults | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def build() -> Callable[..., ModernBertForMaskedLM]:
    def make(
        config: ModernBertConfig, theta: float = 10_000.0, z_loss: float = 0.0, **compute: object
    ) -> ModernBertForMaskedLM:
        settings = ComputeConfig(**({"attention": "sdpa"} | compute))  # type: ignore[arg-type]
        model = ModernBertForMaskedLM(replace(config, global_rope_theta=theta), settings, z_loss=z_loss)
        initialize(model, config, seed=3)
        generator = torch.Generator().manual_seed(4)
        for parameter in model.parameters():  # norms and biases that parity could miss at one and zero
            if parameter.dim() == 1:
                parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
        return model.eval()

    return make


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


@pytest.fixture
def reference() -> Callable[..., transformers.ModernBertForMaskedLM]:
    """transformers' model with the same weights; names must match exactly for this to load."""

    def make(model: ModernBertForMaskedLM, theta: float = 10_000.0, attention: str = "eager") -> torch.nn.Module:
        config = model.config
        hf_config = transformers.ModernBertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            local_attention=config.local_attention,
            norm_eps=config.norm_eps,
            global_attn_every_n_layers=config.global_attn_every_n_layers,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": theta},
                "sliding_attention": {"rope_type": "default", "rope_theta": config.local_rope_theta},
            },
            pad_token_id=PAD,
            bos_token_id=2,
            eos_token_id=3,
            cls_token_id=2,
            sep_token_id=3,
            attn_implementation=attention,
        )
        with no_init_weights():  # drawing them takes seconds at real sizes, and all are loaded
            twin = transformers.ModernBertForMaskedLM(hf_config)
        twin.tie_weights()
        twin.load_state_dict(model.state_dict(), strict=True)
        return twin.eval()

    return make
