"""The interface for programs and notebooks: each name does its command's work, and the notebook of the docs runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Callback
from composer.callbacks import EarlyStopper, LRMonitor
from composer.core import State
from composer.loggers import InMemoryLogger, Logger

import modernbert_train
from modernbert_train import (
    RunError,
    build_model,
    check_run,
    export_run,
    finetune_model,
    iter_batches,
    load_config,
    load_model,
    plan_run,
    train_run,
)
from tests.docs.notebook import page
from tests.support.paths import ROOT
from tests.support.runs import records
from tests.support.tiny_run import TinyRun


def test_no_name_is_a_folder_of_the_package() -> None:
    """An import of the folder would replace the function, and only in programs that use both."""
    inside = {path.stem for path in (ROOT / "modernbert_train").iterdir()}
    assert not inside & {*modernbert_train.__all__}
    assert all(callable(getattr(modernbert_train, name)) for name in modernbert_train.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = modernbert_train.trian  # type: ignore[attr-defined]


@pytest.mark.runs
@pytest.mark.parametrize(
    "code",
    [
        "from modernbert_train import load_config, check_run",
        "from modernbert_train.collate import pack; assert pack([3, 4], 8)",
    ],
)
def test_what_needs_no_torch_imports_none(code: str) -> None:
    code += "; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_mistakes_are_errors_that_a_program_can_catch(tiny_run: TinyRun) -> None:
    with pytest.raises(RunError, match="learning_rate"):
        load_config(*tiny_run("optim.learning_rate=1"))
    with pytest.raises(RunError, match=r"phases\.short\.tokens"):
        check_run(load_config(*tiny_run("phases.short.tokens=0")))


def test_batches_are_the_same_in_every_call_and_shared_by_ranks(tiny_run: TinyRun) -> None:
    config = load_config(*tiny_run("phases.short.microbatch_tokens=128"))
    first, again = ([step.microbatches for step in iter_batches(config)] for _ in range(2))
    assert len(first) == plan_run(config).steps > 5
    for mine, same in zip(first, again, strict=True):
        assert all(
            torch.equal(*pair)
            for a, b in zip(mine, same, strict=True)
            for pair in zip(a.tensors(), b.tensors(), strict=True)
        )
    ranks = [next(iter_batches(config, ranks=2, rank=rank)) for rank in range(2)]
    assert sum(len(step.microbatches) for step in ranks) == len(first[0])
    assert ranks[0].plan.tokens == ranks[1].plan.tokens


@pytest.mark.runs
def test_embeddings_are_those_of_the_exported_model(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Indexing texts with one and querying with the other would find nothing; test_embed.py has transformers'."""
    config = load_config(*tiny_run())
    folder = train_run(config)
    hf = export_run(config, tmp_path / "hf")
    texts = ["w3 w4 w5", "w9", " ".join(["w7 w8"] * 200)]
    mine = load_model(folder).embed(texts)
    assert torch.equal(load_model(hf).embed(texts), mine)
    assert mine.isfinite().all() and len(mine) == 3
    one = load_model(folder).embed(texts[1])  # a text, and no list of its letters
    assert one.shape == (1, mine.shape[1]) and torch.allclose(one[0], mine[1], atol=1e-6)
    with pytest.raises(TypeError, match=r"texts\[1\]=7: is no text"):
        load_model(folder).embed(["w3", 7])  # type: ignore[list-item]
    fresh, trained = (
        dict(model_.model.named_parameters()) for model_ in (build_model(config), load_model(folder).module)
    )
    assert any(not torch.equal(fresh[name], trained[name]) for name in fresh)


class Heard(Callback):
    """Counts batches, and stops the run by an error at a given one."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.events: list[str] = []
        self.losses: dict[int, float] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        self.events.append("fit_start")

    def batch_end(self, state: State, logger: Logger) -> None:
        assert isinstance(state.total_loss_dict, dict)
        self.losses[state.timestamp.batch.value] = state.total_loss_dict["loss/train/total"]
        if state.timestamp.batch.value == self.fail_at:
            raise RuntimeError("the callback's own")

    def fit_end(self, state: State, logger: Logger) -> None:
        self.events.append("fit_end")


@pytest.mark.runs
def test_a_callback_of_the_program_hears_a_run_and_its_resumption(tiny_run: TinyRun, tmp_path: Path) -> None:
    config = load_config(*tiny_run("checkpoint.interval_steps=3", "phases.long=null"))
    first, second = Heard(fail_at=5), Heard()
    with pytest.raises(RuntimeError, match="the callback's own"):
        train_run(config, callbacks=[first])
    train_run(config, callbacks=[second, LRMonitor])
    assert first.events == ["fit_start"] and second.events == ["fit_start", "fit_end"]
    assert [*first.losses] == [1, 2, 3, 4, 5] and [*second.losses][:2] == [4, 5]
    assert first.losses[4] == second.losses[4]
    steps = {line["step"]: line["loss"] for line in records(tmp_path / "runs/tiny")}
    assert steps == pytest.approx(first.losses | second.losses)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (print, "is no callback. Give subclasses of composer.Callback"),
        (type("Needy", (Callback,), {"__init__": lambda self, path: None}), "Give an instance instead"),
        (EarlyStopper("loss", "eval"), "cannot work here, it reads Composer's metrics"),
        (InMemoryLogger(), r"Name it in loggers:"),
    ],
)
def test_a_callback_that_would_do_nothing_is_refused_before_the_run(
    tiny_run: TinyRun, tmp_path: Path, wrong: Any, message: str
) -> None:
    with pytest.raises(RunError, match=rf"callbacks\[0\]=.*{message}"):
        train_run(load_config(*tiny_run()), callbacks=[wrong])
    assert not (tmp_path / "runs").exists()


def test_a_run_without_its_data_is_refused_before_its_folder_is_made(tiny_run: TinyRun, tmp_path: Path) -> None:
    """As the command does; else the next try finds a folder that holds nothing of a run."""
    with pytest.raises(RunError, match="absent: no such folder"):
        train_run(load_config(*tiny_run("data.validation=absent")))
    assert not (tmp_path / "runs").exists()


@pytest.mark.runs
def test_fine_tuning_gives_its_figures(tiny_run: TinyRun, tmp_path: Path) -> None:
    folder = train_run(load_config(*tiny_run()))
    rows = "".join(f"w{3 + number % 2} w9\t{'ab'[number % 2]}\n" for number in range(64))
    (tmp_path / "texts.tsv").write_text(f"text\tlabel\n{rows}")
    task = tmp_path / "task.yaml"
    task.write_text(f"kind: single-label\ntrain: {tmp_path}/texts.tsv\nvalidation: {{dev: {tmp_path}/texts.tsv}}\n")
    result = finetune_model(task, folder, f"runs_folder={tmp_path}/runs", "epochs=1", "compute.device=cpu")
    assert result["task"] == "task" and 0 <= result["figures"]["dev"]["accuracy"] <= 1


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Every cell as it is, in one interpreter and an empty folder, without the environment's commands on PATH."""
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text())["cells"]
    assert (ROOT / "docs/notebook.md").read_text() == page(cells), "write it again: python -m tests.docs.notebook"
    script = tmp_path / "notebook.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": os.defpath}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "guessing evenly 7.62" in done.stdout and "already trained to its end" in done.stdout
