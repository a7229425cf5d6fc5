"""The last lines of a run: its figures, and the commands to continue with."""

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
    """The last lines of a run that reached its end.

    Args:
        folder: of the run.
        tokens, steps: trained.
        loss: see training_loss.py.
        held_out: figures as measured last, which is at the end; None where nothing is held out.
        compared: with those before the first step, see eval_delta.py.
        spent: what its time went into, see effective.py.
        measured: whether `eval` has something to measure it on.
    """
    figures = [f"done: {tokens:,} tokens in {steps:,} steps"]
    if loss is not None:
        figures.append(f"loss {loss:.3f} (mean of the last {min(steps, LOSS_STEPS)} steps)")
    if held_out is not None:
        figures.append(held_out)
    more = [text for text in (spent, compared) if text is not None]
    return "\n".join([", ".join(figures), *more, next_commands(folder, measured=measured)])


def next_commands(folder: str, *, measured: bool) -> str:
    """What can be done with a run that is trained, as one would type it."""
    verbs = (["eval"] if measured else []) + ["export", "report"]
    return "\n".join(["next:", *(f"  python -m modernbert_train {verb} {shlex.quote(folder)}" for verb in verbs)])
