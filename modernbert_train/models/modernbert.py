"""The ModernBERT encoder on packed buffers, with its masked-LM head (arXiv 2412.13663).

One model for all kernels: rows lie end to end in one line of T tokens and `cu_seqlens` says where sequences end, so
nothing is padded inside the model. Hidden states are gathered at the predicted positions before the head, which keeps
logits, the largest tensor by far, to the masked share of the tokens, and in training to a chunk of them at a time.

Names of modules and parameters are those of transformers' ModernBertForMaskedLM: state dicts pass both ways as they
are. There are no buffers; the RoPE bases are plain numbers of the configuration, so a change of phase cannot be lost in
a cache or a checkpoint.

Shape legend: T packed tokens, M predicted positions (padded), D model width, V vocabulary, E rotated pairs of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modernbert_train.batch import IGNORED_LABEL, Batch
from modernbert_train.config.schema import ComputeConfig, ModernBertConfig
from modernbert_train.models.attention import choose_kernel
from modernbert_train.models.heads import ChunkedLoss, PredictionHead, loss_and_gradient, masked_lm_loss_sum
from modernbert_train.models.layers import EncoderLayer, compute_dtype, layer_norm, rotary_tables

_PLAIN = ComputeConfig()


@dataclass(frozen=True)
class MlmOutput:
    """What one microbatch gives.

    Attributes:
        loss: fp32 scalar, the mean over the microbatch's labels; 0 with a graph if it has none.
        logits_MV: at batch.positions_M, in the precision of the forward pass; None if they were not asked for.
    """

    loss: Tensor
    logits_MV: Tensor | None


class Embeddings(nn.Module):
    """Token embedding and its norm; positions enter in the attention."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = layer_norm(config)

    def forward(self, input_ids_T: Tensor) -> Tensor:
        return self.norm(self.tok_embeddings(input_ids_T))


class Encoder(nn.Module):
    """Embeddings, layers and the final norm."""

    def __init__(self, config: ModernBertConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.config = config
        self.compute = compute
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(EncoderLayer(config, index) for index in range(config.num_layers))
        self.final_norm = layer_norm(config)

    def rotary(self, position_ids_T: Tensor, dtype: torch.dtype) -> dict[bool, tuple[Tensor, Tensor]]:
        """cos_TE and sin_TE of global (True) and local (False) layers, from the bases of the present phase."""
        config, size = self.config, self.config.head_size
        return {
            True: rotary_tables(position_ids_T, config.global_rope_theta, size, dtype),
            False: rotary_tables(position_ids_T, config.local_rope_theta, size, dtype),
        }

    def forward(self, batch: Batch) -> Tensor:
        config, compute = self.config, self.compute
        hidden_TD = self.embeddings(batch.input_ids_T)
        device, dtype = hidden_TD.device, compute_dtype(hidden_TD)
        local = choose_kernel(compute.attention, device, dtype)
        attention = dict.fromkeys((True, False), (local, local.prepare(batch, config.half_window)))
        if compute.global_attention is not None:
            whole = choose_kernel(compute.global_attention, device, dtype, "compute.global_attention")
            if whole is not local:
                attention[True] = (whole, whole.prepare(batch, config.half_window))
        # its length follows the number of documents; nothing compiled depends on it, so no graph should
        torch._dynamo.maybe_mark_dynamic(batch.cu_seqlens_S, 0)
        rotary = self.rotary(batch.position_ids_T, dtype)
        recompute = compute.activation_checkpointing and torch.is_grad_enabled()
        for index, layer in enumerate(self.layers):
            is_global = config.is_global(index)
            inputs = (hidden_TD, rotary[is_global], *attention[is_global])
            hidden_TD = checkpoint(layer, *inputs, use_reentrant=False) if recompute else layer(*inputs)
        return self.final_norm(hidden_TD)


class ModernBertForMaskedLM(nn.Module):
    """Encoder, head and tied decoder. Fresh weights are meaningless until `models.init.initialize` or a checkpoint.

    Args:
        config: the architecture.
        compute: kernels and recomputation.
        z_loss: see `masked_lm_loss_sum`.
    """

    def __init__(self, config: ModernBertConfig, compute: ComputeConfig = _PLAIN, *, z_loss: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.model = Encoder(config, compute)
        self.z_loss = z_loss
        self.head = PredictionHead(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=True)
        self.decoder.weight = self.model.embeddings.tok_embeddings.weight
        self._loss_and_gradient = loss_and_gradient

    def set_phase(self, config: ModernBertConfig) -> None:
        """Go on with the architecture as it is in a phase, which may have other RoPE bases; before every step."""
        self.config = self.model.config = config

    def compile_layers(self, **options: Any) -> None:
        """torch.compile each layer, and the loss, in place; parameter names stay. Call it once, before sharding.

        Shapes are static within a phase, whatever the number of documents, so each (kind of layer, train or eval,
        shape) is one graph: first, local and global layers make 6 graphs for each shape, more than dynamo's limit of 8
        allows over a run with several phases.

        Args:
            options: for torch.compile, such as mode="max-autotune-no-cudagraphs".
        """
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        for layer in self.model.layers:
            layer.compile(dynamic=False, **options)
        self._loss_and_gradient = torch.compile(loss_and_gradient, dynamic=False, **options)

    def encode(self, batch: Batch) -> Tensor:
        """Final hidden states, hidden_TD, of every token (pad tokens too).

        Under FSDP2 make it an entry first: torch.distributed.fsdp.register_fsdp_forward_method(model, "encode").
        """
        return self.model(batch)

    def forward(self, batch: Batch, keep_logits: bool = False) -> MlmOutput:
        """Predict the microbatch's masked tokens; see `MlmOutput`. Nothing is read back from the device.

        Args:
            batch: on the model's device.
            keep_logits: compute the loss from all logits at once, in the plain way, and return them.

        Raises:
            ConfigError: compute.attention names a kernel that cannot serve this device and precision.
        """
        # index_select: its backward pass adds rows where they belong, that of an index sorts the positions first
        hidden_MD = self.head(self.encode(batch).index_select(0, batch.positions_M))
        logits_MV = None
        if keep_logits:
            logits_MV = self.decoder(hidden_MD)
            loss_sum = masked_lm_loss_sum(logits_MV, batch.labels_M, self.z_loss)
        else:
            weight_VD, bias_V = self.decoder.weight, self.decoder.bias
            size = compute_dtype(hidden_MD).itemsize
            chunk = self.config.logit_chunk(on_gpu=hidden_MD.is_cuda, bytes_per_logit=size)
            loss_sum = ChunkedLoss.apply(
                hidden_MD, weight_VD, bias_V, batch.labels_M, self.z_loss, chunk, self._loss_and_gradient
            )
        # counted on the device, not taken from the host, so that one CUDA graph serves microbatches of any content
        predicted = (batch.labels_M != IGNORED_LABEL).sum().clamp(min=1)
        return MlmOutput(loss_sum / predicted, logits_MV)
