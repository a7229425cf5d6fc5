"""Tokens a second of whole training steps, from MDS shards to updated weights, compared with transformers.

    python -m benchmarks.train_step --preset cpu              # the quickstart's size, under two minutes
    python -m benchmarks.train_step --preset cpu-base         # ModernBERT-base, some minutes
    python -m benchmarks.train_step --preset cpu --precision bf16 --threads 1
    python -m benchmarks.train_step --preset gpu              # base and large at 1,024 and 8,192: the table of goals
    python -m benchmarks.train_step --preset gpu --only base-1024 --compile off --kernel flex --microbatch-tokens 65536

Three contenders alternate on the same documents with the same masks:

- ours: the loader with its worker processes, packed rows, the encoder, the loss and StableAdamW, in a bare loop;
- ours through `train`: a real run with Composer, clock, guard and metrics, measured by its own record;
- transformers' ModernBERT as its users train it, with torch's fused AdamW, in the forms that --references names:
  plain (documents padded to the longest of a microbatch, torch's scaled_dot_product_attention, eager), sparse (the same
  with its switch `sparse_prediction`), compiled (that by torch.compile), flash (packed documents, the package
  flash_attn, `sparse_prediction`; on a GPU).

Only tokens of documents count, never padding. A step includes the wait for its batch and the copy to the device. Rates
are tokens over the time of a whole round, which ends with a synchronisation; parts are CUDA events on a GPU. MFU counts
only visible keys and predicted positions; its peaks are the datasheet's and the measured rate of a large matrix product
in the same run. Settings that a case leaves open are chosen as by `train` on this device; dropout is the recipe's, for
transformers too. All start with the same weights and must agree on the first loss.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # run as a script: sys.path begins with this folder, the packages are one above it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.contenders import REFERENCES, Contender, Ours, Theirs, through_train
from benchmarks.corpus import write_corpus
from benchmarks.measure import measure_rates
from modernbert_train.config.auto import OPEN, assigned, microbatch_key, value_of
from modernbert_train.config.schema import (
    CheckpointConfig,
    ComputeConfig,
    DataConfig,
    EvalConfig,
    LoggingConfig,
    ModernBertConfig,
    PhaseConfig,
    RunConfig,
    StableAdamWConfig,
)
from modernbert_train.distributed.compute import Compute, keep_freed_memory, resolve_precision, use_threads
from modernbert_train.models.init import initialize
from modernbert_train.models.masked_lm import ForMaskedLM
from modernbert_train.plan.speed_settings import close_settings, gpu_of_this_rank
from modernbert_train.report.throughput import peak_flops
from modernbert_train.train.build_trainer import build_model

SMALL = ModernBertConfig(
    vocab_size=8192, hidden_size=192, num_layers=7, num_heads=3, intermediate_size=288, attention_out_dropout=0.0
)
BASE = ModernBertConfig()
LARGE = replace(BASE, hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=2624)

# tokens/s: our goal on one H200, the goal after that, and the rate published for one H100
GOALS = {
    "base-1024": (480_000, 535_000, 305_000),
    "base-8192": (273_000, 330_000, 218_000),
    "large-1024": (190_000, 215_000, 140_000),
    "large-8192": (130_000, 150_000, 108_000),
}


@dataclass(frozen=True)
class Case:
    """Model, data and length of a measurement.

    Attributes:
        model, compute: the encoder and its kernels.
        row_tokens: of a row.
        microbatch_tokens, batch_tokens: of a forward pass and of a step.
        rounds, steps, warm_up: turns of each contender; our counted steps in a turn, and uncounted ones before.
        reference_documents: in a microbatch of transformers.
        references: forms of transformers to measure, names of `REFERENCES`.
        median_tokens: of a document.
        compile_mode: of torch.compile, for ours in the bare loop; None is its default if compute.compile is on.
        fused: `optim.fused`; None: as `train` chooses.
    """

    model: ModernBertConfig
    row_tokens: int
    microbatch_tokens: int
    batch_tokens: int
    rounds: int
    steps: int
    warm_up: int
    reference_documents: int
    median_tokens: int = 300
    compile_mode: str | None = None
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    references: tuple[str, ...] = ("plain", "sparse")
    fused: bool | None = None


GPU = Case(BASE, 1024, 98_304, 98_304, 2, 50, 5, 64)
PRESETS: dict[str, dict[str, Case]] = {
    "cpu": {"small-1024": Case(SMALL, 1024, 4096, 4096, 5, 4, 1, 8)},
    "cpu-base": {"base-1024": Case(BASE, 1024, 3072, 3072, 2, 1, 1, 4)},
    "gpu": {
        "base-1024": GPU,
        "base-8192": replace(GPU, row_tokens=8192, reference_documents=8, median_tokens=1500),
        "large-1024": replace(GPU, model=LARGE, microbatch_tokens=49_152),
        "large-8192": replace(
            GPU,
            model=LARGE,
            row_tokens=8192,
            microbatch_tokens=49_152,
            reference_documents=8,
            median_tokens=1500,
        ),
    },
}


def run_config(case: Case, folder: Path, data: Path, device: torch.device, workers: int) -> RunConfig:
    """Return the case as a run of `train`, of one round."""
    tokens = (case.steps + case.warm_up) * case.batch_tokens
    phase = PhaseConfig(
        tokens=tokens,
        row_tokens=case.row_tokens,
        batch_rows=case.batch_tokens // case.row_tokens,
        microbatch_tokens=case.microbatch_tokens,
        model={"global_rope_theta": 160_000.0} if case.row_tokens > 1024 else {},
    )
    return RunConfig(
        name="benchmark",
        runs_folder=str(folder),
        compute=replace(case.compute, device=device.type),  # type: ignore[arg-type]
        data=DataConfig(train=str(data / "train"), tokenizer=str(data / "tokenizer"), num_workers=workers),
        model=case.model,
        optim=StableAdamWConfig(lr=1e-4, fused=case.fused),
        phases={"only": phase},
        eval=EvalConfig(),
        checkpoint=CheckpointConfig(interval_seconds=None),
        logging=LoggingConfig(progress_bar=False),
    )


def as_trained(config: RunConfig, device: torch.device) -> RunConfig:
    """Return the run with its open settings filled in, as `train` does at a start on this device."""
    compute = Compute(device, resolve_precision(config.compute, device))
    return close_settings(config, gpus=gpu_of_this_rank(compute), fresh=True).config


def settings_of(config: RunConfig) -> list[str]:
    """Return the speed settings of a complete run, each as KEY=VALUE, and its dropout."""
    keys = [*OPEN, *(microbatch_key(name) for name in config.phases), "model.attention_out_dropout"]
    return [assigned(key, value_of(config, key)) for key in keys]


def run(case: Case, device: torch.device, data: Path, workers: int, with_trainer: bool = True) -> dict[str, Contender]:
    """Run all rounds.

    Args:
        case: to measure.
        device: of the model.
        data: folder with train and tokenizer.
        workers: processes that read, pack and mask.
        with_trainer: also train through `train`.

    Returns:
        The contenders with their measurements, ours first.

    Raises:
        RuntimeError: the contenders compute different losses from the same weights.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = as_trained(run_config(case, Path(folder), data, device, workers), device)
        print(", ".join(settings_of(config)))
        use_threads(config.compute, device)
        model = build_model(config, sharded=False)
        assert isinstance(model, ForMaskedLM)
        if case.compile_mode is not None:
            model.compile_layers(mode=case.compile_mode)
        initialize(model, case.model, config.seed)
        ours = Ours(model.to(device).train(), config, device)
        contenders: dict[str, Contender] = {"ours": ours}
        theirs = {}
        for reference in (REFERENCES[name] for name in case.references):
            theirs[reference.name] = Theirs(model, config, device, case.reference_documents, reference)
        first = ours.next_batch()
        losses = [ours.first_loss(first), *(contender.first_loss(first) for contender in theirs.values())]
        rounded = resolve_precision(config.compute, device) == "amp_bf16"
        limit = 5e-3 if rounded or case.model.attention_out_dropout else 1e-4  # contenders draw different dropout
        if any(abs(loss - losses[0]) > limit * losses[0] for loss in losses):
            raise RuntimeError(f"first losses {losses}: they differ, so the contenders do not compute the same.")
        for number in range(case.rounds):
            seen = ours.turn(case.steps, case.warm_up)
            for contender in theirs.values():
                contender.turn(seen[: max(1, len(seen) // 10)])
            if with_trainer:
                trained = through_train(replace(config, name=f"round{number}"), case.warm_up)
                contenders.setdefault("ours, through train", trained).extend(trained)
        ours.close()
        return contenders | theirs


def report(name: str, case: Case, contenders: dict[str, Contender], peaks: dict[str, float]) -> list[dict[str, Any]]:
    """Print a table; return its figures."""
    print(
        f"\n{name}: rows of {case.row_tokens:,}, microbatches of {case.microbatch_tokens:,}, steps of "
        f"{case.batch_tokens:,} tokens, {case.rounds} rounds of {case.steps} steps"
    )
    columns = "".join(f"{'MFU ' + peak:>15}" for peak in peaks)
    head = f"{'':<30}{'tokens/s':>10}{'min':>10}{'max':>10}{'ours is':>9}{'tokens/CPU s':>14}{'ours is':>9}"
    print(f"{head}{columns}  parts of a step, ms")
    first, first_cpu = contenders["ours"].rates, contenders["ours"].cpu_rates
    lines = []
    for who, each in contenders.items():
        mfu = {peak: median(each.flop_rates) / rate for peak, rate in peaks.items()}
        ms_of_parts = {part: 1e3 * median(times) for part, times in each.seconds.items()}
        ratio = median(a / b for a, b in zip(first, each.rates, strict=True))
        cpu = f"{'':>23}"
        if each.cpu_rates:
            cpu_ratio = median(a / b for a, b in zip(first_cpu, each.cpu_rates, strict=True))
            cpu = f"{median(each.cpu_rates):>14,.0f}{cpu_ratio:>8.2f}x"
        print(
            f"{who:<30}{median(each.rates):>10,.0f}{min(each.rates):>10,.0f}{max(each.rates):>10,.0f}{ratio:>8.2f}x{cpu}"
            + "".join(f"{share:>15.1%}" for share in mfu.values())
            + "  "
            + ", ".join(f"{part} {ms:,.1f}" for part, ms in ms_of_parts.items())
            + (f"; peak {each.peak_bytes / 1e9:.1f} GB" if each.peak_bytes else "")
        )
        figures = {"tokens_per_second": median(each.rates), "ours_is": ratio, "mfu": mfu, "parts_ms": ms_of_parts}
        if each.cpu_rates:
            figures["tokens_per_cpu_second"] = median(each.cpu_rates)
        lines.append({"case": name, "contender": who, **figures, "peak_bytes": each.peak_bytes})
    if name in GOALS and contenders["ours"].on_gpu:
        goal, beyond, published = GOALS[name]
        rate = median(first)
        print(
            f"goal {goal:,}: {rate / goal:.2f}; beyond it {beyond:,}: {rate / beyond:.2f}; published on one H100 "
            f"{published:,}: {rate / published:.2f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="cases of the preset, such as base-1024")
    parser.add_argument("--data", type=Path, help="folder with train and tokenizer; default: drawn documents")
    parser.add_argument("--kernel", help="compute.attention")
    parser.add_argument("--global-kernel", help="compute.global_attention")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), help="of all contenders; default: auto")
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--compile", help="off, on, or a mode of torch.compile, without `train`; default: as `train`")
    parser.add_argument("--fused", choices=("off", "on"), help="optim.fused; default: as `train`")
    parser.add_argument("--microbatch-tokens", type=int)
    parser.add_argument("--batch-tokens", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="of ours in a round")
    parser.add_argument("--workers", type=int, default=4 if torch.cuda.is_available() else 0)
    parser.add_argument("--no-reference", action="store_true", help="leave transformers out")
    parser.add_argument(
        "--references", nargs="+", choices=REFERENCES, help="forms of transformers; default: plain sparse"
    )
    parser.add_argument("--dropout", type=float, help="model.attention_out_dropout; default: the recipe's")
    parser.add_argument("--no-trainer", action="store_true", help="leave the run through `train` out")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    cases = PRESETS[options.preset]
    if unknown := set(options.only or ()) - set(cases):
        parser.error(f"--only {' '.join(sorted(unknown))}: not in this preset, which has {', '.join(cases)}")

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if on_gpu:
        rates = measure_rates(device, torch.bfloat16, 8192, 1 << 28)
        datasheet = peak_flops(torch.cuda.get_device_name(), "amp_bf16")
        where = torch.cuda.get_device_name()
    else:
        keep_freed_memory()
        rates, datasheet = measure_rates(device, torch.float32, 1024, 1 << 26), None
        where = f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} threads"
    peaks = ({"of datasheet": datasheet} if datasheet else {}) | {"of matmul": rates.flops}
    print(f"{where}, torch {torch.__version__}; matrix product {rates.flops / 1e12:.3g} TFLOP/s")

    figures = []
    for name, preset in cases.items():
        if options.only and name not in options.only:
            continue
        case = changed(preset, options)
        with tempfile.TemporaryDirectory() as folder:
            data = options.data
            if data is None:
                data = Path(folder)
                tokens = min(40_000_000, 4 * (case.steps + case.warm_up) * case.batch_tokens)
                write_corpus(data, case.model.vocab_size, tokens, case.median_tokens, 4 * case.row_tokens)
            with_trainer = not options.no_trainer and case.compile_mode is None
            contenders = run(case, device, data, options.workers, with_trainer)
        figures += report(name, case, contenders, peaks)
        if options.json is not None:
            about = {"where": where, "torch": torch.__version__, "matmul_flops": rates.flops, "case": asdict(case)}
            options.json.write_text(json.dumps({"about": about, "lines": figures}, indent=1), encoding="utf-8")


def changed(case: Case, options: argparse.Namespace) -> Case:
    """Return the case with the options applied."""
    compute = case.compute
    if options.kernel is not None:
        compute = replace(compute, attention=options.kernel)
    if options.precision is not None:
        compute = replace(compute, precision=options.precision)
    if options.threads is not None:
        compute = replace(compute, threads=options.threads)
    if options.global_kernel is not None:
        compute = replace(compute, global_attention=options.global_kernel)
    mode = None
    if options.compile is not None:
        mode = options.compile if options.compile not in ("on", "off") else None
        compute = replace(compute, compile=options.compile == "on")
    sizes = {
        "microbatch_tokens": options.microbatch_tokens,
        "batch_tokens": options.batch_tokens,
        "rounds": options.rounds,
        "steps": options.steps,
    }
    case = replace(
        case, compute=compute, compile_mode=mode, **{key: value for key, value in sizes.items() if value is not None}
    )
    if options.dropout is not None:
        case = replace(case, model=replace(case.model, attention_out_dropout=options.dropout))
    if options.fused is not None:
        case = replace(case, fused=options.fused == "on")
    if options.references is not None:
        case = replace(case, references=tuple(options.references))
    return replace(case, references=()) if options.no_reference else case


if __name__ == "__main__":
    main()
