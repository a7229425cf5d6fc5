"""Shards, tokenizer and figures belong together: for every verb that opens shards, and between two starts of a run.

If this breaks, a meaningless loss is printed, or two halves of a curve were measured on different text.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from launch.run import main as launch
from launch.sweeps.space import make_space
from launch.sweeps.worker import Worker
from modernbert_train.__main__ import main
from modernbert_train.config.load import load_run
from modernbert_train.data.dataset_card import TOKEN_COUNTS
from modernbert_train.data.facts import read_folder
from modernbert_train.data.open_shards import open_shards
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import read_vocabulary
from tests.support.make_shards import make_documents, make_shards, make_texts, make_tokenizer
from tests.support.paths import ROOT
from tests.support.sweeps import FAKE, spec
from tests.support.tiny_run import TINY_YAML, TinyRun

SHORT = ("phases.long=null", "phases.short.tokens=600", "phases.short.batch_warmup=null")


@pytest.fixture(scope="module")
def other_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write training and held-out shards of another tokenizer of the same size."""
    folder = tmp_path_factory.mktemp("other_data")
    tokenizer = make_tokenizer(folder / "tokenizer", make_texts(40, seed=12))
    for name in ("train", "validation"):
        make_shards(folder / name, make_documents(tokenizer, [40, 90, 150]), tokenizer)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """Return the folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    file = folder / "tiny.yaml"
    file.write_text(TINY_YAML.format(runs=folder, data=tiny_data), encoding="utf-8")
    assert main(["train", str(file), "name=run", *SHORT]) == 0
    return folder / "run"


def checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


# every verb that opens shards -> its command line, given an untrained run, a finished one and the wrong setting
VERBS: dict[str, Callable[[list[str], Path, str], int]] = {
    "train": lambda words, run, wrong: main(["train", *words, wrong]),
    "check": lambda words, run, wrong: main(["check", *words, wrong]),
    "inspect": lambda words, run, wrong: main(["inspect", *words, wrong]),
    "plan": lambda words, run, wrong: main(["plan", *words, wrong]),
    "launch": lambda words, run, wrong: launch([*words, wrong, "--ranks", "2"]),
    "eval RUN": lambda words, run, wrong: main(["eval", str(run), wrong]),
    "eval CHECKPOINT": lambda words, run, wrong: main(["eval", str(checkpoint(run)), wrong]),
    "eval YAML": lambda words, run, wrong: main(["eval", *words, f"runs_folder={run.parent}", "name=run", wrong]),
}


@pytest.mark.runs
@pytest.mark.parametrize(
    ("verb", "key"), [*((verb, "validation") for verb in VERBS), ("train", "train"), ("inspect", "train")]
)
def test_every_verb_refuses_shards_of_another_tokenizer(
    tiny_run: TinyRun, finished: Path, other_data: Path, verb: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their ids mean other words; the loss would still look plausible."""
    assert VERBS[verb](tiny_run(*SHORT), finished, f"data.{key}={other_data / key}") == 65
    said = "".join(capsys.readouterr())
    assert f"data.{key}={other_data / key}: made with another tokenizer" in said
    assert "loss" not in said and "Traceback" not in said


@pytest.mark.runs
def test_a_sweep_refuses_shards_of_another_tokenizer(tiny_run: TinyRun, tmp_path: Path, other_data: Path) -> None:
    """Before its first trial, which would seem the best of all."""
    sweep = spec(tiny_run(), tmp_path, f"overrides=['data.validation={other_data / 'validation'}']")
    with pytest.raises(DataError, match="made with another tokenizer"):
        Worker(make_space(sweep), FAKE).run()


@pytest.mark.runs
@pytest.mark.parametrize("lost", ["removed", "edited"])
def test_a_run_is_what_its_checkpoint_was_trained_with(
    tiny_run: TinyRun, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    """Its config.yaml can be lost or edited: then the run went on with another rate or objective, as if it were one."""
    run = shutil.copytree(finished, tmp_path / "run")
    written = run / "config.yaml"
    words = [*tiny_run(*SHORT), "name=run", f"runs_folder={tmp_path}", "optim.lr=0.5", "seed=3"]
    if lost == "removed":
        written.unlink()
    else:
        text = written.read_text()
        for before, after in (("seed: 5", "seed: 3"), ("lr: 0.005", "lr: 0.5")):
            assert text.count(before) == 1
            text = text.replace(before, after)
        written.write_text(text)
        words = [str(run)]
    for verb in ("check", "train") if lost == "removed" else ("check", "train", "eval", "export"):
        assert main([verb, *words]) == 78, verb
        said = capsys.readouterr().err
        assert "another configuration" in said and "  seed: 5 -> 3\n" in said and "  optim.lr: 0.005 -> " in said
    assert main(["check", *tiny_run(*SHORT), "name=run", f"runs_folder={tmp_path}"]) == 0


@pytest.mark.runs
def test_a_damaged_record_of_the_last_start_is_named(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says from which folder relative paths count: without it `eval` may measure on other text of the same name."""
    run = shutil.copytree(finished, tmp_path / "run")
    for content in ("{", "[]", '{"home": 5}'):
        (run / "resolved.json").write_text(content)
        assert main(["eval", str(run)]) == 74
        said = capsys.readouterr().err
        assert f"{run / 'resolved.json'}: cannot be read" in said and "Restore it; or remove it" in said
    (run / "resolved.json").unlink()
    assert main(["eval", str(run)]) == 0, "earlier versions wrote none"


@pytest.mark.runs
def test_eval_refuses_a_tokenizer_and_an_architecture_that_the_checkpoint_does_not_have(
    finished: Path, other_data: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards and tokenizer that match each other but not the weights; and heads that match the same tensors."""
    words = [f"data.{key}={other_data / key}" for key in ("train", "validation", "tokenizer")]
    for verb in ("eval", "export"):
        assert main([verb, str(finished), *words]) == 78
        assert f"trained with another tokenizer than data.tokenizer={other_data}" in capsys.readouterr().err
        assert main([verb, str(finished), "model.local_attention=8", "optim.lr=0.5"]) == 78
        said = capsys.readouterr().err
        assert "was trained with another configuration" in said and "  model.local_attention: 16 -> 8\n" in said, verb
        assert "  optim.lr: 0.005 -> 0.5\n" in said, "a key that the verb does not read may not be given in vain"

    held_out = shutil.copytree(tiny_data / "train", finished.parent / "held_out", dirs_exist_ok=True)
    assert main(["eval", str(finished), f"data.validation={held_out}"]) == 0, "other text of the right tokenizer"
    said = capsys.readouterr()
    assert re.search("(better|worse) by", said.out)
    assert "warning: other data than the run had when it was saved: its hash of validation" in said.err


@pytest.mark.runs
def test_there_is_no_way_to_the_tokens_of_a_run_around_the_check(tiny_data: Path, other_data: Path) -> None:
    """A new verb cannot forget the check: opening shards requires the tokenizer, which is compared."""
    data = f"data={{train: {tiny_data}/train, tokenizer: {tiny_data}/tokenizer}}"
    config = load_run([], ["name=x", "optim.lr=1", data])
    folder = read_folder("data.train", str(other_data / "train"), config.data)
    with pytest.raises(DataError, match="made with another tokenizer"):
        open_shards(folder, config.data, read_vocabulary(config.data.tokenizer))
    makers = {
        str(path.relative_to(ROOT))
        for package in ("modernbert_train", "launch")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "TokenShards"
    }
    assert makers == {"modernbert_train/data/open_shards.py"}


def exchange(folder: Path, tokenizer: Path, number: int) -> None:
    """Replace the shards in a folder by others of the same tokenizer."""
    shutil.rmtree(folder)
    make_shards(folder, make_documents(tokenizer, [50, 60, 70, number], seed=number), tokenizer)


@pytest.mark.runs
def test_data_exchanged_between_two_starts_are_refused_and_named(
    tiny_run: TinyRun, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held-out text, the counts behind the baseline, training text. A set once measured stays known while it is
    dropped."""
    data = Path(shutil.copytree(tiny_data, tmp_path / "data"))
    words = tiny_run(*(f"data.{key}={data / key}" for key in ("train", "validation", "tokenizer")), *SHORT)
    longer = 600

    def go_on(*more: str) -> tuple[int, str]:
        nonlocal longer
        longer += 600
        code = main(["train", *words, f"phases.short.tokens={longer}", *more])
        return code, capsys.readouterr().err

    assert go_on()[0] == 0
    exchange(data / "validation", data / "tokenizer", 80)
    assert go_on("data.validation=null")[0] == 0, "dropped"
    code, said = go_on()
    assert code == 65, "and replaced while it was dropped"
    assert "measured on other held-out text" in said and f"data.validation={data}/validation" in said
    assert "its hash of validation lengths is" in said and "choose another name=" in said
    shutil.rmtree(data / "validation")
    shutil.copytree(tiny_data / "validation", data / "validation")
    assert go_on()[0] == 0

    counts = np.load(data / "train" / TOKEN_COUNTS)
    np.save(data / "train" / TOKEN_COUNTS, counts[::-1])
    code, said = go_on()
    assert code == 65 and "its hash of token counts is" in said and TOKEN_COUNTS in said
    assert main(["eval", str(tmp_path / "runs/tiny")]) == 0
    assert "warning: other data than the run had when it was saved: its hash of token counts" in capsys.readouterr().err
    np.save(data / "train" / TOKEN_COUNTS, counts + 1)
    assert main(["eval", str(tmp_path / "runs/tiny")]) == 65
    assert f"{TOKEN_COUNTS}: holds" in capsys.readouterr().err, "not the counts of these shards"
    np.save(data / "train" / TOKEN_COUNTS, counts)

    exchange(data / "train", data / "tokenizer", 90)
    code, said = go_on()
    assert code == 65 and "trained on other data: its hash of lengths is" in said
    assert os.listdir(tmp_path / "runs") == ["tiny"]
