"""A configuration with several streams."""

from __future__ import annotations

from modernbert_train.config.schema import (
    DataConfig,
    PhaseConfig,
    PhaseStreamConfig,
    RunConfig,
    StableAdamWConfig,
    StreamConfig,
)


def config(streams: dict[str, StreamConfig], mix_by: str = "tokens", **phases: dict[str, float]) -> RunConfig:
    """A run with a phase of 1,000 tokens for each entry, with the shares given, and one named `plain` without."""
    common = {"tokens": 1000, "row_tokens": 64, "batch_rows": 1, "microbatch_tokens": 64}
    asked = {
        name: PhaseConfig(streams={n: PhaseStreamConfig(proportion=p) for n, p in shares.items()}, **common)
        for name, shares in {"plain": {}, **phases}.items()
    }
    return RunConfig(
        name="t",
        data=DataConfig(streams=streams, tokenizer="", mix_by=mix_by),  # type: ignore[arg-type]
        optim=StableAdamWConfig(lr=1.0),
        phases=asked,
    )
