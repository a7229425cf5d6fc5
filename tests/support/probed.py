"""Call a verb in a process that reports its imports."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT

HEAVY = ["torch", "composer", "streaming", "transformers", "datasets", "fsspec"]
PROBE = """\
import sys
from modernbert_train.__main__ import main
code = main(sys.argv[1:])
print("loaded:", *(name for name in {heavy!r} if name in sys.modules))
sys.exit(code)
"""


def call_probed(*words: str) -> subprocess.CompletedProcess[str]:
    """The same in one process that ends at a warning, and says at its end which heavy libraries it has loaded."""
    return subprocess.run(
        [sys.executable, "-c", PROBE.format(heavy=HEAVY), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=60,
    )
