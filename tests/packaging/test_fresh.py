"""The package in an empty environment: from its wheel, by `pip install modernbert-train` outside the checkout,
and by `uv sync` and `uvx` in one.

Slow, and needs a package index: `make test-slow`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SHORT = ("phases.stable.tokens=14_000", "phases.stable.batch_warmup=null", "phases.stable.schedule.warmup_tokens=1_000")
SHORTER = ("phases.context=null", "phases.decay.tokens=6_000", "phases.decay.schedule.decay_tokens=6_000")
TESTED = "torch==2.13.0"


Program = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Program:
    """Run a program in tmp_path, without this environment; return its output."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}

    def run(*words: str, cwd: Path = tmp_path) -> str:
        done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    return run


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_in_a_fresh_environment_goes_from_text_to_a_model(tmp_path: Path, run: Program) -> None:
    """Plain pip with the tested versions; then the command, in a separate folder."""
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "wheels", str(ROOT))
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    pins = re.findall(r"^([\w.-]+==\S+) ", (ROOT / "requirements/pinned.txt").read_text(), re.MULTILINE)
    (tmp_path / "tested.txt").write_text("\n".join([TESTED, *pins]))
    run(sys.executable, "-m", "venv", "fresh")
    run("fresh/bin/python", "-m", "pip", "install", "-q", "-c", "tested.txt", str(wheel))
    assert "No broken requirements" in run("fresh/bin/python", "-m", "pip", "check")

    program = "fresh/bin/modernbert-train"
    output = run(program, "pretrain", "--preset", "quickstart", *SHORT, *SHORTER)
    assert "Done." in output and (tmp_path / "runs/quickstart/hf/model.safetensors").is_file()
    (tmp_path / "run.yaml").write_text(run(program, "init", "recipe", "modernbert-base"))
    assert "149,655,232" in run(program, "plan", "run.yaml")
    assert "mosaicml 0.32.1" in run(program, "doctor")
    assert "quickstart" in run(program, "report", "runs/quickstart")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_uv_sync_makes_an_environment_that_trains(tmp_path: Path, run: Program) -> None:
    """The newest versions that the package allows, not those that are pinned: uv resolves them itself; and uvx runs the
    command without an installation, as README says."""
    run(sys.executable, "-m", "venv", "tool")
    run("tool/bin/python", "-m", "pip", "install", "-q", "uv")
    checkout, uv = tmp_path / "checkout", str(tmp_path / "tool/bin/uv")
    made = shutil.ignore_patterns(
        ".git", ".*venv*", ".*cache*", "__pycache__", "runs", "data", "build", "dist", "*.egg-info"
    )
    shutil.copytree(ROOT, checkout, ignore=lambda folder, names: made(folder, names) if folder == str(ROOT) else ())
    run(uv, "sync", cwd=checkout)
    assert "pretrain" in run(f"{uv}x", "--from", ".", "modernbert-train", "--help", cwd=checkout)
    assert "mosaicml 0.32.1" in run(uv, "run", "modernbert-train", "doctor", cwd=checkout)
    output = run(uv, "run", "modernbert-train", "pretrain", "--preset", "quickstart", *SHORT, *SHORTER, cwd=checkout)
    assert "Done." in output and (checkout / "runs/quickstart/hf/model.safetensors").is_file()
