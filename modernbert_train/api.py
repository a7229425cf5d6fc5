"""The Python interface: `from modernbert_train import ...`, which imports only what is used.

Most functions are what a verb of the command does; nothing ends the process, and mistakes are
`RunError`s that say what is wrong, where, and what to do.

Shape legend: N texts, D model width.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modernbert_train.config.schema import ModelConfig, ObjectiveConfig, PhaseConfig, RunConfig

if TYPE_CHECKING:
    from composer import Callback
    from tokenizers import Tokenizer
    from torch import Tensor

    from modernbert_train.data.loader import StepBatch
    from modernbert_train.models.encoder import OnEncoder
    from modernbert_train.plan.make import Plan
    from modernbert_train.vocabulary import Vocabulary

_MICROBATCH_TOKENS = 16_384


def load_config(*words: str | Path) -> RunConfig:
    """A run's configuration.

    Args:
        words: as on the command line: YAML files, merged left to right, or one run's folder; then overrides
            `section.key=value`.

    Raises:
        ConfigError: every mistake that the text alone shows: unknown keys with the nearest name, values of the wrong
            kind. `check_run` finds those that need the whole.
    """
    from modernbert_train.cli.arguments import read_run

    return read_run([str(word) for word in words])


def check_run(config: RunConfig, ranks: int = 1) -> None:
    """Every mistake that can be found before training, without torch: rules of the configuration, its data, its folder.

    Args:
        config: the run.
        ranks: processes that would train.

    Raises:
        RunError: all mistakes at once.
    """
    from modernbert_train.plan.preflight import preflight

    preflight(config, ranks)


def plan_run(config: RunConfig, ranks: int = 1) -> Plan:
    """Parameters, FLOPs, steps, padding and bytes sent, without a GPU and without training.

    Args:
        config: the run; its data is read where it exists.
        ranks: GPUs that would train.
    """
    from modernbert_train.config.check import check
    from modernbert_train.plan.make import make_plan

    check(config, ranks)
    return make_plan(config, ranks)


def iter_batches(config: RunConfig, ranks: int = 1, rank: int = 0) -> Iterator[StepBatch]:
    """The batches that training sees, from the first on: packed, masked, the same in every call.

    Args:
        config: the run.
        ranks: processes that would share each batch.
        rank: whose share this is.

    Yields:
        One optimizer step: `microbatches` of packed sequences with their targets, and the `plan` of the whole batch.
    """
    from modernbert_train.config.check import check
    from modernbert_train.data.check import check_data
    from modernbert_train.train.build import build_data

    check(config, ranks)
    here = replace(config, data=replace(config.data, num_workers=0))
    yield from build_data(here, check_data(here)).loader(rank, ranks)


def build_model(config: RunConfig) -> OnEncoder:
    """The model that a run trains, with the weights it begins with if it begins from scratch: a function of the seed.

    Calling it with a microbatch of `iter_batches` gives the sums of its losses.
    """
    from modernbert_train.models.build import build_model as build
    from modernbert_train.models.init import initialize

    model = build(config.model, config.objective, config.compute)
    initialize(model, config.model, config.seed)
    return model


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder with its weights and its tokenizer.

    Attributes:
        module: torch's module; `module.encode(packed)` gives hidden states of packed sequences.
        config: the architecture, with the RoPE bases that the weights were last trained with.
        tokenizer: of the library tokenizers.
        max_tokens: longest sequence that it was trained on.
    """

    module: OnEncoder
    config: ModelConfig
    tokenizer: Tokenizer
    max_tokens: int
    _vocabulary: Vocabulary
    _objective: ObjectiveConfig

    def embed(self, texts: str | Sequence[str]) -> Tensor:
        """The mean of the last hidden states over the tokens of each text, [CLS] and [SEP] included.

        That is sentence-transformers' mean pooling of the exported model. Texts longer than `max_tokens` are cut.

        Args:
            texts: one text, which is one row, or several.

        Returns:
            embeddings_ND: fp32, on the CPU.

        Raises:
            TypeError: one of them is no text; names its place.
        """
        import numpy as np

        from modernbert_train.distributed.compute import Compute
        from modernbert_train.evaluate.embeddings import embed, most_tokens

        texts = [texts] if isinstance(texts, str) else list(texts)
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"texts[{number}]={text!r:.60}: is no text. Give a text, or a list of texts.")
        config = RunConfig(name="embed", model=self.config, objective=self._objective)
        rows = max(1, _MICROBATCH_TOKENS // self.max_tokens)
        phase = PhaseConfig(
            tokens=1, row_tokens=self.max_tokens, batch_rows=rows, microbatch_tokens=rows * self.max_tokens
        )
        ids = [
            np.asarray(each.ids[: most_tokens(phase)], dtype=np.int32)
            for each in self.tokenizer.encode_batch(texts, add_special_tokens=False)
        ]
        compute = Compute.of(config)
        return embed(self.module.to(compute.device), ids, self._vocabulary, config, phase, compute)


def load_model(name: str | Path) -> LoadedEncoder:
    """An encoder to embed texts with, or to build on.

    Args:
        name: a run's folder (its newest whole checkpoint counts), a checkpoint, a folder for Hugging Face or an id of
            the hub, or a checkpoint file of Composer; of any architecture that this package knows.

    Raises:
        DataError, StorageError: there is no such model, it is damaged, or no tokenizer comes with it.
    """
    import torch
    from tokenizers import Tokenizer

    from modernbert_train.config.schema import ComputeConfig, MaskedLmConfig
    from modernbert_train.models.build import ENCODERS
    from modernbert_train.models.encoder import OnEncoder
    from modernbert_train.vocabulary import read_vocabulary
    from modernbert_train.weights.source import open_source, phase_objective

    source = open_source(name)
    model = OnEncoder(ENCODERS[type(source.model)](source.model, ComputeConfig()))
    weights = source.weights()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(weights[key])
    objective = MaskedLmConfig() if source.checkpoint is None else phase_objective(source.checkpoint)
    with source.tokenizer_folder() as folder:
        tokenizer, vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")), read_vocabulary(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return LoadedEncoder(model.eval(), source.model, tokenizer, source.max_tokens, vocabulary, objective)


def train_run(config: RunConfig, *, fresh: bool = False, callbacks: Sequence[Callback | type[Callback]] = ()) -> Path:
    """Train a run to its end, from its newest checkpoint where it has one: calling it again resumes.

    Args:
        config: the run.
        fresh: put what the run's folder holds aside and start from scratch.
        callbacks: of your own, subclasses of `composer.Callback` or instances of them; they hear Composer's events
            beside the callbacks that the run names. Their state is not saved: on resume they begin anew.

    Returns:
        The run's folder.

    Raises:
        RunError: anything that the user has to fix; StoppedEarly when a signal ended the run after a checkpoint.
    """
    from modernbert_train.train.session import train

    train(config, fresh=fresh, callbacks=callbacks)
    return Path(config.folder)


def evaluate_run(config: RunConfig) -> dict[str, dict[str, float]]:
    """Measure a run's newest checkpoint on its held-out text and by its `evals`; the run keeps it.

    Returns:
        Figures by name; those of the held-out text are `heldout`.
    """
    from modernbert_train.evaluate import evaluate

    return evaluate.evaluate_run(config)


def export_run(config: RunConfig, out: str | Path | None = None) -> Path:
    """Write a run's newest checkpoint for Hugging Face; returns the folder, by default hf in the run's."""
    from modernbert_train.weights import export

    return export.export_run(config, None if out is None else Path(out))


def finetune_model(task: str | Path, model: str | Path, *overrides: str) -> dict[str, Any]:
    """Fine-tune a model on labelled texts, measure it, and export it with its classes.

    Args:
        task: one of yamls/tasks, such as "mnli", or a YAML file.
        model: see `load_model`.
        overrides: keys of the task and of the run, `key=value`.

    Returns:
        What result.json holds: figures by split, counts, settings.
    """
    from modernbert_train.train.finetune import finetune

    result = finetune(str(task), str(model), overrides)
    return dict(json.loads(result.read_text(encoding="utf-8")))
