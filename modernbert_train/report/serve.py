"""The page of runs, served while they train: `report --serve`.

The standard library's server, on this machine alone unless asked otherwise. The page asks again every few seconds and
is given what is new; of a run's record only the bytes that have come are read. A request under a name that is not this
machine's is refused, so that no site on the web can have a browser read the runs.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from modernbert_train.core.files import os_errors_as
from modernbert_train.core.text import shorten
from modernbert_train.errors import ConfigError
from modernbert_train.report.document import Known, WatchedRun, document, points_of
from modernbert_train.report.page import ONLY_OURS, render

PORT = 8421
LOOPBACK = "127.0.0.1"
MOST_RUNS = 1000
_SECONDS = 0.5  # of reading, after which a page is given what there is
_MOST_BODY = 1 << 16  # bytes of a question


class Watch:
    """The runs of some folders, as far as they have got.

    Args:
        folders: each a run, or a folder of runs, in which new ones may appear.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._runs: list[WatchedRun] = []
        self._known: set[Path] = set()
        self._lock = threading.Lock()
        self._next = 0

    def changes(self, known: Sequence[Known]) -> dict[str, Any]:
        """What a page does not have.

        Args:
            known: what it has of each run, in the order in which they joined.

        Returns:
            `runs`: number of a run and what is new of it; `more`: whether there is more to read yet.
        """
        with self._lock:
            more = self._refresh()
            found = []
            for number, run in enumerate(self._runs):
                changes = run.changes(known[number] if number < len(known) else Known())
                if changes is not None:
                    found.append([number, changes])
            return {"runs": found, "more": more, "points": points_of(len(self._runs))}

    def _refresh(self) -> bool:
        """Read what has come, a moment long, and go on with the next run another time."""
        self._join()
        until, more = time.monotonic() + _SECONDS, False
        for _ in range(len(self._runs)):
            if time.monotonic() > until:
                return True
            self._next = (self._next + 1) % len(self._runs)
            more = self._runs[self._next].refresh(max(0.01, until - time.monotonic())) or more
        return more

    def _join(self) -> None:
        folders = [found for folder in self._folders for found in _runs_in(folder) if found not in self._known]
        for folder in folders[: max(0, MOST_RUNS - len(self._runs))]:
            names = {run.name for run in self._runs}
            name = shorten(folder.resolve().name, 200)
            self._known.add(folder)
            self._runs.append(
                WatchedRun(
                    folder,
                    name if name not in names else shorten(str(folder.resolve()), 200),
                    points_of(len(self._known)),
                    live=True,
                )
            )


def _runs_in(folder: Path) -> list[Path]:
    if _is_run(folder):
        return [folder]
    with suppress(OSError):
        return [each for each in sorted(folder.iterdir()) if _is_run(each)]
    return []


def _is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() or (folder / "config.yaml").is_file()


class Server(ThreadingHTTPServer):
    """Serves the page of `watch`; `address` is where."""

    daemon_threads = True
    allow_reuse_address = False

    def __init__(self, watch: Watch, host: str, port: int) -> None:
        self.watch = watch
        self.host = host
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that left in the middle of an answer is none of our business."""

    def allows(self, host: str) -> bool:
        """Whether a request under this name is meant for us: an address, or a name of this machine."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else host
        name = name.strip("[]").lower()
        if name in ("localhost", self.host.lower(), socket.gethostname().lower()):
            return True
        with suppress(ValueError):
            return bool(ipaddress.ip_address(name))
        return False


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "modernbert-train"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        if self._refuses():
            return
        if self.path.split("?")[0] == "/":
            empty = document((), title="runs", points=points_of(1), live=True)
            self._answer(render(empty).encode(), "text/html; charset=utf-8")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        if self._refuses():
            return
        length = self.headers.get("Content-Length", "")
        if self.path != "/data.json" or not length.isdecimal() or int(length) > _MOST_BODY:
            self.close_connection = True
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        found = self.server.watch.changes(parse_known(self.rfile.read(int(length)).decode("ascii", "replace")))
        self._answer(json.dumps(found, separators=(",", ":"), allow_nan=False).encode(), "application/json")

    def _refuses(self) -> bool:
        if self.server.allows(self.headers.get("Host", "")):
            return False
        self.close_connection = True
        self.send_error(HTTPStatus.FORBIDDEN, "This name is not one of this machine.")
        return True

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Security-Policy", f"{ONLY_OURS}; frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for each question would fill the terminal."""


def parse_known(text: str) -> list[Known]:
    """'choice.steps.revision' of each run, with commas between; what is none of that is of an unknown run."""
    found = []
    for word in text.split(","):
        parts = word.split(".")
        right = len(parts) == len(Known._fields) and all(part.isdecimal() and len(part) < 16 for part in parts)
        found.append(Known(*map(int, parts)) if right else Known())
    return found


def open_server(folders: Sequence[Path], host: str = LOOPBACK, port: int | None = None) -> Server:
    """A server that listens, and answers once `serve_forever` is called.

    Args:
        folders: see `Watch`.
        host: address to listen on.
        port: None: PORT, or a free one where that is taken; 0: a free one.

    Raises:
        ConfigError: a folder is not there, or the address cannot be had.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"report --serve {folder}: no such folder. Name runs, or a folder that holds runs.")
    watch = Watch(folders)
    where = f"report --serve --host {host} --port {port or PORT}: cannot listen there"
    with os_errors_as(ConfigError, where, "Name another port, or --port 0 for any that is free."):
        if port is not None:
            return Server(watch, host, port)
        with suppress(OSError):
            return Server(watch, host, PORT)
        return Server(watch, host, 0)


def serve(folders: Sequence[Path], host: str = LOOPBACK, port: int | None = None) -> None:
    """Serve the page until a signal ends the process; see `open_server`."""
    with open_server(folders, host, port) as server:
        print(f"{server.address}  (Ctrl-C ends it)")
        server.serve_forever(poll_interval=0.2)
