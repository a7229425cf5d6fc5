"""A field of the configuration with what is true of it: its bounds, and who or what may change it.

    mask_rate: float = knob(0.3, above=0, high=1, phased=True)  # share of the tokens that are predicted

The facts of a key stand beside the key and nowhere else. Whoever needs one loops over the fields: check.py for bounds,
load.py for what a phase may override, checkpoints/run_folder.py for what may change at a restart,
distributed/same_run.py for what may differ between machines, tools/reference.py for the page of every key.
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
MOST = 1 << 53  # of a whole number with no bound of its own: JSON, and the arithmetic of schedules, hold these exactly


@dataclass(frozen=True, kw_only=True)
class Knob:
    """The facts of a field; those of a section hold for every field within it.

    Attributes:
        above, low, high, below: the value lies above, at or above, at or below, below these; so does each of a list.
        why: ends the sentence of a value that does not.
        phased: a phase may override it, see `RunConfig.in_phase`.
        training: it matters in training alone: weights that were trained with another value are of the same model.
        overrides: the field is a phase's, and holds what it overrides of the run's section of that name.
        restart: may change between the starts of one run; it decides how fast or how visibly it trains, not what.
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
        """Where a value lies, in words; empty where nothing bounds it."""
        words = (("above", self.above), ("at least", self.low), ("at most", self.high), ("below", self.below))
        return " and ".join(f"{word} {bound:,}" for word, bound in words if bound is not None)

    def too_many(self, value: Any) -> bool:
        """Whether it is a count beyond any use: what is done so often, or made so large, would never end."""
        return isinstance(value, int) and not isinstance(value, bool) and self.high is not None and value > self.high

    def mistakes(self, key: str, value: Any) -> Iterator[str]:
        """A message for the value, or for each of a list, that lies outside the bounds; None lies nowhere."""
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
    """A dataclass field with facts; see `Knob` for their names.

    Args:
        default: its value where none is given; without one the user must choose.
        factory: makes the default of a section or a mapping.
        facts: the fields of `Knob`.
    """
    metadata = {_KEY: Knob(**facts)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def facts_of(field: dataclasses.Field[Any]) -> Knob:
    """The facts of one field; none where it was not made by `knob`."""
    facts: Knob = field.metadata.get(_KEY, Knob())
    return facts


def knobs(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, Knob]]:
    """Every value of a configuration that is no section: its dotted key, itself, and its own facts."""
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


def refuse_too_many(config: Any, path: tuple[str, ...] = ()) -> None:
    """Refuse counts that no other rule, and nothing that loads the configuration, would come to an end with.

    Args:
        config: a run, or a section of one.
        path: of keys to the section.

    Raises:
        ConfigError: one line for each.
    """
    found = [
        message
        for key, value, knob in knobs(config, path)
        if knob.too_many(value)
        for message in knob.mistakes(key, value)
    ]
    if found:
        raise ConfigError("\n".join(found))


def phased_keys(section: Any) -> list[str]:
    """What a phase may override of a section, given as its dataclass or an instance of it."""
    return [field.name for field in dataclasses.fields(section) if facts_of(field).phased]


def architecture_keys(section: Any) -> list[str]:
    """What weights are only of one model with, of a `model` section: keys that are neither `phased` nor `training`."""
    facts = {field.name: facts_of(field) for field in dataclasses.fields(section)}
    return [name for name, knob in facts.items() if not (knob.phased or knob.training)]


def may(what: Literal["restart", "local"], schema: type, key: str) -> bool:
    """Whether a dotted key, or a section that it lies in, is marked so.

    Args:
        what: the fact.
        schema: dataclass at the root.
        key: dotted; names of entries of a mapping are passed over.
    """
    inner: Any = schema
    for part in key.split("."):
        if typing.get_origin(inner) is dict:  # the part is a name
            inner = typing.get_args(inner)[1]
            continue
        owner = next((each for each in _variants(inner) if part in each.__dataclass_fields__), None)
        if owner is None or getattr(facts_of(owner.__dataclass_fields__[part]), what):
            return owner is not None
        inner = without_none(hints_of(owner)[part])
        if not dataclasses.is_dataclass(inner) and typing.get_origin(inner) is not dict:
            return False
    return False


def _variants(schema: type) -> Iterator[Any]:
    """A section's dataclass, and those that have keys of their own besides."""
    yield schema
    more: list[type] = schema.__subclasses__()
    for each in more:
        yield from _variants(each)
