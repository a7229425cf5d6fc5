"""Write the race's results as a Markdown table and a picture of its curves."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.curves import draw_curves
from benchmarks.race.protocol import Protocol

Row = Mapping[str, Any]


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """Return the finished runs of a file by name; a line that a kill has torn is left out."""
    rows = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        if line.endswith("}"):
            row = json.loads(line)
            rows[row["name"]] = row
    return rows


def counts(row: Row) -> bool:
    """True for a run of the race itself, neither for tuning nor a repetition."""
    return row["share"] == 1 and not row["repeat"]


def losses_of(rows: Mapping[str, Row], size: str) -> dict[str, list[float]]:
    """Return the final held-out losses of each arm at a size, in order of seeds."""
    losses: dict[str, list[float]] = {}
    for row in sorted(rows.values(), key=lambda row: row["seed"]):
        if row["size"] == size and counts(row):
            losses.setdefault(row["arm"], []).append(row["loss"])
    return losses


def pooled_deviation(losses: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation over seeds, pooled over arms with several finite losses; NaN without any."""
    several = [each for each in losses if len(each) > 1 and all(map(math.isfinite, each))]
    if not several:
        return math.nan
    squares = sum(statistics.variance(each) * (len(each) - 1) for each in several)
    return math.sqrt(squares / sum(len(each) - 1 for each in several))


def verdict(mean: float, seeds: int, reference: float, of_reference: int, spread: float, errors: float) -> str:
    """Return the protocol's decision on an arm: better, worse, within noise, or one seed."""
    if seeds < 2 or math.isnan(spread):
        return "one seed"
    noise = errors * spread * math.sqrt(1 / seeds + 1 / of_reference)
    gain = reference - mean
    return "better" if gain > noise else "worse" if gain < -noise else "within noise"


def finalists_of(protocol: Protocol, rows: Mapping[str, Row]) -> list[str] | None:
    """Return the reference and the best arms of the smallest size; None before all have run."""
    first, small = protocol.tree["seeds"][0], protocol.sizes[0]
    losses = {row["arm"]: row["loss"] for row in rows.values()
              if row["size"] == small and row["seed"] == first and counts(row)}  # fmt: skip
    arms = protocol.trained()
    if not losses.keys() >= set(arms):
        return None
    return [protocol.reference, *sorted(arms[1:], key=lambda arm: losses[arm])[: protocol.tree["finalists"]]]


def write_table(protocol: Protocol, rows: Mapping[str, Row], out: Path) -> None:
    """Write OUT/table.md and OUT/curves.svg of the finished runs, and print the table."""
    text = table_of(protocol, rows)
    (out / "table.md").write_text(text, encoding="utf-8")
    (out / "curves.svg").write_text(picture_of(protocol, rows), encoding="utf-8")
    print(text)


def table_of(protocol: Protocol, rows: Mapping[str, Row]) -> str:
    """Return the table of the finished runs in Markdown, the noise of each size below its rows."""
    lines = [
        f"Protocol {protocol.sha256[:12]}, sealed {protocol.tree['sealed']}. Held-out loss in nats, 15 % predicted.",
        "",
    ]
    for size in protocol.sizes:
        losses = losses_of(rows, size)
        reference = losses.get(protocol.reference)
        if not reference:
            continue
        lines += [f"| {size} | rate x | loss | seeds | difference | decision |", "| --- " * 6 + "|"]
        spread = pooled_deviation(list(losses.values()))
        base = statistics.fmean(reference)
        for arm, values in sorted(losses.items(), key=lambda each: statistics.fmean(each[1])):
            row = next(row for row in rows.values() if (row["size"], row["arm"]) == (size, arm) and counts(row))
            mean = statistics.fmean(values)
            judgement = "reference" if arm == protocol.reference else verdict(
                mean, len(values), base, len(reference), spread, protocol.tree["standard_errors"])  # fmt: skip
            lines.append(f"| {arm} | {row['multiple']:g} | {mean:.4f} | {len(values)} | {mean - base:+.4f} "
                         f"| {judgement} |")  # fmt: skip
        lines += ["", *_noise(protocol, rows, size, spread), ""]
    if finalists := finalists_of(protocol, rows):
        lines += [f"Finalists: {', '.join(finalists)}."]
    return "\n".join(lines) + "\n"


def _noise(protocol: Protocol, rows: Mapping[str, Row], size: str, spread: float) -> list[str]:
    again = [row for row in rows.values() if row["size"] == size and row["repeat"]]
    first = {(row["arm"], row["seed"]): row["loss"] for row in rows.values() if row["share"] == 1 and not row["repeat"]
             and row["size"] == size}  # fmt: skip
    apart = [abs(row["loss"] - first[row["arm"], row["seed"]]) for row in again]
    summary = f"{size}: standard deviation over seeds {spread:.4f}"
    return [summary + (f"; the same run repeated differs by {max(apart):g}." if apart else ".")]


def picture_of(protocol: Protocol, rows: Mapping[str, Row]) -> str:
    """Return the curves of the first seed at the smallest size over the share of the budget, as SVG."""
    size, seed = protocol.sizes[0], protocol.tree["seeds"][0]
    curves = {row["arm"]: row["curve"] for row in rows.values() if row["size"] == size and row["seed"] == seed
              and row["share"] == 1 and not row["repeat"] and len(row["curve"]) > 2}  # fmt: skip
    points = {arm: [(index / (len(curve) - 1), loss) for index, loss in enumerate(curve) if index]
              for arm, curve in curves.items()}  # fmt: skip
    return draw_curves(points, f"held-out loss over the share of the budget, size {size}, seed {seed}")
