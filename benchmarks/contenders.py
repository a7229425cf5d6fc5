"""The contenders of benchmarks/train_step.py: our parts in a bare loop, our `train`, and transformers' ModernBERT."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW

from benchmarks.batches import labels_of_line
from benchmarks.reference import transformers_model
from benchmarks.timing import Stopwatch, wait
from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.clock import Clock
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.check_shards import check_data
from modernbert_train.data.loader import StepBatch
from modernbert_train.data.packing import SPECIAL_TOKENS
from modernbert_train.data.path import open_path
from modernbert_train.distributed.compute import Compute, resolve_precision
from modernbert_train.models.masked_lm import ForMaskedLM
from modernbert_train.objectives import build_objective
from modernbert_train.optim.stable_adamw import StableAdamW
from modernbert_train.report.throughput import training_flops
from modernbert_train.train.measure_speed import BareLoop
from modernbert_train.train.session import train
from modernbert_train.vocabulary import read_vocabulary

ADAM = {"betas": (0.9, 0.98), "eps": 1e-6}


@dataclass(frozen=True)
class Reference:
    """One form of transformers' ModernBERT in training.

    Attributes:
        sparse: its switch `sparse_prediction`, which computes logits only at predicted positions.
        compiled: by torch.compile, as a whole, with its defaults.
        attention: transformers' name of the attention.
        packed: documents are concatenated, with boundaries for flash attention; else padded to the longest of a
            microbatch.
    """

    sparse: bool = False
    compiled: bool = False
    attention: str = "sdpa"
    packed: bool = False

    @property
    def name(self) -> str:
        """The exact name, for tables."""
        words = ["packed" if self.packed else "padded", self.attention, "compiled" if self.compiled else "eager"]
        return ", ".join(["transformers", *words, *(["sparse_prediction"] * self.sparse)])


REFERENCES = {
    "plain": Reference(),
    "sparse": Reference(sparse=True),
    "compiled": Reference(sparse=True, compiled=True),
    "flash": Reference(sparse=True, attention="flash_attention_2", packed=True),
}


class Contender:
    """The measurements of one contender.

    Attributes:
        rates: tokens a second of each round.
        cpu_rates: tokens a CPU second of this process, which other work on the machine does not change; without rounds
            through `train`.
        flop_rates: FLOPs a second of each round, see `training_flops`.
        seconds: of each part of a step, over all steps.
        peak_bytes: allocated on the GPU in its turns; 0 without one.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.rates: list[float] = []
        self.cpu_rates: list[float] = []
        self.flop_rates: list[float] = []
        self.seconds: dict[str, list[float]] = {}
        self.peak_bytes = 0

    def extend(self, other: Contender) -> None:
        """Add the measurements of another turn."""
        if other is not self:
            self.rates += other.rates
            self.flop_rates += other.flop_rates
            self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
            for part, seconds in other.seconds.items():
                self.seconds.setdefault(part, []).extend(seconds)


class Ours(Contender):
    """Loader, encoder, loss and StableAdamW only: a bare loop with its parts timed.

    Args:
        model: on the device, in training.
        config: of data and batches.
        device: of the model.
    """

    def __init__(self, model: ForMaskedLM, config: RunConfig, device: torch.device) -> None:
        super().__init__(device.type == "cuda")
        self._config, self._device = config, device
        model.set_phase(next(iter(config.in_phase.values())).modernbert)
        self._loop = BareLoop(model, config, Compute(device, resolve_precision(config.compute, device)))
        self._batches = _batches_of(_endless(config))

    def next_batch(self) -> StepBatch:
        return next(self._batches)

    def first_loss(self, batch: StepBatch) -> float:
        """Return the mean loss of a batch, before any step."""
        loss = float(self._loop.gradients(batch))
        self._loop.optimizer.zero_grad()
        return loss

    def turn(self, steps: int, warm_up: int) -> list[StepBatch]:
        """Take steps; the first `warm_up` do not count. Return the batches of those that do."""
        for _ in range(warm_up):
            self._loop.step(self.next_batch())
        wait(self._device)
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        clock, seen, began = Stopwatch(self._device), [], _now()
        for _ in range(steps):
            asked = time.perf_counter()
            seen.append(self.next_batch())
            clock.add("data wait", time.perf_counter() - asked)
            clock.start()
            self._loop.step(seen[-1], clock.mark)
        wait(self._device)
        _record(self, seen, self._config, began, clock)
        return seen

    def close(self) -> None:
        """End the loader's workers."""
        self._batches.close()  # type: ignore[attr-defined]


class Theirs(Contender):
    """transformers' model with our initial weights, on the documents of our batches.

    Args:
        model: ours; its weights are copied.
        config: the run.
        device: of the model.
        documents: in a microbatch.
        reference: the form of transformers.
    """

    def __init__(
        self, model: ForMaskedLM, config: RunConfig, device: torch.device, documents: int, reference: Reference
    ) -> None:
        super().__init__(device.type == "cuda")
        self._config, self._device, self._documents, self._reference = config, device, documents, reference
        vocabulary = read_vocabulary(config.data.tokenizer)
        self._pad = vocabulary.pad_id
        (phase,) = config.phases.values()
        self._model = transformers_model(
            next(iter(config.in_phase.values())).modernbert,
            phase.row_tokens,
            vocabulary,
            sparse=reference.sparse,
            attention=reference.attention,
        )
        self._model.load_state_dict(model.state_dict())
        self._model.to(device).train()
        if reference.compiled:
            self._model.compile()
        self._optimizer = AdamW(self._model.parameters(), 1e-4, fused=True, **ADAM)  # type: ignore[arg-type]

    def first_loss(self, batch: StepBatch) -> float:
        """Return the mean loss of a batch, before any step."""
        microbatches = self._parts(batch)
        predicted = sum(count for _, count in microbatches)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return sum(float(self._loss(tensors)) * count / predicted for tensors, count in microbatches)

    def turn(self, batches: Sequence[StepBatch]) -> None:
        """Take a step for each batch; padding is not timed, since a collator's workers would do it."""
        padded = [self._parts(batch) for batch in batches]
        # a compiled model must have seen every length before the first turn that counts
        for microbatches in padded if self._reference.compiled and not self.rates else padded[:1]:
            self._step(microbatches, Stopwatch(self._device))
        wait(self._device)
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        clock, began = Stopwatch(self._device), _now()
        for microbatches in padded:
            self._step(microbatches, clock)
        wait(self._device)
        _record(self, batches, self._config, began, clock)

    def _loss(self, tensors: dict[str, Any]) -> Tensor:
        with Compute(self._device, resolve_precision(self._config.compute, self._device)).autocast():
            return self._model(**tensors).loss

    def _step(self, microbatches: list[tuple[dict[str, Any], int]], clock: Stopwatch) -> None:
        predicted = sum(count for _, count in microbatches)
        clock.start()
        for tensors, count in microbatches:
            loss = self._loss(tensors) * (count / predicted)
            clock.mark("forward")
            loss.backward()
            clock.mark("backward")
        self._optimizer.step()
        self._optimizer.zero_grad()
        clock.mark("optimizer")

    def _parts(self, batch: StepBatch) -> list[tuple[dict[str, Any], int]]:
        """Return the documents in order, a microbatch at a time: the model's inputs, and the number of predictions."""
        documents = list(_documents(batch))
        gradients = []
        for first in range(0, len(documents), self._documents):
            ids, labels = zip(*documents[first : first + self._documents], strict=True)
            inputs = self._packed(ids, labels) if self._reference.packed else self._padded(ids, labels)
            count = sum(int((one != IGNORED_LABEL).sum()) for one in labels)
            on_device = {key: v.to(self._device) if isinstance(v, Tensor) else v for key, v in inputs.items()}
            gradients.append((on_device, count))
        return gradients

    def _padded(self, ids: Sequence[Tensor], labels: Sequence[Tensor]) -> dict[str, Any]:
        mask = pad_sequence([torch.ones_like(one) for one in ids], True, 0)
        padded = pad_sequence(list(ids), True, self._pad), pad_sequence(list(labels), True, IGNORED_LABEL)
        return {"input_ids": padded[0], "attention_mask": mask, "labels": padded[1]}

    def _packed(self, ids: Sequence[Tensor], labels: Sequence[Tensor]) -> dict[str, Any]:
        lengths = [len(one) for one in ids]
        boundaries = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
        return {
            "input_ids": torch.cat(list(ids)).unsqueeze(0),
            "position_ids": torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
            "labels": torch.cat(list(labels)).unsqueeze(0),
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }


def through_train(config: RunConfig, warm_up: int) -> Contender:
    """Train a whole run by `train` and read its metrics.jsonl, without the first `warm_up` steps, which compile."""
    contender = Contender(config.compute.device == "cuda")
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with quiet[0], quiet[1], noting_host_gaps() as gaps:
        train(config)
    lines = (Path(config.folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [entry for entry in map(json.loads, lines) if entry["kind"] == "step"][warm_up:]
    seconds = sum(step["seconds"] for step in steps)
    contender.rates = [sum(step["tokens_per_second"] * step["seconds"] for step in steps) / seconds]
    contender.flop_rates = [sum(step["rank_flops_per_second"] * step["seconds"] for step in steps) / seconds]
    contender.seconds = {
        "data wait": [step["data_wait_share"] * step["seconds"] for step in steps],
        "host between update and forward": gaps[warm_up:],
        "all": [step["seconds"] for step in steps],
    }
    contender.peak_bytes = max(step["peak_memory_bytes"] for step in steps) if contender.on_gpu else 0
    return contender


@contextlib.contextmanager
def noting_host_gaps() -> Iterator[list[float]]:
    """Record the host's seconds from the end of each update's launch to the next forward pass.

    A GPU that has finished the update by then is idle.
    """
    gaps: list[float] = []
    updated: list[float] = []
    step, forward = StableAdamW.step, ForMaskedLM.forward

    def noted_step(self: StableAdamW, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        updated[:] = [time.perf_counter()]
        return result

    def noted_forward(self: ForMaskedLM, *args: Any, **kwargs: Any) -> Any:
        if updated:
            gaps.append(time.perf_counter() - updated.pop())
        return forward(self, *args, **kwargs)

    StableAdamW.step, ForMaskedLM.forward = noted_step, noted_forward  # type: ignore[method-assign]
    try:
        yield gaps
    finally:
        StableAdamW.step, ForMaskedLM.forward = step, forward  # type: ignore[method-assign]


def _now() -> tuple[float, float]:
    """Return seconds of the wall clock and CPU seconds of this process."""
    return time.perf_counter(), time.process_time()


def _record(
    who: Contender, batches: Sequence[StepBatch], config: RunConfig, began: tuple[float, float], clock: Stopwatch
) -> None:
    """Record a round of steps over these batches, which ends now."""
    seconds, cpu_seconds = (end - start for start, end in zip(began, _now(), strict=True))
    microbatches = [part for batch in batches for part in batch.microbatches]
    flops = sum(
        training_flops(
            batch.rows,
            {"mlm": sum(part.counts["mlm"] for part in batch.microbatches)},
            config.model,
            batch.plan.objective,
        )
        for batch in batches
    )
    tokens = sum(part.num_tokens for part in microbatches)
    who.rates.append(tokens / seconds)
    who.cpu_rates.append(tokens / cpu_seconds)
    who.flop_rates.append(flops / seconds)
    for part, by_part in clock.read().items():
        who.seconds.setdefault(part, []).extend(by_part)
    if who.on_gpu:
        who.peak_bytes = max(who.peak_bytes, torch.cuda.max_memory_allocated())


def _documents(batch: StepBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids after masking, and labels, of each document of a batch, without tails of rows."""
    rows = iter(batch.rows)
    for part in batch.microbatches:
        part = part.to("cpu")
        ids_T, labels_T = part.packed.input_ids_T, labels_of_line(part)
        for number in range(part.num_rows):
            at = number * batch.plan.row_tokens
            for chunk in next(rows):
                end = at + chunk.length + SPECIAL_TOKENS
                yield ids_T[at:end], labels_T[at:end]
                at = end


def _batches_of(config: RunConfig) -> Iterator[StepBatch]:
    """Yield the batches of a run on one rank, from the first."""
    facts = check_data(config)
    objective_of = partial(build_objective, vocabulary=facts.vocabulary)
    return iter(open_path(config.data, config.seed, Clock.of(config), facts, objective_of).loader(0, 1))


def _endless(config: RunConfig) -> RunConfig:
    """Return the run without an end, for a loader that serves all rounds."""
    ((name, phase),) = config.phases.items()
    return replace(config, phases={name: replace(phase, tokens=1 << 50)})
