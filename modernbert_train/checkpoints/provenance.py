"""Record the provenance of a run: program, libraries, command line, machine and times of each of its starts.

starts.jsonl of the run's folder has a line for the beginning of each start and one for its end. The file is never
rewound: metrics.jsonl records the steps that the weights have seen, starts.jsonl every start that led there. A killed
start lacks its second line. Host and command line appear only here and on the run's report; the model card, which is
published, omits them.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from modernbert_train.core.installed import commit, library_version
from modernbert_train.core.read_json import is_count, number, read_lines
from modernbert_train.core.redact import HIDDEN, is_secret_name, redact
from modernbert_train.core.text import date, plural, shorten
from modernbert_train.core.version import __version__

STARTS = "starts.jsonl"
_LIBRARIES = ("torch", "mosaicml", "mosaicml-streaming", "transformers", "tokenizers", "numpy")
_LETTERS = 200  # characters of a text shown on a page; the file has the whole text
_COMMIT = 7


def here() -> dict[str, Any]:
    """Return the program and the machine of this process, as keys of the line of a start."""
    known_commit = commit()
    libraries = {}
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            libraries[name] = library_version(name)
    return {
        "version": __version__,
        "commit": None if known_commit is None else known_commit[0],
        "changes": None if known_commit is None else known_commit[1],
        "python": platform.python_version(),
        "libraries": libraries,
        "command": command_line(sys.argv),
        "host": socket.gethostname(),
    }


def command_line(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, with likely secrets hidden."""
    shown = [Path(words[0]).name] if words else []
    hide = False
    for word in words[1:]:
        key, equals, _ = word.partition("=")
        if hide and not word.startswith("-"):
            shown.append(HIDDEN)
        elif equals and is_secret_name(key):
            shown.append(f"{key}={HIDDEN}")
        else:
            shown.append(redact(word))
        hide = word.startswith("--") and not equals and is_secret_name(word)
    return shown


@dataclass(frozen=True)
class Start:
    """One start of a run; values that the file lacks are empty, 0 or None.

    Attributes:
        version, commit, changes: of this program; `changes` is True if the checkout differed from its commit.
        python, libraries: their versions.
        plugins: versions of the user's own packages, with a hash of each one's source.
        command: words of the command line.
        host, device, ranks: host of rank 0, kind of device, and number of ranks.
        tokens: seen by the run before this start.
        time, ended: unix time.
        outcome: finished, stopped or failed; empty while it runs, and after a kill.
        error: message of the error that ended it.
    """

    version: str = ""
    commit: str = ""
    changes: bool = False
    python: str = ""
    libraries: Mapping[str, str] | None = None
    plugins: Mapping[str, str] | None = None
    command: tuple[str, ...] = ()
    host: str = ""
    device: str = ""
    ranks: int = 0
    tokens: int = 0
    time: float = math.nan
    ended: float | None = None
    outcome: str = ""
    error: str = ""

    @property
    def program(self) -> str:
        """Program and machine as text."""
        text = f"modernbert-train {self.version or 'of an unknown version'}"
        if self.commit:
            text += f", commit {self.commit[:_COMMIT]}{' with changes' if self.changes else ''}"
        torch = (self.libraries or {}).get("torch")
        text += "" if torch is None else f", torch {torch}"
        text += "".join(f", {name} {version}" for name, version in (self.plugins or {}).items())
        return text + (f", on {self.ranks} x {self.device}" if self.ranks and self.device else "")


def program(entry: Mapping[str, Any]) -> str:
    """Return program and machine as text, from the line of a start."""
    return _start(entry).program


def read_starts(run_folder: Path) -> list[Start]:
    """Return the starts of a run in order; other lines are left out, and an unreadable file has none."""
    entries: list[dict[str, Any]] = []
    with suppress(OSError):
        entries, _ = read_lines(run_folder / STARTS)
    starts: list[dict[str, Any]] = []
    for entry in entries:
        if entry.get("kind") == "start":
            starts.append(entry)
        elif entry.get("kind") == "end" and starts and "ended" not in starts[-1]:
            starts[-1] |= {key: entry.get(key) for key in ("outcome", "error")}
            starts[-1]["ended"] = entry.get("time")
    return [_start(entry) for entry in starts]


def _start(entry: Mapping[str, Any]) -> Start:
    """Parse a start; values of a wrong type are left out: the file may hold anything."""
    command = entry.get("command")
    values: dict[str, Any] = {}
    for each in fields(Start):
        value = entry.get(each.name)
        if each.type == "str" and isinstance(value, str):
            values[each.name] = shorten(value, _LETTERS)
        elif (each.type == "bool" and isinstance(value, bool)) or (each.type == "int" and is_count(value)):
            values[each.name] = value
        elif each.type in ("float", "float | None") and math.isfinite(finite := _finite(value)):
            values[each.name] = finite
    for key in ("libraries", "plugins"):
        if isinstance(named := entry.get(key), dict):
            values[key] = {shorten(str(name), 60): shorten(str(version), 60) for name, version in named.items()}
    if isinstance(command, list):
        values["command"] = tuple(map(str, command))
    return Start(**values)


def _finite(value: object) -> float:
    parsed = number(value)
    return math.nan if parsed is None or not math.isfinite(parsed) else parsed


def in_words(starts: Sequence[Start], until: float = math.nan) -> str:
    """Return a sentence on the programs, machines and times of a run; empty without starts.

    Args:
        starts: of the run.
        until: time of its last record, used if the end of the last start is not recorded.
    """
    if not starts:
        return ""
    programs = "; then by ".join(dict.fromkeys(start.program for start in starts))
    ended = starts[-1].ended
    first, last = date(starts[0].time), date(until if ended is None else ended)
    when = "".join(f" {word} {day}" for word, day in (("from", first), ("to", last)) if day)
    return f"Trained by {programs}, in {plural(len(starts), 'start')}{when}."
