"""Convert text, or pairs of texts, to MDS shards: prepare SPEC.yaml [a.b=c ...] [--overwrite] [--part i/n]

The corpus is cut into tasks, which any number of processes and machines may do (see tasks/stages.py). Results are kept
next to the dataset, in <out>.work, until the dataset is complete: after a kill the same command resumes, and the
dataset is equal to the byte. No text is stored in between, and memory does not grow with the corpus.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # run as a script: sys.path begins with this folder, the packages are one above it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data_prep.program import finish
from data_prep.write.workspace import LOCK, Part, claimed
from modernbert_train import import_hook
from modernbert_train.cli.parser import Parser
from modernbert_train.config.load import load_typed
from modernbert_train.config.tools.pairs import PairsConfig
from modernbert_train.config.tools.prepare import DatasetConfig, ExecutorConfig, PrepareConfig, is_of_pairs
from modernbert_train.core.claim import changes, refuse
from modernbert_train.core.files import lock
from modernbert_train.core.version import __version__
from modernbert_train.errors import ConfigError, DataError, RunError

if TYPE_CHECKING:
    from data_prep.report import Fingerprint
    from data_prep.tasks.executors import Stage
    from data_prep.tasks.work import Work

_OTHER = "out=..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (see modernbert_train/errors.py)."""
    parsed = make_parser().parse_args(arguments)
    files = [word for word in parsed.spec if "=" not in word]
    overrides = [word for word in parsed.spec if "=" in word]
    return finish(lambda: run_spec(files, overrides, parsed.overwrite, parsed.part))


def run_spec(files: Sequence[str], overrides: Sequence[str], overwrite: bool, part: Part) -> str:
    """Prepare the dataset of a spec, of text or of pairs; see `prepare`."""
    if folder := next((file for file in files if Path(file).is_dir()), None):
        raise ConfigError(
            f"{folder}: is a folder, and the YAML file of a spec is expected. `init data own_text > data.yaml` prints "
            f"one, in which sources.mine.path={folder}; or `pretrain {folder} --hours 8` does all from text to a model."
        )
    schema = PairsConfig if is_of_pairs(files, overrides) else PrepareConfig
    return prepare(load_typed(schema, files, overrides), overwrite, part)


def make_parser() -> Parser:
    """Return the parser of the command's arguments."""
    parser = Parser(prog="modernbert-train prepare", description="Text or pairs of texts to tokenised shards.")
    parser.add_argument("spec", nargs="+", metavar="SPEC [KEY=VALUE]", help="YAML files and overrides; later ones win")
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset of another spec in `out`")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="machine I of N with a shared disk")
    return parser


def prepare(config: DatasetConfig, overwrite: bool = False, part: Part = (1, 1)) -> str:
    """Make the dataset of a spec, or find that it exists already.

    With more than one worker, a script must call this under `if __name__ == "__main__"`, because the worker processes
    import it.

    Args:
        config: the spec.
        overwrite: replace a dataset of another spec; never a folder that is not a dataset.
        part: (i, n) with i from 1: do the i-th of n parts, and wait for other machines to do the others.

    Returns:
        A description of the dataset for the user.

    Raises:
        ConfigError: the spec is wrong, or `out` holds something else.
        DataError: the text or the given tokenizer is missing, damaged or too small.
        StorageError: the disk is too small or fails, or another process is writing `out`.
        RunError: a worker process died.
    """
    if problems := config.problems():
        raise ConfigError("\n".join(problems))
    if part != (1, 1) and config.executor.name != "local":
        raise ConfigError(f"--part: executor.name={config.executor.name} divides the work itself. Use one of the two.")
    from data_prep.report import fingerprint, is_finished
    from modernbert_train.data.read.find_files import passed_over, passed_over_lines

    home: Any = importlib.import_module(config.home)
    out = Path(config.out)
    real_out = out.resolve() if out.is_symlink() else out  # the link's folder may be on another disk
    folder = real_out.with_name(f"{real_out.name}.work")
    identity = fingerprint(config)
    if is_finished(out, identity, overwrite, home.REPORT):
        _remove_work(folder, identity)
        return f"already complete, made from the same spec and files; --overwrite writes it again\n{home.describe(out)}"
    home.check(config)
    others = passed_over(config)
    once = {config.sources[name].path: name for name in reversed(others)}  # several sources may share a folder
    for line in passed_over_lines({name: others[name] for name in reversed(once.values())}):
        print(line, file=sys.stderr, flush=True)
    with claimed(folder, _OTHER, part):
        try:
            work = _open_work(folder, config, identity, overwrite)
            is_done = partial(is_finished, out, identity, False, home.REPORT)
            _run(home.make_stages(work, config, identity), work, config.executor, part, is_done)
        except RunError as error:
            _after_failure(folder, part, error)
            raise
        if config.executor.name == "slurm":
            return f"submitted to Slurm, see squeue; when it is done, the same command describes {out}"
        if part[0] == part[1]:
            _empty(folder)
            shutil.rmtree(folder, ignore_errors=True)  # other machines may hold locks in it
    return home.describe(out)


def _run(stages: list[Stage], work: Work, executor: ExecutorConfig, part: Part, is_done: Callable[[], bool]) -> None:
    from data_prep.tasks.executors import num_workers, run_local, submit

    if executor.name == "local":
        run_local(stages, work, num_workers(work, executor), part, is_done)
        return
    submit(stages, work, executor)
    if executor.name == "ray" and not is_done():
        raise RunError(f"Ray has not completed all tasks. See {work.folder}/stages/*/logs; the same command resumes.")


def _open_work(folder: Path, config: DatasetConfig, identity: Fingerprint, overwrite: bool) -> Work:
    """Open the existing work, or cut the corpus and begin.

    Raises:
        ConfigError: the work is of another spec, and may not be discarded.
        DataError: a hub dataset cannot be opened.
    """
    from data_prep.tasks.work import make_work, read_work

    identity = {"version": __version__, **identity}
    with (folder / ".planning").open("a") as turn:
        lock(turn)  # several machines may start at the same time
        work_of_folder = read_work(folder)
        if work_of_folder is not None:
            work, stored = work_of_folder
            changed = changes(stored, identity)
            if not changed:
                work.failure_file.unlink(missing_ok=True)
                return work
            if not overwrite:
                claim = f"{folder}: holds unfinished work of another spec or of other files"
                refuse(claim, changed, "Discard it with --overwrite, or give another folder with out=...")
        _empty(folder)
        return make_work(folder, config, identity)


def _after_failure(folder: Path, part: Part, error: RunError) -> None:
    """Discard work that cannot be resumed, or report the failure to waiting machines."""
    if part != (1, 1):
        (folder / "failed").write_text(f"part {part[0]} of {part[1]}: {error}", encoding="utf-8")
    elif isinstance(error, DataError):  # after a fix, spec or files will differ
        _empty(folder)
        shutil.rmtree(folder)


def _remove_work(folder: Path, identity: Fingerprint) -> None:
    """Remove the work of a finished dataset, if the process that made it could not, or was on Slurm."""
    from data_prep.tasks.work import read_work

    work_of_folder = read_work(folder)
    if (folder / LOCK).exists() and (
        work_of_folder is None or not changes(work_of_folder[1], {"version": __version__, **identity})
    ):
        with claimed(folder, _OTHER):
            _empty(folder)
            shutil.rmtree(folder)


def _empty(folder: Path) -> None:
    """Remove the list of tasks first and then all results, so that a kill in between leaves nothing to resume."""
    from data_prep.tasks.work import TASKS

    (folder / TASKS).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)


def _part(text: str) -> Part:
    number, _, num_parts = text.partition("/")
    if not (number.isdecimal() and num_parts.isdecimal() and 1 <= int(number) <= int(num_parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1/4, the first of four")
    return int(number), int(num_parts)


if __name__ == "__main__":
    import_hook.only_shards()
    sys.exit(main())
