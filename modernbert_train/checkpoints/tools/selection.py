"""The run, and the checkpoint of it, that a command line names; and its second home."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from modernbert_train.checkpoints.copier import manifest_of
from modernbert_train.checkpoints.manifest import CONFIG_YAML
from modernbert_train.checkpoints.replica import store_of
from modernbert_train.checkpoints.store import Store
from modernbert_train.checkpoints.verified import NAME, step_folders, step_of
from modernbert_train.config.load import load_run
from modernbert_train.config.read import runs_beside
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.files import errors_to
from modernbert_train.errors import ConfigError, RunError, StorageError


@dataclass(frozen=True)
class Selection:
    """What was named.

    Attributes:
        run: folder of the run; None of a checkpoint that lies outside of a run.
        checkpoints: folder of its checkpoints, which need not be there.
        step: of the checkpoint that was named; None if a run was.
    """

    run: Path | None
    checkpoints: Path
    step: int | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return str(self.checkpoints if self.run is None else self.run)

    def config(self) -> RunConfig:
        """Of the run, as it was last started.

        Raises:
            ConfigError: there is none, or it is another version's.
        """
        if self.run is None:
            raise ConfigError(f"{self.checkpoints}: not in the folder of a run. Name a run, such as runs/quickstart.")
        return load_run([self.run / CONFIG_YAML])

    def folder(self, step: int) -> Path:
        """Of the checkpoint of a step.

        Raises:
            StorageError: there is none; names those that are there.
        """
        for folder in step_folders(self.checkpoints):
            if step_of(folder) == step:
                return folder
        raise self.unknown(step)

    def unknown(self, step: int) -> StorageError:
        """What to say of a step of which there is no checkpoint."""
        there = [f"{step_of(folder):,}" for folder in step_folders(self.checkpoints)]
        instead = f"There are steps {', '.join(there)}." if there else "There is none."
        return StorageError(f"{self.checkpoints}: no checkpoint of step {step:,}. {instead}")


def find_selection(word: Path) -> Selection:
    """Find what a word names: the folder of a run, or of one of its checkpoints.

    Raises:
        ConfigError: neither.
    """
    if NAME.fullmatch(word.name) and word.is_dir():
        beside = word.absolute().parent
        is_in_run = beside.name == "checkpoints" and (beside.parent / CONFIG_YAML).is_file()
        return Selection(word.parent.parent if is_in_run else None, word.parent, step_of(word))
    if not word.is_dir():
        raise ConfigError(f"{word}: no such run, nor one of its checkpoints. {runs_beside(word)}")
    if not (word / CONFIG_YAML).is_file() and not (word / "checkpoints").is_dir():
        raise ConfigError(f"{word}: no run there. Name a run, such as runs/quickstart, or one of its checkpoints.")
    return Selection(word, word / "checkpoints")


def step_from(text: str) -> int:
    """The step that a word says: 500, step-00000500, or the folder of that checkpoint.

    Raises:
        ValueError: it says none.
    """
    name = text.rstrip("/").rpartition("/")[2].removeprefix("step-").replace(",", "").replace("_", "")
    if not name.isascii() or not name.isdecimal() or len(name) > 18:
        raise ValueError(text)
    return int(name)


def replica_of(config: RunConfig) -> tuple[Store | None, dict[int, str], str | None]:
    """The store that a run copies its checkpoints to, if it answers.

    Returns:
        The store, None if there is none or it does not answer; the names of the checkpoints in it, by step; and why it
        does not answer.
    """
    try:
        store = store_of(config.checkpoint, config.name)
        return store, {} if store is None else store.steps(), None
    except RunError as error:
        return None, {}, f"the second home {config.checkpoint.copy_to} cannot be asked: {error}"


def verify_copies(store: Store, only: int | None, say: Callable[[str], None]) -> list[str]:
    """Read the checkpoints of a second home and compare them with the manifests there.

    Args:
        store: the run's folder there.
        only: the one step that is wanted.
        say: prints a line for each that is whole.

    Returns:
        What is wrong, a line for each checkpoint that is damaged.

    Raises:
        RunError: the store cannot be asked.
    """
    wrong: list[str] = []
    for step, name in sorted(store.steps().items()):
        if only not in (None, step):
            continue
        with errors_to(wrong.append, StorageError):
            manifest = manifest_of(store, name)
            for each, expected in manifest.files.items():
                if (found := store.digest(f"{name}/{each}")) != expected:
                    raise StorageError(f"{store.url}/{name}/{each}: {found}, the manifest says {expected}")
            say(f"{store.url}/{name}: valid")
    return wrong
