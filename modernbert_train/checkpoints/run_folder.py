"""A run's folder: its lock, its files, and the line-by-line record of the run.

runs/NAME/config.yaml      the resolved configuration, itself runnable
runs/NAME/resolved.json    the last start: the requested configuration and its decisions; see plan/resolve.py
runs/NAME/metrics.jsonl    one line per optimizer step, validation, start and resume
runs/NAME/starts.jsonl     a line for the beginning of each start and one for its end; see provenance.py
runs/NAME/evaluations.jsonl measurements of its checkpoints by `eval` and `finetune`; see evaluations.py
runs/NAME/samples.jsonl    predictions at each validation; lines of steps that were trained again are void
runs/NAME/halved.json      microbatches that did not fit and were halved; see oom_backoff.py
runs/NAME/faults.jsonl     one line for each batch that stability.py skipped, or ended the run at; never rewound
runs/NAME/checkpoints/     see checkpoint.py; superseded/ has checkpoints set aside by tools/restore.py
runs/NAME/copies.jsonl     copies to checkpoint.copy_to, and errors; see replica.py
runs/NAME/data.json        statistics of its data: lengths, fields, sources; see data/statistics.py
runs/NAME/tokenizer/       a copy of data.tokenizer, with which the folder can be used anywhere; see vocabulary.py
runs/NAME/report.html      drawn from metrics.jsonl
runs/NAME/profile/         traces and tables of the steps that profile: asks for
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from modernbert_train.checkpoints.manifest import CONFIG_YAML, read_manifest, step_folders
from modernbert_train.checkpoints.provenance import STARTS, read_starts
from modernbert_train.checkpoints.verified import check_hashes
from modernbert_train.config.auto import filled, recorded
from modernbert_train.config.knob import may
from modernbert_train.config.load import differences, load_run, to_yaml
from modernbert_train.config.plugins import versions
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.claim import START_OVER, Change, refuse
from modernbert_train.core.files import append_line, lock_now, os_errors_as, sweep, values_as, write_whole
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.read_json import Count, as_type, is_count, read_lines
from modernbert_train.core.redact import redact, redacted
from modernbert_train.data.statistics import DATA
from modernbert_train.distributed.heartbeat import is_running
from modernbert_train.errors import ConfigError, RunError, StorageError

SAMPLES, RESOLVED = "samples.jsonl", "resolved.json"
TOKENIZER_COPY = "tokenizer"  # folder
_GONE_SECONDS = 60.0  # without a record: then its machine may be lost; runs record more often, schedulers restart later
_OF_FAULTS = (
    ". It lists the updates that the run has skipped, and without it the run would not continue as it did. Restore it "
    "from a copy; or remove the damaged lines, if those updates lie before the newest checkpoint."
)
BUSY = "Two jobs must not write one run: wait for it, stop it, or give this one another name=."
_HELD: set[Path] = set()  # folders that this process has locked with `held`, for the duration of a verb
# written by the process that has locked the folder
_RECORDS = ("config.yaml", RESOLVED, DATA, "metrics.jsonl", "faults.jsonl")


class RunFolder:
    """The folder of one run, as rank 0 writes it.

    Args:
        config: the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.path = Path(config.folder)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.faults = self.path / "faults.jsonl"
        self._lock: IO[str] | None = None

    def open(self, *, fresh: bool = False) -> list[str]:
        """Create the folder, or take it over if it is of the same run; hold its lock as long as the process lives.

        Args:
            fresh: rename the existing folder first; no file is deleted.

        Returns:
            Harmless differences from the last configuration of the folder.

        Raises:
            ConfigError: the folder belongs to a run with an incompatible configuration, or is in use.
            DataError: a file in it is a link to elsewhere, or no file.
            StorageError: it cannot be written.
        """
        require_own_files(self.path)  # a link would be written through
        with self._opening(), ExitStack() as on_error:
            self._take_lock()
            if fresh:
                self.path.rename(self.path.with_name(f"{self.path.name}.until-{time.strftime('%Y%m%d-%H%M%S')}"))
                self.close()
                self._take_lock()
            on_error.callback(self.close)
            changed = self.compare()
            on_error.pop_all()
        return changed

    def check_writable(self) -> None:
        """Check, without writing, that `open` could write here.

        Raises:
            StorageError: it could not.
        """
        parents = (self.path, *self.path.absolute().parents)
        existing = next(path for path in parents if path.exists() or path.is_symlink())
        code = None
        if not existing.is_dir():
            code = errno.EEXIST if existing == self.path else errno.ENOTDIR
        elif os.statvfs(existing).f_flag & os.ST_RDONLY:
            code = errno.EROFS
        elif not os.access(existing, os.W_OK | os.X_OK):
            code = errno.EACCES
        if code is not None:
            with self._opening():
                raise OSError(code, os.strerror(code))

    def has_checkpoints(self) -> bool:
        """True if the folder has checkpoints by name, whole or damaged."""
        return bool(step_folders(self.checkpoints))

    def save_config(self) -> None:
        """Replace config.yaml, after all checks of the run.

        Raises:
            StorageError: it cannot be written.
        """
        with self._opening():
            write_whole(self.path / "config.yaml", to_yaml(self.config))

    def _opening(self) -> AbstractContextManager[None]:
        remedy = "Fix the permissions or the disk, or choose another runs_folder."
        return os_errors_as(StorageError, f"{self.path}: cannot be written", remedy)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        if self.path.resolve() not in _HELD:
            self._lock = take_lock(self.path, BUSY)
        sweep(self.path)

    def compare(self) -> list[str]:
        """Return the harmless differences from the configuration of the newest whole checkpoint, else of the folder.

        Raises:
            ConfigError: the folder belongs to a run with an incompatible configuration.
        """
        saved = self._trained_by()
        if not saved.exists():
            return []
        remedy = f"\nContinue with the version that wrote it, give this run another name=, or {START_OVER}."
        others = f"{saved}: not written by this version, which has other keys"
        with values_as(ConfigError, others, ConfigError, after=remedy):
            last = load_run([saved])
        changed = changed_keys(last, self.config)
        refuse(
            f"{self.path} holds a run with another configuration",
            fixed(changed),
            f"Give this run another name=, restore the values, or {START_OVER}.",
        )
        return [str(Change(*change)) for change in (*changed, *self._other_plugins())]

    def _trained_by(self) -> Path:
        """Return the configuration of the newest checkpoint that has one whole: the folder's may have been edited."""
        for step in reversed(step_folders(self.checkpoints)):
            with suppress(OSError, KeyError, RunError):  # damaged; training uses the newest whole one, and reports it
                check_hashes(step, read_manifest(step), [CONFIG_YAML])
                return step / CONFIG_YAML
        return self.path / CONFIG_YAML

    def _other_plugins(self) -> list[tuple[str, str, str]]:
        """Return the plugins whose version or source has changed since the last start: name, old and new."""
        starts = read_starts(self.path)
        last = (starts[-1].plugins if starts else None) or {}
        here = versions([name for name in self.config.plugins if name in last])
        return [(f"plugin {name}", last[name], version) for name, version in here.items() if version != last[name]]

    def record(self, entry: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl.

        Raises:
            StorageError: the disk refuses it.
        """
        with _writing(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry | {"time": round(time.time(), 3)}) + "\n")

    def record_samples(self, entry: dict[str, Any]) -> None:
        """Add one line to samples.jsonl.

        Raises:
            StorageError: the disk refuses it.
        """
        path = self.path / SAMPLES
        with _writing(path):
            append_line(path, json.dumps(entry | {"time": round(time.time(), 3)}, ensure_ascii=False))

    def record_start(self, entry: dict[str, Any]) -> None:
        """Add one line to starts.jsonl, of a start or of its end; secrets in it are hidden.

        Raises:
            StorageError: the disk refuses it.
        """
        path = self.path / STARTS
        with _writing(path):
            append_line(path, json.dumps(redacted(entry) | {"time": round(time.time(), 3)}))

    def save_resolved(self, resolved: str, statistics: dict[str, Any]) -> None:
        """Replace config.yaml, resolved.json and data.json, after all checks of the run.

        Args:
            resolved: the run, as JSON.
            statistics: of its data.

        Raises:
            StorageError: the disk refuses them.
        """
        self.save_config()
        data = json.dumps(statistics, indent=1, ensure_ascii=False) + "\n"
        for path, text in ((self.path / RESOLVED, resolved), (self.path / DATA, data)):
            with _writing(path):
                write_whole(path, text)

    def record_fault(self, entry: dict[str, Any]) -> None:
        """Add one line to faults.jsonl; it is complete and synced to the disk when this returns.

        Raises:
            StorageError: the disk refuses it.
        """
        entries = [*self.read_faults(), entry | {"time": round(time.time(), 3)}]
        with _writing(self.faults):
            write_whole(self.faults, "".join(json.dumps(each) + "\n" for each in entries))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read every line of metrics.jsonl with a step; damaged lines are left out.

        Raises:
            StorageError: the file cannot be read.
        """
        return _read(self.metrics)[0]

    def read_faults(self) -> list[dict[str, Any]]:
        """Read and validate every line of faults.jsonl, which the decisions of a resumed run depend on.

        Raises:
            StorageError: a line is damaged, which a crash cannot cause, since the file is replaced as a whole.
        """
        entries, damaged = _read(self.faults)
        for number, entry in enumerate(entries, start=1):
            with values_as(StorageError, f"{self.faults}: damaged; entry {number}", after=_OF_FAULTS):
                _check_fault(entry)
        if damaged:
            raise StorageError(f"{self.faults}: damaged; {damaged} lines are not JSON or lack a step{_OF_FAULTS}")
        return entries

    def rewind_metrics(self, step: int) -> None:
        """Drop the lines after a step: the run continues from it and will write them again.

        Raises:
            StorageError: the file cannot be read or written.
        """
        entries, damaged = _read(self.metrics)
        if damaged:
            print(
                f"warning: {self.metrics}: {damaged} lines could not be read and are left out; a process killed while "
                "writing leaves one"
            )
        kept = [entry for entry in entries if entry["step"] <= step]
        with _writing(self.metrics):
            write_whole(self.metrics, "".join(json.dumps(entry) + "\n" for entry in kept))


@contextmanager
def held(folder: Path, instead: str) -> Iterator[None]:
    """Create a folder, and lock it so that only one command works there. `instead`: see `take_lock`.

    A run that is trained there within the context opens the folder under this lock.

    Raises:
        ConfigError, RunError: see `take_lock`.
        StorageError: it cannot be written.
    """
    with os_errors_as(StorageError, f"{folder}: cannot be written", "Free the disk, or name another folder."):
        folder.mkdir(parents=True, exist_ok=True)
        lock, path = take_lock(folder, instead), folder.resolve()
    with lock:
        _HELD.add(path)
        try:
            yield
        finally:
            _HELD.discard(path)


def take_lock(folder: Path, instead: str) -> IO[str]:
    """Hold the lock of a run until the file is closed.

    Args:
        folder: of the run.
        instead: remedy if another process has it.

    Raises:
        ConfigError: another process has it.
        RunError: a process of another machine has it, which may be gone with its machine; try again later.
        OSError: the disk refuses it.
    """
    lock = (folder / ".lock").open("a+", encoding="utf-8")
    if not (lock_now(lock) or _free_by_now(lock)):
        lock.seek(0)
        owner = lock.read().strip() or "another process"
        lock.close()
        still = _seconds_since_a_sign(folder)
        if not _runs_here(owner) and still > _GONE_SECONDS:
            raise RunError(
                f"{folder}: in use by {owner}, and nothing was recorded there for {still / 60:.1f} minutes. If that "
                "machine is gone, a network disk keeps its lock until that machine restarts, or the file server "
                "drops it. Start again then; or remove the folder's .lock if no such process is left."
            )
        raise ConfigError(f"{folder}: in use by {owner}. {instead}")
    lock.truncate(0)
    lock.write(redact(f"process {os.getpid()} on {socket.gethostname()}"))
    lock.flush()
    return lock


def _runs_here(owner: str) -> bool:
    """True if a lock's owner is a running process of this machine; a pod has the host name of the one it replaces."""
    match = re.fullmatch(r"process (\d+) on (.*)", owner)
    return match is None or (match[2] == socket.gethostname() and is_running(int(match[1])))


def _seconds_since_a_sign(folder: Path) -> float:
    """Return the time since the last record of a run, or since its lock was taken."""
    signs = [file.stat().st_mtime for file in (folder / "metrics.jsonl", folder / ".lock") if file.exists()]
    return time.time() - max(signs, default=time.time())


def _free_by_now(lock: IO[str]) -> bool:
    """Retry the lock after a moment: listing runs takes it briefly, to see whether the run is training."""
    time.sleep(0.1)
    return lock_now(lock)


def _writing(path: Path) -> AbstractContextManager[None]:
    remedy = "Free some space or fix the permissions; the same command resumes from the newest checkpoint."
    return os_errors_as(StorageError, f"{path}: cannot be written", remedy)


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of a record with a step, and the number of all others."""
    with os_errors_as(StorageError, f"{path}: cannot be read", "Fix the disk or the permission."):
        entries, wrong = read_lines(path)
    valid = [entry for entry in entries if is_count(entry.get("step"))]
    return valid, len(wrong) + len(entries) - len(valid)


def _check_fault(entry: dict[str, Any]) -> None:
    """Raise ValueError if a value that decisions depend on is missing."""
    for key, kind in {"tokens_before": Count, "tokens": Count, "fault": str, "action": str}.items():
        as_type(kind, entry.get(key), key)
    if entry["action"] == "roll_back" and not re.fullmatch(r"step-\d{8,18}", as_type(str, entry.get("to"), "to")):
        raise ValueError(f"to: expected the name of a checkpoint, found {entry['to'][:60]!r}")


def changed_keys(last: RunConfig, config: RunConfig) -> list[Change]:
    """Return the differences between two configurations of a run; keys that both leave open are equal."""
    changed = [Change(*each) for each in differences(filled(last, {}), recorded(config, last))]
    before, after = list(last.phases), list(config.phases)
    if before != after and sorted(before) == sorted(after):
        changed.append(Change("phases", before, after))
    return changed


def fixed(changed: Iterable[Change]) -> list[Change]:
    """Return the changes that no start of a run may make: a stream may move, but none may be added or removed."""
    return [
        each
        for each in changed
        if (each.key.startswith("data.streams.") and None in (each.before, each.now))
        or not may("restart", RunConfig, each.key)
    ]
