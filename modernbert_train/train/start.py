"""Find where a run starts: its newest whole checkpoint, another run's (config.start), pretrained weights, or scratch.

Tried in this order (pretrained weights: source.py). The banner names the one used. A teacher is opened with it, and the
data are compared with the data that the checkpoint was trained on.

A start from another run depends only on the configuration and that checkpoint. So a run that dies before its first
checkpoint starts the same way again. Afterwards the section `start` is not read any more.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from composer import Trainer
from composer.core.time import Timestamp

from modernbert_train.checkpoints import checkpoint, provenance
from modernbert_train.checkpoints.checkpoint import Checkpoint
from modernbert_train.checkpoints.manifest import STATE
from modernbert_train.checkpoints.resume_rules import check_same_past, refuse_average
from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.checkpoints.verified import print_choice
from modernbert_train.config.plugins import versions
from modernbert_train.config.schema import RunConfig, StartConfig
from modernbert_train.core.read_json import number
from modernbert_train.data.dataset_card import TOKEN_COUNTS
from modernbert_train.data.facts import DataFacts
from modernbert_train.data.fingerprint import data_fingerprint, differences, known_since
from modernbert_train.data.loader import PackedLoader
from modernbert_train.distributed.agreement import code_hash
from modernbert_train.distributed.group import num_ranks, ranks_per_node
from modernbert_train.errors import ConfigError, DataError, StorageError
from modernbert_train.models.build import shapes_of
from modernbert_train.models.init import initialize
from modernbert_train.report.effective import LAST_SIGN
from modernbert_train.report.progress import stage
from modernbert_train.train.adapters import inner_model
from modernbert_train.train.step import Loop
from modernbert_train.weights.gather import load_optimizer, load_weights

if TYPE_CHECKING:
    from modernbert_train.weights.source import Origin
    from modernbert_train.weights.teacher import FoundTeacher
    from modernbert_train.weights.token_effect import Effect

FIRST_HASH = "source_weights"  # in the record of a start


@dataclass(frozen=True)
class Start:
    """The position from which a run starts.

    Attributes:
        checkpoint: the checkpoint to continue from; None from scratch.
        passed_over: newer checkpoints that are damaged, and why.
        branch: the parts to take from another run's checkpoint; None for the run's own.
        origin: pretrained weights for a run without a checkpoint; None: drawn from the seed.
        origin_hash: see `weights_hash`.
        effects: effects of a changed vocabulary on the text of each stream.
        effect_lines: the same, as a table.
        teacher: the model that objective.teacher names.
        data: fingerprint of the data, to be saved with the run's checkpoints.
    """

    checkpoint: Checkpoint | None = None
    passed_over: list[str] = field(default_factory=list)
    branch: StartConfig | None = None
    origin: Origin | None = None
    origin_hash: str | None = None
    effects: Mapping[str, Effect] = field(default_factory=dict)
    effect_lines: Sequence[str] = ()
    teacher: FoundTeacher | None = None
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def keeps_clock(self) -> bool:
        return self.checkpoint is not None and (self.branch is None or self.branch.clock == "keep")

    @property
    def tokens(self) -> int:
        return self.checkpoint.state.tokens if self.keeps_clock and self.checkpoint is not None else 0

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.keeps_clock and self.checkpoint is not None else 0

    @property
    def phase(self) -> str | None:
        """Phase of the last step; None if the clock begins at 0."""
        return self.checkpoint.state.phase if self.keeps_clock and self.checkpoint is not None else None

    def __str__(self) -> str:
        """Return one line for the banner and the record."""
        if self.checkpoint is None:
            return "scratch" if self.origin is None else self.origin.describe()
        if self.branch is None:
            return f"{self.checkpoint.folder.name} ({self.tokens:,} tokens)"
        taken = ", ".join(f"{key} {getattr(self.branch, key)}" for key in ("clock", "moments", "data"))
        return f"{self.checkpoint.folder} ({self.checkpoint.state.tokens:,} tokens there): {taken}"


def find_first(config: RunConfig, facts: DataFacts, folder: RunFolder, *, fresh: bool) -> Start | None:
    """Return the start of a run without a checkpoint; None if it has one.

    Raises:
        RunError: see `find_origin` and `find_branch`.
    """
    if folder.has_checkpoints() and not fresh:
        return None
    if config.start is not None:
        return find_branch(config, config.start)
    if not config.weights.named:
        return Start()
    from modernbert_train.weights.names import weights_hash
    from modernbert_train.weights.source import find_origin
    from modernbert_train.weights.token_effect import describe_effects, effects

    origin = find_origin(config)
    assert origin is not None
    token_effects = effects(config.data, facts, origin)
    own = weights_hash(str(origin.source.folder))
    return Start(origin=origin, origin_hash=own, effects=token_effects, effect_lines=describe_effects(token_effects))


def find_start(config: RunConfig, facts: DataFacts, folder: RunFolder, first: Start | None) -> Start:
    """Find where a run starts: at `first`, or else at its newest whole checkpoint; then its teacher.

    Raises:
        ConfigError: the run is an average, or its configuration differs from the one that trained it so far.
        DataError: see `check_same_data`.
        RunError: see `find_teacher`.
        StorageError: checkpoints exist and none is whole.
    """
    start = first or find_newest(folder)
    if start.tokens >= config.total_tokens:  # nothing is left to train
        return start
    teacher = None
    if config.objective.named_teacher is not None:
        from modernbert_train.weights.teacher import find_teacher

        about = (config.objective, config.model, config.phases.values(), config.data.tokenizer, config.runs_folder)
        teacher = find_teacher(*about)
    here = data_fingerprint(facts) | ({} if teacher is None else teacher.fingerprint)
    return replace(start, teacher=teacher, data=check_same_data(start, config, here))


def find_newest(folder: RunFolder) -> Start:
    """Find the newest whole checkpoint of a run; see `find_start`."""
    start = Start(*checkpoint.newest_valid(folder.checkpoints))
    if start.checkpoint is not None and start.checkpoint.is_average:
        refuse_average(folder.path)
    if start.checkpoint is not None:
        check_same_past(start.checkpoint, folder.config.phases)
    return start


def find_branch(config: RunConfig, settings: StartConfig) -> Start:
    """Return the checkpoint of another run that config.start names, after comparing it with this run.

    Raises:
        ConfigError: it is not a checkpoint, or has another architecture, tokenizer or optimizer; names both values.
        StorageError: see `open_model`.
    """
    from modernbert_train.weights.names import check_same_architecture
    from modernbert_train.weights.source import check_same_tokenizer, open_model

    name = f"start.checkpoint={settings.checkpoint}"
    source = open_model(settings.checkpoint, runs_folder=config.runs_folder)
    if source.checkpoint is None or source.checkpoint.is_average:
        raise ConfigError(
            f"{name}: holds weights only, so training cannot continue from it. Name a run or a checkpoint of this "
            "program, or use weights.init_from for weights."
        )
    check_same_architecture(source, config.model, name)
    check_same_tokenizer(source, config.data.tokenizer, name)
    heads = source.checkpoint.config.objective.heads
    if heads != config.objective.heads:
        raise ConfigError(
            f"{name}: has the heads {', '.join(heads)}, and objective.name={config.objective.name} here needs "
            f"{', '.join(config.objective.heads)}. Use weights.init_from, which initialises missing heads, or set the "
            "objective it had."
        )
    shapes_there = shapes_of(config.model, source.checkpoint.config.objective)
    if heads == config.objective.heads and shapes_there != shapes_of(config.model, config.objective):
        raise ConfigError(
            f"{name}: its heads or generator have other shapes. Use weights.init_from, or restore its settings of "
            "objective: sharing, mlm_head and the generator's size."
        )
    optimizer, tokens = source.checkpoint.config.optim.name, source.checkpoint.state.tokens
    if settings.moments == "keep" and optimizer != config.optim.name:
        raise ConfigError(
            f"{name}: its moments are of optim.name={optimizer}, this run has {config.optim.name}. Set "
            "start.moments=reset, or the optimizer it had."
        )
    if settings.clock == "keep" and tokens >= config.total_tokens:
        raise ConfigError(
            f"{name}: is at {tokens:,} tokens, this run ends at {config.total_tokens:,}. Set start.clock=reset for "
            "phases that count from there, or lengthen the phases."
        )
    return Start(source.checkpoint, [], settings)


def check_same_data(start: Start, config: RunConfig, here: Mapping[str, str]) -> dict[str, str]:
    """Compare the data of a start with the data that its checkpoint was trained on.

    Args:
        start: where the run starts.
        config: the run.
        here: fingerprint of the data as they are now.

    Returns:
        The fingerprint to save with the run's checkpoints.

    Raises:
        DataError: the training text or the held-out text differs from before; names the difference.
    """
    if start.checkpoint is None or (start.branch is not None and start.branch.data != "keep"):
        return dict(here)
    recorded, folder = start.checkpoint.state.data, start.checkpoint.folder
    changed = differences(recorded, here)
    for each in changed:
        if each.is_teacher and start.branch is None:
            raise DataError(
                f"{folder}: trained by another teacher than objective.teacher={config.objective.named_teacher} holds "
                f"now: {each}. Name the one it had, or choose another name=."
            )
        if each.is_trained_on and not each.is_teacher:
            remedy = "choose another name=." if start.branch is None else "set start.data=restart."
            raise DataError(
                f"{folder}: trained on other data: {each}. Resuming would repeat or skip text. Restore the data or "
                f"{remedy}"
            )
    if start.branch is not None:  # another run has separate figures
        return dict(here)
    for each in changed:
        if each.is_held_out:
            raise DataError(
                f"{folder}: measured on other held-out text than data.validation={config.data.validation} holds now: "
                f"{each}. Losses before and after would not compare. Restore the folder, or choose another name=; "
                f"`eval {config.folder} data.validation=FOLDER` measures on other text at any time."
            )
        raise DataError(
            f"{folder}: measured against other {each.name}: {each}. The unigram baseline would not compare. Restore "
            f"{TOKEN_COUNTS} in the shards' folder, or choose another name=."
        )
    return known_since(recorded, here)


def restore(trainer: Trainer, loader: PackedLoader, start: Start) -> None:
    """Load a checkpoint's weights, moments, clock and data position into a trainer that is about to fit.

    Raises:
        ConfigError: the checkpoint is of another model.
        StorageError: the data do not have this position.
    """
    assert start.checkpoint is not None and start.checkpoint.state.training is not None
    state, branch = start.checkpoint.state.training, start.branch
    model = inner_model(trainer.state.model)
    load_weights(model, start.checkpoint.stored_weights())
    if branch is None or branch.moments == "keep":
        load_optimizer(model, trainer.state.optimizers[0], start.checkpoint.stored_optimizer())
    if start.keeps_clock:
        elapsed = datetime.timedelta(seconds=state.seconds)
        trainer.state.timestamp = Timestamp(**state.timestamp, total_wct=elapsed, epoch_wct=elapsed)
    position = state.loader if branch is None or branch.data == "keep" else loader.state_dict()
    try:
        loader.load_state_dict({**position, "tokens": start.tokens, "phase": start.phase})
    except ValueError as error:
        raise StorageError(
            f"{start.checkpoint.folder / STATE}: training.loader.{error}. Restore it from a copy, or move "
            "the checkpoint away to resume from the one before."
        ) from None


def fill(loop: Loop, start: Start, config: RunConfig) -> None:
    """Fill in weights, everything a checkpoint restores, and the teacher; a sharded model has allocated its shards."""
    model = inner_model(loop.trainer.state.model)
    if start.checkpoint is not None:
        stage(f"restoring {start.checkpoint.folder.name}")
        restore(loop.trainer, loop.loader, start)
        if start.branch is None:
            assert start.checkpoint.state.training is not None
            loop.guard.memory.update(start.checkpoint.state.training.stability)
    elif start.origin is not None:
        stage(f"reading the first weights from {start.origin.source.folder}")
        start.origin.fill(model)
    else:
        initialize(model, config.model, config.seed)
    if start.teacher is not None:
        stage(f"reading the teacher from {start.teacher.source.folder}")
        start.teacher.teach(model, config.compute, loop.compute.device, bf16=loop.compute.bf16)


def record_start(folder: RunFolder, start: Start, device: torch.device) -> bool:
    """Record the start, and cut the record back to its step.

    Returns:
        True if another process has trained this run before.
    """
    if start.checkpoint is not None:
        print_choice(start.checkpoint, start.passed_over)
    step = start.step
    entry: dict[str, Any] = {"kind": "start", "step": step, "tokens": start.tokens}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    machine = {"device": name, "ranks": num_ranks(), "nodes": -(-num_ranks() // ranks_per_node())}
    own = {"plugins": versions(folder.config.plugins)} if folder.config.plugins else {}
    here = provenance.here() | {"code": code_hash(), **own, **machine}
    last = max((number(each.get("time")) or 0.0 for each in folder.read_metrics()), default=0.0)
    folder.record_start(entry | here | ({LAST_SIGN: last} if last else {}))
    entry["program"] = provenance.program(here)
    if start.checkpoint is None or start.branch is not None:
        folder.rewind_metrics(-1)
        entry |= {"from": str(start)} | ({FIRST_HASH: start.origin_hash} if start.origin_hash is not None else {})
        effects = {name: asdict(each) for name, each in start.effects.items()}
        folder.record(entry | ({"vocabulary": effects} if effects else {}))
        return last > 0
    folder.rewind_metrics(step)
    folder.record(entry | {"kind": "resume", "checkpoint": start.checkpoint.folder.name})
    return last > 0
