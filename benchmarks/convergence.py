"""Our run beside a plain PyTorch loop over transformers' ModernBERT, on the same batches from the same weights.

    python -m benchmarks.convergence --data data/quickstart --tokens 400_000 --svg docs/convergence.svg

`--data` is any folder of data_prep/prepare.py with a vocabulary of at most 8,192. Runs of the quickstart's model
(width 192, 7 layers), all at the same rate and schedule, without dropout:

- ours with optim.name=adamw, through `train`: Composer, packing, our encoder and kernels;
- the plain loop: transformers' ModernBertForMaskedLM in padded batches of one document per line, torch's AdamW, and
  nothing of ours but the batches (the same rows, the same masks) and the first weights;
- the plain loop once more, which adds the same numbers in another order: its documents stand in reverse in a batch;
- ours as it is meant to be, with StableAdamW.

Each curve is kept in `--curves` as soon as it is there and read from it next time, so runs can be made one by one, or
side by side with `--only`.

The first two should be one curve, to float error. Training amplifies that error sooner or later; the two plain loops
show how much, so ours may be as far from one as they are from each other.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.batches import labels_of_line
from benchmarks.reference import transformers_model
from modernbert_train.batch import Batch
from modernbert_train.clock import at
from modernbert_train.compute import Compute
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.check import check_data
from modernbert_train.evals.heldout import open_validation
from modernbert_train.models.init import initialize
from modernbert_train.report.chart import Chart, Line, Marks, standalone
from modernbert_train.train.build import build_data, build_model
from modernbert_train.train.session import train
from modernbert_train.vocabulary import Vocabulary

ROOT = Path(__file__).resolve().parent.parent
IGNORED = -100
WARMUP, DECAY = 0.05, 0.3  # shares of the run
OURS, STABLE = "ours, AdamW", "ours, StableAdamW"
PLAIN, REVERSED = "transformers, plain loop, AdamW", "the same, documents in reverse"
RUNS = {"adamw": OURS, "plain": PLAIN, "reversed": REVERSED, "stable_adamw": STABLE}


@dataclass(frozen=True)
class Curve:
    """One run: tokens after each step, loss of each step over all its predicted tokens, held-out loss at the end."""

    tokens: list[int]
    losses: list[float]
    held_out: float
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train, validation and tokenizer")
    parser.add_argument("--tokens", type=int, default=400_000, help="tokens of each run")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak rate of all three")
    parser.add_argument("--curves", type=Path, help="keep the curves here; one that is there is not run again")
    parser.add_argument("--only", choices=RUNS, nargs="+", default=list(RUNS), help="runs to make; all for a report")
    parser.add_argument("--svg", type=Path, help="draw the curves here")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # after Composer's own, which still draws reports there
    configs = {
        name: configure(folder, options.data, options.tokens, options.lr, optimizer)
        for name, optimizer in ((OURS, "adamw"), (STABLE, "stable_adamw"))
    }
    make: dict[str, Callable[[], Curve]] = {
        OURS: lambda: ours(configs[OURS]),
        PLAIN: lambda: plain(configs[OURS], reverse=False),
        REVERSED: lambda: plain(configs[OURS], reverse=True),
        STABLE: lambda: ours(configs[STABLE]),
    }
    curves = {RUNS[key]: kept(options.curves, key, make[RUNS[key]], vars(options)) for key in options.only}
    if len(curves) < len(RUNS):
        return
    print(report(curves))
    if options.svg is not None:
        options.svg.write_text(picture(curves), encoding="utf-8")


def kept(folder: Path | None, key: str, make: Callable[[], Curve], options: dict[str, Any]) -> Curve:
    """The curve of a folder, if it was made with these options; otherwise it is made, and put there."""
    made_with = {"tokens": options["tokens"], "lr": options["lr"], "data": str(options["data"].resolve())}
    if folder is None:
        return make()
    path = folder / f"{key}.json"
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("options") != made_with:
            raise SystemExit(f"{path}: made with other tokens, rate or data. Give another --curves, or remove it.")
        return Curve(**found)
    curve = make()
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(curve) | {"options": made_with}), encoding="utf-8")
    return curve


def configure(folder: Path, data: Path, tokens: int, lr: float, optimizer: str) -> RunConfig:
    """The quickstart in one phase: warmup, plateau and 1-sqrt decay."""
    decay = {"adamw": 0.01, "stable_adamw": 1e-5}[optimizer]
    schedule = f"warmup_tokens: {round(WARMUP * tokens)}, decay_tokens: {round(DECAY * tokens)}"
    return load_run(
        [ROOT / "yamls/quickstart.yaml"],
        [
            f"name={optimizer}",
            f"runs_folder={folder}",
            "compute.device=cpu",
            *(f"data.{part}={data / part}" for part in ("train", "validation", "tokenizer")),
            "data.num_workers=0",
            f"optim={{name: {optimizer}, lr: {lr}, weight_decay: {decay}}}",
            "phases.context=null",
            "phases.decay=null",
            "phases.stable={batch_rows: 2, microbatch_tokens: 1024, batch_warmup: null}",  # small, to learn early
            f"phases.stable={{tokens: {tokens}, schedule: {{{schedule}}}}}",
            "checkpoint.interval_seconds=null",
            "logging.progress_bar=false",
        ],
    )


def ours(config: RunConfig) -> Curve:
    """Train as a user does, and read the record."""
    started = time.perf_counter()
    train(config)
    seconds = time.perf_counter() - started
    lines = (Path(config.folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    steps = [entry for entry in entries if entry["kind"] == "step"]
    (held_out,) = (entry["loss"] for entry in entries if entry["kind"] == "validation")
    return Curve([step["tokens"] for step in steps], [step["loss"] for step in steps], held_out, seconds)


def plain(config: RunConfig, reverse: bool) -> Curve:
    """A loop such as one writes in an afternoon; `reverse` only changes in which order numbers are added."""
    facts = check_data(config)
    vocabulary = facts.vocabulary
    first = build_model(config, sharded=False)
    initialize(first, config.modernbert, config.seed)
    model = transformers_model(at(config, 0).modernbert, config.phases["stable"].row_tokens, vocabulary)
    model.load_state_dict(first.state_dict())
    model.train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.optim.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        betas=config.optim.betas,
        eps=config.optim.eps,
    )
    curve = Curve([], [], 0.0, 0.0)
    started, seen, total = time.perf_counter(), 0, config.total_tokens
    for step in build_data(config, facts).loader(0, 1):
        for group in optimizer.param_groups:
            group["lr"] = config.optim.lr * rate(seen, total)
        optimizer.zero_grad()
        predicted = sum(batch.counts["mlm"] for batch in step.microbatches)
        loss = 0.0
        for batch in step.microbatches:
            ids, mask, labels = padded(batch.to("cpu"), vocabulary, reverse)
            share = batch.counts["mlm"] / predicted
            mean = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            (share * mean).backward()
            loss += share * mean.item()
        optimizer.step()
        seen += sum(batch.num_tokens for batch in step.microbatches)
        curve.tokens.append(seen)
        curve.losses.append(loss)
    seconds = time.perf_counter() - started
    first.load_state_dict(model.state_dict())
    phase = config.phases["stable"]
    found = open_validation(config, facts).evaluate(first, phase, Compute(torch.device("cpu"), "fp32"))
    return Curve(curve.tokens, curve.losses, found.loss, seconds)


def rate(seen: int, total: int) -> float:
    """Warmup, plateau, 1 - sqrt; as the configuration says, written once more."""
    warmup, decay = round(WARMUP * total), round(DECAY * total)
    if seen < warmup:
        return seen / warmup
    return 1.0 if seen <= total - decay else 1.0 - math.sqrt((seen - (total - decay)) / decay)


def padded(batch: Batch, vocabulary: Vocabulary, reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A packed microbatch as transformers takes it: a line for each sequence, padded; ids, mask and labels."""
    ids_T, labels_T = batch.packed.input_ids_T, labels_of_line(batch)
    spans = sorted(_sequences(batch, vocabulary), reverse=reverse)
    ids = pad_sequence([ids_T[a:b] for a, b in spans], True, vocabulary.pad_id)
    mask = pad_sequence([torch.ones(b - a, dtype=torch.long) for a, b in spans], True, 0)
    return ids, mask, pad_sequence([labels_T[a:b] for a, b in spans], True, IGNORED)


def _sequences(batch: Batch, vocabulary: Vocabulary) -> Iterator[tuple[int, int]]:
    """Where sequences of text begin and end; the tail of a row is a sequence of pads and is left out."""
    for start, end in pairwise(batch.packed.cu_seqlens_S.tolist()):
        if end > start and int(batch.packed.input_ids_T[start]) == vocabulary.cls_id:
            yield start, end


def report(curves: dict[str, Curve]) -> str:
    """Markdown: the runs, and how far ours is from the plain loop, and that one from itself."""
    assert len({tuple(curve.tokens) for curve in curves.values()}) == 1
    rows = ["| | mean loss of the last 10 % of steps | held-out loss | seconds |", "| --- | --- | --- | --- |"]
    for name, curve in curves.items():
        last = curve.losses[-max(1, len(curve.losses) // 10) :]
        rows.append(f"| {name} | {sum(last) / len(last):.4f} | {curve.held_out:.4f} | {curve.seconds:.0f} |")
    plain_losses = curves[PLAIN].losses
    apart = {
        name: [abs(a - b) / b for a, b in zip(curves[name].losses, plain_losses, strict=True)]
        for name in (OURS, REVERSED)
    }
    steps = len(plain_losses)
    rows.append(f"\n{steps} steps, {curves[PLAIN].tokens[-1]:,} tokens. Largest relative difference in loss:\n")
    rows += [f"| steps | {OURS}, and the plain loop | the two plain loops | mean loss of each |", 4 * "| --- " + "|"]
    ends = sorted({end for end in (50, 100, 150) if end < steps // 8} | {steps * part // 8 for part in range(1, 9)})
    for first, end in pairwise([0, *ends]):
        cells = [f"{max(apart[name][first:end]):.1e}" for name in (OURS, REVERSED)]
        means = ", ".join(f"{sum(curve.losses[first:end]) / (end - first):.4f}" for curve in curves.values())
        rows.append(f"| {first + 1} to {end} | {' | '.join(cells)} | {means} |")
    return "\n".join(rows)


def picture(curves: dict[str, Curve]) -> str:
    """Losses smoothed over 20 steps, in an SVG file."""
    kinds = {OURS: "main", PLAIN: "points", STABLE: "dashed"}
    lines = []
    for name in kinds:
        curve = curves[name]
        y = [sum(curve.losses[max(0, i - 19) : i + 1]) / min(20, i + 1) for i in range(len(curve.losses))]
        x = [float(tokens) for tokens in curve.tokens]
        if kinds[name] == "points":  # dots on the line that it should lie on
            apart = max(1, len(x) // 40)
            x, y = x[apart - 1 :: apart], y[apart - 1 :: apart]
        lines.append(Line(name, kinds[name], x, y))  # type: ignore[arg-type]
    chart = Chart(
        "The same batches, two programs", lines, lambda value: f"{value:.4f} nats", lambda value: f"{value:g}"
    )
    style = files("modernbert_train.report").joinpath("chart.css").read_text(encoding="utf-8")
    marks = Marks(float(curves[OURS].tokens[-1]))
    return standalone(chart, marks, "masked-LM loss, mean of 20 steps; width 192, 7 layers", style)


if __name__ == "__main__":
    main()
