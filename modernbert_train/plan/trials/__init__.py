"""Try what a run may compute with on this machine: attention kernels, torch.compile, the fused optimizer, backends.

A trial computes a few numbers, forward and backward, on the device that a run would take, and compares them with the
same written out. `attempt` makes it in a process of its own with a time limit, so a kernel that crashes, hangs or
leaves the GPU in disorder costs one line, and nothing that was not tried is called usable. table.py lists the trials.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

MARK = "trial: "  # before the answer, among whatever libraries print
# a program of a user's own, which knows nothing of this project
IMPORTS = f"""\
import json
try:
    import composer, streaming
    outcome = True, f"composer {{composer.__version__}}, streaming {{streaming.__version__}}"
except Exception as error:
    outcome = False, f"{{type(error).__name__}}: {{error}}"
print({MARK!r} + json.dumps(outcome))
"""


@dataclass(frozen=True)
class Outcome:
    """Result of a trial: True if usable, and a sentence."""

    usable: bool
    text: str


def attempt(command: list[str], seconds: float) -> Outcome:
    """Make a trial in a process of its own, with all that it starts, in a folder that is gone afterwards.

    Args:
        command: of the process; see `command_of`.
        seconds: after which it is taken to hang.
    """
    with tempfile.TemporaryDirectory(prefix="modernbert-train-") as folder:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",  # what lies in a cache would not be tried
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return Outcome(False, f"it gave no answer within {seconds:g} s")
        finally:
            if process.returncode is None:  # it hangs, or somebody ends the doctor
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return _outcome(output, process.wait())


def _outcome(output: str, code: int) -> Outcome:
    answers = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    if answers:
        usable, text = json.loads(answers[-1])
        return Outcome(usable, without_paths(text))
    return Outcome(False, f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")


def command_of(name: str) -> list[str]:
    """Return the command that makes a trial of TRIALS, from any folder."""
    root = str(Path(__file__).parents[3])
    call = f"from modernbert_train.plan.trials.table import answer; answer({name!r})"
    code = f"import sys; sys.path.insert(0, {root!r}); {call}"
    return [sys.executable, "-c", code]


def without_paths(text: str) -> str:
    """The first line of a message, without paths, which do not belong into a public report."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return re.sub(r"(?<![\w.])~?/[\w.@+-]+(/[\w.@+-]*)+", "...", first)[:300]
