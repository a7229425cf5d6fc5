"""Try attention kernels, torch.compile, the fused optimizer and backends on this machine.

A trial computes a few numbers, forward and backward, on the device that a run would use, and compares them with a plain
reference. `attempt` runs it in a separate process with a time limit, so a kernel that crashes, hangs or leaves the GPU
in disorder costs one line. Only features that were tried count as usable. trials_table.py lists the trials.
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

MARK = "trial: "  # prefix of the answer, among other output of libraries
# a user's program, independent of this project
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
    """Run a trial in a separate process group, in a temporary folder.

    Args:
        command: the process's command; see `command_of`.
        seconds: time after which it counts as hung.
    """
    with tempfile.TemporaryDirectory(prefix="modernbert-train-") as folder:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",  # a cached kernel would not be tried
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
            if process.returncode is None:  # it hangs, or doctor is being interrupted
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
    """Return the command that runs a trial of TRIALS, from any folder."""
    root = str(Path(__file__).parents[3])
    call = f"from modernbert_train.plan.trials.trials_table import answer; answer({name!r})"
    code = f"import sys; sys.path.insert(0, {root!r}); {call}"
    return [sys.executable, "-c", code]


def without_paths(text: str) -> str:
    """Return the first line of a message without paths, which do not belong in a public report."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return re.sub(r"(?<![\w.])~?/[\w.@+-]+(/[\w.@+-]*)+", "...", first)[:300]
