"""Access one run's folder in any store that fsspec supports, by its URL.

    URL/RUN/step-00000012/    the files of a checkpoint; MANIFEST.json is written last and makes it valid
    URL/RUN/record/           the run's small files, as they were with the newest checkpoint
    URL/RUN/superseded/       checkpoints that `checkpoints restore` has set aside

Stores cannot rename. A folder without a manifest does not count: an interrupted copy left it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import xxhash

from modernbert_train.checkpoints.manifest import MANIFEST, NAME, FileHash
from modernbert_train.errors import ConfigError, DataError, RunError, StorageError

RECORD = "record"
KEY = "checkpoint.copy_to"
_CHUNK = 1 << 22
_WITH_PASSWORD = re.compile(r"://[^/@]*:[^/@]*@")
Moved = Callable[[int], None]  # called with the number of bytes transferred


def problem_of(url: str) -> str | None:
    """Return the problem with the URL of a store, found without a connection; None if it is valid."""
    if "://" not in url:
        return f"{KEY}={url}: not a URL. Write s3://BUCKET/FOLDER, gs://... or file:///OTHER/DISK."
    if _WITH_PASSWORD.search(url):
        return (
            f"{KEY}: has a password in it, and is saved with the run. Leave it out, and give credentials "
            "as the store's library takes them (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile)."
        )
    from fsspec import available_protocols, get_filesystem_class

    protocol = url.partition("://")[0]
    try:
        get_filesystem_class(protocol)
    except ValueError:
        return f"{KEY}={url}: no such kind of store. There are {', '.join(sorted(available_protocols()))}."
    except ImportError as error:
        remedy = "pip install 'modernbert-train[s3]'" if protocol == "s3" else "Install the package it names"
        return f"{KEY}={url}: cannot be used here ({error}). {remedy}."
    return None


class Store:
    """The folder of one run in a store.

    Args:
        url: checkpoint.copy_to.
        run: name of the run.
        timeout_seconds: a slower answer is an error, if the store's library supports timeouts.
        moved: called with the number of bytes of each transfer.
    """

    def __init__(self, url: str, run: str, timeout_seconds: float, moved: Moved = lambda count: None) -> None:
        from fsspec.core import url_to_fs

        self.url = f"{url.rstrip('/')}/{run}"
        self._moved = moved
        with self._errors(""):
            self._fs, self._root = url_to_fs(self.url, **_options(url, timeout_seconds))

    def steps(self) -> dict[int, str]:
        """Return the steps of the whole checkpoints, each with the name of its folder; in no order."""
        return {int(name.removeprefix("step-")): name for name in self.folders() if self.has(f"{name}/{MANIFEST}")}

    def folders(self) -> set[str]:
        """Return the names of the folders of checkpoints, whole or not."""
        paths: list[object] = []
        with self._errors(""), suppress(FileNotFoundError):
            paths = self._fs.ls(self._root, detail=False)
        names = {str(path).rstrip("/").rpartition("/")[2] for path in paths}
        return {name for name in names if NAME.fullmatch(name)}

    def has(self, name: str) -> bool:
        with self._errors(name):
            return bool(self._fs.exists(self._path(name)))

    def write(self, name: str, source: IO[bytes]) -> FileHash:
        """Write a file as a whole; return the size and hash of the source."""
        digest, size = xxhash.xxh3_128(), 0
        with self._errors(name):
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            with self._fs.open(self._path(name), "wb", block_size=_CHUNK * 4) as target:
                while chunk := source.read(_CHUNK):
                    target.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
                    self._moved(len(chunk))
        return FileHash(size, digest.hexdigest())

    def digest(self, name: str) -> FileHash:
        """Read a whole file back and return its size and hash."""
        return self._read_into(name, None)

    def fetch(self, name: str, target: Path) -> FileHash:
        """Read a file into a local one; return the size and hash of the received bytes.

        Raises:
            OSError: the local disk refuses it.
        """
        with target.open("wb") as file:
            return self._read_into(name, file)

    def _read_into(self, name: str, target: IO[bytes] | None) -> FileHash:
        digest, size = xxhash.xxh3_128(), 0
        for chunk in self._chunks(name):
            if target is not None:
                target.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        return FileHash(size, digest.hexdigest())

    def read(self, name: str, max_bytes: int) -> bytes:
        """Read the first bytes of a small file."""
        with self._errors(name), self._fs.open(self._path(name), "rb") as file:
            content: bytes = file.read(max_bytes)
        return content

    def remove_file(self, name: str) -> None:
        with self._errors(name):
            if self._fs.exists(self._path(name)):
                self._fs.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        """Remove a checkpoint, its manifest first, so a partial folder never counts as one."""
        self.remove_file(f"{name}/{MANIFEST}")
        with self._errors(name):
            if self._fs.exists(self._path(name)):
                self._fs.rm(self._path(name), recursive=True)

    def move_folder(self, name: str, to: str) -> None:
        """Move a checkpoint; the copy is complete before the original is removed.

        Raises:
            StorageError: a copy has another size.
        """
        with self._errors(name):
            inside = [str(path)[len(self._path(name)) + 1 :] for path in self._fs.find(self._path(name))]
            for each in sorted(inside, key=lambda each: each == MANIFEST):
                target = self._path(f"{to}/{each}")
                self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._fs.copy(self._path(f"{name}/{each}"), target)
                if self._fs.size(target) != self._fs.size(self._path(f"{name}/{each}")):
                    raise StorageError(f"{self.url}/{to}/{each}: the store has not copied it whole. Try again.")
        self.remove_folder(name)

    def _chunks(self, name: str) -> Iterator[bytes]:
        with self._errors(name):
            file = self._fs.open(self._path(name), "rb", cache_type="readahead", block_size=_CHUNK * 4)
        with file:
            while True:
                with self._errors(name):
                    chunk: bytes = file.read(_CHUNK)
                if not chunk:
                    return
                self._moved(len(chunk))
                yield chunk

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Convert the errors of every store's library.

        Raises:
            ConfigError: access is refused.
            DataError: the object is missing.
            StorageError: any other error, which may be temporary.
        """
        where = f"{self.url}/{name}".rstrip("/")
        try:
            yield
        except FileNotFoundError:
            raise DataError(f"{where}: no such object, or no such bucket. Correct {KEY}.") from None
        except PermissionError as error:
            raise ConfigError(
                f"{where}: access refused ({error}). Give this machine credentials that may read, write and delete "
                "there (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile, and S3_ENDPOINT_URL for "
                "stores other than AWS)."
            ) from None
        except Exception as error:  # each store's library has other classes of errors
            if isinstance(error, RunError):
                raise
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
                raise ConfigError(f"{where}: no credentials ({error}). Set AWS_PROFILE, or the two keys.") from None
            raise StorageError(f"{where}: {type(error).__name__}: {error}") from None


def _options(url: str, timeout_seconds: float) -> dict[str, Any]:
    """Return options for the store's library. Listings are never cached: another machine may write to the store."""
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if url.startswith("s3://"):
        options["config_kwargs"] = {
            "connect_timeout": min(10.0, timeout_seconds),
            "read_timeout": timeout_seconds,
            "retries": {"max_attempts": 2},
        }
        if endpoint := os.environ.get("S3_ENDPOINT_URL"):  # the same as for shards
            options["endpoint_url"] = endpoint
    return options
