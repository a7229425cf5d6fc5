"""Shares of streams: the output keeps the configured shares, at every moment and in every range, exactly.

If this breaks, a model is trained on another mixture than its configuration says, or for a while on one stream only.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from modernbert_train.clock import Clock
from modernbert_train.config.schema import DataConfig, PhaseConfig, PhaseStreamConfig, RunConfig, StreamConfig
from modernbert_train.data.mixing import FairQueue, phase_weights, token_shares
from modernbert_train.data.planner import BatchPlanner
from modernbert_train.data.shuffle import ShuffledChunks
from tests.support.planned import run

OWN = {"a": 900, "b": 300}


def mixed(streams: dict[str, dict[str, Any]], *shares: dict[str, float], **data: Any) -> RunConfig:
    """A run with a phase of 1,000 tokens for each entry of `shares`."""
    settings = {name: StreamConfig(path="", **each) for name, each in streams.items()}
    return run(*(64 for _ in shares), tokens=1000, shares=shares, streams=settings, **data)


def test_no_rounding_gathers_over_a_long_run() -> None:
    """A tenth is a tenth: after 700,000 tokens in chunks of 7, exactly a tenth; floats would be off."""
    queue = FairQueue([1, 9])
    given_out = [queue.give([7, 7]) for _ in range(100_000)]
    assert given_out.count(0) == 10_000 and queue.lag == [0, 0]


@pytest.mark.parametrize(
    ("streams", "of_the_phase", "weights"),
    [
        ({"a": {}, "b": {}}, {}, {"a": 3, "b": 1}),  # as large as they are
        ({"a": {}, "b": {"repeat": 3.0}}, {}, {"a": 1, "b": 1}),
        ({"a": {"repeat": 0.5}, "b": {"repeat": 2.5}}, {}, {"a": 3, "b": 5}),
        ({"a": {}, "b": {"tokens": 100}}, {}, {"a": 9, "b": 1}),
        ({"a": {"proportion": 0.1}, "b": {"proportion": 0.9}}, {}, {"a": 1, "b": 9}),
        ({"a": {"proportion": 1.0}, "b": {"proportion": 0.0}}, {}, {"a": 1, "b": 0}),
        ({"a": {}, "b": {"repeat": 0.0}}, {"b": 0.8, "a": 0.2}, {"a": 1, "b": 4}),  # upsampled in the decay phase
        ({"a": {}, "b": {"repeat": 0.0}}, {}, {"a": 1, "b": 0}),
        ({"a": {}, "b": {}}, {"b": 1.0}, {"a": 0, "b": 1}),  # read by one phase only
    ],
)
def test_weights_by_hand(streams: dict[str, Any], of_the_phase: dict[str, float], weights: dict[str, int]) -> None:
    asked = mixed(streams, of_the_phase)
    assert phase_weights(asked.data, asked.phases["p0"], OWN) == weights


def test_a_long_phase_counts_for_as_long_as_it_is() -> None:
    """Nine tenths of the run are all of a: the card and the unigram baseline must not call it half."""
    asked = mixed({"a": {}, "b": {"repeat": 0.0}}, {}, {"b": 1.0})
    phases = [replace(asked.phases["p0"], tokens=9000), asked.phases["p1"]]
    assert token_shares(asked.data, phases, OWN, {"a": 9, "b": 9}) == pytest.approx({"a": 0.9, "b": 0.1})


def test_shares_of_documents_are_turned_into_shares_of_tokens() -> None:
    """Half of the documents each; stream a's are three times as long."""
    asked = mixed({"a": {"proportion": 0.5}, "b": {"proportion": 0.5}}, {}, mix_by="documents")
    shares = token_shares(asked.data, asked.phases.values(), OWN, {"a": 9, "b": 9})
    assert shares == pytest.approx({"a": 0.75, "b": 0.25})


def of_languages(power: float | None, sizes: dict[str, int], **phase: Any) -> tuple[DataConfig, PhaseConfig]:
    asked = mixed({name: {} for name in sizes}, {}, alpha=power)
    return asked.data, replace(asked.phases["p0"], **phase)


@pytest.mark.parametrize(
    ("alpha", "shares"),
    [(1.0, (0.9, 0.1)), (0.5, (0.75, 0.25)), (0.0, (0.5, 0.5))],
    ids=["as they are", "root", "alike"],
)
def test_shares_by_size_to_a_power(alpha: float, shares: tuple[float, float]) -> None:
    """Small languages are seen more often than they are large (arXiv 1911.02116); sizes of 9 to 1."""
    sizes = {"en": 900, "sw": 100}
    weights = phase_weights(*of_languages(alpha, sizes), sizes)
    found = [weight / sum(weights.values()) for weight in weights.values()]
    assert found == pytest.approx(shares, abs=2e-9)


def test_a_phase_may_have_a_power_and_streams_of_its_own() -> None:
    """Languages join, and the power falls (arXiv 2509.06888), without a number for each."""
    sizes = {"en": 900, "sw": 100, "gd": 1}
    few = {name: PhaseStreamConfig() for name in ("en", "sw")}
    weights = phase_weights(*of_languages(0.7, sizes, alpha=0.5, streams=few), sizes)
    assert weights["gd"] == 0 and weights["en"] / weights["sw"] == pytest.approx(3, abs=1e-7)
    asked, phase = of_languages(0.7, sizes, streams={"gd": PhaseStreamConfig(proportion=1.0)})
    assert phase_weights(asked, phase, sizes) == {"en": 0, "sw": 0, "gd": 1}


@pytest.mark.runs
def test_two_thousand_languages_keep_to_their_shares() -> None:
    """Each within its longest text of its configured share; with a state that fits a checkpoint."""
    draw = np.random.default_rng(1)
    sizes = np.maximum(30, 20_000 / np.arange(1, 2001) ** 1.1).astype(int)
    streams = {}
    for number, documents in enumerate(sizes.tolist()):
        lengths = draw.integers(8, 60, documents)
        streams[f"l{number:04}"] = ShuffledChunks([documents], lengths, 16, seed=number)
    asked = mixed({name: {} for name in streams}, {}, alpha=0.3)
    phase = replace(asked.phases["p0"], tokens=10_000_000, batch_rows=4096, batch_warmup=None)
    asked = replace(asked, phases={"p0": phase})
    planner = BatchPlanner(asked.data, Clock.of(asked), streams)
    seen = dict.fromkeys(streams, 0)
    for _ in range(4):
        for stream in next(planner).streams:
            seen[stream.name] += stream.tokens
    total = sum(seen.values())
    weights = phase_weights(asked.data, phase, {name: each.num_tokens for name, each in streams.items()})
    whole = sum(weights.values())
    waiting = asked.data.packing_window * 60
    apart = {name: abs(seen[name] - weight / whole * total) for name, weight in weights.items()}
    assert max(apart.values()) < 60 + waiting * max(weights.values()) / whole and min(seen.values()) > 0
    assert len(json.dumps(planner.state_dict())) < 1 << 18
