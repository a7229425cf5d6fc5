"""Every knob of a SetFit: how few texts it learns from, and how it is trained.

Defaults are those of the paper's script (scripts/setfit/run_fewshot.py; Tunstall et al., arXiv 2209.11055), else the
library's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from omegaconf import MISSING

from modernbert_train.config.knob import knob, knobs
from modernbert_train.config.tools.finetune import split_name_problems

TABLES = (".jsonl", ".tsv", ".csv")


@dataclass(frozen=True, kw_only=True)
class SetfitConfig:
    """Classes of texts from a few of each: the encoder is trained on pairs of them, then a logistic regression."""

    train: str = MISSING  # .jsonl, .tsv or .csv to draw the few from
    validation: dict[str, str] = field(default_factory=dict)  # files to measure on, by names of your choice
    text_column: str = "text"
    label_column: str = "label"
    shots: int = knob(8, low=1)  # texts of each class, drawn by the seed; paper: 8 and 64
    num_iterations: int = knob(20, low=1)  # so many pairs of one class and of two for each text; paper's script
    epochs: int = knob(1, low=1)  # over the pairs; paper's script
    max_steps: int | None = knob(None, low=1)  # ends the training earlier
    batch_size: int = knob(16, low=1)  # pairs; paper's script
    lr: float = knob(2e-5, above=0)  # of the encoder, peak; the library's default
    warmup: float = knob(0.1, low=0, high=1)  # share of the steps; then the rate falls linearly; the library's default
    weight_decay: float = knob(0.01, low=0)  # the library's default
    max_tokens: int = knob(256, low=8)  # longer texts are cut, special tokens included; paper's script
    # of the texts that are drawn, of the order of the pairs and of dropout. Which of the drawn are paired is the
    # library's, by a seed that is always 42
    seed: int = knob(1618, low=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one
    runs_folder: str = "runs"
    name: str | None = None  # of the run's folder; None: recipe, model and seed


def setfit_problems(config: SetfitConfig) -> Iterator[str]:
    """What is wrong with the settings, as far as it can be told without the files."""
    for key, value, facts in knobs(config):
        yield from facts.mistakes(key, value)
    yield from split_name_problems(config.validation)
    for name, file in (
        ("train", config.train),
        *((f"validation.{key}", file) for key, file in config.validation.items()),
    ):
        if not file.endswith(TABLES):
            yield f"{name}={file}: of which kind is it? Name one of {', '.join(TABLES)}."
    if config.text_column == config.label_column:
        yield f"label_column={config.label_column} is text_column too: the text would contain the label."
