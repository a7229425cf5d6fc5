"""examples/hub_job.py: its header is what uv reads, and one call goes from a dataset of the hub to a model there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.hub_stand_in import running
from tests.support.make_shards import make_texts
from tests.support.paths import ROOT

SCRIPT = ROOT / "examples/hub_job.py"


def test_the_header_asks_for_this_package_and_its_pythons() -> None:
    """PEP 723: a job service makes the environment of the script from these lines alone."""
    (header,) = re.findall(r"(?m)^# /// script$\s((?:^#(?:| .*)$\s)+)^# ///$", SCRIPT.read_text(encoding="utf-8"))
    wanted = tomllib.loads("".join(line[2:] for line in header.splitlines(keepends=True)))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert wanted["requires-python"] == project["requires-python"]
    assert project["name"] in wanted["dependencies"] and project["name"] in wanted["tool"]["uv"]["sources"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dataset_of_the_hub_becomes_a_model_of_the_hub(tmp_path: Path) -> None:
    """The job's disk is deleted at its end: a model that is not pushed has been trained for nothing."""
    with running() as hub:
        hub.datasets["me/texts"] = {f"{n:02}.txt": text.encode() for n, text in enumerate(make_texts(40))}
        job = subprocess.run(
            [sys.executable, SCRIPT, "me/texts", "--push", "me/model", "--size", "tiny", "--tokens", "20k"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.address, "HF_TOKEN": "hf_none",
                              "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
        )  # fmt: skip
    assert job.returncode == 0, f"{job.stdout}\n{job.stderr}"
    assert {"config.json", "model.safetensors", "README.md"} <= hub.models["me/model"]["main"].keys()
