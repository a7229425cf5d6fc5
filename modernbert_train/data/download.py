"""One file out of a remote store, by Streaming's own downloaders: bounded in time, and every failure has a name.

Streaming knows the stores (s3, gs, oci, azure, hf, dbfs, sftp) and how to sign in to each; patience is ours. Its
downloaders cannot be interrupted, and wait for each of their own retries anew, so an attempt runs in a thread that is
left behind when no byte has arrived for the time that the configuration allows.
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

_LOOK_SECONDS = 0.2  # between two looks at how much has arrived
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0  # seconds between attempts, doubled from one to the next
# codes of S3's errors, and names of the exceptions of the other stores' libraries
_MISSING = {"404", "NoSuchKey", "NoSuchBucket", "NotFound", "EntryNotFoundError", "RepositoryNotFoundError"}
_REFUSED = {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
_REFUSED |= {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "ProfileNotFound"}
_REFUSED |= {"Forbidden", "Unauthorized"}
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


class Patience:
    """Is over once nothing new has arrived for so many seconds, however often it was begun anew."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._most = 0
        self._since = time.monotonic()

    def saw(self, arrived: int) -> None:
        """So many bytes are there now."""
        if arrived > self._most:
            self._most, self._since = arrived, time.monotonic()

    def over(self, ahead: float = 0.0) -> bool:
        """Whether it is over, or will be in so many seconds."""
        return time.monotonic() + ahead - self._since > self.seconds


class Downloader:
    """Fetches files of one remote folder.

    Args:
        url: the folder, without a slash at its end.
        timeout_seconds: a file of which nothing new arrives for so long is given up, attempts and pauses included.
    """

    def __init__(self, url: str, timeout_seconds: float) -> None:
        self.url = url
        self.timeout_seconds = timeout_seconds
        self._idle: dict[int, list[Any]] = {}  # Streaming's downloaders that are not at work, of each process

    def fetch(self, name: str, scratch: Path, max_bytes: int | None = None) -> Path:
        """Fetch one file.

        Args:
            name: of the file, in the remote folder.
            scratch: an empty folder of the caller's own; the file is made in it, unverified.
            max_bytes: give up once more than this has arrived.

        Returns:
            Where the file is.

        Raises:
            ConfigError: the store is not supported here, or refuses the credentials.
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
            except Exception as error:  # of whatever library reads this store; told if it comes again until time is up
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
        except BaseException as error:  # raised where it is waited for
            outcome.put(error)

    def _raise_if_final(self, name: str, error: Exception) -> None:
        """Raise what trying again would not fix."""
        where, found = f"{self.url}/{name}", f"{type(error).__name__}: {error}"
        # botocore's ClientError, which Streaming's downloader of gs:// hides behind a FileNotFoundError
        response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        names = {kind.__name__ for kind in type(error).__mro__} | {str(code)}
        if names & _REFUSED or "Application Default Credentials" in str(error):
            raise ConfigError(
                f"{where}: access refused ({code or found}). Give this machine credentials that may read it (for S3: "
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
                f"{where}: Streaming cannot read from this store here ({found}). Install the package it names, or use "
                "a store that is supported: s3, gs, oci, azure, hf, dbfs, sftp."
            ) from None


def _streaming_downloader(url: str) -> Any:
    import_hook.activate()
    from streaming.base.storage import CloudDownloader

    return CloudDownloader.get(url)


def _arrived(target: Path) -> int:
    """Bytes of a file and of what a downloader writes beside it before the file is whole."""
    total = 0
    for path in target.parent.glob(f"{target.name}*"):
        with suppress(OSError):
            total += path.stat().st_size
    return total
