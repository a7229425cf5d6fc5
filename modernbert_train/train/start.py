"""Where a run starts: at its newest whole checkpoint, else with weights from elsewhere (origin.py), else from scratch.

Nothing is guessed and nothing is silent.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from composer import Trainer
from composer.core.time import Timestamp

from modernbert_train.data.loader import PackedLoader
from modernbert_train.errors import DataError
from modernbert_train.train import checkpoint
from modernbert_train.train.adapters import inner_model
from modernbert_train.train.checkpoint import Checkpoint
from modernbert_train.train.origin import Origin
from modernbert_train.train.run_folder import RunFolder
from modernbert_train.train.state import load_optimizer, load_weights


@dataclass(frozen=True)
class Start:
    """Where the run starts.

    Attributes:
        checkpoint: the checkpoint it goes on from; None from scratch.
        passed_over: newer checkpoints that are damaged, and why.
    """

    checkpoint: Checkpoint | None
    passed_over: list[str]

    @property
    def tokens(self) -> int:
        return 0 if self.checkpoint is None else int(self.checkpoint.state()["tokens"])

    @property
    def left_out(self) -> int:
        """See `BatchPlanner.left_out`."""
        return 0 if self.checkpoint is None else int(self.checkpoint.state()["loader"]["left_out"])


def any_checkpoint(folder: RunFolder) -> bool:
    """Whether `find_start` will find a checkpoint, or refuse because all are damaged; only names are looked at."""
    return any("." not in path.name for path in folder.checkpoints.glob("step-*"))


def origin_text(start: Start, origin: Origin | None) -> str:
    """The start in a line, for the banner and the record."""
    if start.checkpoint is not None:
        return f"{start.checkpoint.folder.name} ({start.tokens:,} tokens)"
    return "scratch" if origin is None else origin.describe()


def find_start(folder: RunFolder) -> Start:
    """Find the newest whole checkpoint of a run.

    Raises:
        StorageError: checkpoints exist and none is whole.
    """
    return Start(*checkpoint.newest_valid(folder.checkpoints))


def restore(trainer: Trainer, loader: PackedLoader, start: Start, fingerprint: dict[str, str]) -> None:
    """Put a checkpoint's weights, moments, clock and data position into a trainer that is about to fit.

    Raises:
        ConfigError: the checkpoint is of another model.
        DataError: it was trained on other shards or with another tokenizer.
    """
    assert start.checkpoint is not None
    state = start.checkpoint.state()
    for name, now in fingerprint.items():
        if state["data"][name] != now:
            raise DataError(
                f"{start.checkpoint.folder}: trained on other data: its {name} hash is {state['data'][name][:12]}, now "
                f"it is {now[:12]}. Going on would repeat or skip text. Restore the data or choose another name=."
            )
    model = inner_model(trainer.state.model)
    load_weights(model, start.checkpoint.weights())
    load_optimizer(model, trainer.state.optimizers[0], start.checkpoint.optimizer())
    elapsed = datetime.timedelta(seconds=state["seconds"])
    trainer.state.timestamp = Timestamp(**state["timestamp"], total_wct=elapsed, epoch_wct=elapsed)
    loader.load_state_dict(state["loader"])
