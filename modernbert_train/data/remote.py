"""Remote folders of shards, and the copies of their files that one machine keeps and shares.

A folder in a store is named by its URL wherever a local one could stand. Its small files (the card, the index, the
lengths, the counts) are fetched when a run starts; shards are fetched when they are read or a block ahead. A file
appears under its name only after its hash was found right, by a rename, so that no reader ever sees half of one. All
processes of a machine share the cache; what keeps two of them from fetching the same file is a lock that the kernel
drops with its process, so that a kill leaves nothing in the way: what it had half fetched is recognised by its free
lock. There is no shared memory.

    CACHE/NAME-OF-THE-URL/dataset.json, index.json, lengths.npy, token_counts.npy
    CACHE/NAME-OF-THE-URL/shards/    verified shards; the time of the last reading is their mtime
    CACHE/NAME-OF-THE-URL/partial/   one folder for each download under way
    CACHE/NAME-OF-THE-URL/locks/     empty files that stay
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote

from modernbert_train.config.schema import DataConfig
from modernbert_train.core.own_files import require_own_files
from modernbert_train.data.dataset_card import CARD, TOKEN_COUNTS, Hashes, other_sha256, parse_card
from modernbert_train.data.download import Downloader, Patience
from modernbert_train.data.shared_files import locked, mtime, size_of, touch, try_lock, writing
from modernbert_train.errors import ConfigError, DataError, StorageError

Fault = Callable[[bytes], str | None]  # what is wrong with a file's bytes, if anything
REMEDY = "Upload the folder again from a whole copy, or prepare the data again with `prepare`."
_RESERVED = "reserved"  # as large as the shard being fetched beside it will be
_LOOK_SECONDS = 0.05


def is_remote(path: str) -> bool:
    """Whether a folder of shards lies in a store: s3://bucket/folder, gs://..., dbfs:/Volumes/..."""
    return "://" in path or path.startswith("dbfs:")


def remote_folder(path: str, data: DataConfig) -> RemoteFolder | None:
    """The remote folder of a URL; None for the path of a local folder."""
    if not is_remote(path):
        return None
    return _remote_folder(path.rstrip("/"), _cache_root(data), data.cache_limit_bytes, data.download_timeout_seconds)


def local_folder(path: str, data: DataConfig) -> Path:
    """Where the small files of a folder of shards can be read: in it, or in a verified copy of a remote one's.

    Raises:
        DataError: see `require_own_files`.
        DataError, ConfigError, StorageError: as `RemoteFolder.describe`.
    """
    remote = remote_folder(path, data)
    if remote is not None:
        return remote.describe()
    require_own_files(Path(path))
    return Path(path)


def _cache_root(data: DataConfig) -> Path:
    if data.cache_folder is not None:
        return Path(data.cache_folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modernbert_train"


@functools.cache
def _remote_folder(url: str, root: Path, limit_bytes: int | None, timeout_seconds: float) -> RemoteFolder:
    """One object per process, so that its small files are fetched once in it."""
    return RemoteFolder(url, root, limit_bytes, timeout_seconds)


class RemoteFolder:
    """One folder in a store, and its copy in this machine's cache.

    Args:
        url: the folder, without a slash at its end.
        root: the cache, shared with other folders and processes.
        limit_bytes: shards of all folders in the cache take no more than this; None for no limit.
        timeout_seconds: see `Downloader`.
    """

    def __init__(self, url: str, root: Path, limit_bytes: int | None, timeout_seconds: float) -> None:
        self.url = url
        self.limit_bytes = limit_bytes
        self._root = root
        name = re.sub(r"[^A-Za-z0-9._]+", "-", url)[-60:].strip("-.")
        self.local = root / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
        self._timeout = timeout_seconds
        self._downloader = Downloader(url, timeout_seconds)
        self._described = False

    def describe(self) -> Path:
        """Fetch the small files; those of an earlier run are kept where they still belong to the remote card.

        Returns:
            The folder of the copies.

        Raises:
            DataError: a file is missing in the store, or is not the one that the card was written for.
            ConfigError, StorageError: the store refuses, cannot be reached, or the cache cannot be written.
        """
        if not self._described:
            for partial in self._root.glob("*/partial/*"):
                self._remove_if_dead(partial)
            card = parse_card(self._get(self.local / CARD, None, _nothing, fresh=True), f"{self.url}/{CARD}")
            for name, hashes in card.hashes().items():
                if not _is_there(self.local / name, hashes):
                    self._get(self.local / name, None, functools.partial(_wrong_sha256, hashes.sha256))
            self._get(self.local / TOKEN_COUNTS, None, functools.partial(_wrong_counts, card.tokens))
            self._described = True
        return self.local

    def read(self, name: str, size: int, fault: Fault) -> bytes:
        """The verified bytes of a shard, from the cache or the store.

        Args:
            name: of the file, in the remote folder.
            size: its bytes.
            fault: finds out what is wrong with bytes that should be its own.

        Raises:
            DataError: it does not exist, or what was fetched is damaged, twice.
            ConfigError, StorageError: the store refuses, cannot be reached, or the cache cannot be written.
        """
        return self._get(self._cached(name), size, fault)

    def fetch_ahead(self, name: str, size: int, fault: Fault) -> None:
        """Have a shard in the cache, unless another process is at it already. Raises as `read`."""
        path = self._cached(name)
        if touch(path):
            return
        with self._file_lock(path.name, wait=False) as mine:
            if mine and not path.exists():
                self._fetch(path, size, fault)

    def _cached(self, name: str) -> Path:
        """Where a shard is kept; all of them in one folder, those of folders below the remote one too."""
        return self.local / "shards" / quote(name, safe="")

    def _get(self, path: Path, size: int | None, fault: Fault, *, fresh: bool = False) -> bytes:
        if not fresh and (data := _sound(path, fault)) is not None:
            return data
        with self._file_lock(path.name, wait=True):
            if not fresh and (data := _sound(path, fault)) is not None:  # fetched by another process meanwhile
                return data
            return self._fetch(path, size, fault)

    def _fetch(self, path: Path, size: int | None, fault: Fault) -> bytes:
        """Fetch a file whose lock is held; what is in its partial folder was left by a process that died."""
        partial = self.local / "partial" / path.name
        with writing(self._root):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if size is not None and self.limit_bytes is not None:
                self._reserve(partial / _RESERVED, size, self.limit_bytes)
            found: str | None = None
            for _ in range(2):
                file = self._downloader.fetch(unquote(path.name), partial, size)
                data = file.read_bytes()
                found = fault(data)
                if found is None:
                    with writing(self._root):
                        os.replace(file, path)
                    return data
                file.unlink()
            raise DataError(f"{self.url}/{unquote(path.name)}: {found}; fetched twice. {REMEDY}")
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _reserve(self, reserved: Path, size: int, limit: int) -> None:
        """Make room for a shard by removing those that were not read for longest, and mark it as taken.

        Readers hold a shard's bytes in memory, so removing its file takes nothing from them.
        """
        if size > limit:
            raise ConfigError(
                f"{self.url}/{reserved.parent.name}: its {size} bytes do not fit into data.cache_limit_bytes={limit}. "
                "Raise the limit."
            )
        patience = Patience(self._timeout)
        while not patience.over():
            with locked(self._root / ".lock", patience), writing(self._root):
                shards = sorted(self._root.glob("*/shards/*"), key=mtime)
                downloads = [path for path in self._root.glob("*/partial/*") if not self._remove_if_dead(path)]
                used = sum(map(size_of, shards)) + sum(size_of(path / _RESERVED) for path in downloads)
                for shard in shards:
                    if used + size <= limit:
                        break
                    used -= size_of(shard)
                    shard.unlink(missing_ok=True)
                if used + size <= limit:
                    with reserved.open("wb") as file:
                        file.truncate(size)  # takes no room itself
                    return
            time.sleep(_LOOK_SECONDS)  # other processes are fetching: their shards will be complete and removable
        raise StorageError(
            f"{self.url}/{reserved.parent.name}: no room for its {size} bytes in data.cache_folder={self._root}: other "
            f"downloads under way take up data.cache_limit_bytes={limit}. Raise the limit."
        )

    def _remove_if_dead(self, partial: Path) -> bool:
        """Remove what a process that died had half fetched; says whether it was so."""
        with try_lock(partial.parents[1] / "locks" / partial.name) as dead:
            if dead:
                shutil.rmtree(partial, ignore_errors=True)
            return dead

    @contextmanager
    def _file_lock(self, name: str, *, wait: bool) -> Iterator[bool]:
        """The right to fetch one file; yields whether it was given, which is certain when waiting."""
        path = self.local / "locks" / name
        if wait:
            with locked(path, Patience(self._timeout), self.local / "partial" / name):
                yield True
        else:
            with try_lock(path) as mine:
                yield mine


def _sound(path: Path, fault: Fault) -> bytes | None:
    """The bytes of a file in the cache if it is there and whole, marked as just read."""
    with suppress(OSError):
        data = path.read_bytes()
        if fault(data) is None:
            touch(path)
            return data
    return None


def _is_there(path: Path, hashes: Hashes) -> bool:
    """Whether a file in the cache is the expected one; asked as read_card will ask, so that it is hashed once."""
    with suppress(OSError):
        return other_sha256(path, hashes) is None
    return False


def _nothing(data: bytes) -> None:
    return None


def _wrong_sha256(expected: object, data: bytes) -> str | None:
    found = hashlib.sha256(data).hexdigest()
    return None if found == expected else f"sha256 {found[:12]}..., but {CARD} says {str(expected)[:12]}..."


def _wrong_counts(tokens: int, data: bytes) -> str | None:
    import numpy as np  # here, so that local folders can be checked where there is no numpy

    try:
        found = int(np.load(io.BytesIO(data), allow_pickle=False).sum())
    except (ValueError, EOFError, OSError, TypeError) as error:
        return f"cannot be read ({error})"
    return None if found == tokens else f"counts {found} tokens, but {CARD} says {tokens}"
