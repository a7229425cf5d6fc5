"""What `train` would refuse within its first seconds, found without torch; `check` and the launcher ask the same.

One list, so that `check` cannot say good where `train` refuses. Nothing is written, no lock is taken, and large files
are not read: whether a checkpoint is whole, or weights fit, is told when they are loaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

from modernbert_train.config.check import check
from modernbert_train.config.load import load_run
from modernbert_train.config.packages import missing_packages
from modernbert_train.config.schema import RunConfig
from modernbert_train.copies.store import problem_of
from modernbert_train.data.check import check_data
from modernbert_train.data.labelled import describe_labelled
from modernbert_train.errors import ConfigError, DataError, RunError, StorageError
from modernbert_train.run.manifest import CONFIG_YAML, STATE, read_manifest
from modernbert_train.run.run_folder import RunFolder
from modernbert_train.run.saved_state import read_state
from modernbert_train.run.trained_phases import refuse_average, refuse_changes
from modernbert_train.weights.named_source import check_named, check_vocabulary, tokenizer_named

Look = Callable[[], object]


def preflight(config: RunConfig, num_ranks: int = 1, *, fresh: bool = False, folder: bool = True) -> None:
    """Look for everything that would end this run before it begins.

    Args:
        config: the run.
        num_ranks: processes that would train.
        fresh: what the run's folder holds would be put aside.
        folder: also look at the run's folder, its first weights and labelled texts, which only the first machine need
            see.

    Raises:
        RunError: a line, or a few, for each mistake; of several the exit code is that of the configuration before that
            of the data before that of the disk.
    """
    mistakes = [*_mistakes(_of_itself(config, num_ranks))]
    if folder and not any(isinstance(mistake, ConfigError) for mistake in mistakes):
        mistakes += _mistakes(_of_its_folder(config, fresh))
    if len(mistakes) == 1:
        raise mistakes[0]
    for kind in (ConfigError, DataError, StorageError, RunError):
        if any(isinstance(mistake, kind) for mistake in mistakes):
            raise kind("\n".join(map(str, mistakes)))


def _mistakes(looks: Iterator[Look]) -> Iterator[RunError]:
    for look in looks:
        try:
            look()
        except RunError as mistake:
            yield mistake


def _of_itself(config: RunConfig, num_ranks: int) -> Iterator[Look]:
    yield lambda: check(config, num_ranks)
    yield lambda: check_data(config)
    yield lambda: _check_second_home(config)
    if importlib.util.find_spec("torch") is not None:  # else this is not the environment that trains
        yield lambda: _refuse(missing_packages(config))


def _check_second_home(config: RunConfig) -> None:
    if config.checkpoint.copy_to is not None and (problem := problem_of(config.checkpoint.copy_to)) is not None:
        raise ConfigError(problem)


def _of_its_folder(config: RunConfig, fresh: bool) -> Iterator[Look]:
    if config.evals:  # which rank 0 reads for all
        yield lambda: describe_labelled(config)
    run = RunFolder(config)
    if fresh or not run.has_checkpoints():
        start = () if config.start is None else (config.start.checkpoint,)
        for name in (config.weights.init_from, config.weights.grow_from, *start):
            if name is not None:
                yield lambda name=name: check_named(name, config.runs_folder)  # type: ignore[misc]
        yield lambda: _check_vocabulary(config)
    yield run.check_writable
    if not fresh:
        yield run.compare
        yield lambda: _check_trained(run)


def _check_vocabulary(config: RunConfig) -> None:
    """Compare the tokenizers, where that of the weights is at hand and nothing is wrong with the weights' name."""
    name = config.weights.init_from
    try:
        if name is not None:
            check_named(name, config.runs_folder)
    except RunError:
        return
    if name is not None and (tokenizer := tokenizer_named(name)) is not None:
        check_vocabulary(config, tokenizer)


def _check_trained(run: RunFolder) -> None:
    """Compare the plan with what the newest checkpoint was trained by.

    One that is damaged says nothing here: training will look for the newest that is whole, and say so.
    """
    names = [path for path in run.checkpoints.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    if not names:
        return
    newest = max(names, key=lambda path: int(path.name.removeprefix("step-")))
    try:
        manifest = read_manifest(newest)
        whole = all((newest / name).stat().st_size == file.bytes for name, file in manifest.files.items())
        then = load_run([newest / CONFIG_YAML])
        state = read_state(newest / STATE, then, manifest.step)
    except (OSError, ValueError, RunError):
        return
    if not whole:
        return
    if state.training is None:
        refuse_average(run.path)
    refuse_changes(newest, then, run.config, state.phase, state.tokens)


def _refuse(messages: Iterator[str]) -> None:
    if found := list(messages):
        raise ConfigError("\n".join(found))
