"""The parts of the first GPU hour, the most important first, with their sizes.

Limits are about twice the expected time. Expected numbers are predictions for an H100, per GPU: rates are from
`plan`, the rest from benchmarks/roofline.py and the published runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks import hour_numbers as read
from benchmarks.hour_numbers import Numbers
from modernbert_train.config.load import load_run
from modernbert_train.plan.cost import bill_of
from modernbert_train.plan.make import make_plan

Range = tuple[float | None, float | None]
Gpus = Literal["one", "other", "two", "all"]
NOTHING: dict[str, Range] = {}


@dataclass(frozen=True)
class Part:
    """A row of the table.

    Attributes:
        name: of the part, its files, and the run that it trains.
        what: its purpose, in a few words.
        gpus: the GPUs that it uses: the first; the second, or the first if there is no other; the first two; all.
        minutes: its time limit.
        command: for python; names in braces are keys of `sizes`.
        numbers: function that reads numbers from the command's output; raises Wrong if they reveal an error.
        expected: number -> lowest and highest, on an H100.
        otherwise: advice if it fails or a number is not as expected.
        min_gpus: number of GPUs that it needs.
        ranks: number of ranks, if not one for each of its GPUs; with fewer GPUs, ranks share them.
        max_gpus: largest number of GPUs with which it runs; with more, another part does the same on them.
    """

    name: str
    what: str
    gpus: Gpus
    minutes: float
    command: str
    numbers: Callable[[Path, str], Numbers] = read.nothing
    expected: dict[str, Range] = field(default_factory=dict)
    otherwise: str = "read the log"
    min_gpus: int = 1
    ranks: int | None = None
    max_gpus: int | None = None


# for ranks that share a GPU: NCCL treats them as separate hosts, which communicate over the loopback network
SHARED = {
    "NCCL_HOSTID": "shared", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_MAX_CTAS": "2",
}  # fmt: skip


def _start(name: str, gpus: Gpus, words: str, min_gpus: int = 1, ranks: int | None = None, **more: Any) -> Part:
    """Train the quickstart's model through the launcher: the same batches and masks on any number of GPUs."""
    settings = words.replace("compute.", "").replace("distributed.", "")
    where = f"{gpus} GPU{'s' * (gpus != 'one')}" if ranks is None else f"{ranks} ranks"
    return Part(
        name,
        f"the quickstart on {where}: {settings}",
        gpus,
        5,
        f"launch/run.py yamls/quickstart.yaml {{quick}} {words}",
        read.losses,
        {read.APART: (0, 1), "first loss": (9.1, 9.3), "last loss": (None, 6.5)},
        "send the log; if losses differ, work/runs/*/metrics.jsonl, too",
        min_gpus,
        ranks,
        **more,
    )


def _recipe(name: str, what: str, gpus: Gpus, words: str, rate: Range, gigabytes: Range, **more: Any) -> Part:
    """Take steps of a recipe of the paper, on synthetic text."""
    expected = {read.RATE: rate, read.SHARE: (97, None), read.MEMORY: gigabytes, read.WAIT: (None, 1)}
    return Part(name, what, gpus, 6, f"launch/run.py {words}", read.speed_of_run, expected, **more)


def predicted_rate(size: str, words: str) -> Range:
    """Return the lowest and highest tokens/s that `plan` predicts for a recipe's first phase on one H100."""
    recipe = Path(__file__).parents[1] / f"yamls/recipes/modernbert-{size}/1-stable.yaml"
    config = load_run([recipe], ["data.train=absent/train", *words.split()])
    low, high = bill_of(make_plan(config, 1), "h100", {}).tokens_per_second
    return round(low, -3), round(high, -3)


EAGER = "compute.compile=false optim.fused=false"
FAST = "compute.compile=true optim.fused=true"
BASE_RATE, EAGER_RATE, LARGE_RATE = (
    predicted_rate(*each) for each in (("base", FAST), ("base", EAGER), ("large", FAST))
)
FSDP2 = "distributed.strategy=fsdp2"
MUON = "optim.name=muon"
LOOK_FOR_BREAKS = "run it again with TORCH_LOGS=graph_breaks,recompiles and look for a graph that breaks"
LOOK_FOR_WAITS = (
    "look at the data wait; train with `profile: {}` and look whether all-reduces lie under the last backward"
)
PARTS = (
    Part("doctor", "usable features on this machine", "all", 3, "-m modernbert_train doctor", read.doctor, NOTHING,
         "each line that is not ok names the remedy; a driver from 580 on is needed for CUDA 13"),
    Part("text", "the quickstart's text, from Python's own source", "all", 3,
         "data_prep/prepare.py yamls/data/quickstart.yaml out={work}/quickstart"),
    Part("drawn-text", "drawn documents, for the recipes", "all", 4, "-m benchmarks.corpus {work}/drawn {drawn}"),
    _start("one-varlen", "one", f"compute.attention=varlen {EAGER}"),
    _start("one-flex", "one", f"compute.attention=flex {EAGER}"),
    _start("one-compiled", "one", FAST),
    Part("shared-collectives", "NCCL's collectives compared with sums on the host, 2 ranks", "two", 6,
         "-m benchmarks.collectives --ranks {ranks} {bytes}", read.collectives, {"wrong": (0, 0)},
         "do not train on several GPUs: send the log", ranks=2),
    Part("shared-collectives-4", "the same, 4 ranks, and in groups of 2", "all", 6,
         "-m benchmarks.collectives --ranks {ranks} {bytes}", read.collectives, {"wrong": (0, 0)},
         "do not train on several GPUs: send the log", ranks=4),
    _start("shared-ddp", "one", EAGER, ranks=2, max_gpus=1),
    _start("shared-fsdp2", "one", f"{FSDP2} {EAGER}", ranks=2, max_gpus=1),
    _start("shared-compiled", "one", FAST, ranks=2, max_gpus=1),
    _start("one-muon", "one", f"{MUON} {EAGER}"),
    _start("shared-muon", "two", f"{MUON} {FSDP2} {EAGER}", ranks=2),
    _start("shared-hsdp", "all", f"distributed.strategy=hsdp distributed.shard_ranks=2 {EAGER}", ranks=4),
    Part("shared-killed", "kill -9 of a rank, SIGTERM, resumed to the bit, 2 ranks", "two", 12,
         "-m benchmarks.interrupted --whole --after 4 --json {figures} {work}/runs/shared-killed "
         f"launch/run.py yamls/quickstart.yaml {{quick}} {EAGER} compute.deterministic=true phases.context=null "
         "phases.decay=null phases.stable.tokens={few} checkpoint.interval_steps=3 checkpoint.keep=2 "
         "data.validation=null",
         read.interrupted, {read.KILLED: (0, 60), read.STOPPED_IN: (0, 60)},
         "see the table of exit codes in docs/faults.md; send the log", ranks=2),
    _start("two-ddp", "two", EAGER, 2),
    _start("two-fsdp2", "two", f"{FSDP2} {EAGER}", 2),
    _start("two-compiled", "two", FAST, 2),
    _start("two-fsdp2-compiled", "two", f"{FSDP2} {FAST}", 2),
    _start("all-ddp", "all", EAGER, 3),
    _start("all-fsdp2", "all", f"{FSDP2} {EAGER}", 3),
    _start("all-compiled", "all", FAST, 3),
    _start("all-fsdp2-compiled", "all", f"{FSDP2} {FAST}", 3),
    Part("kernels", "the speed of each kernel", "one", 5, "-m benchmarks.kernels {kernels} --json {figures}",
         read.kernels,
         {read.PRODUCT: (540, 650), read.COPY: (2.6, 2.9), read.GLOBAL: (180, 255), read.LOCAL: (60, 100)},
         "these four replace the shares at the head of modernbert_train/plan/speed.py: send them first"),
    Part("parity", "numbers compared with the reference: `make test-gpu`", "other", 12, "-m pytest {parity} -q -rfE",
         read.tests, {"failed": (0, 0)}, "do not use the feature that a failing test names; send its whole output"),
    Part("memory", "the memory predicted by `plan`", "other", 5, "-m pytest {memory} -q -rfE", read.tests,
         {"failed": (0, 0)}, "plan's figures of memory are wrong here: send the output"),
    Part("step-compiled", "whole steps of base, compiled", "one", 6, "-m benchmarks.train_step {step} --json {figures}",
         read.step, {read.RATE: BASE_RATE, read.MEMORY: (55, 65)}, f"below 200,000: {LOOK_FOR_BREAKS}"),
    Part("step-eager", "the same, eager", "one", 5, "-m benchmarks.train_step {step} --compile off --json {figures}",
         read.step, {read.RATE: EAGER_RATE, read.MEMORY: (64, 75)},
          "compiled is less than 1.3 times as fast: some kernel differs from plan's assumption, see the part kernels"),
    _recipe("base-one", "recipe base, compiled, on one GPU", "one", f"{{base}} {FAST}", BASE_RATE, (55, 65),
            otherwise=f"slower than step-compiled: {LOOK_FOR_WAITS}"),
    _recipe("base", "recipe base, compiled", "all", f"{{base}} {FAST}", BASE_RATE, (55, 66), min_gpus=2,
            otherwise=LOOK_FOR_WAITS),
    _recipe("base-eager", "recipe base, eager", "all", f"{{base}} {EAGER}", EAGER_RATE, (64, 76), min_gpus=2,
            otherwise=LOOK_FOR_WAITS),
    _recipe("base-fsdp2", "recipe base, compiled, fsdp2", "all", f"{{base}} {FAST} {FSDP2}", BASE_RATE,
            (53, 65), min_gpus=2, otherwise=LOOK_FOR_WAITS),
    _recipe("large", "recipe large, compiled", "all", f"{{large}} {FAST}", LARGE_RATE, (70, 79),
            otherwise="above 80 GB or out of memory: torch._dynamo.config.optimize_ddp is on, or a graph breaks"),
    Part("killed", "kill -9 of a rank, resume, SIGTERM, resume", "all", 8,
         "-m benchmarks.interrupted --after {after} --json {figures} {work}/runs/killed "
         f"launch/run.py {{base}} {FAST} checkpoint.interval_steps=3 checkpoint.keep=2", read.interrupted,
         {read.KILLED: (0, 30), read.STOPPED_IN: (0, 30), read.BLOCKED: (0, 0.1)},
         "see the table of exit codes in docs/faults.md; send the log"),
)  # fmt: skip


class Place(NamedTuple):
    """Machine, folder and scale of the parts.

    Attributes:
        out: folder of all parts.
        gpus: as CUDA_VISIBLE_DEVICES names them.
        gigabytes: of the smallest.
        tiny: True in a rehearsal.
    """

    out: Path
    gpus: tuple[str, ...]
    gigabytes: float = 80.0
    tiny: bool = False

    def ranks(self, part: Part) -> int:
        """Return the number of ranks of a part, which may exceed its GPUs."""
        return part.ranks or len(self.of(part))

    def of(self, part: Part) -> tuple[str, ...]:
        """Return the GPUs of a part."""
        return {
            "one": self.gpus[:1],
            "other": self.gpus[1:2] or self.gpus,
            "two": self.gpus[:2],
            "all": self.gpus,
        }[part.gpus]


def sizes(part: Part, place: Place) -> dict[str, str]:
    """Return the values of the names in a part's command."""
    ranks = place.ranks(part)
    halvings = 0
    while place.gigabytes * 2**halvings < 79 and halvings < 3:
        halvings += 1
    work = shlex.quote(str(place.out / "work"))
    run = f"runs_folder={work}/runs name={part.name} --ranks {ranks} logging.progress_bar=false"
    quickstart = f"data.train={work}/quickstart/train data.validation={work}/quickstart/validation"
    quick = (
        f"{run} {quickstart} data.tokenizer={work}/quickstart/tokenizer phases.stable.batch_warmup=null "
        "phases.stable.batch_rows=32 distributed.timeout_seconds=120"
    )
    quick += (
        " phases.context=null phases.decay=null phases.stable.tokens=100_000 data.validation=null"
        if place.tiny
        else " phases.context.batch_rows=16 phases.decay.batch_rows=16"
    )

    def recipe(size: str, rows: int, microbatch: int, steps: int) -> str:
        rows *= ranks
        tokens = steps * rows * 1024
        words = (
            f"yamls/recipes/modernbert-{size}/1-stable.yaml {run} data.train={work}/drawn/train "
            f"data.tokenizer={work}/drawn/tokenizer data.validation=null eval.interval_tokens=null "
            f"phases.stable.batch_warmup=null phases.stable.batch_rows={rows} phases.stable.tokens={tokens} "
            f"phases.stable.microbatch_tokens={microbatch} phases.stable.schedule.warmup_tokens=0 optim.lr=1e-4"
        )
        if size == "large":
            words += " weights.grow_from=null phases.lower=null"
        if place.tiny:
            words += (
                " model.hidden_size=128 model.num_heads=2 model.intermediate_size=192 model.num_layers=4 "
                "model.vocab_size=512 data.num_workers=1"
            )
        return words

    tests = "-p no:cacheprovider -m gpu tests/gpu"
    common = {
        "work": work,
        "figures": shlex.quote(str(place.out / f"parts/{part.name}.figures.json")),
        "quick": quick,
        "ranks": str(ranks),
        "few": "300_000" if place.tiny else "600_000",
        "bytes": "--bytes 8 4096" if place.tiny else "",
    }
    if place.tiny:
        return common | {
            "base": recipe("base", 4, 2048, 12),
            "large": recipe("large", 4, 2048, 12),
            "drawn": "--vocab-size 512 --tokens 200_000",
            "kernels": "--preset cpu --only attention optimizer",
            "parity": f"{tests}/test_step.py -k waits",
            "memory": f"{tests}/test_memory.py -k eager",
            "step": "--preset cpu --rounds 1 --steps 2 --no-reference",
            "after": "2",
        }
    # most of the tests' time is compilation, and a GPU can hold several of them; memory tests run alone
    side_by_side = "-n 5 --dist loadfile" if find_spec("xdist") else "--durations=15"
    return common | {
        "base": recipe("base", 576, 98_304 >> halvings, 30),
        "large": recipe("large", 616, 57_344 >> halvings, 15),
        "drawn": "--vocab-size 50_368 --tokens 40_000_000",
        "kernels": "--preset gpu",
        "memory": f"{tests}/test_memory.py",
        "parity": f"{tests} tests/optim/test_fused.py --ignore=tests/gpu/test_memory.py {side_by_side}",
        "step": f"--preset gpu --only base-1024 --no-reference --microbatch-tokens {98_304 >> halvings}",
        "after": "6",
    }
