"""First weights from elsewhere: a run, a checkpoint, a Hugging Face model, a file of Composer; as they are or grown.

They are found and compared with the run before anything is built, and put into the model when it is there, before it
is sharded, so that ranks and strategy do not matter to them.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from modernbert_train.config.schema import ModelConfig, PhaseConfig, RunConfig
from modernbert_train.errors import ConfigError, DataError, StorageError
from modernbert_train.models.sharding import like
from modernbert_train.models.tiling import EQUAL, GROWING, check_growth, grow_each
from modernbert_train.own_files import require_own_files
from modernbert_train.run.checkpoint import Checkpoint, newest_valid, verify
from modernbert_train.run.manifest import CONFIG_YAML, MANIFEST
from modernbert_train.vocabulary import read_vocabulary, token_ids
from modernbert_train.weights.composer_file import ComposerFile, open_composer
from modernbert_train.weights.formats import modernbert
from modernbert_train.weights.hf_folder import DECODER, TOKENIZER, load_weights
from modernbert_train.weights.hub import local_model
from modernbert_train.weights.named_source import check_named


@dataclass(frozen=True)
class Source:
    """Weights on disk and what must be known about them; plain values, because rank 0 tells them to the others.

    Attributes:
        folder: a checkpoint or a Hugging Face model; of Composer, the file.
        checkpoint: the checkpoint, if it is one.
        model: the architecture, with the RoPE base of local layers that the weights were last trained with.
        global_rope_theta: the same of global layers.
        max_tokens: longest sequence they were trained on.
        tokenizer: folder of the tokenizer; None where it is in Composer's file, or nowhere.
        tokenizer_sha256: its hash; None where there is none.
    """

    folder: Path
    checkpoint: Checkpoint | None
    model: ModelConfig
    global_rope_theta: float
    max_tokens: int
    tokenizer: Path | None
    tokenizer_sha256: str | None

    def weights(self) -> dict[str, Tensor]:
        """Every parameter, whole, in fp32; mapped from the file, so only what is being copied need be in memory.

        Raises:
            DataError: the file of a Hugging Face model or of Composer is damaged, or does not fit its configuration.
        """
        if self.checkpoint is not None:
            return self.checkpoint.weights()
        return open_composer(self.folder).weights() if self.folder.is_file() else load_weights(self.folder)

    @contextmanager
    def tokenizer_folder(self) -> Iterator[Path]:
        """The folder of the tokenizer, there as long as the block runs.

        Raises:
            DataError: no tokenizer comes with the weights.
        """
        if self.tokenizer is not None:
            yield self.tokenizer
        elif self.tokenizer_sha256 is None:
            beside = self.folder.parent if self.folder.is_file() else self.folder
            raise DataError(f"{beside / TOKENIZER}: no such file. Put the tokenizer of the weights there.")
        else:
            with tempfile.TemporaryDirectory() as folder:
                for name, text in open_composer(self.folder).tokenizer_files.items():
                    (Path(folder) / name).write_text(text, encoding="utf-8")
                yield Path(folder)


def open_source(name: str | Path) -> Source:
    """Find weights.

    Args:
        name: the folder of a run (its newest whole checkpoint counts), of a checkpoint, or of a Hugging Face model; the
            id of one on the hub; or a checkpoint file of Composer, as AnswerDotAI's training code writes them.

    Raises:
        DataError: there is no such model, or its files are damaged or describe another architecture.
        StorageError: the run has no checkpoint, or the checkpoint is damaged.
    """
    check_named(name)
    folder = Path(name)
    if (folder / MANIFEST).is_file():
        return source_of(verify(folder))
    if (folder / CONFIG_YAML).is_file():
        found, passed_over = newest_valid(folder / "checkpoints")
        for text in passed_over:
            print(f"warning: passed over a damaged checkpoint: {text}")
        if found is None:
            raise StorageError(f"{folder}: a run without a checkpoint. Train it first, or name another.")
        return source_of(found)
    if folder.is_file():
        return _from_composer(open_composer(folder))
    folder = local_model(str(name))
    require_own_files(folder)
    raw = modernbert.read_object(folder / modernbert.CONFIG_JSON)
    model, theta = modernbert.architecture(raw, str(folder / modernbert.CONFIG_JSON))
    return Source(folder, None, model, theta, modernbert.max_tokens_of(raw), *_tokenizer_in(folder))


def _from_composer(file: ComposerFile) -> Source:
    text = file.tokenizer_files.get(TOKENIZER)
    tokenizer = (None, hashlib.sha256(text.encode()).hexdigest()) if text else _tokenizer_in(file.path.parent)
    return Source(file.path, None, file.model, file.global_rope_theta, file.max_tokens, *tokenizer)


def _tokenizer_in(folder: Path) -> tuple[Path | None, str | None]:
    return (folder, read_vocabulary(folder).sha256) if (folder / TOKENIZER).is_file() else (None, None)


def last_phase(found: Checkpoint) -> PhaseConfig:
    """The phase of the last step before a checkpoint. Its tokens do not tell: the last batch passes the phase's end."""
    return found.config.phases[found.state.phase]


def source_of(found: Checkpoint) -> Source:
    """A checkpoint as a source of weights."""
    config, phase = found.config, last_phase(found)
    model = replace(config.model, local_rope_theta=phase.local_theta(config.model))
    tokenizer = Path(config.data.tokenizer)
    sha256 = found.state.data["tokenizer"]
    return Source(found.folder, found, model, phase.global_rope_theta, phase.row_tokens, tokenizer, sha256)


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
        if self.source.tokenizer_sha256 is None:
            text += "; no tokenizer comes with it, so nobody could tell whether it is yours"
        phase = next(iter(self.config.phases.values()))
        bases = {
            "global": (self.source.global_rope_theta, phase.global_rope_theta),
            "local": (old.local_rope_theta, phase.local_theta(model)),
        }
        return text + "".join(
            f"; {kind} RoPE base {there:,.0f} there, {here:,.0f} here"
            for kind, (there, here) in bases.items()
            if there != here
        )

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Put the weights into a model, sharded or not, one tensor after the other; every rank reads its own share.

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
                target = targets.pop(name)
                target.copy_(like(tensor, target))
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
    check_named(name, config.runs_folder)
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
        with source.tokenizer_folder() as folder:
            here, there = token_ids(config.data.tokenizer), token_ids(folder)
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
