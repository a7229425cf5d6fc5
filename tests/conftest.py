"""What tests of several folders share: a data set of a few kilobytes, and a run that trains on it within seconds."""

from __future__ import annotations

import gc
import multiprocessing.process
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from modernbert_train.core import installed
from tests import warm
from tests.compiled import CACHE
from tests.data.make_shards import make_documents, make_shards, make_tokenizer

TinyRun = Callable[..., list[str]]
ROOT = Path(__file__).resolve().parents[1]

# keys of metrics.jsonl in which two runs that train the same may differ: how long it took, and what it took
TIMES = (
    "time", "seconds", "tokens_per_second", "rank_flops_per_second", "data_wait_share", "peak_memory_bytes",
    "seconds_left", "mfu",
)  # fmt: skip

TINY_YAML = """\
name: tiny
runs_folder: {runs}
seed: 5
compute: {{device: cpu}}
data:
  train: {data}/train
  validation: {data}/validation
  tokenizer: {data}/tokenizer
  packing_window: 8
  max_wait_rows: 32
  shuffle_block_shards: 2
  num_workers: 0
model:
  vocab_size: 512
  hidden_size: 32
  num_layers: 4
  num_heads: 2
  intermediate_size: 48
  local_attention: 16
  attention_out_dropout: 0.0
optim:
  name: stable_adamw
  lr: 5e-3
phases:
  short:
    tokens: 4000
    row_tokens: 64
    batch_rows: 8
    microbatch_tokens: 256
    batch_warmup: {{start_rows: 4, step_rows: 4, tokens: 800}}
    schedule: {{warmup_tokens: 500}}
  long:
    tokens: 2000
    row_tokens: 128
    batch_rows: 4
    microbatch_tokens: 256
    model: {{global_rope_theta: 160_000}}
    schedule: {{decay_tokens: 1000}}
checkpoint:
  interval_seconds: null
logging:
  progress_bar: false
"""


RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


# by far the longest; where several processes share the tests by file, these must not be left for the end
LONGEST = (
    *("test_commands.py", "test_lost_ranks.py", "test_replaced_tokens.py", "test_recipes.py"),
    *("test_stability.py", "test_exactness.py", "test_tasks.py", "test_start.py", "test_curves.py", "test_finetune.py"),
    *("test_skeletons.py", "test_hostile_files.py", "test_probe.py", "test_pending_saves.py", "test_thousand_ranks.py"),
    *("test_communication.py", "test_adopt.py", "test_remote.py", "test_sweep.py", "test_retrieval.py"),
    *("test_push.py", "test_silent_faults.py", "test_copier_process.py", "test_run.py", "test_faults.py"),
)


@pytest.hookimpl(optionalhook=True)  # the environment of `make test-cuda` has no xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n logical`: tests that start processes wait half of their time, so two cores have four of them."""
    cores = os.cpu_count() or 1
    return cores if "not runs" in config.option.markexpr else 2 * cores


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    """The workers of xdist are forks of a process that has collected; the kernels of a new clone compile meanwhile."""
    if not session.config.getoption("numprocesses", None) or hasattr(session.config, "workerinput"):
        return (yield)
    compiled = any(ROOT.glob(CACHE)) or subprocess.Popen([sys.executable, "-m", "tests.compiled"], cwd=ROOT)
    if "not runs" in session.config.option.markexpr:  # with one worker a core they are sooner done without
        yield
    else:
        with patch.dict(os.environ, PYTHONWARNINGS="ignore:resource_tracker"):  # of the semaphores of killed processes
            resource_tracker.ensure_running()
        os.environ[warm.COLLECTED] = shlex.join(session.config.invocation_params.args)
        warm.CONTEXT.set_forkserver_preload([*warm.PRELOAD, "tests.collected"])
        with patch.object(subprocess, "Popen", warm.Popen):
            yield
    assert compiled is True or compiled.wait() == 0


def pytest_configure() -> None:
    """Nothing that is imported while tests are collected is garbage, so none is looked for."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """The imports are passed over from here on: a collection would take most of a second, and each run asks for one."""
    if session.config.option.collectonly:
        return
    if hasattr(session.config, "workerinput") and "not runs" not in session.config.option.markexpr:
        import modernbert_train.train.session  # noqa: F401  # a process of the whole suite trains
    if step := sys.modules.get("modernbert_train.train.step"):
        step.gc = SimpleNamespace(collect=int, freeze=int, unfreeze=int)  # type: ignore[attr-defined]  # test_garbage.py
    if start := sys.modules.get("modernbert_train.train.start"):  # each run asks git, its packages and its own code
        from composer.utils import collect_env

        installed._git, start.code_hash = cache(installed._git), cache(start.code_hash)
        collect_env.get_composer_commit_hash = cache(collect_env.get_composer_commit_hash)
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest files first; otherwise the order stays."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(autouse=True)
def quick_tests_start_nothing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `make test-quick` a test that starts a process or trains must say so, or the tier slows down unnoticed."""
    if "not runs" not in request.config.option.markexpr:
        return

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("starts a process or trains a run: mark it @pytest.mark.runs", pytrace=False)

    monkeypatch.setattr("modernbert_train.train.session._build", refuse)  # first: its import starts programs itself
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)


@pytest.fixture(autouse=True)
def no_rank_of_an_earlier_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composer leaves these variables behind in its process; a launcher started with them takes itself for a rank."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def make_tiny_data(folder: Path) -> Path:
    """Write train (60 documents of 3 to 400 tokens in several shards), validation and tokenizer; always the same."""
    tokenizer = make_tokenizer(folder / "tokenizer")
    draw = np.random.default_rng(3)
    lengths = [3, 400, *np.clip(draw.lognormal(3.5, 1.0, 58), 3, 400).astype(int)]
    make_shards(folder / "train", make_documents(tokenizer, lengths, seed=21), tokenizer)
    make_shards(folder / "validation", make_documents(tokenizer, [40, 3, 150, 90, 300], seed=22), tokenizer)
    return folder


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `make_tiny_data`. Shared by the whole session: copy it before changing anything in it."""
    return make_tiny_data(tmp_path_factory.mktemp("tiny_data"))


@pytest.fixture
def tiny_run(tiny_data: Path, tmp_path: Path) -> TinyRun:
    """Gives the command line of a small run: tiny_run("checkpoint.interval_steps=2") -> [path of a YAML, override].

    Two phases, rows of 64 and then 128 tokens, a growing batch, 6,000 tokens in some 15 steps. The list goes to
    `main(["train", *words])`, or to `read_run(words)` for a RunConfig. The run lives in tmp_path/runs/tiny.
    """

    def words(*overrides: str) -> list[str]:
        file = tmp_path / "tiny.yaml"
        file.write_text(TINY_YAML.format(runs=tmp_path / "runs", data=tiny_data), encoding="utf-8")
        return [str(file), *overrides]

    return words
