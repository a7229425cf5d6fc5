"""Format the last lines of a run: its figures, and the next commands."""

from __future__ import annotations

import shlex

from modernbert_train.report.training_loss import LOSS_STEPS


def final_summary(
    folder: str,
    *,
    tokens: int,
    steps: int,
    loss: float | None,
    held_out: str | None,
    compared: str | None = None,
    spent: str | None = None,
    measured: bool,
) -> str:
    """Return the last lines of a finished run.

    Args:
        folder: of the run.
        tokens, steps: trained.
        loss: see training_loss.py.
        held_out: figures measured at the end; None without held-out data.
        compared: table of changes since before the first step, see eval_delta.py.
        spent: where its time went, see effective.py.
        measured: True if `eval` has data to measure it on.
    """
    figures = [f"done: {tokens:,} tokens in {steps:,} steps"]
    if loss is not None:
        figures.append(f"loss {loss:.3f} (mean of the last {min(steps, LOSS_STEPS)} steps)")
    if held_out is not None:
        figures.append(held_out)
    more = [text for text in (spent, compared) if text is not None]
    return "\n".join([", ".join(figures), *more, next_commands(folder, measured=measured)])


def next_commands(folder: str, *, measured: bool) -> str:
    """Return the next commands for a trained run, ready to paste."""
    verbs = (["eval"] if measured else []) + ["export", "report"]
    return "\n".join(["next:", *(f"  python -m modernbert_train {verb} {shlex.quote(folder)}" for verb in verbs)])
