"""The wheel in an environment that has nothing else, outside the checkout: what `pip install modernbert-train` gives.

Slow, and needs a package index: `make test-wheel`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ("phases.stable.tokens=14_000", "phases.stable.batch_warmup=null", "phases.stable.schedule.warmup_tokens=1_000")
SHORTER = ("phases.context=null", "phases.decay.tokens=6_000", "phases.decay.schedule.decay_tokens=6_000")
TESTED = "torch==2.13.0"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_in_a_fresh_environment_goes_from_text_to_a_model(tmp_path: Path) -> None:
    """Plain pip with the versions that are tested; then the command, in a folder of its own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "wheels", str(ROOT))
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    pins = re.findall(r"^([\w.-]+==\S+) ", (ROOT / "requirements/pinned.txt").read_text(), re.MULTILINE)
    (tmp_path / "tested.txt").write_text("\n".join([TESTED, *pins]))
    run(sys.executable, "-m", "venv", "fresh")
    run("fresh/bin/python", "-m", "pip", "install", "-q", "-c", "tested.txt", str(wheel))
    assert "No broken requirements" in run("fresh/bin/python", "-m", "pip", "check")

    program = "fresh/bin/modernbert-train"
    output = run(program, "quickstart", *SHORT, *SHORTER)
    assert "Done." in output and (tmp_path / "runs/quickstart/hf/model.safetensors").is_file()
    (tmp_path / "run.yaml").write_text(run(program, "init", "recipe", "modernbert-base"))
    assert "149,655,232" in run(program, "plan", "run.yaml")
    assert "mosaicml 0.32.1" in run(program, "doctor")
    assert "quickstart" in run(program, "report", "runs/quickstart")
