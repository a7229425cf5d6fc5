"""The page of runs, served while they train: `report --serve`.

The standard library's server, by default reachable from this machine only. The page polls every few seconds and
receives the changes; only new bytes of a run's record are read. A request whose Host header names another machine is
refused, so that no site on the web can read the runs through a browser.
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
from modernbert_train.errors import ConfigError
from modernbert_train.report.document import Known, WatchedRun, document, names_of, points_of
from modernbert_train.report.page import ONLY_OURS, render
from modernbert_train.report.run_list import require_folders, run_folders

PORT = 8421
LOOPBACK = "127.0.0.1"
MAX_RUNS = 1000
_SECONDS = 0.5  # time limit of reading for one answer
_MAX_BODY = 1 << 16  # bytes of a request


class Watch:
    """The runs of some folders, read as they grow.

    Args:
        folders: each a run, or a folder of runs, in which new ones may appear.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._runs: list[WatchedRun] = []
        self._lock = threading.Lock()
        self._next = 0

    def changes(self, shown: Sequence[Known]) -> dict[str, Any]:
        """Return the changes that a page does not have.

        Args:
            shown: its part of each run, in the order in which they joined.

        Returns:
            `runs`: number of a run and its changes; `more`: True if there is more to read.
        """
        with self._lock:
            more = self._refresh()
            changed = []
            for number, run in enumerate(self._runs):
                changes = run.changes(shown[number] if number < len(shown) else Known())
                if changes is not None:
                    changed.append([number, changes])
            return {"runs": changed, "more": more, "points": points_of(len(self._runs))}

    def _refresh(self) -> bool:
        """Read new lines for a moment; the next call continues with the next run."""
        self._join()
        until, more = time.monotonic() + _SECONDS, False
        for _ in range(len(self._runs)):
            if time.monotonic() > until:
                return True
            self._next = (self._next + 1) % len(self._runs)
            more = self._runs[self._next].refresh(max(0.01, until - time.monotonic())) or more
        return more

    def _join(self) -> None:
        watched = dict.fromkeys(run.folder for run in self._runs)
        folders = run_folders(self._folders, "metrics.jsonl", "config.yaml")
        new = [folder for folder in folders if folder not in watched][: max(0, MAX_RUNS - len(watched))]
        names = names_of([*watched, *new]) if new else []
        for folder, name in zip(new, names[len(watched) :], strict=True):
            self._runs.append(WatchedRun(folder, name, points_of(len(self._runs) + 1), live=True))


class Server(ThreadingHTTPServer):
    """Server of the page of `watch`, at `address`."""

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
        """Ignore a browser that closed the connection in the middle of an answer."""

    def allows(self, host: str) -> bool:
        """True if a Host header is an address or a name of this machine."""
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
        if self.path != "/data.json" or not length.isdecimal() or int(length) > _MAX_BODY:
            self.close_connection = True
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        changes = self.server.watch.changes(parse_known(self.rfile.read(int(length)).decode("ascii", "replace")))
        self._answer(json.dumps(changes, separators=(",", ":"), allow_nan=False).encode(), "application/json")

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
        """Log nothing: a line for each request would fill the terminal."""


def parse_known(text: str) -> list[Known]:
    """Parse 'choice.steps.revision' of each run, separated by commas; anything else is an unknown run."""
    counts = []
    for word in text.split(","):
        numbers = word.split(".")
        right = len(numbers) == len(Known._fields) and all(part.isdecimal() and len(part) < 16 for part in numbers)
        counts.append(Known(*map(int, numbers)) if right else Known())
    return counts


def open_server(folders: Sequence[Path], host: str = LOOPBACK, port: int | None = None) -> Server:
    """Return a server that listens, and answers once `serve_forever` is called.

    Args:
        folders: see `Watch`.
        host: address to listen on.
        port: None: PORT, or a free one if that is taken; 0: a free one.

    Raises:
        ConfigError: a folder is missing, or the address cannot be used.
    """
    require_folders("report --serve", folders)
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
