"""The parts of a training step around attention, eager and compiled: norm, rotary positions, GeGLU, a layer, the head.

Elementwise parts are compared with their bytes, each tensor moved once: the residual stream and its gradient in fp32,
inputs of matrix products in autocast's precision. Layers and the head are compared with their FLOPs. The head predicts
30 % of the tokens.

Shape legend: T packed tokens, M predicted positions, D model width, F hidden width, N heads, H head width,
V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.attention import BACKWARD, attention_flops, draw_lengths, line_of
from benchmarks.measure import Case, Group, Stage, Unusable, Work
from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.schema import ComputeConfig, ModernBertConfig
from modernbert_train.models.attention import choose_kernel
from modernbert_train.models.attention.visible import Visible
from modernbert_train.models.heads import ChunkedLoss, PredictionHead, loss_and_gradient, masked_lm_loss_sum
from modernbert_train.models.layers import EncoderLayer, layer_norm, rotary_tables, rotate

MASK_RATE = 0.3
MEDIAN, LONGEST = 300, 1024  # of documents, in tokens


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Return the mixed precision of training; a no-op in fp32."""
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def passes(
    name: str, call: Callable[..., Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor], work: Sequence[Work]
) -> Case:
    """Time forward, and backward with random numbers as the output's gradient; as one stage if `work` has one."""

    def build() -> list[Stage]:
        with_gradient = [*(tensor for tensor in inputs if tensor.requires_grad), *parameters]
        grads: list[Tensor] = []

        def backward(out: Tensor) -> object:
            if not grads:
                grads.append(torch.randn_like(out))
            return torch.autograd.grad(out, with_gradient, grads[0])

        if len(work) == 1:
            return [Stage("forward and backward", lambda _: backward(call(*inputs)), work[0])]
        return [Stage("forward", lambda _: call(*inputs), work[0]), Stage("backward", backward, work[1])]

    return Case(name, build)


def layer_groups(
    model: ModernBertConfig, tokens: int, device: torch.device, dtype: torch.dtype, compile: bool
) -> Iterator[Group]:
    """Yield elementwise parts of a layer, then a whole global and a whole local layer with the kernel of `auto`."""
    width, hidden, heads, size = model.hidden_size, model.intermediate_size, model.num_heads, model.head_size
    c = dtype.itemsize
    lengths = draw_lengths(tokens, MEDIAN, LONGEST)
    line = line_of(lengths, LONGEST, device)
    tables = rotary_tables(line.position_ids_T, model.local_rope_theta, size, dtype)
    norm = layer_norm(model).to(device)

    def moved(forward: int, backward: int) -> tuple[Work, Work]:
        return Work(0.0, float(tokens * forward), tokens), Work(0.0, float(tokens * backward), tokens)

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    def geglu(wide_TF: Tensor) -> Tensor:
        value_TF, gate_TF = wide_TF.chunk(2, dim=-1)
        return F.gelu(value_TF) * gate_TF

    timed: list[tuple[str, Callable[..., Tensor], Tensor, Sequence[Tensor], tuple[Work, Work]]] = [
        (
            "norm of the residual",
            lambda x_TD: norm(x_TD).to(dtype),
            random(tokens, width, dtype=torch.float32),
            list(norm.parameters()),
            moved((4 + c) * width, (4 + c + 4) * width),
        ),
        (
            "rotary positions of q and k",
            lambda x_T2NH: rotate(x_T2NH, *tables),
            random(tokens, 2, heads, size),
            [],
            moved(4 * c * width, 4 * c * width),
        ),
        ("GELU times gate", geglu, random(tokens, 2 * hidden), [], moved(3 * c * hidden, 5 * c * hidden)),
    ]
    for title, call, value, parameters, work in timed:
        cases = [passes("eager", call, [value], parameters, work)]
        if compile:
            cases.append(passes("compiled", torch.compile(call, dynamic=False), [value], parameters, work))
        yield Group(f"{title}, {tokens:,} tokens, width {width}", cases)
    del timed, value

    kernel = choose_kernel("auto", device, dtype)
    layout = kernel.prepare(line, Visible.around(model.half_window))
    weights = 4 * width**2 + 3 * width * hidden
    for index, kind in ((model.global_attn_every_n_layers, "global"), (1, "local")):
        attended = attention_flops(lengths, None if kind == "global" else model.half_window, heads)
        products = 2.0 * weights * tokens
        work = (
            Work(products + attended, float(tokens * 8 * width), tokens),
            Work(2 * products + BACKWARD * attended, float(tokens * 12 * width), tokens),
        )
        cases = []
        for name in ("eager", "compiled") if compile else ("eager",):
            layer = EncoderLayer(model, index).to(device)
            if name == "compiled":
                layer.compile(dynamic=False)

            def run(x_TD: Tensor, layer: nn.Module = layer) -> Tensor:
                with autocast(device, dtype):
                    out_TD, added_TD = layer(x_TD, None, tables, kernel, layout)
                return out_TD + added_TD

            value = random(tokens, width, dtype=torch.float32)
            cases.append(passes(name, run, [value], list(layer.parameters()), work))
        yield Group(f"a whole {kind} layer with {kernel.name}, {tokens:,} tokens, width {width}", cases)


def head_groups(
    model: ModernBertConfig, tokens: int, device: torch.device, dtype: torch.dtype, compile: bool
) -> Iterator[Group]:
    """Yield dense, norm, decoder and cross-entropy in every form; chunked forms do all in the forward pass."""
    width, vocab = model.hidden_size, model.vocab_size
    predicted = round(MASK_RATE * tokens)
    head, decoder = PredictionHead(model).to(device), nn.Linear(width, vocab, device=device)
    hidden_MD = torch.randn(predicted, width, device=device, requires_grad=True)
    labels_M = torch.randint(0, vocab, (predicted,), device=device)
    parameters = [*head.parameters(), *decoder.parameters()]
    products = 2.0 * width * (width + vocab) * predicted
    moved = 4.0 * (width * (width + vocab) + predicted * width)  # fp32 weights and hidden states; no logits
    work = [Work(3 * products, 3 * moved, tokens)]

    def plain(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(hidden_MD: Tensor) -> Tensor:
            with autocast(device, dtype):
                return loss(decoder(head(hidden_MD)), labels_M, 0.0)

        return run

    on_gpu = device.type == "cuda"
    chunk = ComputeConfig().logits_at_once(vocab, on_gpu=on_gpu, bytes_per_logit=dtype.itemsize)

    def chunked(step: Callable[..., Any], size: int = chunk) -> Callable[..., Tensor]:
        def run(hidden_MD: Tensor) -> Tensor:
            with autocast(device, dtype):
                hidden = head(hidden_MD)
                out: Tensor = ChunkedLoss.apply(hidden, decoder.weight, decoder.bias, labels_M, None, 0.0, size, step)[
                    0
                ]
                return out

        return run

    def torch_chunked(hidden_MD: Tensor) -> Tensor:
        """Call torch's own chunked loss, which is new and experimental in 2.13 and ignores autocast."""
        if not hasattr(F, "linear_cross_entropy"):
            raise Unusable(f"torch {torch.__version__} lacks linear_cross_entropy (2.13 has it)")
        with autocast(device, dtype):
            hidden_MD = head(hidden_MD)
        out: Tensor = F.linear_cross_entropy(
            hidden_MD.to(dtype),
            decoder.weight.to(dtype),
            labels_M,
            linear_bias=decoder.bias.to(dtype),
            reduction="sum",
            ignore_index=IGNORED_LABEL,
            options=torch.nn.LinearCrossEntropyOptions(),
        )
        return out

    forms = {"plain, eager": plain(masked_lm_loss_sum), f"chunks of {chunk:,}, eager": chunked(loss_and_gradient)}
    if compile:
        step = torch.compile(loss_and_gradient, dynamic=False)
        forms |= {
            "plain, loss compiled": plain(torch.compile(masked_lm_loss_sum, dynamic=False)),
            "plain, all compiled": torch.compile(plain(masked_lm_loss_sum), dynamic=False),
            f"chunks of {chunk:,}, compiled": chunked(step),
            f"chunks of {chunk // 4:,}, compiled": chunked(step, chunk // 4),
            "one chunk, compiled": chunked(step, predicted),
        }
    forms["torch.linear_cross_entropy"] = torch_chunked
    cases = [passes(name, form, [hidden_MD], parameters, work) for name, form in forms.items()]
    yield Group(f"head, {predicted:,} predictions, width {width}, {vocab:,} entries", cases)
