"""The fit of the expected held-out loss to the runs in expected_loss.json: constants and errors.

    python -m benchmarks.expected_loss    # needs scipy

Each of the runs was `python -m modernbert_train train yamls/quickstart.yaml` with another width, number of layers and
number of tokens, on one CPU thread. Warm-up, context and decay kept their shares of the tokens; the learning rate and
the batch stayed. The first weights scaled with 1 / sqrt(width) from the quickstart's 0.05 at a width of 192: with 0.05,
a width of 64 sits on the unigram plateau. Texts: Python's standard library with 8,192 entries, and English books with
4,096 (28 classics of Project Gutenberg from the repositories of GITenberg, public domain, cut at chapters, one document
a line).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modernbert_train.plan.expected_loss import ALPHA, FLOOR, effective_tokens

Row = dict[str, Any]  # of the table
ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "benchmarks/expected_loss.json"


def read_table() -> list[Row]:
    """The committed runs."""
    rows: list[Row] = json.loads(TABLE.read_text("utf-8"))["runs"]
    return rows


@dataclass(frozen=True)
class Law:
    """Constants of the rule in one unit of the loss.

    Attributes:
        unit: unigram (loss over unigram loss) or bits (per byte).
        count: which parameters: key of a row.
        values: SIZE, DATA and BETA of plan/expected_loss.py, in that unit.
    """

    unit: str
    count: str
    values: tuple[float, float, float]

    def loss(self, row: Row) -> float:
        """Return the expected loss of a run, in nats per token."""
        size, data, beta = self.values
        tokens = effective_tokens(row["tokens"], row["unique_tokens"])
        share = size / (row[self.count] / 1e6) ** ALPHA + data / (tokens / 1e6) ** beta
        return (FLOOR * floor_of(self.unit) + share) * nats_of(self.unit, row)


def nats_of(unit: str, row: Row) -> float:
    """Return the nats per token of one unit."""
    return float(row["unigram_loss"] if unit == "unigram" else row["loss"] / row["bits_per_byte"])


def floor_of(unit: str) -> float:
    """Return the factor of FLOOR, a share of the unigram loss: both texts have about 2.6 bits a byte of it."""
    return 1.0 if unit == "unigram" else 2.6


def fit(rows: Sequence[Row], unit: str = "unigram", count: str = "parameters") -> Law:
    """Fit the loss by least squares, each in nats over its unit."""
    from scipy.optimize import least_squares

    wanted = np.array([row["loss"] / nats_of(unit, row) for row in rows])

    def errors(values: Any) -> Any:
        law = Law(unit, count, tuple(values))
        return np.array([law.loss(row) / nats_of(unit, row) for row in rows]) - wanted

    found = least_squares(errors, (0.1, 0.5, 0.3), bounds=([0.0, 0.0, 0.02], [5.0, 10.0, 2.0]), xtol=1e-12)
    return Law(unit, count, tuple(found.x.tolist()))


def left_out(rows: Sequence[Row], unit: str, count: str) -> tuple[list[float], list[float]]:
    """Return errors in nats of each run by a fit without it, and by a fit without its text."""
    without_run = [fit([r for r in rows if r is not row], unit, count).loss(row) - row["loss"] for row in rows]
    of_text = {text: fit([r for r in rows if r["text"] != text], unit, count) for text in {r["text"] for r in rows}}
    return without_run, [of_text[row["text"]].loss(row) - row["loss"] for row in rows]


def print_fit() -> None:
    """Print the committed constants and their uncertainty."""
    rows = read_table()
    inside = [row for row in rows if not row["held_out"]]
    for count in ("parameters", "with_embedding"):
        for unit in ("unigram", "bits"):
            run, text = left_out(inside, unit, count)
            print(f"{unit:8} {count:15} without the run {_errors(run)}; without the text {_errors(text)}")
    law = fit(inside)
    print("SIZE, DATA, BETA = " + ", ".join(f"{value:.4f}" for value in law.values))
    every = [
        abs(error) / row["unigram_loss"]
        for errors in left_out(inside, "unigram", "parameters")
        for error, row in zip(errors, inside, strict=True)
    ]
    print(f"RESIDUAL: nine of ten left out are within {np.quantile(every, 0.9):.4f} of the unigram loss")
    for name, far in (
        ("most tokens", lambda row: row["tokens"] > 1_500_000),
        ("widest", lambda row: row["width"] >= 160),
    ):
        near = fit([row for row in inside if not far(row)])
        errors = [(near.loss(row) - row["loss"]) / row["unigram_loss"] for row in inside if far(row)]
        print(f"extrapolated to the {name}: " + ", ".join(f"{error:+.3f}" for error in errors) + " of the unigram loss")
    for row in rows:
        if row["held_out"]:
            print(
                f"held out, {row['width']} x {row['layers']}, {row['text']}: {law.loss(row):.3f}, was {row['loss']:.3f}"
            )
    print(
        "highest above the rule at a validation: " + f"{max(excess(law, row) for row in rows):+.4f} of the unigram loss"
    )


def excess(law: Law, row: Row) -> float:
    """Return a run's highest excess over the rule at validations from 400,000 tokens on, over the unigram loss."""
    return max(
        (loss - law.loss(row | {"tokens": tokens, "unigram_loss": unigram})) / unigram
        for tokens, _, loss, unigram in row["validations"]
        if tokens >= 400_000
    )


def _errors(errors: Sequence[float]) -> str:
    return f"{np.sqrt(np.mean(np.square(errors))):.3f}, at most {np.max(np.abs(errors)):.3f} nats"


if __name__ == "__main__":
    print_fit()
