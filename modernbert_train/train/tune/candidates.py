"""Candidates of a tune, in the order of what they usually win, and a run of each.

A candidate is the settings of some dotted keys, and the microbatch of the phase by its bare name. Only what the run
leaves open is tried, since what is given stays; a given microbatch is tried and reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from modernbert_train.config.auto import MICROBATCH, OPEN, assigned, filled, open_settings, value_of, with_settings
from modernbert_train.config.launch import LaunchConfig
from modernbert_train.config.schema import (
    CheckpointConfig,
    EvalConfig,
    RunConfig,
    ScheduleConfig,
    StabilityConfig,
    WeightsConfig,
)
from modernbert_train.plan.room import Card, on_gpu

Settings = dict[str, Any]

PHASE = "tuned"  # of a candidate's run
ENDLESS = 1 << 50
MICROBATCHES = 4  # of a step, with the microbatch that is given
MOST_TOKENS = {True: 1 << 18, False: 1 << 14}  # of a microbatch that nobody gives, with and without a GPU
KERNELS = ("compute.attention", "compute.global_attention")
NUMERIC = (
    *KERNELS,
    "compute.query_block",
    "compute.compile",
    "optim.fused",
)  # what may compute something else, if it is wrong
THREADS, BLOCK, WORKERS = "compute.threads", "compute.query_block", "data.num_workers"
CHUNK, CHUNKS = "compute.logit_chunk", (0.25, 0.5, 2.0)  # times the usual one; in steps of 128 positions


@dataclass(frozen=True)
class Question:
    """Candidates that are compared with one another.

    Attributes:
        title: in the table.
        options: what each changes of the best settings so far; those themselves take part besides.
        left_out: what is not tried, and why.
        reported: the answer is not taken, since the run gives the key.
    """

    title: str
    options: list[Settings]
    left_out: list[tuple[Settings, str]] = field(default_factory=list)
    reported: bool = False


@dataclass(frozen=True)
class Case:
    """What is tuned.

    Attributes:
        config: the run.
        phase: the name of its phase.
        facts: of the device, as worker.py says them.
        omp: OMP_NUM_THREADS; None where it is not set.
    """

    config: RunConfig
    phase: str
    facts: Mapping[str, Any]
    omp: str | None = None

    @property
    def open(self) -> Settings:
        """What the run leaves open, each with what it is without tuning."""
        return {key: value_of(self._untuned, key) for key in open_settings(self.config) if key in OPEN}

    @property
    def _untuned(self) -> RunConfig:
        """The run as it would train here without a finding."""
        card = self.facts.get("card")
        return filled(self.config, {}) if card is None else on_gpu(self.config, Card(**card), 1, fast=not card["lacks"])

    @property
    def plain(self) -> Settings:
        """The settings that a run has today."""
        kernels = usable(self.facts)
        named = {"compute.attention": kernels[0]} if "compute.attention" in self.open else {}
        return self.open | named | {MICROBATCH: self._untuned.phases[self.phase].tokens_at_once}

    @property
    def gives_microbatch(self) -> bool:
        return self.config.phases[self.phase].microbatch_tokens is not None

    @property
    def step_rows(self) -> int:
        """Rows of a step: so many that there are some microbatches in it, and no more than the run has."""
        phase = self.config.phases[self.phase]
        own = phase.microbatch_rows if self.gives_microbatch else self._most_rows() // MICROBATCHES
        return max(1, min(phase.batch_rows, MICROBATCHES * own))

    def _most_rows(self) -> int:
        phase = self.config.phases[self.phase]
        most = MOST_TOKENS[self.facts["on_gpu"]] // phase.row_tokens
        return max(1, min(phase.batch_rows, most))

    @property
    def usual_chunk(self) -> int:
        """Predicted tokens whose logits exist at a time, where nobody says how many; 0 where no logits are made."""
        now = self.config.in_phase[self.phase]
        if not {"tokens", "generator"} & {*now.objective.heads, *now.objective.idle_heads}:
            return 0
        size = 2 if self.facts["fit"]["precision"] == "amp_bf16" else 4
        return now.model.logit_chunk(on_gpu=self.facts["on_gpu"], bytes_per_logit=size)

    def cuts(self, settings: Settings) -> bool:
        """Whether the loss of a microbatch comes in several chunks of the size that the settings name, if they do."""
        share = self.config.in_phase[self.phase].objective.predicted_share
        return (settings.get(CHUNK) or 0) < share * settings[MICROBATCH]

    def microbatches(self) -> list[int]:
        """Tokens of the microbatches to try, from one row on where nobody gives any."""
        phase = self.config.phases[self.phase]
        if self.gives_microbatch:
            rows = phase.microbatch_rows
            wanted = [rows // 2, *(rows * 2**double for double in (1, 2))]
        else:
            wanted = [2**double for double in range(1, self.step_rows.bit_length())]
        return [n * phase.row_tokens for n in wanted if 0 < n <= self.step_rows]


def usable(facts: Mapping[str, Any]) -> list[str]:
    """Kernels that serve, the one first that a run takes by itself."""
    return [name for name, reason in facts["kernels"].items() if reason is None]


def questions(case: Case) -> list[Question]:
    """What is asked, one after the other."""
    microbatch = Question("microbatch", [{MICROBATCH: tokens} for tokens in case.microbatches()],
                          reported=case.gives_microbatch)  # fmt: skip
    found = [] if case.gives_microbatch else [replace(microbatch, title="microbatch, at first")]
    found += [
        _layers(case),
        _global_layers(case),
        _optimizer(case),
        _threads(case),
        _blocks(case),
        _chunks(case),
        _workers(case),
        microbatch,
    ]
    return [each for each in found if each.options or each.left_out]


def _layers(case: Case) -> Question:
    able = usable(case.facts)
    skipped = {"sdpa", "cudnn"} if _has_local_layers(case) else {"sdpa"}  # cudnn differs in global layers, asked next
    fast = [name for name in able if name not in skipped] or able
    kernels = fast if "compute.attention" in case.open else [None]
    compiled = [False, True] if "compute.compile" in case.open else [None]
    options = [
        {key: value for key, value in {"compute.attention": kernel, "compute.compile": on}.items() if value is not None}
        for kernel, on in product(kernels, compiled)
    ]
    left_out = []
    if "compute.attention" in case.open and case.facts["on_gpu"]:
        options.append({"compute.attention": "sdpa", **({"compute.compile": False} if len(compiled) > 1 else {})})
        reasons = case.facts["kernels"].items()
        left_out = [({"compute.attention": name}, reason) for name, reason in reasons if reason is not None]
    return Question("attention kernel and compiler", [each for each in options if each], left_out)


def _has_local_layers(case: Case) -> bool:
    return getattr(case.config.model, "global_attn_every_n_layers", 1) > 1


def _global_layers(case: Case) -> Question:
    """All kernels that compute them, sdpa too: on documents of one length it is faster than varlen, see RESULTS.md."""
    if "compute.global_attention" not in case.open or not _has_local_layers(case) or not case.facts["on_gpu"]:
        return Question("kernel of global layers", [])
    able = [name for name in usable(case.facts) if name != "tiles"]  # which is varlen there
    options = [{"compute.global_attention": name} for name in able] if len(able) > 1 else []
    return Question("kernel of global layers", options)


def _optimizer(case: Case) -> Question:
    title = "optimizer"
    if "optim.fused" not in case.open:
        return Question(title, [])
    if (reason := case.facts["fused"]) is not None:
        return Question(title, [], [({"optim.fused": True}, reason)] * case.facts["on_gpu"])
    return Question(title, [{"optim.fused": not case.open["optim.fused"]}])


def _threads(case: Case) -> Question:
    title, facts = "threads", case.facts
    if THREADS not in case.open or facts["on_gpu"]:
        return Question(title, [])
    numbers = [n for n in dict.fromkeys((facts["cores"], facts["cores"] // 2, 1)) if 0 < n != facts["threads"]]
    if case.omp is not None:
        reason = f"OMP_NUM_THREADS={case.omp} is set"
        return Question(title, [], [({THREADS: n}, reason) for n in numbers])
    return Question(title, [{THREADS: n} for n in numbers])


def _blocks(case: Case) -> Question:
    """Where local layers are computed in blocks at all: by the plain kernel, which CPUs have."""
    local = hasattr(case.config.model, "half_window") and not case.facts["on_gpu"]
    sizes = (32, 128) if local and BLOCK in case.open else ()
    return Question("block of local layers", [{BLOCK: size} for size in sizes])


def _chunks(case: Case) -> Question:
    """Which cut changes nothing but the order of sums, so that it is not held against the plain form anew."""
    usual = case.usual_chunk if CHUNK in case.open else 0
    sizes = dict.fromkeys(max(1, round(usual * times / 128)) * 128 for times in CHUNKS)
    most = max([case.plain[MICROBATCH], *case.microbatches()])
    options: list[Settings] = [{CHUNK: size} for size in sizes if usual and size != usual]
    return Question("chunk of the loss", [each for each in options if case.cuts({MICROBATCH: most} | each)])


def _workers(case: Case) -> Question:
    numbers = (2, 4) if case.facts["on_gpu"] else (0,)
    return Question("data workers", [{WORKERS: n} for n in numbers] if WORKERS in case.open else [])


def numeric(settings: Settings) -> Settings:
    """Of settings, those that decide what is computed; all of them plain: none."""
    found = {key: settings[key] for key in NUMERIC if settings.get(key) not in (None, False)}
    return {} if found == {"compute.attention": "sdpa"} else found


def candidate_run(case: Case, settings: Settings, *, rows: int | None = None) -> RunConfig:
    """A run that trains with these settings and does nothing else: the phase without its end, its warmup, its checks.

    Args:
        case: what is tuned.
        settings: of the candidate.
        rows: of a step, and of its microbatch; None: those of the case and the candidate.
    """
    now, phase = case.config.in_phase[case.phase], case.config.phases[case.phase]
    alone = replace(
        phase,
        tokens=ENDLESS,
        batch_rows=rows or case.step_rows,
        microbatch_tokens=rows * phase.row_tokens if rows else settings[MICROBATCH],
        model={},
        objective={},
        optim={},
        schedule=ScheduleConfig(),
        batch_warmup=None,
        reset_moments=False,
        restart_data=False,
    )
    run = replace(
        now,
        name="candidate",
        phases={PHASE: alone},
        data=replace(now.data, validation=None),
        weights=WeightsConfig(),
        start=None,
        eval=EvalConfig(),
        evals={},
        checkpoint=CheckpointConfig(),
        stability=StabilityConfig(),
        launch=LaunchConfig(),
        profile=None,
        callbacks={},
        loggers={},
    )
    return filled(with_settings(run, {key: value for key, value in settings.items() if key != MICROBATCH}), {})


def label(settings: Settings, before: Settings | None = None) -> str:
    """The settings as one would write them; of several those alone that others had otherwise."""
    changed = {key: value for key, value in settings.items() if before is None or before.get(key) != value}
    return ", ".join(assigned(key, value) for key, value in changed.items()) or "as it was"
