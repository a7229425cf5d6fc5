"""Remote folders of shards, and their local copies, which the processes of a machine share.

A URL may replace the path of a local folder anywhere. Its small files (card, index, lengths, counts) are fetched when a
run starts; shards when they are read, or a block ahead. A file gets its name, by a rename, only after its hash was
verified, so no reader sees a partial file. All processes of a machine share the cache. A lock keeps two of them from
fetching the same file; the kernel releases it when its process ends. So after a kill nothing blocks: a partial download
whose lock is free is removed. There is no shared memory.

    CACHE/NAME-OF-THE-URL/dataset.json, index.json, lengths.npy, token_counts.npy
    CACHE/NAME-OF-THE-URL/shards/    verified shards; their mtime is the time of the last reading
    CACHE/NAME-OF-THE-URL/partial/   one folder for each download in progress
    CACHE/NAME-OF-THE-URL/locks/     empty files, never removed
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

Fault = Callable[[bytes], str | None]  # returns the problem with a file's bytes, or None
REMEDY = "Upload the folder again from a whole copy, or prepare the data again with `prepare`."
_RESERVED = "reserved"  # a sparse file as large as the shard that is being fetched
_LOOK_SECONDS = 0.05


def is_remote(path: str) -> bool:
    """Return True if a folder of shards is in a store: s3://bucket/folder, gs://..., dbfs:/Volumes/..."""
    return "://" in path or path.startswith("dbfs:")


def remote_folder(path: str, data: DataConfig) -> RemoteFolder | None:
    """Return the remote folder of a URL; None for a local path."""
    if not is_remote(path):
        return None
    return _remote_folder(path.rstrip("/"), _cache_root(data), data.cache_limit_bytes, data.download_timeout_seconds)


def local_folder(path: str, data: DataConfig) -> Path:
    """Return the folder with the small files of a folder of shards: itself, or the verified copy of a remote one.

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
    """Return the same object for the same arguments, so that a process fetches the small files once."""
    return RemoteFolder(url, root, limit_bytes, timeout_seconds)


class RemoteFolder:
    """One folder in a store, and its copy in this machine's cache.

    Args:
        url: the folder, without a slash at its end.
        root: the cache, shared with other folders and processes.
        limit_bytes: maximum size of all shards in the cache; None for no limit.
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
        """Fetch the small files; copies of an earlier run are kept if they still match the remote card.

        Returns:
            The folder of the copies.

        Raises:
            DataError: a file is missing in the store, or does not match the card.
            ConfigError, StorageError: the store rejects, cannot be reached, or the cache cannot be written.
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
        """Return the verified bytes of a shard, from the cache or the store.

        Args:
            name: its path in the remote folder.
            size: its bytes.
            fault: returns the problem with its bytes, or None.

        Raises:
            DataError: it does not exist, or the fetched file was damaged, twice.
            ConfigError, StorageError: the store rejects, cannot be reached, or the cache cannot be written.
        """
        return self._get(self._cached(name), size, fault)

    def fetch_ahead(self, name: str, size: int, fault: Fault) -> None:
        """Fetch a shard into the cache, unless another process is fetching it. Raises as `read`."""
        path = self._cached(name)
        if touch(path):
            return
        with self._file_lock(path.name, wait=False) as mine:
            if mine and not path.exists():
                self._fetch(path, size, fault)

    def _cached(self, name: str) -> Path:
        """Return the path of a shard in the cache; subfolders of the remote folder are flattened."""
        return self.local / "shards" / quote(name, safe="")

    def _get(self, path: Path, size: int | None, fault: Fault, *, fresh: bool = False) -> bytes:
        if not fresh and (data := _sound(path, fault)) is not None:
            return data
        with self._file_lock(path.name, wait=True):
            if not fresh and (data := _sound(path, fault)) is not None:  # fetched by another process meanwhile
                return data
            return self._fetch(path, size, fault)

    def _fetch(self, path: Path, size: int | None, fault: Fault) -> bytes:
        """Fetch a file whose lock is held, after removing the partial download of a dead process."""
        partial = self.local / "partial" / path.name
        with writing(self._root):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if size is not None and self.limit_bytes is not None:
                self._reserve(partial / _RESERVED, size, self.limit_bytes)
            problem: str | None = None
            for _ in range(2):
                file = self._downloader.fetch(unquote(path.name), partial, size)
                data = file.read_bytes()
                problem = fault(data)
                if problem is None:
                    with writing(self._root):
                        os.replace(file, path)
                    return data
                file.unlink()
            raise DataError(f"{self.url}/{unquote(path.name)}: {problem}; fetched twice. {REMEDY}")
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _reserve(self, reserved: Path, size: int, limit: int) -> None:
        """Reserve space for a shard by removing the least recently read ones.

        Readers hold a shard's bytes in memory, so removing its file does not affect them.
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
        """Remove the partial download of a dead process; return True if it was one."""
        with try_lock(partial.parents[1] / "locks" / partial.name) as dead:
            if dead:
                shutil.rmtree(partial, ignore_errors=True)
            return dead

    @contextmanager
    def _file_lock(self, name: str, *, wait: bool) -> Iterator[bool]:
        """Lock a file for fetching; yield True if the lock was taken, which is certain when waiting."""
        path = self.local / "locks" / name
        if wait:
            with locked(path, Patience(self._timeout), self.local / "partial" / name):
                yield True
        else:
            with try_lock(path) as mine:
                yield mine


def _sound(path: Path, fault: Fault) -> bytes | None:
    """Read a file of the cache and mark it as just used; None if it is missing or damaged."""
    with suppress(OSError):
        data = path.read_bytes()
        if fault(data) is None:
            touch(path)
            return data
    return None


def _is_there(path: Path, hashes: Hashes) -> bool:
    """Return True if a file in the cache is the expected one; with the cache of read_card, so it is hashed once."""
    with suppress(OSError):
        return other_sha256(path, hashes) is None
    return False


def _nothing(data: bytes) -> None:
    return None


def _wrong_sha256(expected: object, data: bytes) -> str | None:
    sha256 = hashlib.sha256(data).hexdigest()
    return None if sha256 == expected else f"sha256 {sha256[:12]}..., but {CARD} says {str(expected)[:12]}..."


def _wrong_counts(tokens: int, data: bytes) -> str | None:
    import numpy as np  # here, so that local folders can be checked where there is no numpy

    try:
        counted = int(np.load(io.BytesIO(data), allow_pickle=False).sum())
    except (ValueError, EOFError, OSError, TypeError) as error:
        return f"cannot be read ({error})"
    return None if counted == tokens else f"counts {counted} tokens, but {CARD} says {tokens}"
