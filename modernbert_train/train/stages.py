"""What a start is busy with until the first step, said as it begins: loading, reading and compiling take their time."""

from __future__ import annotations

import os


def stage(text: str) -> None:
    """Say what comes next; of several ranks only the first speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{text} ...", flush=True)
