"""First weights from another model: a run, a checkpoint, a Hugging Face model or a file of Composer; copied, grown or
shrunk.

The model is opened and compared with the run before anything is built. Its weights are copied into the run's model
before sharding, so the result does not depend on ranks or strategies.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from modernbert_train.checkpoints.checkpoint import Checkpoint, newest_checkpoint, open_named
from modernbert_train.config.contrastive import TOKEN_PROJECTION
from modernbert_train.config.knob import architecture_keys
from modernbert_train.config.objective import Order
from modernbert_train.config.schema import (
    ComputeConfig,
    LabelledConfig,
    MaskedLmConfig,
    ModelConfig,
    ObjectiveConfig,
    RunConfig,
)
from modernbert_train.core.files import warn
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.models.build import ENCODERS, shapes_of
from modernbert_train.models.classifier import CLASSIFIER, POOLER
from modernbert_train.models.init import initialize, module_of
from modernbert_train.models.replaced import DELTA, GENERATOR, discriminator_of
from modernbert_train.models.sharding import like
from modernbert_train.models.shrinking import SHRINKING, check_shrinking, drops_types, kept_layers, shrink_each
from modernbert_train.models.tiling import GROWING, check_growth, grow_each
from modernbert_train.vocabulary import TOKENIZER, Vocabulary, read_vocabulary, token_ids, tokenizer_sha256
from modernbert_train.weights.composer_file import open_composer
from modernbert_train.weights.formats import read_folder
from modernbert_train.weights.formats.config_json import PAIR_HEAD
from modernbert_train.weights.formats.tensors import DECODER, EMBEDDING, MASKED_LM, Shapes
from modernbert_train.weights.hf_folder import load_weights
from modernbert_train.weights.names import (
    DROPOUTS,
    another_tokenizer,
    check_same_architecture,
    check_vocabulary,
    described_by,
    fetched,
    growable,
    look_up,
    other_architecture,
    token_difference,
    tokenizer_copy,
    tokenizer_of,
)
from modernbert_train.weights.token_rows import TokenRows, token_rows

_OTHER_TOKENIZERS = ("vocab.txt", "vocab.json", "spiece.model", "spm.model", "sentencepiece.bpe.model")
_SPARE_ROWS = 1024  # rows beyond the tokenizer's entries; published models round the number of rows up
_BY_TOKEN = (EMBEDDING, DECODER, "decoder.bias")  # a row for each token, in every architecture

_T = TypeVar("_T")


@dataclass(frozen=True)
class Source:
    """Weights on disk and their description, in plain values, because rank 0 sends them to the other ranks.

    Attributes:
        folder: a checkpoint or a Hugging Face model; of Composer, the file.
        checkpoint: the checkpoint, if it is one.
        model: the architecture, with the RoPE bases that the weights were last trained with.
        order: which tokens each token saw in training.
        max_tokens: longest sequence of their training.
        tokenizer: folder of the tokenizer; None if it is in Composer's file or missing.
        tokenizer_sha256: its hash; None for a model that comes without one.
        objective: for a labelled model or an encoder without a head; None: any other.
    """

    folder: Path
    checkpoint: Checkpoint | None
    model: ModelConfig
    order: Order
    max_tokens: int
    tokenizer: Path | None
    tokenizer_sha256: str | None
    objective: ObjectiveConfig | None = None

    def weights(self) -> dict[str, Tensor]:
        """Read every parameter, whole, in fp32, with any further heads, without a generator.

        The tensors are mapped from the file, so only the one being copied needs memory.

        Raises:
            DataError: the file of a Hugging Face model or of Composer is damaged, or does not fit its configuration.
        """
        if self.checkpoint is not None:
            return plain_weights(self.checkpoint)
        return open_composer(self.folder).weights() if self.folder.is_file() else load_weights(self.folder, self.model)

    @cached_property
    def shapes(self) -> Shapes:
        """Shapes of the weights; computing them reads each weight once.

        Raises:
            DataError: see `weights`; or a weight is not finite.
        """
        shapes = {}
        for name, tensor in self.weights().items():
            require_finite(self.folder, name, tensor)
            shapes[name] = tuple(tensor.shape)
        return shapes

    @property
    def modules(self) -> set[str]:
        """Modules of the weights: `model`, and the name of each head."""
        return {module_of(name) for name in self.shapes}

    @property
    def missing(self) -> list[str]:
        """Missing modules that predicting tokens needs."""
        needed = {module_of(name) for name in shapes_of(self.model, MaskedLmConfig())}
        return sorted((needed & {*MASKED_LM}) - self.modules)

    def require_predictions(self, key: str, remedy: str) -> None:
        """Raise ConfigError unless the model predicts tokens; `key` names its key."""
        if self.missing:
            raise ConfigError(f"{key}: has no {', '.join(self.missing)}, so it predicts no tokens. {remedy}")

    @contextmanager
    def tokenizer_folder(self) -> Iterator[Path]:
        """Yield the folder of the tokenizer, which exists while the block runs.

        Raises:
            DataError: the weights come without a tokenizer, or it is gone.
        """
        if self.tokenizer is not None:
            yield self.tokenizer
        elif self.checkpoint is not None:
            raise DataError(
                f"{self.folder}: the tokenizer of its training, of sha256 {str(self.tokenizer_sha256)[:12]}, is "
                f"neither in {self.checkpoint.config.data.tokenizer} nor in {tokenizer_copy(self.folder)}. Put it "
                "there; or copy the whole folder of the run, which has it."
            )
        elif self.tokenizer_sha256 is None:
            parent = self.folder.parent if self.folder.is_file() else self.folder
            others = [each for each in _OTHER_TOKENIZERS if (parent / each).exists()]
            remedy = ". Put the tokenizer of the weights there."
            if others:
                remedy = (
                    f", only {', '.join(others)}; write it with transformers: "
                    "AutoTokenizer.from_pretrained(old).save_pretrained(new)."
                )
            raise DataError(f"{parent / TOKENIZER}: no such file{remedy}")
        else:
            with tempfile.TemporaryDirectory() as folder:
                for name, text in open_composer(self.folder).tokenizer_files.items():
                    (Path(folder) / name).write_text(text, encoding="utf-8")
                yield Path(folder)

    def vocabulary(self) -> Vocabulary:
        """Read the ids of the tokenizer and the roles of its special tokens.

        Raises:
            DataError: see `tokenizer_folder`; or a role lacks a token.
        """
        with self.tokenizer_folder() as folder:
            return read_vocabulary(folder)


def require_finite(folder: Path, name: str, tensor: Tensor) -> None:
    """Raise DataError if a weight of a folder has NaN or an infinity."""
    if not tensor.isfinite().all():
        raise DataError(
            f"{folder}: {name} holds numbers that are not finite, so every output would be NaN. Restore it from a "
            "copy, or name another model."
        )


@dataclass(frozen=True)
class Untrained(Source):
    """The encoder of a source with new weights, as a run from scratch with this seed initializes them."""

    seed: int = 0

    def weights(self) -> dict[str, Tensor]:
        encoder = nn.ModuleDict({"model": ENCODERS[type(self.model)](self.model, ComputeConfig())})
        initialize(encoder, self.model, self.seed)
        return dict(encoder.named_parameters())


def open_model(name: str | Path, *, runs_folder: str = RunConfig.runs_folder, untrained: int | None = None) -> Source:
    """Open a model for any use.

    Its tensors are read once, to find damage before anything is built, and again on access.

    Args:
        name: the folder of a run (its newest whole checkpoint is used), of a checkpoint, of a Hugging Face model with
            or without a head, of an export or of a model of sentence-transformers; the id of one on the hub; or a
            checkpoint file of Composer, as AnswerDotAI's training code writes it.
        runs_folder: see `look_up`.
        untrained: seed of new weights: the same architecture and tokenizer without any training.

    Raises:
        DataError: there is no such model, its files are damaged or describe another architecture, a weight is not
            finite, or its tokenizer has more entries than its table has rows.
        StorageError: a run without a checkpoint, or a damaged checkpoint.
    """
    looked_up = look_up(name, runs_folder)
    if looked_up.kind == "checkpoint":
        source = source_of(open_named(looked_up.path))
    elif looked_up.kind == "run":
        source = source_of(newest_checkpoint(looked_up.path))
    elif looked_up.kind == "file":
        file = open_composer(looked_up.path)
        text = file.tokenizer_files.get(TOKENIZER)
        tokenizer = (None, hashlib.sha256(text.encode()).hexdigest()) if text else _tokenizer_in(file.path.parent)
        source = Source(file.path, None, file.model, "all", file.max_tokens, *tokenizer)
    else:
        folder = fetched(looked_up) if looked_up.kind == "hub" else looked_up.path
        facts = read_folder(folder)
        about = (facts.model, facts.order, facts.max_tokens)
        source = Source(folder, None, *about, *_tokenizer_in(folder), facts.objective)
    if source.checkpoint is None and source.tokenizer_sha256 is not None:
        _check_table(source)
    if untrained is None:
        _ = source.shapes  # reads every weight
        return source
    kept = {each.name: getattr(source, each.name) for each in fields(source)}
    return Untrained(**kept | {"objective": None}, seed=untrained)


def _check_table(source: Source) -> None:
    """Compare the rows of the table with the tokenizer's entries: warn of many spare rows, refuse too few."""
    with source.tokenizer_folder() as folder:
        entries = max(token_ids(folder).values(), default=-1) + 1
    rows = source.model.vocab_size
    text = f"{source.folder}: its table has {rows:,} rows, and its tokenizer {entries:,} entries"
    if entries > rows:
        raise DataError(f"{text}. Replace it by the tokenizer that the model was trained with.")
    if rows - entries > _SPARE_ROWS:
        warn(f"{text}; {rows - entries:,} rows are never read. Is it the tokenizer that the model was trained with?")


def _tokenizer_in(folder: Path) -> tuple[Path | None, str | None]:
    return (folder, tokenizer_sha256(folder)) if (folder / TOKENIZER).is_file() else (None, None)


def source_of(checkpoint: Checkpoint) -> Source:
    """Return a checkpoint as a source of weights."""
    described, sha256 = described_by(checkpoint.config, checkpoint.state), checkpoint.state.data["tokenizer"]
    tokenizer = tokenizer_of(
        checkpoint.folder, checkpoint.config.in_phase[checkpoint.state.phase].data.tokenizer, sha256
    )
    about = (described.model, described.order, described.max_tokens)
    return Source(checkpoint.folder, checkpoint, *about, tokenizer, sha256, described.objective)


def plain_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return a checkpoint's weights without its training-only parts: generator, differences, adapters (merged)."""
    weights, objective = discriminator_of(checkpoint.weights()), phase_objective(checkpoint)
    lora = cast(LabelledConfig, objective).lora if objective.is_labelled else None
    if lora is None:
        return weights
    from modernbert_train.models.lora import merge_adapters  # only runs with adapters need it

    return merge_adapters(weights, lora)


def phase_objective(checkpoint: Checkpoint) -> ObjectiveConfig:
    """Return the objective of the phase that wrote a checkpoint."""
    return checkpoint.config.in_phase[checkpoint.state.phase].objective


@dataclass(frozen=True)
class Origin:
    """The first weights of a run that starts from another model.

    Attributes:
        source: the weights.
        config: the run that starts.
        drawn: modules of the run, besides the encoder, that are missing there and are initialized at random.
        left_out: modules there that the run lacks. A module in both is initialized again, because its classes differ.
        rows: with another vocabulary, how to compute the rows by token from old rows; None: they are copied.
    """

    source: Source
    config: RunConfig
    drawn: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    rows: TokenRows | None = None

    def describe(self) -> str:
        """Return one line for the banner. Training records it and `push` compares it, so its words stay as they are."""
        model, weights, old = self.config.model, self.config.weights, self.source.model
        text = f"weights.{next(iter(weights.named), 'init_from')}={self.source.folder}"
        if weights.grow_from is not None:
            text += f" ({weights.grow_mode}): " + ", ".join(
                f"{key} {getattr(old, key):,} -> {getattr(model, key):,}" for key in GROWING
            )
        if weights.shrink_from is not None:
            text += f": layers {', '.join(map(str, kept_layers(old, model)))} of {old.num_layers}"
            text += _fewer(old, model)
            text += ", its first token type added to the positions" if drops_types(old, model) else ""
        if self.rows is not None:
            text += f"; weights.vocabulary={weights.vocabulary}: {self.rows}"
        elif self.source.tokenizer_sha256 is None:
            text += "; no tokenizer comes with it, so the two tokenizers could not be compared"
        first = next(iter(self.config.in_phase.values()))
        if (self.source.order == "causal") is not (first.objective.order == "causal"):
            is_decoder = self.source.order == "causal"
            origin = "a decoder, trained in causal order" if is_decoder else "an encoder, trained to see both sides"
            text += f"; {origin}, and objective.name={first.objective.name} here"
        again = {*self.drawn} & {*self.left_out}
        text += "".join(f"; {head} there has other classes and is drawn again" for head in sorted(again))
        text += "".join(f"; no {head} there, drawn at random" for head in self.drawn if head not in again)
        text += "".join(f"; {head} there is left out" for head in self.left_out if head not in again)
        return text + "".join(_other_bases(old, first.model)) + _dropout(old, first.model)

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Copy the weights into a model, sharded or not, one tensor at a time; every rank reads only its share.

        Raises:
            DataError: see `Source.weights`.
        """
        config, weights = self.config, self.config.weights
        from_source = _as_here(self.source.weights(), {module_of(name) for name, _ in model.named_parameters()})
        stored = {name: tensor for name, tensor in from_source.items() if module_of(name) not in self.left_out}
        tensors: Iterable[tuple[str, Tensor]] = stored.items()
        if weights.grow_from is not None:
            models = growable(self.source.model, config.model, "weights.grow_from")
            tensors = grow_each(stored, *models, weights.grow_mode)
        elif weights.shrink_from is not None:
            tensors = shrink_each(stored, self.source.model, _with_rows_of(self.source, config.model))
        initialize(model, config.model, config.seed, only=self.drawn)
        targets = {name: each for name, each in model.named_parameters() if module_of(name) not in self.drawn}
        generator = {name: each for name, each in model.named_parameters() if module_of(name) == GENERATOR}
        for name in [name for name in targets if name.endswith(DELTA)]:
            # the model's table is the generator's plus a difference: copy the first, set the other to zero
            targets.pop(name).zero_()
            table = name.removesuffix(DELTA) + ".weight"
            targets[table] = generator[f"{GENERATOR}.{table}"]
        for name, tensor in tensors:
            if name != DECODER or name in targets:  # a tied decoder is filled with the embedding
                target = targets.pop(name)
                if self.rows is not None and name in _BY_TOKEN:
                    tensor = self.rows.of(tensor)
                target.copy_(like(tensor, target))
        assert not targets, f"left without weights: {sorted(targets)}"


def _with_rows_of(source: Source, model: ModelConfig) -> ModelConfig:
    return replace(model, vocab_size=source.model.vocab_size)


def _fewer(old: ModelConfig, new: ModelConfig) -> str:
    sizes = ((key.removeprefix("num_"), getattr(new, key), getattr(old, key)) for key in SHRINKING[1:])
    return "".join(f", {key} {few:,} of {many:,}" for key, few, many in sizes if few < many)


def _other_bases(old: ModelConfig, first: ModelConfig) -> Iterator[str]:
    for name, old_value in old.phased_details.items():
        new_value = first.phased_details.get(name, old_value)
        if old_value != new_value:
            yield f"; {name} {old_value} there, {new_value} here"


def _dropout(old: ModelConfig, first: ModelConfig) -> str:
    """Describe dropout there and here; it changes training, not the output of given weights."""
    for key in DROPOUTS:
        if key in {field.name for field in fields(first)} & {field.name for field in fields(old)}:
            old_rate, new_rate = getattr(old, key), getattr(first, key)
            return (
                f"; {key} {old_rate:g} there, {new_rate:g} here"
                if old_rate != new_rate
                else f"; {key} {new_rate:g}, as there"
            )
    return ""


def find_origin(config: RunConfig) -> Origin | None:
    """Open the model that weights.init_from, grow_from or shrink_from names, and compare it with the run.

    Returns:
        None if no key is set.

    Raises:
        ConfigError: the architecture or the tokenizer differs from the run's; names both values.
        DataError, StorageError: see `open_model` and `Source.weights`.
    """
    weights = config.weights
    if not weights.named:
        return None
    key, name = next(iter(weights.named.items()))
    source, model = open_model(name, runs_folder=config.runs_folder), config.model
    if weights.vocabulary != "same":
        model = _with_rows_of(source, model)
    source = read_as(source, model)
    if key == "grow_from":
        check_growth(*growable(source.model, model, f"weights.grow_from={name}"), weights.grow_mode)
    elif key == "shrink_from":
        check_shrinking(source.model, model, f"weights.shrink_from={name}")
    else:
        check_same_architecture(source, model, f"weights.init_from={source.folder}")
    rows = None
    if weights.vocabulary == "same":
        check_same_tokenizer(source, config.data.tokenizer, f"weights.{key}={name}")
    else:
        rows = _rows(source, config)
    shapes = shapes_of(config.model, config.objective)
    new_modules = {module_of(each) for each in shapes}
    shapes_there = _as_here(source.shapes, new_modules)
    old_modules = {module_of(each) for each in shapes_there}
    if (matrix := f"{TOKEN_PROJECTION}.weight") in shapes_there.keys() & shapes.keys():
        _check_token_vectors(shapes_there[matrix][0], shapes[matrix][0], f"weights.{key}={name}")
    if key == "grow_from":
        source.require_predictions(
            f"weights.{key}={name}", "Train one that does from it first, with weights.init_from."
        )
    if key != "init_from":
        kept = old_modules & new_modules & {*MASKED_LM}  # other heads are neither grown nor shrunk
        drawn, left_out = tuple(sorted(new_modules - kept)), tuple(sorted(old_modules - kept))
        return Origin(source, config, drawn=drawn, left_out=left_out, rows=rows)
    same = source.objective is not None and source.objective.label_scheme == config.objective.label_scheme
    other = set() if same else new_modules & old_modules & {CLASSIFIER}
    return Origin(
        source,
        config,
        drawn=tuple(sorted(new_modules - old_modules | other)),
        left_out=tuple(sorted(old_modules - new_modules | other)),
        rows=rows,
    )


def _as_here(weights: Mapping[str, _T], here: Collection[str]) -> dict[str, _T]:
    """Return weights, or their shapes, by the names of a run with these modules.

    In BERT and ALBERT, the dense layer before the two classes of a pair and the one before the classes of a text are
    one module.
    """
    if POOLER not in here:
        return {**weights}
    begin = f"{PAIR_HEAD}.dense."
    renamed = {name: f"{POOLER}.dense.{name.removeprefix(begin)}" for name in weights if name.startswith(begin)}
    return {renamed.get(name, name): tensor for name, tensor in weights.items()}


def _check_token_vectors(source_width: int, run_width: int, key: str) -> None:
    if source_width != run_width:
        raise ConfigError(
            f"objective.token_vectors={run_width}: {key} has vectors of {source_width} numbers. Set "
            f"objective.token_vectors={source_width}, with objective.matryoshka for shorter ones as well."
        )


def _rows(source: Source, config: RunConfig) -> TokenRows:
    """Return how the run's rows by token are computed from the old table.

    Raises:
        ConfigError: see `check_vocabulary`.
        DataError: see `Source.tokenizer_folder`.
    """
    with source.tokenizer_folder() as folder:
        check_vocabulary(config.weights, folder, config.data.tokenizer)
        return token_rows(folder, Path(config.data.tokenizer), source.model.vocab_size, config.model.vocab_size)


def read_as(source: Source, model: ModelConfig) -> Source:
    """Reread a Hugging Face model as an architecture with the same files, where equal stored tensors may be shared."""
    if source.checkpoint is not None or other_architecture(model.stored, source.model.stored):
        return source
    keys = {key: getattr(model, key) for key in architecture_keys(model)}
    return replace(source, model=replace(source.model, **keys))


def check_same_tokenizer(source: Source, tokenizer: str, key: str) -> None:
    """Compare the tokenizer of weights with data.tokenizer; `key` names their key.

    Raises:
        ConfigError: an id has another token.
    """
    ours = read_vocabulary(tokenizer).sha256
    if source.tokenizer_sha256 in (None, ours):
        return
    difference = f"its sha256 is {str(source.tokenizer_sha256)[:12]}, ours {ours[:12]}"
    if source.checkpoint is None:  # files of the same tokenizer may differ, so compare the ids
        with source.tokenizer_folder() as folder:
            run_ids, source_ids = token_ids(tokenizer), token_ids(folder)
        token = token_difference(source_ids, run_ids, run_ids.keys() | source_ids.keys())
        if token is None:
            return
        difference = token
    raise ConfigError(another_tokenizer(key, tokenizer, difference))
