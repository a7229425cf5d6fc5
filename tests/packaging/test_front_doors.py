"""Each front door as a user opens it: new processes in an empty folder, with their own imports, replacing nothing.

`pretrain` of a user's texts is in tests/launch/test_pretrain.py, the witness under torchrun in
tests/examples/test_plain_loop.py, the wheel in test_fresh.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.labelled import sentences, write_tsv
from tests.support.paths import ROOT
from tests.support.runs import records

TINY = "runs/quickstart-tiny"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_quickstart_and_each_verb_after_it(tmp_path: Path) -> None:
    """Any of them broken outside the tests' own processes would be a user's first impression."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MODERNBERT"))}

    def call(*words: str) -> str:
        command = [sys.executable, "-m", "modernbert_train", *words]
        environment["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    call("pretrain", "--preset", "quickstart", "--tiny")
    config = f"{TINY}/config.yaml"
    call("train", config, "name=again")
    assert records(tmp_path / "runs/again") == records(tmp_path / TINY)
    rows = [f"phases.{phase}.batch_rows=2" for phase in ("stable", "context", "decay")]
    call("launch", config, "--ranks", "2", "name=two-ranks", "phases.stable.batch_warmup=null", *rows)
    one, two = (records(tmp_path / run)[-1] for run in (TINY, "runs/two-ranks"))
    assert two["tokens"] == pytest.approx(one["tokens"], rel=0.05) and 0 < two["loss"] < 1.2 * one["loss"]
    call("eval", TINY)
    call("export", TINY, "--out", "exported")
    assert (tmp_path / "exported/model.safetensors").read_bytes() == (
        tmp_path / TINY / "hf/model.safetensors"
    ).read_bytes()
    for name, seed in (("train", 1), ("dev", 2)):
        write_tsv(tmp_path / f"{name}.tsv", ("text", "label"), sentences(60, seed))
    task = {"kind": "single-label", "train": "train.tsv", "validation": {"dev": "dev.tsv"}, "epochs": 1}
    (tmp_path / "tone.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    call("finetune", "tone.yaml", "--model", TINY)
    (result,) = (tmp_path / "runs").glob("tone-*/result.json")
    assert 0 <= json.loads(result.read_text())["figures"]["dev"]["accuracy"] <= 1
