"""Choose size and tokens of a run: from hours and the speed of the device, or as given.

Speed on GPUs is `plan`'s prediction, as slow as the slowest published run of such a size. On a CPU it is measured for a
few seconds in a separate process, on random tokens. Neither needs prepared data.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from data_prep.sample import TextSample, TokenFacts, token_facts
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.config.tools.prepare import SMALLEST_VOCABULARY
from modernbert_train.core.installed import path_of_children
from modernbert_train.core.text import tokens_text
from modernbert_train.distributed.bf16 import cpu_has_bf16
from modernbert_train.distributed.visible_gpus import shown_gpus
from modernbert_train.errors import ConfigError
from modernbert_train.plan.cost import bill_of
from modernbert_train.plan.gpus import GPUS
from modernbert_train.plan.make import make_plan
from modernbert_train.plan.memory_fit import too_large
from modernbert_train.plan.recipe import (
    BY_PARAMETERS,
    MAX_PASSES,
    MIN_BATCH_TOKENS,
    SIZES,
    RunRequest,
    Size,
    entries_for,
    power_of_two,
    run_yaml,
    sizes_for_hours,
    tokens_for,
)
from modernbert_train.plan.speed_settings import on_gpu

MAX_HELD_OUT = 10e6  # a twentieth of the text is held out, at most this many bytes ...
MIN_HELD_OUT = 6  # ... and at least this many documents
# Prepared text: factor over the tokens that a run reads, minimum bytes, and the share above which all is prepared
_MARGIN, _MIN_PREPARED, _MAX_SHARE = 1.2, 20e6, 0.8
_READ_PER_SECOND = 15e6  # bytes of text that a core reads, cleans and hashes; measured on one core of 2025
_MIN_TOKENS = 100 * MIN_BATCH_TOKENS  # with fewer than a hundred steps a model learns nothing
_START_SECONDS = {False: 90.0, True: 300.0}  # preparing, starting, measuring and exporting; on GPUs also compiling
_TRAINING = 0.9  # share of the remaining time; validation may take a twentieth, see EvalConfig
_SAFE = 0.8  # share of the vocabulary that a sample suggests; in trials, nine tenths were reached
_MEASURED_SECONDS = 1.5
_MAX_SECONDS = 120.0  # time limit to measure one size, torch's import included
_NOMINAL_TOKENS = 10_000_000  # length of the measured run
_MEMORY_PER_PARAMETER = 20  # bytes of fp32 weights, gradients, moments and temporaries of an update


@dataclass(frozen=True)
class Device:
    """The device that would train.

    Attributes:
        gpus: number of GPUs; 0: the CPU.
        kind: kind of GPU, a key of GPUS.
        here: True if this machine has them.
        bf16: True for a CPU with bf16 instructions, which trains in bf16.
    """

    gpus: int
    kind: str = "h100"
    here: bool = True
    bf16: bool = False

    @property
    def label(self) -> str:
        if self.gpus:
            return f"{self.gpus} x {GPUS[self.kind].label}"
        cores, threads = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
        fewer = f" with OMP_NUM_THREADS={threads}" if threads.isdecimal() and int(threads) != cores else ""
        return f"{cores} CPU cores{fewer}"


@dataclass(frozen=True)
class Chosen:
    """A run that was chosen.

    Attributes:
        size: size of the model.
        entries: size of its vocabulary.
        tokens: tokens to train on.
        text_tokens: estimated tokens of the training text.
        unigram_loss: of the text, in nats per token.
        bytes_per_token: of the text.
        longest: tokens of the longest documents, the 99th percentile.
        speed: tokens a second of all devices; None if it could not be measured.
        text_share: share of the documents to prepare.
        prepare_seconds: estimated time to prepare them on this machine.
    """

    size: Size
    entries: int
    tokens: int
    text_tokens: float
    unigram_loss: float
    bytes_per_token: float
    longest: int
    speed: float | None
    text_share: float
    prepare_seconds: float


def device_of(gpus: int | None) -> Device:
    """Return the requested number of GPUs, or this machine's GPUs, or its CPU."""
    shown = shown_gpus()
    if gpus is None and not shown:
        return Device(0, bf16=cpu_has_bf16())
    name = shown[0][0].lower().replace(" ", "") if shown else ""
    kind = next((key for key in ("h100-pcie", *GPUS) if all(part in name for part in key.split("-"))), "h100")
    return Device(gpus or len(shown), kind, here=len(shown) >= (gpus or 1))


def held_out_share(sample: TextSample, text_share: float = 1.0) -> float:
    """Return the share of documents to hold out: a twentieth; less of much text, more of few documents.

    Args:
        sample: a sample of the text.
        text_share: share of its documents to prepare.
    """
    text_bytes, documents = text_share * sample.text_bytes, text_share * sample.documents
    share = max(min(0.05, MAX_HELD_OUT / text_bytes), min(0.2, MIN_HELD_OUT / documents))
    return float(f"{share:.2g}")


class Chooser:
    """Facts of a text and a device, for comparing sizes.

    Args:
        sample: a sample of the text.
        device: the device that would train.
        tokenizer: a file or folder; None: one is trained.
    """

    def __init__(self, sample: TextSample, device: Device, tokenizer: str | None = None) -> None:
        self._sample, self._device, self._tokenizer = sample, device, tokenizer
        self._facts: dict[int, TokenFacts] = {}

    def facts(self, entries: int) -> TokenFacts:
        """Return facts of a tokenizer of this size, or of the given one; kept for each size."""
        if entries not in self._facts:
            self._facts[entries] = token_facts(self._sample.texts, entries, self._tokenizer)
        return self._facts[entries]

    def entries(self, size: Size) -> int:
        """Return a size's vocabulary: the given tokenizer's, the rule's, or the limit of this text."""
        if self._tokenizer is not None:
            return self.facts(0).entries
        entries = entries_for(size, self._sample.text_bytes)
        facts = self.facts(entries)
        if facts.entries >= entries:
            return entries
        reached = _SAFE * facts.entries * math.sqrt(max(1.0, self._sample.text_bytes / facts.text_bytes))
        return entries if reached >= entries else max(SMALLEST_VOCABULARY, power_of_two(reached))

    def text_tokens(self, entries: int) -> float:
        """Return the tokens of the training text, without exact duplicates."""
        tokens = self._sample.text_bytes / self.facts(entries).bytes_per_token
        return tokens * (1 - held_out_share(self._sample)) * (1 - self._sample.duplicates)

    def text_share(self, entries: int, tokens: float) -> float:
        """Return the share of documents that a run of this many tokens reads, with a margin; 1 if that is most."""
        needed = max(_MARGIN * tokens * self.facts(entries).bytes_per_token, _MIN_PREPARED)
        share = needed / (0.95 * (1 - self._sample.duplicates) * self._sample.text_bytes)
        return float(f"{share:.2g}") if share < _MAX_SHARE else 1.0

    def prepare_seconds(self, entries: int, text_share: float) -> float:
        """Return the seconds to read the documents twice and tokenise them, on all cores."""
        cores, text_bytes = len(os.sched_getaffinity(0)), self._sample.text_bytes
        return (
            2 * text_bytes / _READ_PER_SECOND + text_share * text_bytes / self.facts(entries).bytes_per_second
        ) / cores

    def request(self, size: Size, tokens: float, folder: str = "data/mine") -> RunRequest:
        """Return the recipe's input for a run of a size."""
        entries = self.entries(size)
        longest = int(self._sample.length(0.99) / self.facts(entries).bytes_per_token)
        return RunRequest(
            "measured", size, round(tokens), entries, self._device.gpus, folder,
            longest=max(1, longest), tokenizer=self._tokenizer, bf16=self._device.bf16,
        )  # fmt: skip

    def median(self, entries: int) -> int:
        """Return the median tokens of a document."""
        return max(1, int(self._sample.length(0.5) / self.facts(entries).bytes_per_token))

    def fits(self, size: Size) -> bool:
        """Return True if memory suffices: of a GPU by `plan`, of this machine for weights and optimizer state."""
        device, request = self._device, self.request(size, _NOMINAL_TOKENS)
        if not device.gpus:
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            return _MEMORY_PER_PARAMETER * size.parameters(request.entries) < memory
        gpu = GPUS[device.kind]
        with _loaded(request) as config:
            return not list(too_large(on_gpu(config, gpu, device.gpus), gpu, device.gpus))

    def predicted(self, size: Size) -> float | None:
        """Return tokens a second on GPUs; None if the model does not fit."""
        if not self.fits(size):
            return None
        request, device = self.request(size, 1000 * size.batch_tokens), self._device
        with _loaded(request) as config:
            plan = make_plan(config, device.gpus, self.median(request.entries))
            bill = bill_of(plan.on(device.kind), device.kind, {})
        return plan.tokens / bill.between[1]

    def largest(self) -> str | None:
        """Return the name of the largest size that fits."""
        return next((name for name in reversed(BY_PARAMETERS) if self.fits(SIZES[name])), None)


def choose(
    sample: TextSample,
    device: Device,
    hours: float | None,
    size: str | None,
    tokens: int | None,
    tokenizer: str | None = None,
) -> Chosen:
    """Choose the run for these hours, or of this size.

    Raises:
        DataError: the tokenizer cannot be read or used.
        ConfigError: too few hours, with the minimum; or the size does not fit, with the largest that does.
    """
    chooser = Chooser(sample, device, tokenizer)
    with _speeds(chooser, device, [size] if size else list(BY_PARAMETERS)) as speed:
        if size is not None:
            return _choose_size(chooser, device, SIZES[size], tokens, speed)
        assert hours is not None
        return _choose_by_hours(chooser, device, hours, speed)


Speed = Callable[[Size], float | None]


def _choose_size(chooser: Chooser, device: Device, size: Size, tokens: int | None, speed: Speed) -> Chosen:
    if not chooser.fits(size):
        largest = chooser.largest()
        fits = f"The largest that fits is --size {largest}." if largest else "No size fits."
        raise ConfigError(f"--size {size.name}: does not fit the memory of {device.label}. {fits}")
    entries = chooser.entries(size)
    text = chooser.text_tokens(entries)
    return _chosen(chooser, size, tokens or tokens_for(size, size.parameters(entries), text), speed(size))


def _choose_by_hours(chooser: Chooser, device: Device, hours: float, speed: Speed) -> Chosen:
    seconds = (hours * 3600 - _START_SECONDS[bool(device.gpus)]) * _TRAINING
    speeds: dict[str, float] = {}

    def known(size: Size, entries: int) -> float | None:
        sizes = speed(size)
        if sizes is not None:
            speeds[size.name] = sizes
        return sizes

    text = chooser.text_tokens(chooser.entries(SIZES["tiny"]))
    sizes = list(sizes_for_hours(max(0.0, seconds) / 3600, known, chooser.entries, text))
    if not sizes:
        raise ConfigError(f"--hours {hours:g}: the speed of {device.label} could not be measured. Give --size instead.")
    best = min(sizes, key=lambda each: each.loss)
    least = min(_MIN_TOKENS, MAX_PASSES * text)
    if best.tokens < 0.9 * least:
        needed = least / max(speeds.values()) / _TRAINING + _START_SECONDS[bool(device.gpus)]
        raise ConfigError(
            f"--hours {hours:g}: too few on {device.label}: {tokens_text(least)} tokens of the smallest size are the "
            f"minimum that teaches anything. Give at least --hours {math.ceil(needed / 36) / 100:g}."
        )
    return _chosen(chooser, best.size, best.tokens, speeds[best.size.name])


def _chosen(chooser: Chooser, size: Size, tokens: int, speed: float | None) -> Chosen:
    request = chooser.request(size, tokens)
    assert request.longest is not None
    share = chooser.text_share(request.entries, tokens)
    return Chosen(
        size=size,
        entries=request.entries,
        tokens=tokens,
        text_tokens=share * chooser.text_tokens(request.entries),
        unigram_loss=chooser.facts(request.entries).unigram_loss,
        bytes_per_token=chooser.facts(request.entries).bytes_per_token,
        longest=request.longest,
        speed=speed,
        text_share=share,
        prepare_seconds=chooser.prepare_seconds(request.entries, share),
    )


@contextmanager
def _loaded(request: RunRequest) -> Iterator[RunConfig]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(run_yaml(request), encoding="utf-8")
        yield load_run([file])


@contextmanager
def _speeds(chooser: Chooser, device: Device, names: list[str]) -> Iterator[Speed]:
    """Yield a function that returns tokens a second of a size: predicted, or on a CPU measured one by one, in order."""
    if device.gpus:
        yield chooser.predicted
        return
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for name in names:
            file = Path(folder) / f"{name}.yaml"
            file.write_text(run_yaml(chooser.request(SIZES[name], _NOMINAL_TOKENS)), encoding="utf-8")
            files.append(str(file))
        median = chooser.median(chooser.entries(SIZES[names[0]]))
        module = "modernbert_train.train.measure_speed"
        command = [sys.executable, "-m", module, str(_MEASURED_SECONDS), str(median), *files]
        print(f"measuring this machine: $ python {' '.join(command[1:5])} ...", flush=True)
        process = subprocess.Popen(
            command,
            bufsize=0,  # `select` would not see a line in a buffer
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path_of_children(), "CUDA_VISIBLE_DEVICES": ""},
        )
        try:
            yield lambda size: _next_speed(process)
        finally:
            process.kill()
            process.communicate()


def _next_speed(process: subprocess.Popen[bytes]) -> float | None:
    """Read the speed of the next size from the process; None if it ends or takes too long."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _MAX_SECONDS)
    line = process.stdout.readline() if ready else b""
    return float(json.loads(line)["tokens_per_second"]) if line.startswith(b"{") else None
