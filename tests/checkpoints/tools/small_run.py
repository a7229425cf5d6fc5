"""A run's folder with checkpoints of a tiny model, and the output of `checkpoints` about it."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modernbert_train.__main__ import main
from modernbert_train.checkpoints.checkpoint import Share, begin, finish, folder_of, write_part
from modernbert_train.checkpoints.copier import Copier, Order
from modernbert_train.checkpoints.store import Store
from modernbert_train.checkpoints.verified import require_files
from modernbert_train.config.load import to_yaml
from modernbert_train.config.schema import RunConfig
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from tests.support.small_checkpoint import CONFIG, flip_last_bit, sign, state_of, write

STEPS = (100, 200, 300, 400, 500)


@functools.cache
def _made() -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for step in STEPS:
        write(folder, step, milestone=step == 100, phase_end=step == 200)
    return folder


class SmallRun:
    """A run of five checkpoints: 100 is a milestone, 200 the end of a phase, and the newest three are kept."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], copies: bool = False) -> None:
        self._capsys = capsys
        self.folder = folder / "runs/small"
        self.checkpoints = self.folder / "checkpoints"
        self.url = f"file://{folder}/store"
        self.there = folder / "store/small"
        settings = replace(CONFIG.checkpoint, copy_to=self.url if copies else None, copy_timeout_seconds=5.0)
        self.config: RunConfig = replace(CONFIG, runs_folder=str(folder / "runs"), checkpoint=settings)
        shutil.copytree(_made(), self.checkpoints)
        self.set_config(self.config)
        record = [{"kind": "step", "step": step, "tokens": 10 * step, "time": 1000.0 + step} for step in STEPS]
        (self.folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in record))

    def set_config(self, config: RunConfig) -> None:
        self.config = config
        (self.folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")

    def write(self, step: int, **kinds: bool) -> Path:
        return write(self.checkpoints, step, **kinds)  # type: ignore[arg-type]

    def at(self, step: int) -> Path:
        return folder_of(self.checkpoints, step)

    def copy(self, *steps: int, url: str | None = None) -> None:
        """Copy steps into the replica, as training does after a step."""
        url = self.url if url is None else url
        order = Order(str(self.folder), url, self.config.name, self.config.checkpoint.keep, 20.0, os.getpid())
        copier = Copier(order, Store(url, self.config.name, 20.0))
        for step in steps:
            assert copier.copy(step, require_files(self.at(step)))
        copier.copy_records()

    def flip(self, step: int, name: str = "model.safetensors") -> None:
        flip_last_bit(self.at(step) / name)

    def says(self, action: str, *words: str | Path, code: int = 0) -> str:
        """Run an action, check its exit code, and return both its outputs."""
        self._capsys.readouterr()
        found = main(["checkpoints", action, *map(str, words)])
        out, error = self._capsys.readouterr()
        assert found == code, out + error
        assert "this is a bug" not in error and "Traceback" not in error, error
        return out + error

    def steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self.checkpoints.glob("step-*"))

    def bytes(self) -> dict[str, bytes]:
        """Return the bytes of every file of the checkpoints, by path below the run."""
        files = [path for path in self.checkpoints.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.checkpoints)): path.read_bytes() for path in files}


def as_schema_4(folder: Path) -> None:
    """Rewrite as the previous schema: whole tensors, and a manifest without slices."""

    def change(content: dict[str, Any]) -> None:
        content["schema"] = 4
        del content["weights"], content["optimizer"]

    sign(folder, change)


def write_sharded(checkpoints: Path, step: int, config: RunConfig) -> None:
    """Write as two ranks would: of every tensor the first has the upper half of the rows, the other the lower."""
    final, parameters = folder_of(checkpoints, step), dict(ModernBertForMaskedLM(config.model).named_parameters())
    staging, parts = begin(final, 1), []
    for rank in (0, 1):
        share = {name: torch.full_like(tensor.chunk(2)[rank], step) for name, tensor in parameters.items()}
        slices = {name: (rank * len(tensor.chunk(2)[0]), len(tensor)) for name, tensor in parameters.items()}
        parts.append(write_part(staging, Share(share, {}, slices, {}, f"-{rank:05d}")))
    text = {"state": state_of(step).as_json(), "config_yaml": to_yaml(config)}
    finish(staging, final, parts, **text, phase_end=False, milestone=False)
