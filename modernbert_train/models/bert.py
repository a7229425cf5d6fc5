"""BERT and RoBERTa on packed buffers, top to bottom, with the heads they are pre-trained with (arXiv 1810.04805).

Learned positions that restart in each sequence, token types, post-norm layers with biases everywhere, full attention
through the same kernels as ModernBERT's global layers. Like there, nothing is padded inside the model.

Query, key and value are one matrix, Wqkv; weights/formats/bert.py translates to transformers' names and back. One
thing differs from training transformers' model: there the embedding row of [PAD] gets no gradient as an input. In a
packed buffer pads are sequences of their own without predictions, so it gets none either, unless the objective puts
[PAD] in place of a token.

Shape legend: T packed tokens, M predicted positions (padded), P pairs, D model width, F hidden width, N heads,
H head width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modernbert_train.batch import IGNORED_LABEL, Batch, Packed
from modernbert_train.config.bert import BertConfig
from modernbert_train.models.attention import Kernel, choose_kernel
from modernbert_train.models.heads import ChunkedLoss, loss_and_gradient, masked_lm_loss_sum
from modernbert_train.models.layers import compute_dtype
from modernbert_train.models.modernbert import MlmOutput

GELU = {"gelu": "none", "gelu_tanh": "tanh"}  # activation -> torch's name for how it is approximated


def layer_norm(config: BertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)


class Embeddings(nn.Module):
    """Sum of a token's, its segment's and its position's vector, norm and dropout."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.position_offset = config.position_offset
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.segment_embeddings = nn.Embedding(config.segments, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_positions + config.position_offset, config.hidden_size)
        self.norm = layer_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, packed: Packed) -> Tensor:
        segments = packed.segment_ids_T
        # one segment: its vector is still added, as in models that were trained with two
        segment_D = self.segment_embeddings.weight[0] if segments is None else self.segment_embeddings(segments)
        sum_TD = self.tok_embeddings(packed.input_ids_T) + segment_D
        sum_TD = sum_TD + self.position_embeddings(packed.position_ids_T + self.position_offset)
        return self.dropout(self.norm(sum_TD))


class Attention(nn.Module):
    """Multi-head self-attention with biases; dropout only after the output projection."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.split = (3, config.num_heads, config.head_size)
        self.Wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.Wo = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_TD: Tensor, kernel: Kernel, layout: Any) -> Tensor:
        q_TNH, k_TNH, v_TNH = self.Wqkv(x_TD).unflatten(-1, self.split).unbind(1)
        out_TNH = kernel.attend(q_TNH, k_TNH, v_TNH, layout, False)
        return self.dropout(self.Wo(out_TNH.flatten(1)))


class FeedForward(nn.Module):
    """Two matrices with biases, GELU between them, dropout after them."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.approximate = GELU[config.activation]
        self.Wi = nn.Linear(config.hidden_size, config.intermediate_size)
        self.Wo = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.dropout(self.Wo(F.gelu(self.Wi(x_TD), approximate=self.approximate)))


class EncoderLayer(nn.Module):
    """Post-norm: norm(x + attn(x)), then norm(x + mlp(x))."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attn = Attention(config)
        self.attn_norm = layer_norm(config)
        self.mlp = FeedForward(config)
        self.mlp_norm = layer_norm(config)

    def forward(self, x_TD: Tensor, kernel: Kernel, layout: Any) -> Tensor:
        x_TD = self.attn_norm(x_TD + self.attn(x_TD, kernel, layout))
        return self.mlp_norm(x_TD + self.mlp(x_TD))


class Encoder(nn.Module):
    """Embeddings and layers; the last layer's norm is the last thing.

    Args:
        config: the architecture.
        attention: the kernel, see models/attention.
        recompute: compute each layer again in the backward pass, instead of keeping what is inside it.
    """

    def __init__(self, config: BertConfig, attention: str = "auto", recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.recompute = recompute
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))

    def embedding(self) -> nn.Parameter:
        """[V, D], what a decoder is tied to."""
        return self.embeddings.get_parameter("tok_embeddings.weight")

    def set_phase(self, model: BertConfig) -> None:
        """Take over what a phase may change: dropout."""
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = model.dropout

    def init_std(self, name: str) -> float:
        """Standard deviation that a matrix is drawn with; see `models.init.draw`."""
        return self.config.init_std

    def forward(self, packed: Packed) -> Tensor:
        """Final hidden states, hidden_TD, of every token (pads too). Nothing is read back from the device.

        Raises:
            ConfigError: `attention` names a kernel that cannot serve this device and precision.
            ValueError: sequences may be longer than there are positions, or have segments or an order that this
                encoder does not know.
        """
        self._check(packed)
        hidden_TD = self.embeddings(packed)
        kernel = choose_kernel(self.attention, hidden_TD.device, compute_dtype(hidden_TD))
        layout = kernel.prepare(packed, 0)  # type: ignore[arg-type]  # of a Batch it reads what a Packed has
        # its length follows the number of documents; nothing compiled depends on it, so no graph should
        torch._dynamo.maybe_mark_dynamic(packed.cu_seqlens_S, 0)
        recompute = self.recompute and torch.is_grad_enabled()
        for layer in self.layers:
            inputs = (hidden_TD, kernel, layout)
            hidden_TD = checkpoint(layer, *inputs, use_reentrant=False) if recompute else layer(*inputs)
        return hidden_TD

    def _check(self, packed: Packed) -> None:
        if packed.max_seqlen > self.config.max_positions:
            raise ValueError(
                f"sequences of up to {packed.max_seqlen} tokens, but model.max_positions={self.config.max_positions}. "
                "Shorten the phase's row_tokens, or train a model with more positions."
            )
        if packed.segment_ids_T is not None and self.config.segments < 2:
            raise ValueError(
                f"the objective makes pairs, but model.segments={self.config.segments}. Set model.segments=2."
            )
        if packed.order_T is not None:
            raise ValueError("an order of what tokens see: no kernel serves it. Use an objective without one.")


class PredictionHead(nn.Module):
    """norm(gelu(dense(h))), with biases; the decoder that follows is tied to the embedding, and its bias is its own."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.approximate = GELU[config.activation]
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = layer_norm(config)

    def forward(self, hidden_MD: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(hidden_MD), approximate=self.approximate))


class PairHead(nn.Module):
    """Two classes from the hidden state of a sequence's first token: the pooler (dense, tanh) and a matrix, no dropout.

    It serves what is asked of two segments: in BERT whether the second follows the first (0: it does), in ALBERT their
    order (0: right, 1: swapped).
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, 2)

    def forward(self, hidden_PD: Tensor) -> Tensor:
        """logits_P2 from the hidden states of [CLS]."""
        return self.classifier(self.dense(hidden_PD).tanh())


class BertForMaskedLM(nn.Module):
    """Encoder, head and tied decoder. Fresh weights are meaningless until `models.init.draw` or a checkpoint."""

    def __init__(self, config: BertConfig, attention: str = "auto", recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.model = Encoder(config, attention, recompute)
        self.head = PredictionHead(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.decoder.weight = self.model.embedding()
        self._loss_and_gradient = loss_and_gradient

    def compile_layers(self, **options: Any) -> None:
        """torch.compile each layer, and the loss, in place; parameter names stay. Call it once, before sharding.

        Args:
            options: for torch.compile, such as mode="max-autotune-no-cudagraphs".
        """
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        for layer in self.model.layers:
            layer.compile(dynamic=False, **options)
        self._loss_and_gradient = torch.compile(loss_and_gradient, dynamic=False, **options)

    def encode(self, packed: Packed) -> Tensor:
        """Final hidden states, hidden_TD, of every token; see `Encoder`."""
        return self.model(packed)

    def forward(self, batch: Batch, keep_logits: bool = False) -> MlmOutput:
        """Predict the microbatch's masked tokens; see `ModernBertForMaskedLM.forward`, which this equals."""
        packed = Packed(batch.input_ids_T, batch.position_ids_T, batch.cu_seqlens_S, batch.max_seqlen)
        hidden_MD = self.head(self.encode(packed).index_select(0, batch.positions_M))
        logits_MV = None
        if keep_logits:
            logits_MV = self.decoder(hidden_MD)
            loss_sum = masked_lm_loss_sum(logits_MV, batch.labels_M, 0.0)
        else:
            weight_VD, bias_V = self.decoder.weight, self.decoder.bias
            size = compute_dtype(hidden_MD).itemsize
            chunk = self.config.logit_chunk(on_gpu=hidden_MD.is_cuda, bytes_per_logit=size)
            loss_sum = ChunkedLoss.apply(
                hidden_MD, weight_VD, bias_V, batch.labels_M, 0.0, chunk, self._loss_and_gradient
            )
        predicted = (batch.labels_M != IGNORED_LABEL).sum().clamp(min=1)
        return MlmOutput(loss_sum / predicted, logits_MV)
