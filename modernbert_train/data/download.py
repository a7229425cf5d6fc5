"""Fetch one file from a remote store by Streaming's downloaders, with a time limit and a clear error for every failure.

Streaming supports the stores (s3, gs, oci, azure, hf, dbfs, sftp) and their credentials. Its downloaders cannot be
interrupted, and restart their own timeout with each retry. So an attempt runs in a thread, which is abandoned when no
byte has arrived for the configured time.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from modernbert_train import import_hook
from modernbert_train.errors import ConfigError, DataError, RunError, StorageError

_LOOK_SECONDS = 0.2  # interval between two checks of the bytes that have arrived
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0  # backoff between attempts in seconds, doubled each time
# error codes of S3, and names of the exceptions of the other stores' libraries
_MISSING = {"404", "NoSuchKey", "NoSuchBucket", "NotFound", "EntryNotFoundError", "RepositoryNotFoundError"}
_REFUSED = {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
_REFUSED |= {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "ProfileNotFound"}
_REFUSED |= {"Forbidden", "Unauthorized"}
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


class Patience:
    """A timeout that restarts only when new bytes arrive, and not with each attempt."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._most = 0
        self._since = time.monotonic()

    def saw(self, arrived: int) -> None:
        """Record the number of bytes that have arrived."""
        if arrived > self._most:
            self._most, self._since = arrived, time.monotonic()

    def over(self, ahead: float = 0.0) -> bool:
        """Return True if the time is over, or will be in `ahead` seconds."""
        return time.monotonic() + ahead - self._since > self.seconds


class Downloader:
    """Fetches files of one remote folder.

    Args:
        url: the folder, without a slash at its end.
        timeout_seconds: a file is given up if nothing new arrives for so long, attempts and pauses included.
    """

    def __init__(self, url: str, timeout_seconds: float) -> None:
        self.url = url
        self.timeout_seconds = timeout_seconds
        self._idle: dict[int, list[Any]] = {}  # process id -> Streaming's downloaders that are free

    def fetch(self, name: str, scratch: Path, max_bytes: int | None = None) -> Path:
        """Fetch one file.

        Args:
            name: its path in the remote folder.
            scratch: an empty folder; the file is created in it, unverified.
            max_bytes: give up once more than this has arrived.

        Returns:
            Path of the file.

        Raises:
            ConfigError: the store is not supported here, or rejects the credentials.
            DataError: the file does not exist, or is larger than max_bytes.
            StorageError: the store cannot be reached in time, or the disk refuses the file.
        """
        patience = Patience(self.timeout_seconds)
        pause, attempts = _FIRST_PAUSE, 0
        while True:
            attempts += 1
            target = scratch / f"attempt-{attempts}"
            try:
                self._attempt(name, target, patience, max_bytes)
                return target
            except RunError:
                raise
            except Exception as error:  # any library's; reported if it persists until the timeout
                self._raise_if_final(name, error)
                if patience.over(ahead=pause):
                    raise StorageError(
                        f"{self.url}/{name}: not fetched in {attempts} attempts; nothing new arrived for "
                        f"{self.timeout_seconds:g} s (data.download_timeout_seconds). The last attempt: "
                        f"{type(error).__name__}: {error}. See that the store can be reached from this machine (for "
                        "S3: S3_ENDPOINT_URL, proxies); the same command resumes from the newest checkpoint."
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _attempt(self, name: str, target: Path, patience: Patience, max_bytes: int | None) -> None:
        outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        threading.Thread(target=self._download, args=(name, target, outcome), daemon=True).start()
        while True:
            try:
                error = outcome.get(timeout=_LOOK_SECONDS)
                break
            except queue.Empty:
                arrived = _arrived(target)
                patience.saw(arrived)
                if max_bytes is not None and arrived > max_bytes:
                    raise DataError(
                        f"{self.url}/{name}: more than {arrived} bytes, index.json says {max_bytes}. Upload the folder "
                        "again from a whole copy."
                    ) from None
                if patience.over():
                    raise TimeoutError("the store does not answer, or stopped in the middle") from None
        if error is not None:
            raise error
        if not target.is_file():  # Streaming's downloader of gs:// with keys swallows 400, 500 and 503
            raise ConnectionError("the store's downloader ended without an error, and the file has not come")

    def _download(self, name: str, target: Path, outcome: queue.SimpleQueue[BaseException | None]) -> None:
        try:
            idle = self._idle.setdefault(os.getpid(), [])  # a forked process must not talk on its parent's connections
            downloader = idle.pop() if idle else _streaming_downloader(self.url)
            downloader.download(f"{self.url}/{name}", str(target), self.timeout_seconds)
            idle.append(downloader)
            outcome.put(None)
        except BaseException as error:  # raised in the waiting thread
            outcome.put(error)

    def _raise_if_final(self, name: str, error: Exception) -> None:
        """Raise an error that another attempt would not fix."""
        where, reason = f"{self.url}/{name}", f"{type(error).__name__}: {error}"
        # botocore's ClientError, which Streaming's downloader of gs:// hides behind a FileNotFoundError
        response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        names = {kind.__name__ for kind in type(error).__mro__} | {str(code)}
        if names & _REFUSED or "Application Default Credentials" in str(error):
            raise ConfigError(
                f"{where}: access refused ({code or reason}). Give this machine credentials that may read it (for S3: "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile, and S3_ENDPOINT_URL for stores other than "
                "AWS; for Google: GCS_KEY and GCS_SECRET), or correct the bucket's name."
            ) from None
        if names & _MISSING or (isinstance(error, FileNotFoundError) and error.errno is None):  # not the disk's
            raise DataError(
                f"{where}: no such object, or no such bucket. Correct the URL, or upload the folder again from a "
                "whole copy."
            ) from None
        if isinstance(error, OSError) and error.errno in _DISK:
            raise StorageError(
                f"{where}: cannot be kept in the cache ({error.strerror}). Free some space, set "
                "data.cache_limit_bytes, or point data.cache_folder at another disk."
            ) from None
        if isinstance(error, ImportError) or "Unsupported remote path" in str(error):
            raise ConfigError(
                f"{where}: Streaming cannot read from this store here ({reason}). Install the package it names, or use "
                "a store that is supported: s3, gs, oci, azure, hf, dbfs, sftp."
            ) from None


def _streaming_downloader(url: str) -> Any:
    import_hook.activate()
    from streaming.base.storage import CloudDownloader

    return CloudDownloader.get(url)


def _arrived(target: Path) -> int:
    """Return the bytes of a file and of the temporary files that a downloader writes next to it."""
    total = 0
    for path in target.parent.glob(f"{target.name}*"):
        with suppress(OSError):
            total += path.stat().st_size
    return total
