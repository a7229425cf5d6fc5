"""The benchmark of scaling, at a small size: who chooses a cluster by a wrong table pays for it."""

from __future__ import annotations

from benchmarks.scaling import SHAPES, choice_rows, read_plan, scaling_rows, strong_rows


def numbers(cells: list[str]) -> list[float]:
    return [float(cell.replace(",", "").rstrip("%")) for cell in cells if cell]


def test_strong_scaling_keeps_the_batch_and_loses_efficiency() -> None:
    """Also that the advice is the strategy with the most tokens a second, but for what sharding must gain."""
    plan = read_plan(SHAPES[2])
    few, many = scaling_rows(plan, "h100", weak=False, scales=(8, 512))
    assert few[:2] == ["8", "4,928"] and many[:2] == ["512", "5,120"]
    assert few[6:8] == ["", ""]  # hsdp in one node is fsdp2
    assert few[8] == "ddp" and many[8] == "hsdp"
    efficiency = {name: numbers([many[at]])[0] for name, at in (("ddp", 3), ("fsdp2", 5), ("hsdp", 7))}
    assert efficiency["hsdp"] == max(efficiency.values()) < numbers([few[3]])[0] < 100
    assert numbers([many[-1]])[0] < numbers([few[-1]])[0] / 32  # milliseconds of a step


def test_a_batch_that_does_not_divide_is_left_out() -> None:
    (phase,) = read_plan(SHAPES[1]).phases
    assert phase.config.batch_rows == 576
    assert [strong_rows(phase, ranks) for ranks in (64, 128, 256, 1024)] == [576, 640, None, None]


def test_weak_scaling_gives_each_gpu_a_microbatch() -> None:
    (row,) = scaling_rows(read_plan(SHAPES[3]), "h200", weak=True, scales=(64,))
    assert row[1] == "448" and row[-2] == "57,344 x 1"


def test_a_choice_is_worth_what_the_model_says() -> None:
    """With one microbatch a step there is nothing to leave out of the others."""
    rows = [row for row in choice_rows(read_plan(SHAPES[0]), "h100") if "last microbatch only" in row[4]]
    worth = {(row[1], row[2]): numbers([row[6]])[0] for row in rows}
    assert {row[3] for row in rows if row[1] == "64"} == {"1"}
    assert all((worth["64", strategy], worth["16", strategy] > 0) == (0, True) for strategy in ("ddp", "fsdp2", "hsdp"))
