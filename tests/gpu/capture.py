"""Capture forward and backward pass of one microbatch into a CUDA graph, and replay it with other documents.

    python -m tests.gpu.capture

Prints two lines of JSON, for eager and for compiled layers: why it could not be captured, or the largest relative
distance of loss and gradients of two replays from the same model without a graph. All that differs between microbatches
is copied into tensors that stay where they are, the number of predictions included.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from tests.support.gpu_parts import build, make_batch, see, small

DOCUMENTS = ([300, 200, 100], [312, 5, 83], [10] * 50)
WARM_UP = 3


def capture(compiled: bool) -> dict[str, object]:
    config = small()
    batches = [make_batch(documents, 1024, config.vocab_size, seed=i) for i, documents in enumerate(DOCUMENTS)]
    assert len({batch.counts["mlm"] for batch in batches}) > 1
    model = build(config, attention="varlen")
    if compiled:
        model.compile_layers()
    static = batches[0].with_tensors([tensor.clone() for tensor in batches[0].tensors()])

    def step() -> Tensor:
        # without the cache of cast weights: a copy made outside the graph would be gone when it is replayed
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = model(static).losses["mlm"]  # the sum: a count is a number of the host, which no graph sees change
        loss.backward()
        return loss

    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                step()
                model.zero_grad()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        model.zero_grad()
        with torch.cuda.graph(graph):
            loss = step()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}

    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    replays = []
    for batch in batches[1:]:
        for tensor, other in zip(static.tensors(), batch.tensors(), strict=True):
            tensor.copy_(other)
        graph.replay()
        predicted = batch.counts["mlm"]
        found = {name: grad.float() / predicted for name, grad in grads.items()}
        replays.append((loss.detach().float() / predicted, found))
    losses, errors = [], []
    for batch, (replayed_loss, replayed) in zip(batches[1:], replays, strict=True):
        _, exact_loss, exact = see(model, batch, bf16=True)
        losses.append(float((replayed_loss - exact_loss).abs() / exact_loss))
        errors += [float((replayed[name] - exact[name]).norm() / exact[name].norm()) for name in exact]
    return {"loss": max(losses), "gradient": max(errors)}


if __name__ == "__main__":
    for compiled in (False, True):
        print(json.dumps({"compiled": compiled} | capture(compiled)), flush=True)
