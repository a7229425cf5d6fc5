"""Two checkpoints beside each other: configuration, clock, place in the data, and every tensor.

Tensors are read by slices of rows, of both at once, and never one as a whole where it is large. So checkpoints of a
model that no machine holds can be compared on a small one, however many ranks wrote them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modernbert_train.checkpoint_tools.details import loader_position
from modernbert_train.checkpoint_tools.listing import one_line
from modernbert_train.config.load import differences
from modernbert_train.errors import StorageError
from modernbert_train.run.checkpoint import Checkpoint
from modernbert_train.tensor_files import StoredTensors
from modernbert_train.text import percent, plural, short, table

_MOST_NUMBERS = 1 << 20  # of a tensor, in memory at a time; in fp64 8 MB of each of the two
SHOWN = 20  # tensors, those that differ most first


@dataclass(frozen=True)
class Difference:
    """Of one tensor.

    Attributes:
        name: of it.
        shapes: in both; None where it is not.
        equal: whether all numbers are the same.
        distance, first_norm: Frobenius norms of the difference, and of the first one.
        largest: difference of two numbers.
    """

    name: str
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    equal: bool
    distance: float = math.nan
    first_norm: float = math.nan
    largest: float = math.nan

    @property
    def relative(self) -> float:
        """Distance by the norm of the first; infinite where that is 0 and the distance is not."""
        if self.first_norm > 0:
            return self.distance / self.first_norm
        return math.inf if self.distance > 0 else 0.0 if self.equal else math.nan


def compare_tensors(one: StoredTensors, other: StoredTensors) -> Iterator[Difference]:
    """Every tensor that is in either, in the order of names.

    Raises:
        ValueError: a file was damaged meanwhile.
    """
    for name in sorted(one.shapes.keys() | other.shapes.keys()):
        shapes = one.shapes.get(name), other.shapes.get(name)
        yield Difference(name, shapes, False) if shapes[0] != shapes[1] else _difference(name, one, other)


@torch.no_grad()
def _difference(name: str, one: StoredTensors, other: StoredTensors) -> Difference:
    equal, squares, norm, largest = True, 0.0, 0.0, 0.0
    for first, second in zip(_slices(name, one), _slices(name, other), strict=True):
        equal = equal and torch.equal(first, second)
        numbers, difference = first.double().flatten(), second.to(torch.float64, copy=True).flatten()
        norm += float(numbers.dot(numbers))
        difference.sub_(numbers)
        squares += float(difference.dot(difference))
        if difference.numel():
            largest = max(largest, float(difference.abs_().max()))
    shape = one.shapes[name]
    return Difference(name, (shape, shape), equal, math.sqrt(squares), math.sqrt(norm), largest)


def _slices(name: str, stored: StoredTensors) -> Iterator[Tensor]:
    shape = stored.shapes[name]
    if not shape:
        yield stored[name]
        return
    rows = max(1, _MOST_NUMBERS // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], rows):
        yield stored.rows(name, first, min(rows, shape[0] - first))


def compare(one: Checkpoint, other: Checkpoint, *, shown: int | None = SHOWN) -> str:
    """What differs between two checkpoints, as text.

    Args:
        one, other: the checkpoints.
        shown: tensors at most in each table; None shows all that differ.

    Raises:
        StorageError: a file was damaged since they were opened.
    """
    lines = [f"A  {_named(one)}", f"B  {_named(other)}"]
    changes = differences(one.config, other.config)
    lines.append(_heading("configuration", len(changes), "key"))
    lines += [f"  {key}: {one_line(str(before))} -> {one_line(str(after))}" for key, before, after in changes]
    places = _places(one, other)
    lines.append(_heading("clock and place in the data", len(places), "value"))
    lines += [f"  {name}: {first} -> {second}" for name, first, second in places]
    try:
        weights = list(compare_tensors(one.stored_weights(), other.stored_weights()))
        moments = list(compare_tensors(one.stored_optimizer(), other.stored_optimizer()))
    except (OSError, ValueError) as error:
        raise StorageError(f"{one.folder} and {other.folder}: damaged since they were opened; {error}") from None
    lines += _tensors("weights", weights, shown)
    for key in sorted({each.name.partition("/")[0] for each in moments}):
        of_key = [each for each in moments if each.name.startswith(f"{key}/")]
        lines += _tensors(f"optimizer state, {one_line(key)}", of_key, shown)
    return "\n".join(lines)


def _named(found: Checkpoint) -> str:
    return f"{found.folder}: step {found.step:,}, {found.state.tokens:,} tokens, phase {one_line(found.state.phase)}"


def _heading(what: str, number: int, noun: str) -> str:
    return f"{what}: the same" if number == 0 else f"{what}: {plural(number, noun)} differ{'s' * (number == 1)}"


def _places(one: Checkpoint, other: Checkpoint) -> list[tuple[str, str, str]]:
    pairs = [(str(getattr(one.state, key)), str(getattr(other.state, key))) for key in ("step", "tokens", "phase")]
    found = [(key, *pair) for key, pair in zip(("step", "tokens", "phase"), pairs, strict=True)]
    data = sorted(one.state.data.keys() | other.state.data.keys())
    found += [(f"data {key}", one.state.data.get(key, "none"), other.state.data.get(key, "none")) for key in data]
    first, second = (
        {} if each.state.training is None else loader_position(each.state.training) for each in (one, other)
    )
    found += [(key, first.get(key, "none"), second.get(key, "none")) for key in dict.fromkeys([*first, *second])]
    return [(one_line(name), one_line(a), one_line(b)) for name, a, b in found if a != b]


def _tensors(what: str, found: Sequence[Difference], shown: int | None) -> list[str]:
    alone = [(each, "A" if each.shapes[1] is None else "B") for each in found if None in each.shapes]
    reshaped = [each for each in found if None not in each.shapes and each.shapes[0] != each.shapes[1]]
    both = [each for each in found if each.shapes[0] == each.shapes[1]]
    differ = sorted((each for each in both if not each.equal), key=_by_size)
    distance = math.sqrt(math.fsum(each.distance**2 for each in both))
    norm = math.sqrt(math.fsum(each.first_norm**2 for each in both))
    if not (alone or reshaped or differ):
        return [f"{what}: the same to the bit, {plural(len(found), 'tensor')}"]
    share = percent(3)(distance / norm) if norm else "-"
    lines = [
        f"{what}: {len(differ):,} of {plural(len(both), 'tensor')} differ; norm of the difference {_norm(distance)}, "
        f"{share} of A's {_norm(norm)}"
    ]
    lines += [f"  {one_line(each.name)}: in {side} only" for each, side in alone]
    lines += [f"  {one_line(each.name)}: {list(each.shapes[0] or ())} in A, {list(each.shapes[1] or ())} in B"
              for each in reshaped]  # fmt: skip
    listed = differ if shown is None else differ[:shown]
    if listed:
        rows = [("tensor", "|A - B|", "by |A|", "largest")]
        rows += [(one_line(d.name), _norm(d.distance), percent(3)(d.relative), _norm(d.largest)) for d in listed]
        lines.append(table(rows, indent=2, numbers=True))
    if len(listed) < len(differ):
        lines.append(f"  and {len(differ) - len(listed):,} more that differ less; --all shows them")
    return lines


def _norm(value: float) -> str:
    return short(value) if math.isfinite(value) else "not a number"


def _by_size(each: Difference) -> tuple[float, str]:
    return (-each.relative if not math.isnan(each.relative) else -math.inf, each.name)
