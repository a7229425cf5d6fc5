"""NeoBERT by its paper and the names of its released files, as a model of transformers, to hold ours against.

Nothing of it is shared with ours: positions are phases of complex numbers, and attention is written out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput


class NeoBERTConfig(transformers.PretrainedConfig):  # type: ignore[misc]
    model_type = "neobert"

    def __init__(self, pad_token_id: int = 0, **keys: Any) -> None:
        super().__init__(**keys)
        self.pad_token_id = pad_token_id
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
            setattr(self, key, keys.get(key, 0))
        self.norm_eps = keys.get("norm_eps", 1e-6)


class Gated(nn.Module):
    def __init__(self, width: int, said: int) -> None:
        super().__init__()
        hidden = -(-int(said * 2 / 3) // 8) * 8  # two thirds of what config.json says, in eights
        self.w12 = nn.Linear(width, 2 * hidden, bias=False)
        self.w3 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).tensor_split(2, dim=-1)
        return self.w3(gate.sigmoid() * gate * value)


class Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.ffn = Gated(width, config.intermediate_size)
        self.attention_norm = nn.RMSNorm(width, config.norm_eps)
        self.ffn_norm = nn.RMSNorm(width, config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Of one sequence, [tokens, width]."""
        size = x.shape[-1] // self.heads
        heads = [self.alone(part, size) for part in self.qkv(self.attention_norm(x)).split(3 * size, dim=-1)]
        x = x + self.wo(torch.cat(heads, dim=-1))
        return x + self.ffn(self.ffn_norm(x))

    def alone(self, qkv: Tensor, size: int) -> Tensor:
        """One head: a score is the real part of a product, q times the conjugate of k, turned by their distance."""
        q, k, v = qkv.split(size, dim=-1)
        frequency = 10_000.0 ** -(torch.arange(size // 2, dtype=torch.float32) * 2 / size)
        angle = torch.arange(len(q))[:, None] * frequency
        phase = torch.complex(angle.cos(), angle.sin())
        turned_q, turned_k = (torch.complex(each[:, ::2], each[:, 1::2]) * phase for each in (q, k))
        scores = (turned_q @ turned_k.conj().t()).real / size**0.5
        return scores.softmax(dim=-1) @ v


class Body(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.encoder = nn.Embedding(config.vocab_size, config.hidden_size)
        self.transformer_encoder = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.layer_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)


class NeoBERTLMHead(transformers.PreTrainedModel):  # type: ignore[misc]
    config_class = NeoBERTConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Body(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def states(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.model.encoder.weight)
        for block in self.model.transformer_encoder:
            x = block(x)
        return self.model.layer_norm(x)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> MaskedLMOutput:
        """Of texts without padding."""
        assert attention_mask is None or attention_mask.all()
        return MaskedLMOutput(logits=self.decoder(torch.stack([self.states(ids) for ids in input_ids])))


def register() -> None:
    """As a user would whose Hub is offline: transformers' Auto classes know it from then on."""
    transformers.AutoConfig.register("neobert", NeoBERTConfig, exist_ok=True)
    transformers.AutoModelForMaskedLM.register(NeoBERTConfig, NeoBERTLMHead, exist_ok=True)
