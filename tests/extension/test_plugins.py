"""`plugins:` in a run's YAML: a package of the user's own is a part of every verb of the run, and of its record."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from modernbert_train.config.schema import VARIANTS
from modernbert_train.errors import PluginError
from modernbert_train.weights.source import open_model
from tests.support.faulty import Killed, at_fault
from tests.support.paths import ROOT
from tests.support.plugins import folder, forget  # noqa: F401
from tests.support.runs import records
from tests.support.tiny_run import TinyRun

HEAD = """\
from collections.abc import Iterator
from dataclasses import dataclass
from modernbert_train.config.knob import knob
from modernbert_train.config.plugins import add
from modernbert_train.config.schema import EvaluatorConfig, ModelConfig, ObjectiveConfig, OptimConfig

@dataclass(frozen=True, kw_only=True)
"""
CONFIG = (
    HEAD
    + """\
class HeavyConfig(OptimConfig):
    name: str = "heavy"
    momentum: float = knob(0.9, low=0, below=1)

add(HeavyConfig, optimizer="heavy_ball.build:build")
"""
)
BUILD = """\
from torch.optim import SGD
from modernbert_train.optim.groups import decay_groups

def build(config, weights):
    return SGD(decay_groups(weights, config.weight_decay), config.lr, momentum=config.momentum)
"""
FORMER = (
    HEAD
    + """\
class BagConfig(ModelConfig):
    name: str = "old_bag"

    def init_std_of(self, name):
        return 0.5

add(BagConfig, encoder="mine:Bag", count="mine:count")
"""
)
HEAVY = (
    *("plugins=[heavy_ball]", "optim={name: heavy, lr: 0.5}", "phases.long=null", "phases.short.tokens=3000"),
    "checkpoint.interval_steps=3",
)


def put(lib: Path, package: str, **modules: str) -> None:
    """Write a package: the text of `init` into its __init__."""
    (lib / package).mkdir()
    for name, text in modules.items():
        (lib / package / f"{name.replace('init', '__init__')}.py").write_text(text)


def refused(capsys: pytest.CaptureFixture[str], words: list[str], about: str) -> list[str]:
    """Return the lines of `check` about something; it must refuse the run."""
    assert main(["check", *words]) == 78
    return [line for line in capsys.readouterr().err.splitlines() if about in line]


@pytest.mark.runs
def test_a_plugin_is_trained_with_recorded_and_its_change_is_reported(
    tiny_run: TinyRun, tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(folder, "heavy_ball", init=CONFIG, build=BUILD)
    with at_fault(kill_at=5), pytest.raises(Killed):
        main(["train", *tiny_run(*HEAVY)])
    (folder / "heavy_ball/build.py").write_text(BUILD + "\n# another\n")
    capsys.readouterr()
    assert main(["train", *tiny_run(*HEAVY)]) == 0
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "plugin heavy_ball: no version (" in line]
    assert "changed since the last start" not in said and " -> no version (" in said
    steps = records(tmp_path / "runs/tiny")
    assert [step["step"] for step in steps] == [*range(1, len(steps) + 1)] and steps[-1]["loss"] < steps[0]["loss"]
    starts = [json.loads(line) for line in (tmp_path / "runs/tiny/starts.jsonl").read_text().splitlines()]
    versions = [line["plugins"]["heavy_ball"] for line in starts if line["kind"] == "start"]
    assert len({*versions}) == len(versions) == 2
    forget(folder)
    for verb in ("eval", "export"):
        assert main([verb, str(tmp_path / "runs/tiny")]) == 0
    assert main(["train", *tiny_run(*HEAVY)]) == 0
    assert "changed since" not in capsys.readouterr().out


@pytest.mark.runs
def test_a_plugin_that_is_gone_is_named_and_no_checkpoint_is_called_damaged(
    tiny_run: TinyRun, tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(folder, "heavy_ball", init=CONFIG, build=BUILD)
    assert main(["train", *tiny_run(*HEAVY)]) == 0
    shutil.rmtree(folder / "heavy_ball")
    forget(folder)
    capsys.readouterr()
    for words in (["train", *tiny_run(*HEAVY)], ["eval", str(tmp_path / "runs/tiny")]):
        assert main(words) == 78
        said = capsys.readouterr().err
        assert (
            "plugins[0]=heavy_ball (" in said and "): cannot be imported: no such module. Install its package" in said
        )
    del VARIANTS["optim"]["heavy"]
    with pytest.raises(PluginError, match="heavy_ball"):
        open_model(tmp_path / "runs/tiny")


@pytest.mark.runs
def test_check_imports_no_torch_for_a_plugin_that_does_not(tiny_run: TinyRun, folder: Path) -> None:
    """A login node lacks GPUs."""
    put(folder, "heavy_ball", init=CONFIG, build=BUILD)
    code = (
        "import sys; from modernbert_train.__main__ import main; "
        f"assert main(['check', *{tiny_run(*HEAVY)!r}]) == 0 and 'torch' not in sys.modules"
    )
    path = os.pathsep.join((str(ROOT), str(folder)))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": path})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CONFIG.replace('"heavy"', '"muon"'), r"optim\.name=muon exists already, .*MuonConfig\. Choose another name"),
        (CONFIG.replace("optimizer=", "encoder="), r'Call it with optimizer="package\.module:name"'),
        (CONFIG.replace('    name: str = "heavy"\n', ""), r"mine\.HeavyConfig: lacks a name\. Begin it with"),
        (FORMER, r"mine\.BagConfig: defines init_std_of, which nothing calls any more\. Define init_of instead"),
        (f"{CONFIG}\nimport no_such_library", r"ModuleNotFoundError: .*no_such_library.*lib/mine\.py:14\)\. Fix"),
        (CONFIG + "\n1 / 0", r"ZeroDivisionError: division by zero \(.*lib/mine\.py:14\)"),
        (CONFIG + "\ndef", r"SyntaxError: .*mine\.py, line 14"),
        ("raise SystemExit('ran')", r"lib/mine\.py does not use modernbert_train, so it adds nothing"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_reported_with_its_place(
    tiny_run: TinyRun, folder: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (folder / "mine.py").write_text(text)
    (file,) = tiny_run()
    Path(file).write_text(f"plugins: [mine]\n{Path(file).read_text()}")
    assert main(["check", file]) == 78
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert f"plugins[0]=mine ({file}:1): " in said


@pytest.mark.parametrize("name", ["this", "antigravity.door", "sys", "no_such_package", "..mine", "mine.deeper"])
def test_a_name_in_a_strangers_file_runs_nothing(
    tiny_run: TinyRun, folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Only a package that is made for this program is imported, and not even those that a module would be in."""
    (folder / "mine.py").write_text("raise SystemExit('ran')")
    assert main(["check", *tiny_run(f"plugins=[{name}]")]) == 78
    assert f"plugins[0]={name} (command line): " in (said := capsys.readouterr()).err and "Zen" not in said.out


@pytest.mark.runs
def test_a_row_whose_code_is_missing_names_the_plugin(
    tiny_run: TinyRun, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(folder, "heavy_ball", init=CONFIG)
    assert main(["train", *tiny_run(*HEAVY)]) == 78
    assert (
        "heavy_ball: optimizer=heavy_ball.build:build: cannot be imported: ModuleNotFoundErr" in capsys.readouterr().err
    )


EVEN = (
    HEAD
    + """\
class EvenConfig(ObjectiveConfig):
    name: str = "even"
    every: int = knob(2, low=1, phased=True)

    @property
    def terms(self):
        return {"even": 1.0}

    @property
    def predicted_share(self):
        return 1 / self.every

    def mistakes(self, model: ModelConfig) -> Iterator[str]:
        if model.hidden_size % self.every:
            yield f"objective.every={self.every} does not divide model.hidden_size={model.hidden_size}. Set 2."

add(EvenConfig, objective="even_tokens.build:Even")
"""
)


def test_an_objective_of_a_plugin_refuses_what_it_cannot_train(
    tiny_run: TinyRun, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the run once, for any number of phases with it, and for a phase that breaks the run's rules."""
    put(folder, "even_tokens", init=EVEN)
    for words, place in (
        (("objective={name: even, every: 7}",), ""),
        (("objective={name: even}", "phases.long.objective.every=7"), "phases.long."),
    ):
        assert refused(capsys, tiny_run("plugins=[even_tokens]", *words), "objective.every") == [
            f"error: {place}objective.every=7 does not divide model.hidden_size=32. Set 2."
        ]


@pytest.mark.parametrize(
    ("rule", "seen"),
    [
        ("raise KeyError('width')", "KeyError: 'width'"),
        ("return None", "TypeError: "),
        ("yield 7", "TypeError: yields 7 and not a text"),
    ],
)
def test_a_rule_of_a_plugin_that_fails_is_the_plugins_mistake_and_hides_no_other(
    tiny_run: TinyRun, folder: Path, capsys: pytest.CaptureFixture[str], rule: str, seen: str
) -> None:
    """It said that this program has a bug, with a traceback of forty lines, and none of the other mistakes."""
    whole, _, _ = EVEN.partition("        if model.hidden_size")
    put(folder, "even_tokens", init=f"{whole}        {rule}\n\n{EVEN.splitlines()[-1]}\n")
    words = tiny_run("plugins=[even_tokens]", "objective={name: even}")
    assert len(refused(capsys, [*words, "model.num_heads=5", "optim.lr=5"], "=5")) == 2
    (line,) = refused(capsys, words, "objective.name=even: ")
    assert f"even_tokens.EvenConfig.mistakes of the plugin fails: {seen}" in line


TAGGED = (
    HEAD
    + """\
class TaggedConfig(EvaluatorConfig):
    name: str = "tagged"

    def mistakes(self, here: str, objective: ObjectiveConfig) -> Iterator[str]:
        if objective.name != "tag":
            yield f"{here}.name=tagged with objective.name={objective.name}: it measures tags. Remove it."

add(TaggedConfig, evaluator="tagged_words.build:Tagged")
"""
)


def test_an_evaluation_of_a_plugin_refuses_a_run_that_it_cannot_measure(
    tiny_run: TinyRun, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the run would end at its first evaluation, after hours of training."""
    put(folder, "tagged_words", init=TAGGED)
    assert refused(capsys, tiny_run("plugins=[tagged_words]", "evals={words: {name: tagged}}"), "tagged") == [
        "error: evals.words.name=tagged with objective.name=mlm: it measures tags. Remove it."
    ]
