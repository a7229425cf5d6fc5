"""Find the run or checkpoint that a command line names, and its replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from modernbert_train.checkpoints.copier import manifest_of
from modernbert_train.checkpoints.manifest import CONFIG_YAML, NAME, step_folders, step_of
from modernbert_train.checkpoints.replica import store_of
from modernbert_train.checkpoints.store import Store
from modernbert_train.config.load import load_run
from modernbert_train.config.read_yaml import runs_beside
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.files import errors_to
from modernbert_train.errors import ConfigError, RunError, StorageError


@dataclass(frozen=True)
class Selection:
    """The run or checkpoint named on a command line.

    Attributes:
        run: folder of the run; None for a checkpoint outside of a run.
        checkpoints: folder of its checkpoints, which may be missing.
        step: of the named checkpoint; None if a run was named.
    """

    run: Path | None
    checkpoints: Path
    step: int | None = None

    @property
    def name(self) -> str:
        """The folder's name, for messages."""
        return str(self.checkpoints if self.run is None else self.run)

    def config(self) -> RunConfig:
        """Read the configuration of the run's last start.

        Raises:
            ConfigError: it is missing, or another version's.
        """
        if self.run is None:
            raise ConfigError(f"{self.checkpoints}: not in the folder of a run. Name a run, such as runs/quickstart.")
        return load_run([self.run / CONFIG_YAML])

    def folder(self, step: int) -> Path:
        """Return the folder of a step's checkpoint.

        Raises:
            StorageError: it is missing; names the existing steps.
        """
        for folder in step_folders(self.checkpoints):
            if step_of(folder) == step:
                return folder
        raise self.unknown(step)

    def unknown(self, step: int) -> StorageError:
        """Return the error for a step without a checkpoint."""
        steps = [f"{step_of(folder):,}" for folder in step_folders(self.checkpoints)]
        instead = f"There are steps {', '.join(steps)}." if steps else "There is none."
        return StorageError(f"{self.checkpoints}: no checkpoint of step {step:,}. {instead}")


def find_selection(word: Path) -> Selection:
    """Find the run or checkpoint at a path.

    Raises:
        ConfigError: neither.
    """
    if NAME.fullmatch(word.name) and word.is_dir():
        parent = word.absolute().parent
        is_in_run = parent.name == "checkpoints" and (parent.parent / CONFIG_YAML).is_file()
        return Selection(word.parent.parent if is_in_run else None, word.parent, step_of(word))
    if not word.is_dir():
        raise ConfigError(f"{word}: no such run, nor one of its checkpoints. {runs_beside(word)}")
    if not (word / CONFIG_YAML).is_file() and not (word / "checkpoints").is_dir():
        raise ConfigError(f"{word}: no run there. Name a run, such as runs/quickstart, or one of its checkpoints.")
    return Selection(word, word / "checkpoints")


def step_from(text: str) -> int:
    """Parse a step: 500, step-00000500, or the folder of that checkpoint.

    Raises:
        ValueError: it is none of these.
    """
    name = text.rstrip("/").rpartition("/")[2].removeprefix("step-").replace(",", "").replace("_", "")
    if not name.isascii() or not name.isdecimal() or len(name) > 18:
        raise ValueError(text)
    return int(name)


def replica_of(config: RunConfig) -> tuple[Store | None, dict[int, str], str | None]:
    """Open the store that a run copies its checkpoints to.

    Returns:
        The store, or None without checkpoint.copy_to or an answer; the names of its checkpoints, by step; and the error
        if it does not answer.
    """
    try:
        store = store_of(config.checkpoint, config.name)
        return store, {} if store is None else store.steps(), None
    except RunError as error:
        return None, {}, f"the replica {config.checkpoint.copy_to} cannot be read: {error}"


def verify_copies(store: Store, only: int | None, say: Callable[[str], None]) -> list[str]:
    """Read the checkpoints of a replica and compare them with their manifests.

    Args:
        store: the run's folder in it.
        only: verify this step only.
        say: prints a line for each whole checkpoint.

    Returns:
        A line for each damaged checkpoint.

    Raises:
        RunError: the store cannot be read.
    """
    wrong: list[str] = []
    for step, name in sorted(store.steps().items()):
        if only not in (None, step):
            continue
        with errors_to(wrong.append, StorageError):
            manifest = manifest_of(store, name)
            for each, expected in manifest.files.items():
                if (digest := store.digest(f"{name}/{each}")) != expected:
                    raise StorageError(f"{store.url}/{name}/{each}: {digest}, the manifest says {expected}")
            say(f"{store.url}/{name}: valid")
    return wrong
