"""Every checkpoint of a run in a line: what it is, what keeps it, and in which state it is.

Without torch. Unless asked to verify them all, of each only the manifest, the sizes and the two small files are read,
which finds what was cut, is missing or was half written, in a moment; a flipped bit in the tensors takes reading them.
Whatever is found is a line and never an error: a damaged checkpoint must not hide the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from modernbert_train.checkpoints.copier import manifest_of
from modernbert_train.checkpoints.manifest import CONFIG_YAML, MANIFEST, STATE, Manifest
from modernbert_train.checkpoints.store import Store
from modernbert_train.checkpoints.tools.selection import Selection
from modernbert_train.checkpoints.verified import (
    NAME,
    SUPERSEDED,
    check_hashes,
    partial_folders,
    read_texts,
    require_files,
    step_folders,
    step_of,
)
from modernbert_train.clock import is_pythia
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.files import os_errors_as
from modernbert_train.core.text import date, plural, table
from modernbert_train.errors import RunError, StorageError

VALID, WHOLE, DAMAGED, INCOMPLETE = "valid", "whole", "damaged", "incomplete"
SET_ASIDE, ELSEWHERE = "set aside", "second home only"
_LETTERS = 400  # of what is wrong with one


@dataclass(frozen=True)
class Listed:
    """One checkpoint; None where nothing says it.

    Attributes:
        name: of its folder, below the folder of checkpoints.
        step: optimizer steps done.
        state: valid, if every byte was read and is right; whole, if only manifest, sizes and the small files were
            looked at; damaged; incomplete, if a write broke off or is at work; set aside, if the run went back to an
            older one; second home only.
        problem: what is wrong, and in which file.
        kept: what it is kept for, when others are removed.
        tokens, phase: of the clock.
        bytes: of its files, as far as they are here.
        time: unix time at which it was written here.
        ranks: that wrote it.
        schema: of its files.
        in_second_home: whether a copy of exactly this one is there; None if that was not asked, or there is none.
    """

    name: str
    step: int
    state: str
    problem: str | None = None
    kept: tuple[str, ...] = ()
    tokens: int | None = None
    phase: str | None = None
    bytes: int | None = None
    time: float | None = None
    ranks: int | None = None
    schema: int | None = None
    in_second_home: bool | None = None


def look(folder: Path) -> Manifest:
    """Make sure of a checkpoint without reading its tensors.

    Raises:
        StorageError: names the file and what is wrong with it.
    """
    manifest = require_files(folder)
    for name, expected in manifest.files.items():
        with os_errors_as(StorageError, f"{folder / name}: cannot be read"):
            found = (folder / name).stat().st_size
        if found != expected.bytes:
            raise StorageError(f"{folder / name}: damaged; {found:,} bytes, the manifest says {expected.bytes:,}")
    check_hashes(folder, manifest, (STATE, CONFIG_YAML))
    return manifest


def kept_for(manifests: Mapping[int, Manifest], config: RunConfig | None) -> dict[int, tuple[str, ...]]:
    """What each checkpoint is kept for.

    Args:
        manifests: of the checkpoints of a run, by step.
        config: of the run; None where it cannot be read, and only what is in the manifests is known.
    """
    keep = 0 if config is None else config.checkpoint.keep
    newest = sorted(manifests, reverse=True)[:keep]
    pythia = config is not None and config.checkpoint.milestones == "pythia"
    found = {}
    for step, manifest in manifests.items():
        why = [f"newest {keep}"] if step in newest else []
        why += ["phase end"] if manifest.phase_end else []
        if manifest.milestone:
            why.append("pythia" if pythia and is_pythia(step) else "milestone")
        found[step] = tuple(why)
    return found


def list_checkpoints(
    selection: Selection,
    config: RunConfig | None,
    store: Store | None = None,
    there: Mapping[int, str] | None = None,
    verify: Callable[[Path], object] | None = None,
    only: int | None = None,
) -> list[Listed]:
    """The checkpoints of a run in order of steps.

    Args:
        selection: the run.
        config: of it; None where it cannot be read.
        store: its second home, where that is to be looked at.
        there: names of the checkpoints in it, by step.
        verify: reads a whole checkpoint, or raises StorageError; None only looks.
        only: the one step that is wanted.
    """
    here = [folder for folder in step_folders(selection.checkpoints) if only is None or step_of(folder) == only]
    manifests = {step_of(each): manifest for each in here if (manifest := _manifest(each)) is not None}
    kept = kept_for(manifests if only is None else _all_manifests(selection), config)
    there = {step: name for step, name in (there or {}).items() if only in (None, step)}
    found = [
        _listed(folder, kept.get(step_of(folder), ()), _copied(store, there, folder, manifests), verify)
        for folder in here
    ]
    found = [
        each for each in found if each.state != DAMAGED or (selection.checkpoints / each.name).is_dir()
    ]  # just removed
    steps = {each.step for each in found}
    for step, name in there.items():
        if step not in steps and store is not None:
            found.append(_listed_there(store, step, name))
    if only is None:
        for path in partial_folders(selection.checkpoints):
            match = NAME.match(path.name)
            assert match is not None
            what, size = _of_partial(path.name), bytes_in(path)
            found.append(Listed(path.name, int(match[1]), INCOMPLETE, what, bytes=size, time=_time(path)))
        for folder in sorted((selection.checkpoints / SUPERSEDED).glob("*")):
            for path in step_folders(folder):
                listed = _listed(path, (), None, None)
                state = listed.state if listed.state == DAMAGED else SET_ASIDE
                name = str(path.relative_to(selection.checkpoints))
                found.append(replace(listed, name=name, state=state, kept=()))
    return sorted(found, key=lambda each: (each.state == SET_ASIDE or "/" in each.name, each.step, each.name))


def _all_manifests(selection: Selection) -> dict[int, Manifest]:
    return {
        step_of(each): found for each in step_folders(selection.checkpoints) if (found := _manifest(each)) is not None
    }


def _manifest(folder: Path) -> Manifest | None:
    with suppress(StorageError):
        return require_files(folder)
    return None


def _copied(
    store: Store | None, there: Mapping[int, str], folder: Path, manifests: Mapping[int, Manifest]
) -> bool | None:
    """Whether a copy of exactly this checkpoint is in the second home."""
    if store is None:
        return None
    step = step_of(folder)
    if step not in there or step not in manifests:
        return False
    with suppress(RunError):
        return manifest_of(store, there[step]) == manifests[step]
    return False


def _listed(
    folder: Path, kept: tuple[str, ...], copied: bool | None, verify: Callable[[Path], object] | None
) -> Listed:
    about: dict[str, Any] = {"name": folder.name, "step": step_of(folder), "kept": kept, "in_second_home": copied}
    about |= {"bytes": bytes_in(folder), "time": _time(folder / MANIFEST)}
    try:
        manifest = look(folder)
        about |= {"ranks": len(manifest.weights), "schema": manifest.schema}
        texts = read_texts(folder, manifest)
        about |= {"tokens": texts.state.tokens, "phase": texts.state.phase}
        if verify is not None:
            verify(folder)
    except StorageError as error:
        return Listed(**about, state=DAMAGED, problem=one_line(str(error).removeprefix(f"{folder}/")))
    return Listed(**about, state=WHOLE if verify is None else VALID)


def _listed_there(store: Store, step: int, name: str) -> Listed:
    try:
        manifest = manifest_of(store, name)
    except RunError as error:
        return Listed(name, step, DAMAGED, one_line(f"in the second home: {error}"), in_second_home=True)
    kept = tuple(
        what for what, holds in (("phase end", manifest.phase_end), ("milestone", manifest.milestone)) if holds
    )
    size = sum(file.bytes for file in manifest.files.values())
    about: dict[str, Any] = {"bytes": size, "ranks": len(manifest.weights), "schema": manifest.schema}
    return Listed(name, step, ELSEWHERE, kept=kept, in_second_home=True, **about)


def _of_partial(name: str) -> str:
    if name.endswith("-removed"):
        return "was being removed"
    return "is being written, or a write broke off; the next checkpoint removes it"


def bytes_in(folder: Path) -> int:
    """Of the files in a folder that is no link; what vanishes meanwhile counts nothing."""
    total = 0
    if folder.is_symlink():
        return 0
    with suppress(OSError):
        for path in folder.iterdir():
            total += path.lstat().st_size
    return total


def _time(path: Path) -> float | None:
    with suppress(OSError):
        return path.stat().st_mtime
    return None


def one_line(text: str) -> str:
    """Text of an error that may quote a hostile file, as part of a line."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= _LETTERS else f"{line[:_LETTERS]}..."


def as_text(found: Sequence[Listed], selection: Selection) -> str:
    """A table, and below it what is wrong."""
    if not found:
        return f"no checkpoint yet in {selection.checkpoints}"
    copies = any(each.in_second_home is not None for each in found)
    places = ["second home"] if copies else []
    rows: list[tuple[str, ...]] = [("step", "tokens", "phase", "written", "MB", "state", *places, "kept as")]
    for each in found:
        cells = [
            f"{each.step:,}",
            "-" if each.tokens is None else f"{each.tokens:,}",
            "-" if each.phase is None else one_line(each.phase),
            "-" if each.time is None else date(each.time),
            "-" if each.bytes is None else f"{each.bytes / 1e6:,.1f}",
            each.state,
        ]
        if copies:
            cells.append({None: "-", True: "yes", False: "no"}[each.in_second_home])
        nothing = "-" if each.state in (SET_ASIDE, ELSEWHERE, INCOMPLETE) or each.schema is None else "nothing"
        rows.append((*cells, ", ".join(each.kept) or nothing))
    lines = [table(rows)]
    lines += [f"{each.name}: {each.state}: {each.problem}" for each in found if each.problem is not None]
    lines += [f"set aside by `checkpoints restore`: {each.name}" for each in found if each.state == SET_ASIDE]
    total = sum(each.bytes or 0 for each in found if each.state != ELSEWHERE)
    lines.append(f"{plural(sum(each.state in (VALID, WHOLE) for each in found), f'{_word(found)} checkpoint')}, "
                 f"{total / 1e6:,.1f} MB here")  # fmt: skip
    if any(each.state == WHOLE for each in found):
        lines.append("whole: manifest, sizes and small files are right; `checkpoints verify` reads every byte")
    return "\n".join(lines)


def _word(found: Sequence[Listed]) -> str:
    return VALID if any(each.state == VALID for each in found) else WHOLE


def as_json(found: Sequence[Listed]) -> str:
    """The same as JSON, with exact numbers."""
    return json.dumps([asdict(each) for each in found], indent=2)
