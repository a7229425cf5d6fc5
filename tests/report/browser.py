"""A real headless browser, driven over chromedriver's HTTP interface with the standard library only."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
PRESS, RELEASE = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}
SECONDS = 120  # timeout of one answer, for a hung browser


class Browser:
    """One page of a browser: open a file, run JavaScript, move the pointer."""

    def __init__(self, session: str) -> None:
        self.session = session

    def open(self, page: Path, width: int = 1000, height: int = 900, *, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._devtools("Emulation.setEmulatedMedia", {"features": scheme})
        self.open_at(page)

    def open_at(self, page: Path | str, fragment: str = "") -> None:
        """Open a file or an address in the current window."""
        address = page if isinstance(page, str) else page.resolve().as_uri()
        _post(f"{self.session}/url", {"url": "about:blank"})
        _post(f"{self.session}/url", {"url": address + fragment})

    def run_later(self, script: str, seconds: float = 60) -> Any:
        """Repeat a script until it returns neither null, false nor empty; return its result."""
        until = time.monotonic() + seconds
        while not (found := self.run(script)) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def drag(self, start: float, end: float, y: float) -> None:
        """Press at a point of the window, move sideways, release."""
        self._mouse(_move(start, y), PRESS, _move((start + end) / 2, y, 20), _move(end, y, 20), RELEASE)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a JavaScript function; an element that it returns is passed to `point` and `click`."""
        return _post(f"{self.session}/execute/sync", {"script": script, "args": list(arguments)})

    def point(self, x: float, y: float, *, click: bool = False) -> None:
        """Move the pointer to a point of the window, and optionally click."""
        self._mouse(_move(x, y), *(PRESS, RELEASE) * click)

    def _mouse(self, *actions: dict[str, Any]) -> None:
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions}
        _post(f"{self.session}/actions", {"actions": [mouse]})

    def to(self, selector: str, *, click: bool = False) -> None:
        """Scroll to the first element of a CSS selector and point at its middle."""
        middle = (
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]"
        )
        self.point(*self.run(middle, selector), click=click)

    def errors(self) -> list[str]:
        """Return the errors of the pages since the last call."""
        return [entry["message"] for entry in _post(f"{self.session}/se/log", {"type": "browser"})]

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return _post(f"{self.session}/goog/cdp/execute", {"cmd": command, "params": parameters})


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with a fresh profile; skip the test if none is installed."""
    driver = shutil.which("chromedriver")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or program is None:
        pytest.skip("no chromium with its chromedriver (Debian: chromium, chromium-driver)")
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = next(found[1] for line in process.stdout if (found := re.search(r"successfully on port (\d+)", line)))
        options = {"binary": program, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        session = _post(f"http://127.0.0.1:{port}/session", {"capabilities": wanted})["sessionId"]
        address = f"http://127.0.0.1:{port}/session/{session}"
        try:
            yield Browser(address)
        finally:
            _send(urllib.request.Request(address, method="DELETE"))
    finally:
        process.terminate()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def _move(x: float, y: float, milliseconds: int = 0) -> dict[str, Any]:
    return {"type": "pointerMove", "x": round(x), "y": round(y), "duration": milliseconds}


def _post(url: str, body: dict[str, Any]) -> Any:
    return _send(urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}))


def _send(request: urllib.request.Request) -> Any:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=SECONDS) as answer:
        return json.load(answer)["value"]
