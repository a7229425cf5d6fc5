"""Communication of GPUs: calls and bytes of real training steps, and times computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from modernbert_train.__main__ import read_run
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.plan.communication import COLLECTIVES, Transfer, exchange, transfer_seconds, transfers
from modernbert_train.plan.gpus import Gpu
from modernbert_train.plan.memory import Strategy
from modernbert_train.plan.parameters import count_parameters
from tests.support.counting import Sizes, count_steps
from tests.support.gloo import run_ranks
from tests.support.tiny_run import TinyRun

STEP = 3  # the recorded step: DDP has arranged its buckets by then
SMALL = 400  # numbers; smaller tensors are neither weights nor gradients
RANKS, MICROBATCHES = 2, 3
CASES: list[tuple[Strategy, int]] = [("ddp", 1), ("fsdp2", 2)]  # ranks of a shard group
# 1 GB/s at the share that links reach, so that seconds equal gigabytes; the time of hops is included
SLOW = Gpu("test", 1e12, 1, 1e12, node_link=1.25e9, network_link=0.125e9, price=1.0)


def large(sizes: Sizes) -> Sizes:
    kept = {kind: [size for size in each if size > SMALL] for kind, each in sizes.items()}
    return {kind: each for kind, each in kept.items() if each}


@pytest.mark.runs
@pytest.mark.timeout(290)
@pytest.mark.parametrize(
    "system",
    [
        "modernbert mlm",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("bert sop", "bert rtd", "albert sop", "albert mlm")),
    ],
)
def test_a_real_step_sends_the_predicted_bytes(tiny_run: TinyRun, system: str) -> None:
    """The number of calls, and of numbers without the padding of uneven shards: under DDP one all-reduce a step, not
    one for each microbatch. HSDP, and many ranks: tests/distributed/test_thousand_ranks.py."""
    runs, cases = [], CASES[:1] if system == "modernbert mlm" else CASES
    for strategy, _ in cases:
        rows = RANKS * MICROBATCHES
        tokens = (STEP + 2) * 64 * rows
        phase = f"{{tokens: {tokens}, row_tokens: 64, batch_rows: {rows}, microbatch_tokens: 64}}"
        words = (f"name={strategy}", f"distributed.strategy={strategy}")
        cut = (f"phases.short={phase}", "phases.short.batch_warmup=null", "phases.long=null", "data.validation=null")
        runs.append(tiny_run(*words, *cut))
    encoder, objective = system.split()
    file = Path(runs[0][0])  # shared by all
    run = yaml.safe_load(file.read_text())
    run["objective"] = {"name": objective}
    if encoder != "modernbert":
        sizes_of = ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size")
        run["model"] = {"name": encoder, "max_positions": 64, **{key: run["model"][key] for key in sizes_of}}
    if system == "albert mlm":
        run["model"]["sharing"] = "ffn"
    file.write_text(yaml.safe_dump(run, sort_keys=False))
    (counted, *_) = run_ranks(count_steps, RANKS, runs, STEP, timeout_seconds=280)
    config = read_run(runs[0])
    for (strategy, shards), found in zip(cases, counted, strict=True):
        assert found.microbatches == MICROBATCHES
        counts = count_parameters(config.model, config.objective)
        setting = {"num_layers": counts.units, "ranks": RANKS, "shards": shards, "per_node": 8}
        collectives, *parts = transfers(strategy, counts, **setting)
        sharded = strategy != "ddp"
        small = [size for size in found.sizes["all_reduce"] if size <= SMALL]
        assert len(small) == COLLECTIVES + sharded == collectives.calls + sharded  # StableAdamW's sums, on shards
        sizes = large(found.sizes)
        assert {part.kind for part in parts} == sizes.keys(), strategy
        for kind, elements in sizes.items():
            same = [part for part in parts if part.kind == kind]
            times = [MICROBATCHES if part.every_microbatch else 1 for part in same]
            assert sum(n * part.calls for n, part in zip(times, same, strict=True)) == len(elements), (strategy, kind)
            payload = sum(n * part.payload for n, part in zip(times, same, strict=True))
            assert payload == pytest.approx(4 * sum(elements), rel=0.03), (strategy, kind)
        if not sharded:  # gradients are views of the bucket and are not copied back
            assert found.gradients == len(sizes["all_reduce"])


def gb(kind: Any, inside: int, nodes: int, payload: float = 1e9) -> Transfer:
    return Transfer(kind, inside, nodes, "backward", int(payload), 1, False, False)


@pytest.mark.parametrize(
    ("transfer", "seconds"),
    [
        (gb("all_gather", 8, 1), 7 / 8),
        (gb("reduce_scatter", 4, 1), 3 / 4),
        (gb("all_reduce", 8, 1), 2 * 7 / 8),
        (gb("all_reduce", 1, 1), 0.0),
        (gb("all_gather", 8, 2), 15 / 16),  # 8 network cards share the transfer
        (gb("all_to_all", 8, 1), 7 / 8 / 8),  # every GPU sends only its eighth
        (gb("all_to_all", 1, 2), 1 / 2 / 2 / 0.1),
        (gb("all_reduce", 1, 4), 2 * 3 / 4 / 0.1),  # one GPU in each node: the network only
        (gb("all_gather", 1, 2), 1 / 2 / 0.1),
    ],
)
def test_times_worked_by_hand(transfer: Transfer, seconds: float) -> None:
    assert transfer_seconds(transfer, SLOW) == pytest.approx(seconds, abs=2e-4)


def test_waiting_grows_with_ranks_for_rings_and_with_their_logarithm_for_trees() -> None:
    """This is why sharding over a thousand GPUs is slow even with little to send."""
    ring = [transfer_seconds(gb("all_gather", 8, nodes, 0), SLOW) for nodes in (1, 16, 128)]
    tree = [transfer_seconds(gb("all_reduce", 8, nodes, 0), SLOW) for nodes in (1, 16, 128)]
    assert ring[2] > 7 * ring[1] > 49 * ring[0]
    assert tree[2] - tree[1] == pytest.approx(2 * 3 * 8e-6)


BASE = count_parameters(ModernBertConfig())
ROOT, LAYERS = 4e-9 * BASE.root, 4e-9 * BASE.layers  # GB


def of(strategy: Strategy, *, ranks: int = 8, shards: int = 8) -> list[Transfer]:
    """Return the transfers of base, without the small collectives."""
    return transfers(strategy, BASE, num_layers=22, ranks=ranks, shards=shards, per_node=8)[1:]


def test_ddp_hides_all_but_the_bucket_of_the_embedding() -> None:
    """The tied embedding has its gradient last: torch puts 175 MB of base into its bucket, and 424 MB before."""
    before, last = of("ddp", shards=1)
    assert last.payload == pytest.approx(174_793_728, rel=0.03) and before.calls == pytest.approx(15, abs=1)
    assert before.payload + last.payload == 4 * BASE.total
    fast = exchange([before, last], SLOW, [30.0] * 4)
    assert fast.payload == 4 * BASE.total and fast.seconds == pytest.approx(2 * 7 / 8 * 4e-9 * BASE.total, rel=0.01)
    assert fast.exposed == pytest.approx(2 * 7 / 8e9 * (last.payload + before.payload / before.calls), rel=0.01)
    slow = exchange([before, last], SLOW, [0.3] * 4)
    assert slow.exposed == pytest.approx(fast.seconds - 0.2, rel=0.01)  # two thirds of 0.3 s go backward, once


def test_sharding_gathers_fp32_and_sends_in_every_microbatch() -> None:
    """Also in bf16 runs: 4 bytes a weight, whatever the precision of products."""
    one, four = (exchange(of("fsdp2"), SLOW, [30.0] * n) for n in (1, 4))
    assert one.payload == 4 * (BASE.total + BASE.layers + BASE.total)
    assert (four.payload, four.exposed) == (4 * one.payload, pytest.approx(4 * one.exposed))
    bare = 2 * (ROOT + LAYERS / 22)  # before the first layer can begin, and after the last has ended
    assert one.exposed == pytest.approx(7 / 8 * bare, rel=0.01)


def test_the_copies_of_hsdp_meet_with_the_last_microbatch_only() -> None:
    one, four = (exchange(of("hsdp", ranks=32), SLOW, [30.0] * n) for n in (1, 4))
    plain = exchange(of("fsdp2"), SLOW, [30.0])
    assert one.payload - plain.payload == four.payload - 4 * plain.payload == 4 * BASE.total // 8
    summed = 2 * 3 / 4 * 10 * (ROOT + LAYERS / 22) / 8  # an eighth of each, over 4 nodes at a tenth of the speed
    assert four.exposed - 4 * plain.exposed == pytest.approx(summed - 7 / 8 * LAYERS / 22, rel=0.02)
