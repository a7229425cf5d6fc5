"""examples/hub_job.py: its header is what uv reads, and one call goes from a dataset of the hub to a model there."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

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


def start(hub: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the job on the dataset me/texts of a hub at this address."""
    return subprocess.run(
        [sys.executable, SCRIPT, "me/texts", "--size", "tiny", "--tokens", "20k", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub, "HF_TOKEN": "hf_none",
                          "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
    )  # fmt: skip


@pytest.mark.runs
@pytest.mark.timeout(300)
def test_of_a_dataset_with_splits_the_training_split_is_trained_on(tmp_path: Path) -> None:
    """Else the dataset's description is a document, and the model is measured on texts that it has learned."""
    splits = {f"data/{split}-00000-of-00001.parquet": rows for split, rows in (("train", 60), ("test", 20))}
    with running() as hub:
        hub.datasets["me/texts"] = {
            "README.md": b"---\nlicense: mit\n---\n" + b"A description of these texts.\n" * 400,
            ".gitattributes": b"*.parquet filter=lfs\n",
        }
        for number, (name, rows) in enumerate(splits.items()):
            content = io.BytesIO()
            parquet.write_table(pa.table({"text": make_texts(rows, seed=number)}), content)
            hub.datasets["me/texts"][name] = content.getvalue()
        job = start(hub.address, tmp_path, "--dry-run")
    assert job.returncode == 0, f"{job.stdout}\n{job.stderr}"
    assert "me/texts: not trained on: README.md, data/test-00000-of-00001.parquet\n" in job.stdout
    assert "in 1 .parquet" in job.stdout and ".md" not in job.stdout.partition("looking at")[2]
    assert [path.name for path in (tmp_path / "texts").rglob("*.parquet")] == ["train-00000-of-00001.parquet"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dataset_of_the_hub_becomes_a_model_of_the_hub(tmp_path: Path) -> None:
    """The job's disk is deleted at its end: a model that is not pushed has been trained for nothing."""
    with running() as hub:
        hub.datasets["me/texts"] = {f"{n:02}.txt": text.encode() for n, text in enumerate(make_texts(40))}
        job = start(hub.address, tmp_path, "--push", "me/model")
    assert job.returncode == 0, f"{job.stdout}\n{job.stderr}"
    assert {"config.json", "model.safetensors", "README.md"} <= hub.models["me/model"]["main"].keys()
