"""Where a run starts: at its own newest whole checkpoint; else at another run's, with what config.start takes from it;
else with weights from elsewhere (origin.py); else from scratch. Nothing is guessed and nothing is silent.

A start from another run is a function of the configuration and of that checkpoint. So if the run dies before its own
first checkpoint, it simply starts the same way again, and after that `start` is never read again.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from composer import Trainer
from composer.core.time import Timestamp

from modernbert_train.config.load import load_run
from modernbert_train.config.schema import RunConfig, StartConfig
from modernbert_train.data.loader import PackedLoader
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.train import checkpoint
from modernbert_train.train.adapters import inner_model
from modernbert_train.train.checkpoint import Checkpoint
from modernbert_train.train.named_source import check_named
from modernbert_train.train.origin import Origin, check_same_architecture, check_same_tokenizer, open_source
from modernbert_train.train.past import check_same_past, refuse_average
from modernbert_train.train.run_folder import RunFolder
from modernbert_train.train.state import load_optimizer, load_weights


@dataclass(frozen=True)
class Start:
    """Where the run starts.

    Attributes:
        checkpoint: the checkpoint it goes on from; None from scratch.
        passed_over: newer checkpoints that are damaged, and why.
        branch: what is taken from the checkpoint of another run; None when it is the run's own.
    """

    checkpoint: Checkpoint | None
    passed_over: list[str]
    branch: StartConfig | None = None

    @property
    def keeps_clock(self) -> bool:
        return self.checkpoint is not None and (self.branch is None or self.branch.clock == "keep")

    @property
    def tokens(self) -> int:
        return int(self.checkpoint.state()["tokens"]) if self.keeps_clock and self.checkpoint is not None else 0

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.keeps_clock and self.checkpoint is not None else 0

    @property
    def phase(self) -> str | None:
        """Phase of the last step; None where the clock begins at 0."""
        return str(self.checkpoint.state()["phase"]) if self.keeps_clock and self.checkpoint is not None else None


def any_checkpoint(folder: RunFolder) -> bool:
    """Whether `find_start` will find a checkpoint, or refuse because all are damaged; only names are looked at."""
    return folder.has_checkpoints()


def origin_text(start: Start, origin: Origin | None) -> str:
    """The start in a line, for the banner and the record."""
    if start.checkpoint is None:
        return "scratch" if origin is None else origin.describe()
    if start.branch is None:
        return f"{start.checkpoint.folder.name} ({start.tokens:,} tokens)"
    taken = ", ".join(f"{key} {getattr(start.branch, key)}" for key in ("clock", "moments", "data"))
    return f"{start.checkpoint.folder} ({int(start.checkpoint.state()['tokens']):,} tokens there): {taken}"


def find_start(folder: RunFolder) -> Start:
    """Find the newest whole checkpoint of a run.

    Raises:
        ConfigError: the run is an average, or what it was trained by so far differs from its configuration now.
        StorageError: checkpoints exist and none is whole.
    """
    start = Start(*checkpoint.newest_valid(folder.checkpoints))
    if start.checkpoint is not None and start.checkpoint.is_average:
        refuse_average(folder.path)
    if start.checkpoint is not None:
        check_same_past(start.checkpoint, folder.config)
    return start


def find_branch(config: RunConfig) -> Start | None:
    """The checkpoint of another run that config.start names, compared with this run; None if it names none.

    Raises:
        ConfigError: it is no checkpoint, or of another architecture, tokenizer or optimizer; names both values.
        DataError: the position in the data is to be kept, and the data are others.
        StorageError: see `open_source`.
    """
    if config.start is None:
        return None
    name = f"start.checkpoint={config.start.checkpoint}"
    check_named(config.start.checkpoint, config.runs_folder)
    source = open_source(config.start.checkpoint)
    if source.checkpoint is None or source.checkpoint.is_average:
        raise ConfigError(
            f"{name}: holds weights alone, so there is nothing to go on from. Name a run or a checkpoint of this "
            "program, or use model.init_from for weights."
        )
    check_same_architecture(source, config.model, name)
    check_same_tokenizer(source, config, name)
    there = load_run([source.checkpoint.folder / checkpoint.CONFIG]).optim.name
    if config.start.moments == "keep" and there != config.optim.name:
        raise ConfigError(
            f"{name}: its moments are of optim.name={there}, this run has {config.optim.name}. Set "
            "start.moments=reset, or the optimizer it had."
        )
    if config.start.clock == "keep" and source.checkpoint.state()["tokens"] >= config.total_tokens:
        raise ConfigError(
            f"{name}: stands at {source.checkpoint.state()['tokens']:,} tokens, this run ends at "
            f"{config.total_tokens:,}. Set start.clock=reset for phases that count from there, or lengthen the phases."
        )
    return Start(source.checkpoint, [], config.start)


def restore(trainer: Trainer, loader: PackedLoader, start: Start, fingerprint: dict[str, str]) -> None:
    """Put a checkpoint's weights, moments, clock and data position into a trainer that is about to fit.

    Raises:
        ConfigError: the checkpoint is of another model.
        DataError: it was trained on other shards or with another tokenizer.
    """
    assert start.checkpoint is not None
    state, branch = start.checkpoint.state(), start.branch
    keeps_data = branch is None or branch.data == "keep"
    if keeps_data:
        _check_same_data(start, state["data"], fingerprint)
    model = inner_model(trainer.state.model)
    load_weights(model, start.checkpoint.weights())
    if branch is None or branch.moments == "keep":
        load_optimizer(model, trainer.state.optimizers[0], start.checkpoint.optimizer())
    if start.keeps_clock:
        elapsed = datetime.timedelta(seconds=state["seconds"])
        trainer.state.timestamp = Timestamp(**state["timestamp"], total_wct=elapsed, epoch_wct=elapsed)
    position = state["loader"] if keeps_data else loader.state_dict()
    loader.load_state_dict(position | {"tokens": start.tokens, "phase": start.phase})


def _check_same_data(start: Start, there: dict[str, str], here: dict[str, str]) -> None:
    assert start.checkpoint is not None
    remedy = "choose another name=." if start.branch is None else "set start.data=restart."
    for name in sorted(here.keys() | there.keys()):
        then, now = there.get(name, "absent"), here.get(name, "absent")
        if then != now:
            raise DataError(
                f"{start.checkpoint.folder}: trained on other data: its hash of {name} is {then[:12]}, "
                f"now it is {now[:12]}. Going on would repeat or skip text. Restore the data or {remedy}"
            )
