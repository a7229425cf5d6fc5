"""The properties of a key are declared with it. If this breaks, a senseless value trains, or a restart is refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from modernbert_train.config.knob import Knob, knob, knobs, may, phased_keys
from modernbert_train.config.schema import VARIANTS, ModelConfig, OptimConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class Part:
    share: float = knob(0.5, above=0, high=1, why="as a share", phased=True)
    pair: tuple[float, float] = knob((0.1, 0.2), low=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Whole:
    part: Part | None = knob(None, restart=True)
    parts: dict[str, Part] = knob(factory=dict)
    folder: str = knob("a", local=True)


def test_values_inside_and_absent_ones_are_no_mistake_and_nan_is() -> None:
    """The other messages: test_check.py."""
    for facts, value in ((Knob(above=0, high=1), 1), (Knob(low=0), 0), (Knob(above=0), None), (Knob(), -1e9)):
        assert not [*facts.mistakes("key", value)]
    assert [*Knob(above=0).mistakes("key", float("nan"))] == ["key=nan: must be above 0."]


def test_every_value_is_reached_with_its_dotted_key() -> None:
    """In sections, in optional ones and in sections with names chosen by the user."""
    found = {key: value for key, value, _ in knobs(Whole(part=Part(), parts={"a": Part(share=0.1)}))}
    assert found == {
        "part.share": 0.5, "part.pair": (0.1, 0.2), "parts.a.share": 0.1, "parts.a.pair": (0.1, 0.2), "folder": "a",
    }  # fmt: skip
    assert next(knobs(Whole()))[:2] == ("part", None)


def test_a_fact_of_a_section_holds_within_it() -> None:
    assert may("restart", Whole, "part") and may("restart", Whole, "part.share")
    assert not may("restart", Whole, "parts.a.share") and not may("restart", Whole, "folder")
    assert may("local", Whole, "folder") and not may("local", Whole, "gone")
    assert phased_keys(Part) == phased_keys(Part()) == ["share"]


def test_what_may_differ_between_machines_is_where_things_are() -> None:
    """What may change between starts: checkpoints/test_what_may_change.py."""
    assert all(may("local", RunConfig, key) for key in ("launch.nodes", "data.train", "data.cache_folder"))
    assert not any(may("local", RunConfig, key) for key in ("runs_folder", "data.num_workers", "data.mix_by"))


@pytest.mark.parametrize(("section", "base"), [("model", ModelConfig), ("optim", OptimConfig)])
def test_a_variant_keeps_the_bounds_of_the_keys_that_all_have(section: str, base: type) -> None:
    """A variant redeclares a key to change its default; without its bounds a rate of -1 would train."""
    common = {key: facts for key, _, facts in knobs(base())}
    for schema in VARIANTS[section].values():
        own = {key: facts for key, _, facts in knobs(schema())}
        assert {key: own[key] for key in common} == common
