"""Evaluations of a model: figures that are equal on any number of ranks.

`EVALUATORS` lists the evaluations besides the held-out text. To add one, write a dataclass in config/evals.py, a row in
schema.VARIANTS, one here, and a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from modernbert_train.clock import Position
from modernbert_train.config.evals import BASELINE, COUNT
from modernbert_train.config.plugins import Rows
from modernbert_train.config.schema import (
    EvaluatorConfig,
    HeldoutStreamConfig,
    ProbeConfig,
    ScoresConfig,
)
from modernbert_train.distributed.compute import Compute
from modernbert_train.evaluate.heldout import HeldOutTexts
from modernbert_train.models.encoder import OnEncoder


class Evaluator(Protocol):
    """One measurement: Evaluator(key, settings, texts), built on every rank; key is evals.NAME, for messages.

    str() returns one line that describes the measurement.
    """

    def __init__(self, key: str, settings: Any, texts: HeldOutTexts) -> None: ...

    def __call__(self, model: OnEncoder, now: Position, compute: Compute) -> dict[str, float]:
        """Measure; every rank calls it and gets the same figures.

        Args:
            model: the model in training, possibly sharded; its weights and its training mode stay as they are.
            now: the phase, whose rows and microbatches are used, and the run's model and objective in it.
            compute: where the model is, and the precision to compute in.

        Returns:
            Figures by name, some with the prefix `BASELINE` or `COUNT`; a function of weights and configuration alone.
        """


EVALUATORS: Rows[type[EvaluatorConfig], type[Evaluator]] = Rows(
    "evaluator",
    {
        ProbeConfig: "modernbert_train.evaluate.probe:Probe",
        ScoresConfig: "modernbert_train.evaluate.scores:Scores",
        HeldoutStreamConfig: "modernbert_train.evaluate.heldout_stream:HeldoutStream",
    },
)


def build_evaluators(evals: Mapping[str, EvaluatorConfig], texts: HeldOutTexts) -> Mapping[str, Evaluator]:
    """Build the evaluators of a run's section `evals`, by name."""
    return {name: EVALUATORS[type(settings)](f"evals.{name}", settings, texts) for name, settings in evals.items()}


def figures_text(figures: Mapping[str, float]) -> str:
    """Return figures in words: 'accuracy 0.912 (baseline 0.5), macro_f1 0.91 (baseline 0.33)'; counts are left out."""
    shown = [name for name in figures if not name.startswith((BASELINE, COUNT))]
    return ", ".join(f"{name} {figures[name]:.3f}{_baseline(figures.get(f'{BASELINE}{name}'))}" for name in shown)


def _baseline(value: float | None) -> str:
    return "" if value is None else f" (baseline {value:.3f})"
