"""64, 256 and 1,024 ranks, one after the other in this process: a cluster, as far as one of its ranks can see it.

`train` itself runs, with its builder, its Trainer, its data and its callbacks; only the group of ranks is torch's fake
one (fake_ranks.py). So the calls of a rank, their order and sizes are real: two ranks with different calls would wait
for each other forever. The communication is not:

- No data is sent. Sums over ranks are this rank's own numbers, so losses, norms and weights after a step are wrong;
  test_train_ranks.py and test_optim_sharded.py compare several real ranks with one, on 2 and 4 ranks.
- DDP's own all-reduce of a bucket is a hook in C++ that a fake group cannot serve. A hook in Python replaces it:
  buckets and their order are DDP's, the overlap with the backward pass is not seen.
- No NCCL, no network, no watchdog, no time: `plan` estimates how long a collective of a thousand ranks takes.
- A checkpoint's copies are taken and its rows shared out; test_saver_ranks.py has ranks write one together.
- Ranks of other machines, other data or other code: test_agreement.py.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from composer import Callback
from torch import Tensor
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

import modernbert_train
from modernbert_train.__main__ import read_run
from modernbert_train.checkpoints.saver import Saved, Saver, Snapshot
from modernbert_train.errors import RunError
from modernbert_train.plan.communication import transfers
from modernbert_train.plan.memory import matrix_numbers, memory, summed_numbers
from modernbert_train.plan.parameters import count_parameters
from modernbert_train.train import build_trainer, session
from modernbert_train.train.step import Loop
from tests.distributed.fake_ranks import PER_NODE, Call, Calls, Spoken, as_rank
from tests.support.faulty import Fault, at_fault
from tests.support.tiny_run import TINY_YAML

pytestmark = pytest.mark.runs

MICROBATCHES, STEPS = 2, 3
LAST = STEPS  # the step that is looked at: DDP has arranged its buckets by then
SHARDS = {"ddp": lambda ranks: 1, "fsdp2": lambda ranks: ranks, "hsdp": lambda ranks: PER_NODE}
FEW = [("ddp", 64), ("hsdp", 64)]  # sharding over all ranks uses the same code as within a group of HSDP
CASES = [
    pytest.param(strategy, ranks, id=f"{strategy}, {ranks}", marks=[pytest.mark.slow] * ((strategy, ranks) not in FEW))
    for ranks in (64, 256, 1024)
    for strategy in SHARDS
]


@dataclass
class Rank:
    """The record of one rank.

    Attributes:
        calls: all its collectives, in order.
        groups: the ranks of each group that it used.
        steps: for each step, its begin and end in `calls`.
        taken: its tensors to be written at the end.
        bytes: by kind in torch's tracker, at the peak of the last step; if sharded.
        gradients: bytes of them before the last update; if sharded.
    """

    calls: list[Call] = field(default_factory=list)
    groups: set[tuple[int, ...]] = field(default_factory=set)
    steps: list[tuple[int, int]] = field(default_factory=list)
    taken: list[Snapshot] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)
    gradients: int = 0

    def of_step(self, step: int) -> list[Call]:
        first, after = self.steps[step - 1]
        return self.calls[first:after]

    @property
    def comparable(self) -> list[Call]:
        """All calls. Objects are pickled, and their size may differ: ranks tell each other theirs before."""
        return [call._replace(numbers=0) if call.dtype == torch.uint8 else call for call in self.calls]


def first_middle_last(ranks: int) -> list[int]:
    return [0, ranks // 2 + 3, ranks - 1]


class Watch(Callback):
    """Records the calls of a rank, step by step."""

    def __init__(self, rank: Rank, calls: Calls) -> None:
        self._rank, self._calls = rank, calls

    def batch_start(self, state: Any, logger: Any) -> None:
        self._begun = len(self._calls.calls)

    def batch_end(self, state: Any, logger: Any) -> None:
        self._rank.steps.append((self._begun, len(self._calls.calls)))


def words_of(folder: Path, data: Path, strategy: str, ranks: int, *more: str) -> list[str]:
    """The command of a run of three steps, two microbatches of a row on each rank."""
    file = folder / "run.yaml"
    file.write_text(TINY_YAML.format(runs=folder / "runs", data=data), encoding="utf-8")
    rows = MICROBATCHES * ranks
    return [
        *(str(file), f"distributed.strategy={strategy}", "phases.long=null", "data.validation=null"),
        *(f"phases.short.batch_rows={rows}", "phases.short.microbatch_tokens=64", "phases.short.batch_warmup=null"),
        f"phases.short.tokens={round((STEPS - 0.5) * rows * 62)}",
        *([f"distributed.shard_ranks={PER_NODE}"] if strategy == "hsdp" else []),
        *more,
    ]


def held(rank: Rank, model: Any) -> None:
    """Whole storages: of weights that do not divide, the last ranks have less than they have room for."""
    storages = [each.grad.to_local().untyped_storage() for each in model.parameters() if each.grad is not None]
    rank.gradients = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def config_of(strategy: str, folder: Path, data: Path) -> Any:
    """Of such runs, for any number of ranks."""
    return read_run(words_of(folder, data, strategy, 64))


def train_as(
    ranks: int,
    words: list[str],
    *,
    meddle: Callable[[int, Call, list[Tensor]], None] = lambda step, call, tensors: None,
    tracked: bool = False,
) -> list[Rank]:
    """Train a run as its first rank, one in the middle, and its last.

    Args:
        meddle: may change the result of a step's collective.
        tracked: track the memory of the last step with torch's tracker.
    """
    spoken, found = Spoken(), []
    all_see, set_clock, advance = build_trainer.ranks_that_see, Loop.set_clock, Loop.advance
    for number in first_middle_last(ranks):
        rank = Rank()

        def changed(call: Call, tensors: list[Tensor], rank: Rank = rank) -> None:
            meddle(len(rank.steps) + 1, call, tensors)

        calls = Calls(changed)
        watch = Watch(rank, calls)

        def seen_by_all(folder: Path) -> list[int]:
            all_see(folder)  # rank 0 has removed its mark long ago
            return list(range(ranks))

        def taken(self: Saver, snapshot: Snapshot, rank: Rank = rank) -> None:
            rank.taken.append(snapshot)
            self._saved = Saved(snapshot.step, 0, 0.0)

        tracking = ExitStack()

        def begins(self: Loop, plan: Any, rank: Rank = rank, tracking: ExitStack = tracking) -> None:
            set_clock(self, plan)
            if not tracked or len(rank.steps) + 1 != LAST:
                return
            model, optimizer = self.state.model.model, self.state.optimizers[0]
            hook = optimizer.register_step_pre_hook(lambda *_: held(rank, model))
            tracker = FSDPMemTracker(model, optimizer)

            def note() -> None:
                hook.remove()
                (peak,) = tracker.get_tracker_snapshot("peak").values()
                rank.bytes |= {str(getattr(kind, "value", kind)): size for kind, size in peak.items()}

            tracking.callback(note)
            tracking.enter_context(tracker)

        def updated(self: Loop, plan: Any, tracking: ExitStack = tracking) -> None:
            tracking.close()
            advance(self, plan)

        with (
            as_rank(number, ranks, spoken),
            calls,
            patch.object(session, "build_callbacks", lambda *given, watch=watch: [watch]),
            patch.object(build_trainer, "ranks_that_see", seen_by_all),
            patch.object(Saver, "_run", taken),
            patch.object(Loop, "set_clock", begins),
            patch.object(Loop, "advance", updated),
        ):
            session.train(read_run(words))
        assert spoken.heard == (len(spoken.words) if number else 0), "a rank has not heard all that rank 0 said"
        rank.calls, rank.groups = calls.calls, calls.groups
        found.append(rank)
    return found


@pytest.fixture(scope="module")
def runs(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], list[Rank]]]:
    """First, middle and last rank of a run, each run once."""
    found: dict[tuple[str, int], list[Rank]] = {}

    def run(strategy: str, ranks: int) -> list[Rank]:
        if (strategy, ranks) not in found:
            words = words_of(tmp_path_factory.mktemp("run"), tiny_data, strategy, ranks)
            found[strategy, ranks] = train_as(ranks, words, tracked=strategy != "ddp")
        return found[strategy, ranks]

    return run


@pytest.mark.parametrize(("strategy", "ranks"), CASES)
def test_all_ranks_call_the_same_in_the_same_order(runs: Any, strategy: str, ranks: int) -> None:
    """From the first line to the last: start, steps, StableAdamW, the guard, the copies of a checkpoint."""
    first, *others = runs(strategy, ranks)
    for other in others:
        for mine, theirs in zip(first.comparable, other.comparable, strict=True):
            assert mine == theirs
    assert len(first.steps) == STEPS and len(first.of_step(LAST)) == (3 if strategy == "ddp" else len(first.of_step(1)))
    for number, rank in zip(first_middle_last(ranks), (first, *others), strict=True):
        node = number - number % PER_NODE
        groups = {tuple(range(ranks))}
        if strategy == "hsdp":
            groups |= {tuple(range(node, node + PER_NODE)), tuple(range(number % PER_NODE, ranks, PER_NODE))}
        assert rank.groups == groups


@pytest.mark.parametrize(("strategy", "ranks"), CASES)
def test_a_step_sends_what_plan_says(runs: Any, strategy: str, ranks: int, tmp_path: Path, tiny_data: Path) -> None:
    """Every call and every byte, those that pad the shards too."""
    config = config_of(strategy, tmp_path, tiny_data)
    shards = SHARDS[strategy](ranks)
    counts = count_parameters(config.model, config.objective, shards=shards)
    said: Counter[tuple[str, int]] = Counter()
    bytes_said: Counter[tuple[str, int]] = Counter()
    for part in transfers(
        strategy,
        counts,
        num_layers=counts.units,
        ranks=ranks,
        shards=shards,
        per_node=PER_NODE,
        exchanged=matrix_numbers(counts, config.optim),
        summed=summed_numbers(counts, config.optim),
    ):
        times = MICROBATCHES if part.every_microbatch else 1
        said[part.kind, part.inside * part.nodes] += times * part.calls
        bytes_said[part.kind, part.inside * part.nodes] += times * part.payload
    for rank in runs(strategy, ranks):
        calls = rank.of_step(LAST)
        assert Counter((call.kind, call.ranks) for call in calls) == said
        found: Counter[tuple[str, int]] = Counter()
        for call in calls:
            found[call.kind, call.ranks] += call.numbers * call.dtype.itemsize
        assert found == bytes_said


@pytest.mark.parametrize(("strategy", "ranks"), CASES)
def test_each_rank_copies_what_it_is_to_write(
    runs: Any, strategy: str, ranks: int, tmp_path: Path, tiny_data: Path
) -> None:
    """All agree on how much it is together; sharded, no rank has more than its rows."""
    config = config_of(strategy, tmp_path, tiny_data)
    exact = count_parameters(config.model, config.objective)
    held = count_parameters(config.model, config.objective, shards=SHARDS[strategy](ranks)).total
    found = [rank.taken for rank in runs(strategy, ranks)]
    assert [len(taken) for taken in found] == [1, 1, 1]
    totals = {taken.total_bytes for (taken,) in found}
    assert totals == {3 * 4 * exact.total + 8 * exact.weights}  # weights, two moments, a step count of each
    for (taken,) in found:
        assert taken.share.bytes <= 3 * 4 * held // SHARDS[strategy](ranks) + 8 * exact.weights


SHARDED = [case for case in CASES if case.values[0] != "ddp"]


@pytest.mark.parametrize(("strategy", "ranks"), SHARDED)
def test_plan_knows_what_a_rank_holds(runs: Any, strategy: str, ranks: int, tmp_path: Path, tiny_data: Path) -> None:
    """Compared with torch's own tracker, which follows every storage of a step."""
    config, shards = config_of(strategy, tmp_path, tiny_data), SHARDS[strategy](ranks)
    said = memory(
        config.modernbert,
        config.compute,
        count_parameters(config.model, config.objective, shards=shards),
        optim=config.optim,
        bf16=False,
        strategy=strategy,
        shards=shards,
        ranks=ranks,
        tokens=64,
        predicted=30,
    )
    for rank in runs(strategy, ranks):
        found = Counter(rank.bytes)
        assert found["Sharded Param"] == said.weights
        assert rank.gradients == said.gradients
        assert found["OptState"] <= said.moments  # the last ranks have less, or nothing, of small weights
        gathered = [found[name] for name in ("Unsharded Param", "All Gather", "Unsharded Grad", "Reduce Scatter")]
        assert 0 < sum(gathered) <= said.copies + said.buffers
    assert runs(strategy, ranks)[0].bytes["OptState"] == said.moments


@pytest.mark.parametrize(
    "strategy", [pytest.param(each, marks=[pytest.mark.slow] * (each != "hsdp")) for each in SHARDS]
)
def test_a_fault_on_one_rank_is_met_by_all_with_the_same_calls(tiny_data: Path, tmp_path: Path, strategy: str) -> None:
    """The rank whose layer gives NaN looks for it, as do those that have only heard of it; a rank that went another way
    would leave 63 waiting."""
    ranks, step = 64, 2
    bad = first_middle_last(ranks)[1]

    # exchanged by ranks in a step: six numbers, and under DDP the time of each
    told = Call("all_reduce", ranks, 1, 6 + (ranks if strategy == "ddp" else 0), torch.float64)

    def meddle(at: int, call: Call, tensors: list[Tensor]) -> None:
        if at == step and call == told:
            tensors[0][1] = math.nan

    words = words_of(tmp_path, tiny_data, strategy, ranks, "stability.non_finite=skip")
    with at_fault(Fault("forward", steps=(step,), microbatch=1, rank=bad)):
        first, middle, last = train_as(ranks, words, meddle=meddle)
    assert first.comparable == middle.comparable == last.comparable
    assert len(first.steps) == STEPS and len(first.of_step(step)) > len(first.of_step(LAST))


class _Enough(RunError):
    """The first step is about to begin."""


class _Stop(Callback):
    def fit_start(self, state: Any, logger: Any) -> None:
        raise _Enough


def count_our_work(work: Counter[str]) -> Callable[..., Any]:
    """For sys.settrace: counts the lines of this package that run, by module; a loop's as often as it goes round."""
    package = str(Path(modernbert_train.__file__).parent)

    def each(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            work[str(Path(frame.f_code.co_filename).relative_to(package).with_suffix(""))] += 1
        return each

    def entered(frame: Any, event: str, _: Any) -> Any:
        return each if frame.f_code.co_filename.startswith(package) else None

    return entered


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp", "hsdp"])
def test_the_start_does_not_grow_with_the_ranks(tiny_data: Path, tmp_path: Path, strategy: str) -> None:
    """As many collectives, and as much work in our code: all of a thousand ranks do the work of a start."""
    found = {}
    for ranks in (64, 1024):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        words = words_of(folder, tiny_data, strategy, ranks)
        work: Counter[str] = Counter()
        with (
            as_rank(0, ranks, Spoken()),
            Calls() as calls,
            patch.object(session, "build_callbacks", lambda *given: [_Stop()]),
        ):
            sys.settrace(count_our_work(work))
            try:
                with pytest.raises(_Enough):
                    session.train(read_run(words))
            finally:
                sys.settrace(None)
        found[ranks] = (calls.calls, work)
    (few_calls, few), (many_calls, many) = found.values()
    assert [call.kind for call in few_calls] == [call.kind for call in many_calls]
    for call in many_calls:  # each rank's random numbers, which Composer gathers before it shards, and small things
        assert call.kind != "all_gather" or call.numbers <= 13_000 * 1024
    # the first batch has 16 times as many rows, which are planned by then; a rank looks at each other one's GPU, and
    # whether it sees its folder
    planning = {"core/keyed_random", *(name for name in many if name.startswith("data/"))}
    more = {name: many[name] - few[name] for name in many.keys() - planning if many[name] > few[name] + 50}
    assert more.keys() <= {"checkpoints/saver", "plan/speed_settings"} and sum(more.values()) <= 2048, more
