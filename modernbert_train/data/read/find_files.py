"""Find the files that a folder or a pattern names, for every verb; hidden and special files are skipped and counted."""

from __future__ import annotations

import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from modernbert_train.config.tools.prepare import GLOBS, DatasetConfig, RowSourceConfig
from modernbert_train.core.files import PACKED, ending, os_errors_as
from modernbert_train.core.own_files import special_kind
from modernbert_train.errors import ConfigError, DataError

_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"}
_MAGIC = "*?[{"
_BRACES = re.compile(r"\{([^{}]*)\}")
NO_END, HIDDEN = "without an ending", "hidden"
# file extension -> kind of the table
TABLES = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".csv": "csv", ".tsv": "tsv", ".mds": "mds"}
_ENDS = 8  # extensions listed in a message


def source_files(name: str, source: RowSourceConfig) -> list[Path]:
    """Return the files of a source, sorted by path; empty for a dataset on the hub.

    Args:
        name: its key under `sources`, for messages.
        source: its configuration.

    Raises:
        ConfigError: the glob is not a pattern.
        DataError: the path does not exist, one of its folders cannot be read, or it holds no matching file.
    """
    if source.kind == "python_stdlib":
        return _stdlib_files()
    assert source.path is not None  # checked by prepare_problems
    path = Path(source.path)
    if source.kind == "hub":
        return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else []
    if os.path.lexists(path) and not path.is_dir():
        if (special := special_kind(path, False, path.parent)) is not None:
            raise DataError(f"sources.{name}.path={path}: {special} are not read. Name a file.")
        return [path]
    root, patterns = path, (source.glob,) if source.glob else GLOBS[source.kind]
    if not path.is_dir():
        if not any(letter in source.path for letter in _MAGIC):
            raise DataError(f"sources.{name}.path={source.path}: no such file or folder. Correct the path.")
        parts = path.parts
        first = next(i for i, part in enumerate(parts) if any(letter in part for letter in _MAGIC))
        root, patterns = Path(*parts[:first]), (str(Path(*parts[first:])),)
    shown = " or ".join(patterns)
    patterns = tuple(each for pattern in patterns for each in _alternatives(pattern))
    for pattern in patterns:
        if (problem := _pattern_problem(pattern)) is not None:
            raise ConfigError(
                f"sources.{name}: {pattern} is not a pattern ({problem}). Write one like **/*.txt, relative to the "
                "folder."
            )
    matching = {file for pattern in patterns for file in _matching(root, PurePosixPath(pattern).parts, root)}
    files = sorted(file for file in matching if source.kind != "text" or not _is_packed_table(file, patterns))
    if not files:
        others_shown = f" ({_shown(others)} are there)" if (others := _endings(root, ())) else ""
        raise DataError(
            f"sources.{name}: no file in {root} matches {shown}{others_shown}. Correct sources.{name}.path, "
            f"or set sources.{name}.glob to a pattern of your files, such as **/*.{{md,txt}}."
        )
    return _without_unpacked(files) if source.kind == "mds" else files


def _is_packed_table(file: Path, patterns: Iterable[str]) -> bool:
    """Return True if only the .gz at the end of a name like a.jsonl.gz made it match: it is not text."""
    end = ending(file)
    return file.suffix in PACKED and end in TABLES and not any(end in pattern for pattern in patterns)


def _alternatives(pattern: str) -> Iterator[str]:
    """Yield the patterns that one with {a,b} stands for."""
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    for each in braces[1].split(","):
        yield from _alternatives(pattern[: braces.start()] + each + pattern[braces.end() :])


def passed_over(config: DatasetConfig) -> dict[str, dict[str, int]]:
    """For each source that is a folder, count the files in it that no source reads, by the end of their names.

    Folders of shards are skipped, since they hold other files too, and datasets of the hub.
    """
    every = [*config.sources.items(), *config.evaluation_sets.items()]
    taken = {os.path.abspath(file) for name, source in every for file in source_files(name, source)}
    return {
        name: dict(endings.most_common())
        for name, source in config.sources.items()
        if source.kind in ("text", "jsonl", "parquet", "csv", "tsv", "fasta")
        and (endings := _endings(Path(source.path or ""), taken))
    }


def passed_over_lines(endings_of: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Describe the result of `passed_over` for the user."""
    for name, endings in endings_of.items():
        yield (
            f"sources.{name}: {sum(endings.values()):,} files of its folder are not read: {_shown(endings)}. To read "
            f"them, set sources.{name}.glob, or add a source."
        )


def _endings(root: Path, taken: Collection[str]) -> Counter[str]:
    return Counter(what for path, what in files_below(root) if os.path.abspath(path) not in taken)


def files_below(root: Path, onerror: Callable[[OSError], None] | None = None) -> Iterator[tuple[Path, str]]:
    """Yield every file below a folder with the end of its name, or with the reason why it cannot be read.

    A hidden folder counts as one file; links to folders are not followed.

    Args:
        root: the folder.
        onerror: called with the error of a folder that cannot be read.
    """
    for place, folders, files in os.walk(root, onerror=onerror):
        for name in sorted((*folders, *files)):
            path = Path(place, name)
            if name.startswith("."):
                yield path, HIDDEN
            elif name in files:
                special = special_kind(path, path.is_symlink(), root)
                yield path, special or name_end(path)
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))


def name_end(file: Path) -> str:
    """Return the end of a name as it is counted, such as .jsonl.gz."""
    return "".join(file.suffixes[-2 if file.suffix in PACKED else -1 :]) or NO_END


def _shown(endings: Mapping[str, int]) -> str:
    commonest = Counter(endings).most_common(_ENDS)
    num_others = sum(endings.values()) - sum(number for _, number in commonest)
    return ", ".join([f"{number:,} {end}" for end, number in commonest] + [f"{num_others:,} others"] * bool(num_others))


def _pattern_problem(pattern: str) -> str | None:
    """Describe why this is not a pattern; Path.glob's answer depends on the version of Python."""
    parts = PurePosixPath(pattern).parts
    if not parts:
        return "it names no file"
    if pattern.startswith("/"):
        return "it begins with /"
    if any("**" in part and part != "**" for part in parts):
        return "** means any folders and must be alone between slashes"
    return None


def _matching(folder: Path, parts: tuple[str, ...], root: Path) -> Iterator[Path]:
    """Yield the files below a folder that match; ** is any number of folders, at the end with all their files.

    Links to folders are followed if a part names them, and never by **. Hidden files and folders match
    only a part that begins with a dot. Links out of `root`, pipes and devices do not match.

    Raises:
        DataError: a folder on the way cannot be read. Path.glob would skip it.
    """
    first, deeper = parts[0], parts[1:]
    if first == "..":
        yield from _matching(folder / first, deeper, root) if deeper else ()
        return
    if first == "**":
        yield from _matching(folder, deeper or ("*",), root)
    remedy = "Make the folder readable, or leave it out of the glob."
    with os_errors_as(DataError, f"{folder}: cannot be read", remedy):
        entries = list(os.scandir(folder))
    for entry in entries:
        if entry.name.startswith(".") and not first.startswith("."):
            continue
        if first == "**":
            if entry.is_dir(follow_symlinks=False):
                yield from _matching(Path(entry.path), parts, root)
        elif fnmatchcase(entry.name, first):
            if not os.path.isdir(entry):
                if not deeper and special_kind(Path(entry.path), entry.is_symlink(), root) is None:
                    yield Path(entry.path)
            elif deeper:
                yield from _matching(Path(entry.path), deeper, root)


def file_state(path: Path) -> tuple[int, int]:
    """Return size in bytes and time of change in nanoseconds; (-1, 0) for a dangling link, reported on reading."""
    with suppress(OSError):
        stat = path.stat()
        return stat.st_size, stat.st_mtime_ns
    return -1, 0


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    topics = root / "pydoc_data" / "topics.py"  # its topics are separate documents
    return sorted(
        file for file in root.rglob("*.py") if not _NOT_STDLIB & set(file.relative_to(root).parts) and file != topics
    )


def _without_unpacked(files: list[Path]) -> list[Path]:
    """Return each shard once: without plain files that also exist compressed in the same folder."""
    packed = {file.with_suffix("") for file in files if file.suffix != ".mds"}
    return [file for file in files if file not in packed]
