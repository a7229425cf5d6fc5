"""Locate a number that is not finite, by computing the step again and watching every module.

A healthy step is not watched and costs nothing extra. The step is repeated from its seed, all its microbatches in
order, on all ranks together (FSDP2 gathers weights in every layer): first forward only; if that is finite, or
weights are sharded, again with a backward pass. Gradients stop at the embeddings' output and never reach parameters, so
nothing is reduced over ranks and each rank sees its own.

The search fits into the memory of a step. It runs eagerly, where a layer keeps about twice the activations of a
compiled one, so its forward pass keeps nothing and its backward pass recomputes each layer. Another program may still
have taken memory that the step had; the fault is then reported without its layer. A rank with whole weights then
continues with the others; a rank with sharded weights has left them in the middle of a layer and decides alone.

Shape legend: T packed tokens, M predicted positions.
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from modernbert_train.batch import Batch, weighted
from modernbert_train.data.loader import StepBatch
from modernbert_train.data.packing import Chunk
from modernbert_train.data.planner import BatchPlan, Row
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import gather_from_all, num_ranks, this_rank
from modernbert_train.models.masked_lm import POSITIONS
from modernbert_train.plan.oom_backoff import is_full
from modernbert_train.train.adapters import ComposerObjective
from modernbert_train.train.gradients import count_terms, counts_per_rank, key_dropout
from modernbert_train.train.step_numbers import as_json

LOSS = "the loss"
NOT_AGAIN = "nothing wrong when computed again, which points to the hardware"
FULL = "layer unknown: the search for it ran out of memory"
_LISTED = 8  # maximum of documents and parameters in a message; faults.jsonl has all


@dataclass(frozen=True)
class Finding:
    """A fault in one microbatch of this rank.

    Attributes:
        microbatch: index in the step, from 0.
        place: the first module, in order of computation, with an output that is not finite, and whether that was in
            the forward or the backward pass.
        chunks: the affected parts of documents; all in the microbatch if they cannot be distinguished.
    """

    microbatch: int
    place: str
    chunks: list[Chunk]


class LeftOthers(Exception):
    """Raised on a rank with sharded weights that ran out of memory in the search, while others wait inside a layer.

    Args:
        findings: this rank's findings so far.
    """

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__(FULL)
        self.findings = findings


def find_non_finite(
    model: ComposerObjective, batch: StepBatch, compute: Compute, seed: int, step: int
) -> list[Finding]:
    """Compute a step again with every module watched; every rank calls this.

    Args:
        model: its weights, before the update.
        batch: the step's batch.
        compute: device and precision.
        seed: the run's seed.
        step: optimizer steps before this one.

    Returns:
        One finding for each faulty microbatch of this rank; none if the fault does not recur. If a microbatch ran out
        of memory, its finding names that instead of a module.

    Raises:
        LeftOthers: weights are sharded over several ranks, and this rank ran out of memory.
    """
    terms, compares = batch.plan.objective.terms, batch.plan.objective.compares
    counts = count_terms(batch.microbatches, terms)
    divisors = counts_per_rank(counts, torch.device("cpu"))  # reduced on the host, which uses no GPU memory
    sharded = num_ranks() > 1 and any(isinstance(parameter, DTensor) for parameter in model.model.parameters())

    def search(*, backward: bool) -> list[Finding]:
        findings, first = [], 0
        for number, part in enumerate(batch.microbatches):
            part_rows = batch.rows[first : first + part.num_rows]
            first += part.num_rows
            watch = _Watch()
            try:
                moved = part.to(compute.device)
                key_dropout(seed, step, number, compute.device)
                with _watched(model.model, watch):
                    _repeat(model, moved, compute, terms, divisors, watch, backward=backward, figures=compares)
                if watch.first is not None:
                    name, direction, tensor, before = watch.first
                    chunks = _chunks_of(tensor, moved, part_rows, batch.plan, before)
                    findings.append(Finding(number, f"{name}, {direction}", chunks))
            except RuntimeError as error:
                if not is_full(error):
                    raise
                findings.append(Finding(number, f"{FULL}{watch.reached}", _chunks(batch, number)))
                if sharded:
                    raise LeftOthers(findings) from error
        return findings

    with torch.compiler.set_stance("force_eager"):
        forward = search(backward=False)
        if isinstance(model.model, FSDPModule):
            model.model.reshard()  # without a backward pass, parameters outside the layers would stay gathered
        elif forward:
            return forward
        backward = search(backward=True)  # if sharded, on every rank, since each layer gathers its weights
        return forward or backward


def _repeat(
    model: ComposerObjective,
    moved: Batch,
    compute: Compute,
    terms: Mapping[str, float],
    divisors: Mapping[str, float | Tensor],
    watch: _Watch,
    *,
    backward: bool,
    figures: bool,
) -> None:
    """Compute a microbatch again, eagerly: forward without keeping activations, or forward and backward.

    Args:
        model, moved, compute, terms, divisors: as in `find_non_finite`; the microbatch is on its device.
        watch: records the first fault.
        backward: also run the backward pass.
        figures: compute the plain form of the loss, with the logits of all predictions in memory at once.
    """
    if not backward:
        with torch.no_grad(), compute.autocast():
            loss = weighted(model(moved, figures=True).losses, terms, divisors)  # also watches the decoder
        watch.note(LOSS, "forward", loss)
        return
    with torch.enable_grad(), model.model.recomputing():
        with compute.autocast():
            loss = weighted(model(moved, figures=figures).losses, terms, divisors)
        if watch.source is not None:
            torch.autograd.grad(loss, watch.source)


class _Watch:
    """Remembers the first tensor that is not finite, and the tensor at which gradients start.

    Attributes:
        first: module, direction, and its output or the gradient of that. For a decoder, which is called on some
            positions at a time, also the number of positions in earlier calls.
        source: the first output that has a gradient.
        reached: " after MODULE, DIRECTION" for the last output or gradient seen; empty before the first.
    """

    def __init__(self) -> None:
        self.first: tuple[str, str, Tensor, int | None] | None = None
        self.source: Tensor | None = None
        self.reached = ""
        self._decoded: Counter[str] = Counter()

    def note(self, name: str, direction: str, tensor: Tensor, before: int | None = None) -> None:
        self.reached = f" after {name}, {direction}"
        if self.first is None and not _is_finite(tensor):
            self.first = (name, direction, tensor.detach(), before)

    def hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return
            before = None
            if name.rpartition(".")[2] == "decoder":
                before = self._decoded[name]
                self._decoded[name] += len(output)
            self.note(name, "forward", output, before)
            if output.requires_grad:
                if self.source is None:
                    self.source = output
                output.register_hook(lambda grad: self.note(name, "backward", grad, before))

        return after_forward


@contextmanager
def _watched(model: nn.Module, watch: _Watch) -> Iterator[None]:
    handles = [module.register_forward_hook(watch.hook(name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _chunks_of(
    tensor: Tensor, batch: Batch, rows: Sequence[Row], plan: BatchPlan, before: int | None = None
) -> list[Chunk]:
    """Return the chunks at whose positions a tensor is not finite; all chunks if the tensor lacks positions. Its first
    dimension is T, M, or the part of M after `before`."""
    everything = [chunk for row in rows for chunk in row]
    bad = ~torch.isfinite(tensor)
    targets = batch.targets.get(POSITIONS)
    if tensor.ndim and len(tensor) == len(batch.packed.input_ids_T):
        positions = bad.flatten(1).any(dim=1).nonzero().flatten()
    elif tensor.ndim and targets is not None and (before is not None or len(tensor) == len(targets)):
        positions = targets[before or 0 :][: len(tensor)][bad.flatten(1).any(dim=1)]
    else:
        return everything
    hit = set(positions.tolist())
    chunks, sequence = [], 0
    boundaries = batch.packed.cu_seqlens_S.tolist()
    for row in rows:
        tokens_left = plan.row_tokens
        for chunk in row:
            if not hit.isdisjoint(range(*boundaries[sequence : sequence + 2])):
                chunks.append(chunk)
            tokens_left -= chunk.length + plan.objective.special_tokens
            sequence += 1
        sequence += tokens_left > 0  # the row's padding
    return chunks or everything


def diagnose(
    model: ComposerObjective,
    batch: StepBatch,
    compute: Compute,
    seed: int,
    step: int,
    fault: str,
    losses: list[float],
) -> tuple[dict[str, Any], bool]:
    """Find the ranks, documents and layers of a fault; every rank calls this and gets the same answer.

    Args:
        model, batch, compute, seed, step: see `find_non_finite`; the model has its gradients.
        fault: "non_finite" or "spike".
        losses: losses of this rank's microbatches.

    Returns:
        JSON: `microbatches`, the affected ones with rank, number, loss, place and documents (for a spike, the one with
        the highest loss); `damaged_weights` and `damaged_gradients`, names of parameters with values that are not
        finite. Also True if this rank has left the others (see `LeftOthers`): only it has the answer, and all must end.
    """
    out_of_step = False
    named = [*model.model.named_parameters()]
    gradients = {name: _local(p.grad) for name, p in named if p.grad is not None}
    damaged_weights = _not_finite({name: _local(p) for name, p in named})
    damaged_gradients = _not_finite(gradients)
    if fault == "spike":
        number = max(range(len(losses)), key=losses.__getitem__)
        findings = [Finding(number, _largest(gradients), _chunks(batch, number))]
    else:
        try:
            findings = find_non_finite(model, batch, compute, seed, step)
        except LeftOthers as error:
            findings, out_of_step = error.findings, True
        if not findings:
            numbers = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
            where = f"{NOT_AGAIN} of {socket.gethostname()}"
            findings = [Finding(number, where, _chunks(batch, number)) for number in numbers]
    mine = [
        {
            "rank": this_rank(),
            "microbatch": finding.microbatch,
            "loss": as_json(losses[finding.microbatch]),
            "place": finding.place,
            "documents": [chunk._asdict() for chunk in finding.chunks],
        }
        for finding in findings
    ]
    own = (mine, damaged_weights, damaged_gradients)
    ranks = [own] if out_of_step else gather_from_all(own)
    microbatches = [each for one, _, _ in ranks for each in one]
    if fault == "spike":
        microbatches = [max(microbatches, key=lambda each: each["loss"])]
    # a microbatch with a finite loss that ran out of memory may be healthy: leave it out if another one is at fault
    telling = [each for each in microbatches if isinstance(each["loss"], str) or not each["place"].startswith(FULL)]
    diagnosis = {
        "microbatches": telling or microbatches,
        "damaged_weights": list(dict.fromkeys(name for _, names, _ in ranks for name in names)),
        "damaged_gradients": list(dict.fromkeys(name for _, _, names in ranks for name in names)),
    }
    return diagnosis, out_of_step


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return names of tensors that are not finite; stop early if memory runs out, which the search then reports."""
    names = []
    with _out_of_memory_ignored():
        for name, tensor in tensors.items():
            if not _is_finite(tensor):
                names.append(name)
    return names


def _largest(gradients: Mapping[str, Tensor]) -> str:
    """Return the name of the gradient with the largest norm, as the place of a finding."""
    with _out_of_memory_ignored():
        return f"largest gradient in {max(gradients, key=lambda name: gradients[name].norm().item())}"
    return "largest gradient unknown: no memory to compare them"


@contextmanager
def _out_of_memory_ignored() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_full(error):
            raise


def hardware_at_fault(microbatches: Sequence[dict[str, Any]]) -> tuple[int, str] | None:
    """Return (rank, host) if the faults that did not recur were all on one rank; otherwise None."""
    of_hardware = f"{NOT_AGAIN} of "
    suspects = {(each["rank"], each["place"]) for each in microbatches}
    if len(suspects) != 1:
        return None
    ((rank, place),) = suspects
    return (rank, place.removeprefix(of_hardware)) if place.startswith(of_hardware) else None


def describe(entry: dict[str, Any]) -> str:
    """Format an entry of faults.jsonl as a sentence."""
    fault = {"non_finite": "not finite", "spike": "a spike"}[entry["fault"]]
    loss = entry["loss"] if isinstance(entry["loss"], str) else f"{entry['loss']:.3f}"
    text = f"step {entry['step']}, tokens {entry['tokens_before']:,} to {entry['tokens']:,}: {fault}, loss {loss}"
    if "precision" in entry:
        text += f", computed in {entry['precision']}"
    if entry["fault"] == "spike":
        text += f" above {entry['highest_normal_loss']:.3f}"
    for each in entry["microbatches"][:_LISTED]:
        documents = list(dict.fromkeys(chunk["document"] for chunk in each["documents"]))
        text += f"; rank {each['rank']}, microbatch {each['microbatch']}, {each['place']}, documents {_some(documents)}"
    if entry["damaged_weights"]:
        text += f"; weights not finite: {_some(entry['damaged_weights'])}"
    elif entry["fault"] == "non_finite" and not entry["microbatches"]:
        text += f"; gradients of {_some(entry['damaged_gradients'])}, {NOT_AGAIN}"
    if "to" in entry:
        text += f"; back to {entry['to']}"
    return text


def _some(values: list[Any]) -> str:
    more = f" and {len(values) - _LISTED:,} more" if len(values) > _LISTED else ""
    return ", ".join(str(value) for value in values[:_LISTED]) + more


def _chunks(batch: StepBatch, number: int) -> list[Chunk]:
    """Return all chunks of a microbatch."""
    first = sum(part.num_rows for part in batch.microbatches[:number])
    return [chunk for row in batch.rows[first : first + batch.microbatches[number].num_rows] for chunk in row]


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())  # adds nothing to the graph, which may be recomputed


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
