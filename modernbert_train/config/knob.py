"""A field of the configuration with its facts: its bounds, and who or what may change it.

    mask_rate: float = knob(0.3, above=0, high=1, phased=True)  # share of the tokens that are predicted

The facts of a key are stored only at the key. Code that needs one loops over the fields: check.py for bounds, load.py
for the keys that a phase may override, checkpoints/run_folder.py for keys that may change at a restart,
distributed/agreement.py for keys that may differ between machines, tests/docs/config_page.py for the page of every key.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import MISSING

from modernbert_train.config.value_types import hints_of, without_none
from modernbert_train.errors import ConfigError

_KEY = "knob"
MOST = 1 << 53  # largest whole number without a bound: exact in JSON and in the arithmetic of schedules


@dataclass(frozen=True, kw_only=True)
class Knob:
    """The facts of a field; a section's facts apply to every field in it.

    Attributes:
        above, low, high, below: bounds of the value, or of each value of a list: value > above, value >= low, value <=
            high, value < below.
        why: last part of the message for a value out of bounds.
        phased: a phase may override it, see `RunConfig.in_phase`.
        training: it only matters in training: weights trained with another value belong to the same model.
        overrides: the field of a phase that overrides keys of the run's section of that name.
        restart: may change between the starts of one run; it decides how fast or how visibly it trains, not the result.
        local: may differ between the machines of one run.
    """

    above: float | None = None
    low: float | None = None
    high: float | None = None
    below: float | None = None
    why: str = ""
    phased: bool = False
    training: bool = False
    overrides: bool = False
    restart: bool = False
    local: bool = False

    def bounds(self) -> str:
        """Return the bounds in words; empty without bounds."""
        words = (("above", self.above), ("at least", self.low), ("at most", self.high), ("below", self.below))
        return " and ".join(f"{word} {bound:,}" for word, bound in words if bound is not None)

    def too_many(self, value: Any) -> bool:
        """Return True for a count beyond any use, which would take endless time or memory."""
        return isinstance(value, int) and not isinstance(value, bool) and self.high is not None and value > self.high

    def mistakes(self, key: str, value: Any) -> Iterator[str]:
        """Yield a message for the value, or each value of a list, that is out of bounds; None never is."""
        if isinstance(value, (tuple, list)):
            for index, each in enumerate(value):
                yield from self.mistakes(f"{key}[{index}]", each)
        elif isinstance(value, int | float) and not self._holds(value):
            yield f"{key}={value}: must be {self.bounds()}{', ' if self.why else ''}{self.why}."
        elif isinstance(value, int) and abs(value) > MOST and self.high is None and self.below is None:
            yield f"{key}={value}: must be at most {MOST:,}, since larger numbers are not exact everywhere."

    def _holds(self, value: float) -> bool:
        return (
            (self.above is None or value > self.above)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.below is None or value < self.below)
        )


def knob(default: Any = MISSING, *, factory: Callable[[], Any] | None = None, **facts: Any) -> Any:
    """Define a dataclass field with facts; see `Knob` for their names.

    Args:
        default: its value if none is given; without a default the user must choose.
        factory: makes the default of a section or a mapping.
        facts: the fields of `Knob`.
    """
    metadata = {_KEY: Knob(**facts)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def rate_knob(default: Any = MISSING) -> Any:
    """Define a learning rate."""
    return knob(default, above=0, high=1, why="usual rates lie between 1e-5 and 1e-2")


def facts_of(field: dataclasses.Field[Any]) -> Knob:
    """Return the facts of a field; defaults if it was not made by `knob`."""
    facts: Knob = field.metadata.get(_KEY, Knob())
    return facts


def knobs(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, Knob]]:
    """Yield every value of a configuration that is not a section: dotted key, value, and facts."""
    if isinstance(config, dict):
        for name, entry in config.items():
            if dataclasses.is_dataclass(entry):
                yield from knobs(entry, (*path, name))
        return
    for field in dataclasses.fields(config):
        value, here = getattr(config, field.name), (*path, field.name)
        if dataclasses.is_dataclass(value) or isinstance(value, dict):
            yield from knobs(value, here)
        else:
            yield ".".join(here), value, facts_of(field)


def bound_mistakes(config: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a message for every number of a configuration, or of a section at this path, that is out of bounds."""
    for key, value, facts in knobs(config, path):
        yield from facts.mistakes(key, value)


def refuse_too_many(config: Any, path: tuple[str, ...] = ()) -> None:
    """Refuse counts so large that other rules, or loading the configuration, would never finish.

    Args:
        config: a run, or a section of one.
        path: of keys to the section.

    Raises:
        ConfigError: a count is too large; one line for each.
    """
    messages = [
        message
        for key, value, knob in knobs(config, path)
        if knob.too_many(value)
        for message in knob.mistakes(key, value)
    ]
    if messages:
        raise ConfigError("\n".join(messages))


def phased_keys(section: Any) -> list[str]:
    """Return the keys of a section that a phase may override; `section` is a dataclass or an instance."""
    return [field.name for field in dataclasses.fields(section) if facts_of(field).phased]


def architecture_keys(section: Any) -> list[str]:
    """Return the keys that determine the shapes of the weights: those neither `phased` nor `training`."""
    facts = {field.name: facts_of(field) for field in dataclasses.fields(section)}
    return [name for name, knob in facts.items() if not (knob.phased or knob.training)]


def may(fact: Literal["restart", "local"], schema: type, key: str) -> bool:
    """Return True if a dotted key, or a section that contains it, has this fact.

    Args:
        fact: its name.
        schema: dataclass at the root.
        key: dotted; names of entries of a mapping are skipped.
    """
    inner: Any = schema
    for part in key.split("."):
        if typing.get_origin(inner) is dict:  # the part is a name
            inner = typing.get_args(inner)[1]
            continue
        owner = next((each for each in _variants(inner) if part in each.__dataclass_fields__), None)
        if owner is None or getattr(facts_of(owner.__dataclass_fields__[part]), fact):
            return owner is not None
        inner = without_none(hints_of(owner)[part])
        if not dataclasses.is_dataclass(inner) and typing.get_origin(inner) is not dict:
            return False
    return False


def _variants(schema: type) -> Iterator[Any]:
    """Yield a section's dataclass and its subclasses, which may have further keys."""
    yield schema
    more: list[type] = schema.__subclasses__()
    for each in more:
        yield from _variants(each)
