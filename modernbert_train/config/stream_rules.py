"""Rules for the streams of training text and their shares; config/check.py runs them with the others."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from modernbert_train.config.schema import DataConfig, PhaseConfig
from modernbert_train.core.text import did_you_mean

_CLOSE = 1e-6  # tolerance of a sum of shares, for a user's rounding


def one_source(data: DataConfig) -> Iterator[str]:
    train, streams = data.train, data.streams
    if train is not None and streams:
        yield (
            f"data.train={train} and data.streams ({', '.join(streams)}): both name the training text. Keep data.train "
            "for one folder of shards, data.streams for several."
        )
    elif train is None and not streams:
        yield (
            "data.train: missing, and so is data.streams. Name the folder of shards in data.train, or several in "
            "data.streams."
        )


def stream_shares(data: DataConfig) -> Iterator[str]:
    proportions: dict[str, float] = {}
    weights: list[float] = []
    for name, stream in data.streams.items():
        here = f"data.streams.{name}"
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            yield f"{here}: a stream's name is used in keys and records. Use letters, digits, '_' and '-'."
        every = {"proportion": stream.proportion, "repeat": stream.repeat, "tokens": stream.tokens}
        chosen = {key: value for key, value in every.items() if value is not None}
        if len(chosen) > 1:
            yield (
                f"{here}: "
                + " and ".join(f"{key}={value}" for key, value in chosen.items())
                + " are different ways to "
                "define its share. Keep one."
            )
        if stream.tokens is not None and data.mix_by == "documents":
            yield f"{here}.tokens={stream.tokens} with data.mix_by=documents: shares of documents. Use proportion."
        if stream.proportion is not None:
            proportions[name] = stream.proportion
        else:
            weights.append(next(iter(chosen.values()), 1.0))
    if data.alpha is not None and (stated := next(iter(proportions), None)) is not None:
        yield (
            f"data.alpha={data.alpha:g} and data.streams.{stated}.proportion={proportions[stated]:g}: both define "
            "its share. Keep one."
        )
    elif data.alpha is not None and any(weight != 1 for weight in weights):
        yield f"data.alpha={data.alpha:g} with repeat or tokens of a stream: both define its share. Keep one."
    if proportions and weights:
        without = [name for name in data.streams if name not in proportions]
        yield (
            f"data.streams.{without[0]} lacks a proportion and data.streams.{next(iter(proportions))} has one. Give it "
            "to all streams or to none, or use repeat or tokens."
        )
    elif proportions:
        yield from _sum("data.streams", proportions)
    elif weights and max(weights) == 0:
        yield "data.streams: every stream weighs 0, so there is nothing to train on. Raise one."


def phase_shares(data: DataConfig, phases: Mapping[str, PhaseConfig]) -> Iterator[str]:
    names = list(data.streams)
    for phase_name, phase in phases.items():
        here = f"phases.{phase_name}.streams"
        if phase.streams and not names:
            yield f"{here} is set and data.streams is not: there are no shares to change. Name the streams there."
            continue
        for name in phase.streams:
            if name not in names:
                hint = did_you_mean(name, names, f"{here}.") or f" Known: {', '.join(names)}."
                yield f"{here}.{name}: no stream of data.streams.{hint}"
        proportions = {n: each.proportion for n, each in phase.streams.items() if each.proportion is not None}
        bare = [name for name in phase.streams if name not in proportions]
        alpha = data.alpha if phase.alpha is None else phase.alpha
        if phase.alpha is not None and proportions:
            yield (
                f"phases.{phase_name}.alpha={phase.alpha:g} and {here}.{next(iter(proportions))}.proportion: both "
                "define its share. Keep one."
            )
        elif bare and (proportions or alpha is None):
            yield f"{here}.{bare[0]} lacks a proportion. Give it one, or set alpha and give it to none."
        elif proportions:
            yield from _sum(here, proportions)


def _sum(here: str, proportions: Mapping[str, float]) -> Iterator[str]:
    total = math.fsum(proportions.values())
    if abs(total - 1) > _CLOSE and min(proportions.values()) >= 0:
        listed = ", ".join(f"{name} {proportion:g}" for name, proportion in proportions.items())
        yield f"{here}: the proportions add up to {total:.6g} ({listed}), not to 1. Change one of them."
