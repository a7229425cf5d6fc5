"""Recorded curves: tokens, loss and gradient norm of every step of small runs, kept in recorded.txt.

Each optimizer and masking has curves on one and two ranks; each encoder has one with each objective. A change that
should not change training must leave them unchanged, to the last bit on the platform that recorded them. After an
intended change they are recorded again, and its commit shows old and new: see record.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from modernbert_train.__main__ import main
from tests.support.forked import CONTEXT, outputs, print_to
from tests.support.gloo import run_ranks
from tests.support.matrix import PAIRS, system
from tests.support.ranks import train_each
from tests.support.tiny_run import TINY_YAML, make_tiny_data

FILE = Path(__file__).with_name("recorded.txt")
COLUMNS = ("step", "phase", "tokens", "loss", "grad_norm")
# elsewhere products and sums may be rounded otherwise; 15 steps let that grow to some 1e-5
TOLERANCE = 2e-4

OPTIMIZERS = {
    "stable_adamw": (),
    "adamw": ("optim={name: adamw, lr: 5e-3}",),
    "muon": ("optim={name: muon, lr: 5e-3}",),
}
MASKINGS = ("exact", "bernoulli", "reference")
# the second half of the short phase decays too, so that each part of the schedule is in the curve
COMMON = (
    *("phases.short.schedule.decay_tokens=1500", "checkpoint.keep=1", "optim.weight_decay=1e-3"),
    *("phases.short.microbatch_tokens=128", "phases.long.microbatch_tokens=128"),
)
SYSTEMS = [*PAIRS, ("modernbert", "sparse"), ("modernbert", "tlm")]
SHORT = ("phases.long=null", "phases.short.tokens=2000", "phases.short.schedule.decay_tokens=1000", "checkpoint.keep=1")
# off, since it draws other numbers on other processors; the other encoders have none
DROPOUT = {"modernbert": "attention_out_dropout"}
DROPOUT |= dict.fromkeys(("bert", "distilbert", "albert", "xlnet", "deberta"), "dropout")


@dataclass(frozen=True)
class Curve:
    """A run whose every step is recorded.

    Attributes:
        words: overrides of the tiny run.
        system: its encoder and objective, see tests/support/matrix.py; None: those of the tiny run.
        ranks: processes that train it.
        anywhere: it means the same on every platform; dropout draws other numbers on other processors.
        norms: tolerance of gradient norms elsewhere. Those of `sparse`, whose pooling takes a maximum, differ by 4e-4
            on a processor without AVX-512.
    """

    words: tuple[str, ...]
    system: tuple[str, str] | None = None
    ranks: int = 1
    anywhere: bool = True
    norms: float = TOLERANCE


def _curves() -> dict[str, Curve]:
    curves = {}
    for optimizer, of_optimizer in OPTIMIZERS.items():
        for masking in MASKINGS[:1] if optimizer == "muon" else MASKINGS:
            words = (*of_optimizer, f"objective.masking={masking}", *COMMON)
            curves[f"{optimizer}-{masking}-1-rank"] = Curve(words)
            for strategy in ("ddp", "fsdp2"):
                curves[f"{optimizer}-{masking}-2-{strategy}"] = Curve(
                    (*words, f"distributed.strategy={strategy}"), ranks=2
                )
    curves["dropout-1-rank"] = Curve(("model.attention_out_dropout=0.1", *COMMON), anywhere=False)
    for encoder, objective in SYSTEMS:
        words = (*SHORT, f"model.{DROPOUT[encoder]}=0.0") if encoder in DROPOUT else SHORT
        norms = 1e-3 if objective == "sparse" else TOLERANCE
        curves[f"{encoder}-{objective}"] = Curve(words, (encoder, objective), norms=norms)
    return curves


CURVES = _curves()


FAULTY = "stable_adamw-exact-1-rank"  # the run in which these faults are planted, to see that a curve notices them
FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {  # a name in a module, its replacement
    "schedule": ("optim.schedules.WARMUP_START", lambda ratio: 1e-3),
    "masking": ("objectives.mlm._KIND", lambda key: key + np.uint64(1)),
    "optimizer": ("optim.stable_adamw._new_shares", lambda new: lambda block: (new(block)[0], 0.9 * new(block)[1])),
}


def planted(fault: str | None) -> AbstractContextManager[Any]:
    """One constant of the code is another."""
    if fault is None:
        return nullcontext()
    name, change = FAULTS[fault]
    return patch(f"modernbert_train.{name}", change(resolve_name(f"modernbert_train.{name}")))


def platform_text() -> str:
    """Return the parts that must be equal for two curves to be equal to the bit."""
    cpu = dict(map(str.strip, line.split(":", 1)) for line in _cpu_lines() if ":" in line)
    names = [cpu[key] for key in ("model name", "cpu family", "model", "stepping") if key in cpu]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {capability}, {' '.join(names) or platform.processor()}, {platform.machine()}"


def _cpu_lines() -> list[str]:
    info = Path("/proc/cpuinfo")
    return info.read_text(encoding="utf-8").splitlines() if info.exists() else []


def data_text(data: Path) -> str:
    """A short hash of the shards and the tokenizer: other data are another curve, and no fault of the code."""
    digest = hashlib.sha256()
    for path in sorted(data.rglob("*")):
        if path.is_file() and path.name in ("index.json", "lengths.npy", "token_counts.npy", "tokenizer.json"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def train(names: Sequence[str], folder: Path, data: Path | None = None, faults: Sequence[str] = ()) -> dict[str, str]:
    """Train curves and write each as text: one rank's in one process, two ranks' in another pair.

    Args:
        names: of CURVES.
        folder: empty, for the runs.
        data: from `make_tiny_data`; None makes it here.
        faults: of FAULTS; FAULTY is also trained with each of them planted, under the fault's name.
    """
    data = data or make_tiny_data(folder / "data")

    def words_of(curve: Curve, name: str) -> list[str]:
        file = folder / f"{name}.yaml"
        file.write_text(TINY_YAML.format(runs=folder / "runs", data=data), encoding="utf-8")
        words = [str(file), *curve.words, f"name={name}"]
        return words if curve.system is None else system(words, *curve.system)

    words = {name: words_of(CURVES[name], name) for name in names}
    alone = [(words[name], None) for name in names if CURVES[name].ranks == 1]
    alone += [(words_of(CURVES[FAULTY], fault), fault) for fault in faults]
    if alone:
        with ProcessPoolExecutor(1, CONTEXT, initializer=print_to, initargs=outputs()) as pool:
            pool.submit(_train_alone, alone).result()
    together = [words[name] for name in names if CURVES[name].ranks == 2]
    if together:
        run_ranks(train_each, 2, together, False, timeout_seconds=280)
    head = f"# platform: {platform_text()}\n# data: {data_text(data)}\n"
    return {name: head + _curve_of(folder / "runs" / name) for name in (*names, *faults)}


def read_recorded(file: Path = FILE) -> dict[str, str]:
    """Return the recorded curves by name."""
    parts = file.read_text(encoding="utf-8").split("== ")[1:]
    return dict(part.split("\n", 1) for part in parts)


def write_recorded(curves: Mapping[str, str], file: Path = FILE) -> None:
    """Replace the recorded curves; one that CURVES lost is left out."""
    text = "".join(f"== {name}\n{curves[name]}" for name in CURVES if name in curves)
    file.write_text(text, encoding="utf-8")


def _train_alone(runs: list[tuple[list[str], str | None]]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)  # sums are added in the same order
    for words, fault in runs:
        with planted(fault):
            assert main(["train", *words]) == 0, words


def _curve_of(run: Path) -> str:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [COLUMNS, *([_text(entry[key]) for key in COLUMNS] for entry in entries if entry["kind"] == "step")]
    return "".join(" ".join(row) + "\n" for row in rows)


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)  # repr gives back the same bits


@dataclass(frozen=True)
class Recorded:
    """A curve as stored in text: the platform that recorded it, and a row for each step."""

    head: Mapping[str, str]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Recorded:
        lines = text.splitlines()
        head = dict(line.removeprefix("# ").split(": ", 1) for line in lines if line.startswith("#"))
        rows = [tuple(line.split(" ")) for line in lines if not line.startswith("#")]
        assert rows[0] == COLUMNS, f"columns are {rows[0]}"
        return cls(head, tuple(rows[1:]))


def moved(name: str, old: str, new: str) -> str:
    """Return a row of a table: the steps that differ, the loss of the last one before and after."""
    lines, before, after = differences(old, new), Recorded.parse(old).rows, Recorded.parse(new).rows
    losses = [float(rows[-1][COLUMNS.index("loss")]) for rows in (before, after)]
    return (
        f"| {name} | {len(lines)} of {len(before)} | {losses[0]:.9g} | {losses[1]:.9g} | {losses[1] - losses[0]:+.2g} |"
    )


def differences(old: str, new: str, norms: float = TOLERANCE) -> list[str]:
    """Lines that tell where two curves differ: to the bit on one platform, else by more than TOLERANCE; none if equal.

    Steps, phases and tokens must always be equal. `norms`: see `Curve`.
    """
    one, other = Recorded.parse(old), Recorded.parse(new)
    if one.head["data"] != other.head["data"]:
        return [f"made from other data: {one.head['data']} -> {other.head['data']}"]
    if len(one.rows) != len(other.rows):
        return [f"{len(one.rows)} steps -> {len(other.rows)} steps"]
    tolerances = (0.0, 0.0) if one.head["platform"] == other.head["platform"] else (TOLERANCE, norms)
    found = []
    for before, after in zip(one.rows, other.rows, strict=True):
        numbers = [(float(x), float(y)) for x, y in zip(before[3:], after[3:], strict=True)]
        far = any(not abs(x - y) <= most * abs(x) for (x, y), most in zip(numbers, tolerances, strict=True))
        if before[:3] != after[:3] or far:
            found.append(f"{' '.join(before)} -> {' '.join(after)}")
    return found
