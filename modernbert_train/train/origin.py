"""First weights that come from elsewhere: a run, a checkpoint or a Hugging Face model, as it is or grown.

They are found and compared with the run before anything is built, and put into the model when it is there, before it
is sharded, so that ranks and strategy do not matter to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from modernbert_train.clock import position_at
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import ModelConfig, RunConfig
from modernbert_train.errors import ConfigError, StorageError
from modernbert_train.export.hf import DECODER, load_weights, model_config_from_hf
from modernbert_train.export.hub import local_model
from modernbert_train.models.tiling import EQUAL, GROWING, check_growth, grow_each
from modernbert_train.train.checkpoint import CONFIG, MANIFEST, Checkpoint, newest_valid, verify
from modernbert_train.vocabulary import read_vocabulary, token_ids

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Source:
    """Weights on disk and what must be known about them.

    Attributes:
        folder: a checkpoint or a Hugging Face model.
        checkpoint: the checkpoint, if it is one.
        model: the architecture.
        global_rope_theta: RoPE base of global layers that the weights were last trained with.
        max_tokens: longest sequence they were trained on.
        tokenizer: folder of the tokenizer.
        tokenizer_sha256: its hash; None where none lies beside the weights.
    """

    folder: Path
    checkpoint: Checkpoint | None
    model: ModelConfig
    global_rope_theta: float
    max_tokens: int
    tokenizer: Path
    tokenizer_sha256: str | None

    def weights(self) -> dict[str, Tensor]:
        """Every parameter, whole, in fp32; mapped from the file, so only what is being copied need be in memory.

        Raises:
            DataError: the file of a Hugging Face model is missing, damaged or cut short.
        """
        return load_weights(self.folder) if self.checkpoint is None else self.checkpoint.weights()


def open_source(name: str | Path) -> Source:
    """Find weights.

    Args:
        name: the folder of a run (its newest whole checkpoint counts), of a checkpoint, or of a Hugging Face model, or
            the id of one on the hub.

    Raises:
        DataError: there is no such model, or its files are damaged or describe another architecture.
        StorageError: the run has no checkpoint, or the checkpoint is damaged.
    """
    folder = Path(name)
    if (folder / MANIFEST).is_file():
        return _from_checkpoint(verify(folder))
    if (folder / CONFIG).is_file():
        found, passed_over = newest_valid(folder / "checkpoints")
        for text in passed_over:
            print(f"warning: passed over a damaged checkpoint: {text}")
        if found is None:
            raise StorageError(f"{folder}: a run without a checkpoint. Train it first, or name another.")
        return _from_checkpoint(found)
    folder = local_model(str(name))
    model, theta = model_config_from_hf(folder)
    max_tokens = json.loads((folder / "config.json").read_bytes()).get("max_position_embeddings", 8192)
    sha256 = read_vocabulary(folder).sha256 if (folder / TOKENIZER).is_file() else None
    return Source(folder, None, model, theta, max_tokens, folder, sha256)


def _from_checkpoint(found: Checkpoint) -> Source:
    config, state = load_run([found.folder / CONFIG]), found.state()
    phase = position_at(config, max(0, int(state["tokens"]) - 1)).phase
    tokenizer = Path(config.data.tokenizer)
    sha256 = state["data"]["tokenizer"]
    return Source(found.folder, found, config.model, phase.global_rope_theta, phase.row_tokens, tokenizer, sha256)


@dataclass(frozen=True)
class Origin:
    """Where a run that starts from scratch has its first weights from.

    Attributes:
        source: the weights.
        config: the run that starts.
    """

    source: Source
    config: RunConfig

    def describe(self) -> str:
        """One line for the banner."""
        model, old = self.config.model, self.source.model
        text = f"model.init_from={self.source.folder}"
        if model.grow_from is not None:
            text = f"model.grow_from={self.source.folder} ({model.grow_mode}): " + ", ".join(
                f"{key} {getattr(old, key):,} -> {getattr(model, key):,}" for key in GROWING
            )
        theta = next(iter(self.config.phases.values())).global_rope_theta
        bases = {
            "global": (self.source.global_rope_theta, theta),
            "local": (old.local_rope_theta, model.local_rope_theta),
        }
        return text + "".join(
            f"; {kind} RoPE base {there:,.0f} there, {here:,.0f} here"
            for kind, (there, here) in bases.items()
            if there != here
        )

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Put the weights into a model that is not sharded yet, one tensor after the other.

        Raises:
            DataError: see `Source.weights`.
        """
        stored, new = self.source.weights(), self.config.model
        tensors: Iterable[tuple[str, Tensor]] = stored.items()
        if new.grow_from is not None:
            tensors = grow_each(stored, self.source.model, new, new.grow_mode)
        targets = dict(model.named_parameters())
        for name, tensor in tensors:
            if name != DECODER:  # tied, and therefore already there
                targets.pop(name).copy_(tensor)
        assert not targets, f"left without weights: {sorted(targets)}"


def find_origin(config: RunConfig) -> Origin | None:
    """What model.init_from or model.grow_from names, compared with the run; None if neither is set.

    Raises:
        ConfigError: the architecture or the tokenizer is not the run's; names both values.
        DataError, StorageError: see `open_source` and `Source.weights`.
    """
    model = config.model
    key, name = ("grow_from", model.grow_from) if model.grow_from is not None else ("init_from", model.init_from)
    if name is None:
        return None
    source = open_source(name)
    if key == "grow_from":
        check_growth(source.model, model, model.grow_mode)
    else:
        check_same_architecture(source, model, f"model.init_from={source.folder}")
    check_same_tokenizer(source, config, f"model.{key}={name}")
    source.weights()  # read once for nothing, so that damage is told before anything is made
    return Origin(source, config)


def check_same_architecture(source: Source, model: ModelConfig, key: str) -> None:
    """Compare the architecture of weights with the run's; `key` is what named them.

    Raises:
        ConfigError: they differ; names every key with both values.
    """
    wrong = [
        f"model.{name}={getattr(model, name)} here, {getattr(source.model, name)} there"
        for name in (*GROWING, *EQUAL)
        if getattr(model, name) != getattr(source.model, name) and name != "head_size"  # follows from two others
    ]
    if wrong:
        raise ConfigError(
            f"{key}: of another architecture:\n  "
            + "\n  ".join(wrong)
            + "\nSet the values it has, or enlarge a smaller model with model.grow_from."
        )


def check_same_tokenizer(source: Source, config: RunConfig, key: str) -> None:
    """Compare the tokenizer of weights with the run's; `key` is what named them.

    Raises:
        ConfigError: at least one id means something else.
    """
    ours = read_vocabulary(config.data.tokenizer).sha256
    if source.tokenizer_sha256 in (None, ours):
        return
    difference = f"its sha256 is {str(source.tokenizer_sha256)[:12]}, ours {ours[:12]}"
    if source.checkpoint is None:  # the same tokenizer may be written in several ways; what counts are the ids
        here, there = token_ids(config.data.tokenizer), token_ids(source.folder)
        differing = [token for token in here.keys() | there.keys() if here.get(token) != there.get(token)]
        if not differing:
            return
        token = min(differing)
        ids = f"id {there.get(token)} there, {here.get(token)} here"
        difference = f"{len(differing)} tokens differ, as {token!r}: {ids}"
    raise ConfigError(
        f"{key}: trained with another tokenizer than data.tokenizer={config.data.tokenizer}; {difference}. Every token "
        "would mean something else. Prepare the data with the tokenizer of the weights, or train from scratch."
    )
