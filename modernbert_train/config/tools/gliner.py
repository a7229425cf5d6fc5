"""Every knob of a GLiNER: which sentences it learns from, which types it is asked for, and how it is trained.

Defaults are the paper's (Zaratiana et al., arXiv 2311.08526) where it says them, else those of the library's
configs/config_span.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from omegaconf import MISSING

from modernbert_train.config.knob import knob, knobs
from modernbert_train.config.tools.finetune import split_name_problems


@dataclass(frozen=True, kw_only=True)
class GlinerConfig:
    """A model that finds the entities of any types that are named with the sentence."""

    train: str = MISSING  # .conll
    validation: dict[str, str] = field(default_factory=dict)  # .conll to measure on, by names of your choice
    # type in the files -> what the model reads; a type that is not there is read with spaces for - and _
    labels: dict[str, str] = field(default_factory=dict)
    # types, as in the files, that training never sees and that are measured for themselves, as are all those that the
    # training file has not
    zero_shot: list[str] = field(default_factory=list)
    # chance that a training sentence is asked for a type that it has not. The library asks sentences without entities
    # for nothing; here they are asked too. The paper's best is half of all types asked
    ask_absent: float = knob(0.5, low=0, high=1)
    max_types: int = knob(25, low=1)  # asked of one training sentence at most; paper: 25
    max_width: int = knob(12, low=1)  # words of an entity at most; paper: 12
    max_len: int = knob(384, low=1)  # words of a sentence at most; the library's default
    hidden_size: int = knob(512, low=2)  # width of spans and types; the library's default. The paper's is 768
    dropout: float = knob(0.4, low=0, below=1)  # beside the encoder; paper: 0.4
    num_rnn_layers: int = knob(1, low=0)  # a bidirectional LSTM over the words, as the library has it; 0: none
    subtoken_pooling: Literal["first", "last", "mean", "max"] = "first"  # tokens of a word -> its state
    max_steps: int = knob(3000, low=1)  # the paper's 30,000 are for 44,889 passages
    batch_size: int = knob(8, low=1)  # sentences; config_span.yaml
    lr: float = knob(1e-5, above=0)  # of the encoder, peak; paper
    others_lr: float = knob(5e-5, above=0)  # of all that is new; paper
    weight_decay: float = knob(0.1, low=0)  # of the encoder; config_span.yaml
    others_weight_decay: float = knob(0.01, low=0)  # config_span.yaml
    warmup: float = knob(0.1, low=0, below=1)  # share of the steps; then the rate falls as a cosine; paper
    max_grad_norm: float = knob(10.0, above=0)  # the loss is a sum; config_span.yaml
    focal_alpha: float = knob(
        0.75, low=-1, high=1
    )  # weight of entities against other spans, -1: none; config_span.yaml
    focal_gamma: float = knob(0.0, low=0)  # config_span.yaml
    threshold: float = knob(0.5, above=0, below=1)  # a span that is likelier is an entity
    seed: int = knob(1618, low=0)  # of new weights, dropout, the order of sentences and the types they are asked for
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one
    runs_folder: str = "runs"
    name: str | None = None  # of the run's folder; None: recipe, model and seed


def gliner_problems(config: GlinerConfig) -> Iterator[str]:
    """What is wrong with the settings, as far as it can be told without the files."""
    for key, value, facts in knobs(config):
        yield from facts.mistakes(key, value)
    yield from split_name_problems(config.validation)
    for name, file in (
        ("train", config.train),
        *((f"validation.{key}", file) for key, file in config.validation.items()),
    ):
        if not file.endswith((".conll", ".txt")):
            yield f"{name}={file}: of which kind is it? Name a .conll file: a word a line with its tag."
    for kind, label in config.labels.items():
        if not label.strip():
            yield f"labels.{kind}: names nothing. Write what the model should read, such as {kind.replace('-', ' ')}."
    said = list(config.labels.values())
    if twice := sorted({label for label in said if said.count(label) > 1}):
        yield f"labels: several types are read as {twice[0]!r}, and could not be distinguished. Name each as another."
