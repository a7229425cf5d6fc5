"""Whether settings compute what the plain form computes: states, gradients, and a short curve of the loss.

The plain form is attention as torch has it, layers that are not compiled, and an optimizer that is not fused. The exact
one is the same in fp32. In bf16 both the plain form and the candidate are off by rounding, so the candidate may be as
far from the exact one as the plain form is, and half as much again; in fp32 there is nothing to be off by but the order
of sums. Dropout is off: a compiler draws other numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from modernbert_train.batch import Batch
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.loader import StepBatch
from modernbert_train.distributed.compute import Compute
from modernbert_train.train.tune.loop import BareLoop, batches_of, fresh_model

STEPS = 10  # of the curve, in which the rate rises to that of the run
ROUNDING = 2e-3  # beyond that of the plain form: another order of sums, TF32 in a kernel
MOST = 1.5  # times the distance of the plain form
SMALL = 1e-3  # of all gradients' norm: a parameter that has less is measured by that


@dataclass(frozen=True)
class Trace:
    """What a form came to: states of the first batch, its gradients by parameter, the loss of each step."""

    states_TD: Tensor
    gradients: Mapping[str, Tensor]
    losses: Sequence[float]

    def apart(self, exact: Trace) -> dict[str, float]:
        """Relative distances; of the gradients that of the parameter that is worst."""
        whole = torch.stack([each.norm() for each in exact.gradients.values()]).norm()
        return {
            "states": float((self.states_TD - exact.states_TD).norm() / exact.states_TD.norm()),
            "gradients": max(
                float((self.gradients[name] - each).norm() / (each.norm() + SMALL * whole))
                for name, each in exact.gradients.items()
            ),
            "loss": max(abs(a - b) / abs(b) for a, b in zip(self.losses, exact.losses, strict=True)),
        }


def plain(config: RunConfig) -> RunConfig:
    """The run in the plain form."""
    kernels: dict[str, Any] = {"attention": "sdpa", "global_attention": None, "query_block": None}
    compute = replace(config.compute, **kernels, logit_chunk=None, compile=False)
    return replace(config, compute=compute, optim=replace(config.optim, fused=False))


def check_parity(config: RunConfig, compute: Compute) -> tuple[bool, str]:
    """Hold a run's settings against the plain form.

    Args:
        config: a run of one phase, whose batch is one row.
        compute: device and precision.

    Returns:
        Whether they compute the same, and by how much they are off.
    """
    config = without_dropout(config)
    batches = list(islice(batches_of(config), STEPS + 1))
    exact = trace(plain(config), Compute(compute.device, "fp32"), batches)
    rounding = trace(plain(config), compute, batches).apart(exact) if compute.bf16 else dict.fromkeys(_NAMES, 0.0)
    return verdict(trace(config, compute, batches).apart(exact), rounding)


_NAMES = ("states", "gradients", "loss")


def verdict(errors: Mapping[str, float], rounding: Mapping[str, float]) -> tuple[bool, str]:
    """Whether distances are those of rounding, and a sentence."""
    limits = {name: MOST * rounding[name] + ROUNDING for name in errors}
    wrong = [name for name, error in errors.items() if not error <= limits[name]]  # NaN is wrong, too
    if wrong:
        name = wrong[0]
        return False, f"{name} off by {errors[name]:.1e}, where {limits[name]:.1e} is rounding"
    return True, ", ".join(f"{name} within {error:.0e}" for name, error in errors.items())


def trace(config: RunConfig, compute: Compute, batches: Sequence[StepBatch]) -> Trace:
    """Train for a few steps from fresh weights."""
    model = fresh_model(config, compute)
    loop = BareLoop(model, config, compute)
    first = batches[0]
    part: Batch = first.microbatches[0].to(compute.device)
    with compute.autocast():  # with a graph, or the layers would be compiled once more
        states_TD = model.encode(part.packed)[: part.num_tokens].detach().float().cpu()
    loop.gradients(first)
    gradients = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    rates = [group["lr"] for group in loop.optimizer.param_groups]
    losses = []
    for number, batch in enumerate(batches[1:], 1):
        for group, rate in zip(loop.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * number / STEPS
        losses.append(loop.step(batch))
    return Trace(states_TD, gradients, torch.stack(losses).tolist())


def without_dropout(config: RunConfig) -> RunConfig:
    """The same run of a phase that overrides nothing, and without dropout."""
    sections = {}
    for section in ("model", "objective"):
        value = getattr(config, section)
        drops = {field.name: 0.0 for field in fields(value) if field.name.endswith("dropout")}
        sections[section] = replace(value, **drops)
    return replace(config, **sections)
