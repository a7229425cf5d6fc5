"""A suite of tasks in a folder, and its command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.evaluate.suite.plan import Plan, read_suite
from modernbert_train.weights.names import NamedModel
from tests.support import fake_runs
from tests.support.front_door import Cli
from tests.support.labelled import WriteTask


class Suite:
    """A suite, its folder of runs, and the output of its last command.

    Args:
        folder: has the tasks' files.
        cli: runs the command.
    """

    def __init__(self, folder: Path, cli: Cli) -> None:
        self.folder, self.out, self.file, self._cli = folder, folder / "out", folder / "suite.yaml", cli
        self.one, self.two = folder / "one", folder / "two"  # models
        self.said: Any = None

    def write(self, tasks: dict[str, dict[str, Any]], **more: Any) -> Suite:
        """Write the suite; a task without a kind is tone.yaml, and there are two seeds."""
        kinds = {"finetune", "retrieval", "beir", "mteb"}
        whole = {
            name: ({} if kinds & each.keys() else {"finetune": "tone.yaml"}) | each for name, each in tasks.items()
        }
        self.file.write_text(json.dumps({"tasks": whole, "seeds": [1, 2], **more}), encoding="utf-8")
        return self

    def plan(self, *models: object, seeds: Sequence[int] | None = None, words: Sequence[str] = ()) -> Plan:
        """Plan the suite for these models, or the first one."""
        names = [str(model) for model in models or (self.one,)]
        return Plan(*read_suite(str(self.file)), names, seeds, self.out, tuple(words))

    def names(self, task: str, *models: object) -> list[str]:
        """Return the names of the runs that decide a task's choices."""
        return [cell.name for cell in self.plan(*models).cells([task], choosing=True)]

    def run(self, *words: object, code: int = 0) -> dict[str, Any]:
        """Run the command with these models and options, or with the first model; return its table."""
        self.said = self._cli("eval", *(words or (self.one,)), "--suite", self.file, "--out", self.out, code=code)
        return json.loads(self.table("json")) if (self.out / "table.json").exists() else {}

    def table(self, form: str = "md") -> str:
        return (self.out / f"table.{form}").read_text()

    def behave(self, how: str, *names: str) -> None:
        """Let stand-ins end otherwise, see `fake_runs`."""
        self.out.mkdir(exist_ok=True)
        (self.out / fake_runs.BEHAVE).write_text(json.dumps({how: names}))

    def starts(self) -> dict[str, int]:
        return fake_runs.starts(self.out)

    def source_of(self, run: str) -> str:
        """Return the first weights that a run's result names."""
        return str(json.loads((self.out / run / "result.json").read_text())["source"])


@pytest.fixture
def real_suite(write_task: WriteTask, tmp_path: Path, cli: Cli) -> Suite:
    """Return a suite with real runs."""
    write_task()
    return Suite(tmp_path, cli)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace runs by stand-ins that take no time."""
    monkeypatch.setattr("modernbert_train.evaluate.suite.cells._command", fake_runs._command)


@pytest.fixture
def suite(real_suite: Suite, stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """Return a suite with stand-ins for runs, and two models."""
    monkeypatch.setattr(
        "modernbert_train.evaluate.suite.run_suite.look_up", lambda source: NamedModel("file", Path(source))
    )
    real_suite.one.mkdir()
    real_suite.two.mkdir()
    return real_suite
