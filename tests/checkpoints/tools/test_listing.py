"""List and verify a run's checkpoints. If a line is missing or wrong, a user relies on a checkpoint that does not
exist, or removes the only whole one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from modernbert_train.checkpoints.manifest import MANIFEST
from modernbert_train.checkpoints.run_folder import take_lock
from modernbert_train.checkpoints.tools import checkpoint_list
from tests.checkpoints.tools.small_run import SmallRun, as_schema_4, write_sharded
from tests.support.probed import call_probed
from tests.support.small_checkpoint import edit_state

pytestmark = pytest.mark.runs


def state_of(text: str, step: int) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{step} ")]
    return line


def test_every_checkpoint_is_a_line_with_what_keeps_it(run: SmallRun) -> None:
    said = run.says("list", run.folder)
    assert re.search(r"^100 +1,000 +short +\d{4}-.* whole +milestone$", said, re.MULTILINE)
    assert state_of(said, 200).endswith("phase end") and state_of(said, 300).endswith("newest 3")
    assert run.says("list", run.folder) == run.says("list", run.folder)
    run.set_config(replace(run.config, checkpoint=replace(run.config.checkpoint, keep=1, milestones="pythia")))
    run.write(512, milestone=True)
    said = run.says("list", run.folder)
    assert state_of(said, 512).endswith("newest 1, pythia") and state_of(said, 100).endswith("milestone")
    assert state_of(said, 400).endswith("nothing")


def test_list_is_what_is_meant_without_an_action(run: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    said = run.says("list", run.folder)
    assert run.says(str(run.folder)) == said
    assert run.says(str(run.folder), "--json").startswith("[")


def test_json_has_exact_numbers_and_what_is_wrong(run: SmallRun) -> None:
    run.flip(400)
    found = {each["step"]: each for each in json.loads(run.says("list", run.folder, "--json"))}
    size = sum(path.stat().st_size for path in run.at(100).iterdir())
    assert found[100]["bytes"] == size and found[100]["tokens"] == 1000 and found[100]["kept"] == ["milestone"]
    assert found[400]["state"] == "whole", "a flipped bit is found only by reading the tensors"
    said = run.says("verify", run.folder, "--json", code=74)
    found = {each["step"]: each for each in json.loads(said[: said.rindex("]") + 1])}
    assert [found[step]["state"] for step in (300, 400, 500)] == ["valid", "damaged", "valid"]
    assert found[400]["problem"].startswith("model.safetensors: damaged; found ")


def test_verify_reads_all_or_one_and_its_exit_code_says(run: SmallRun) -> None:
    assert "5 valid checkpoints" in run.says("verify", run.folder)
    run.flip(300, "optimizer.safetensors")
    said = run.says("verify", run.folder, code=74)
    assert "step-00000300: optimizer.safetensors: damaged" in said and "4 valid checkpoints" in said
    run.says("verify", run.folder, "500")
    run.says("verify", run.at(500))
    run.says("verify", run.folder, "300", code=74)


DAMAGE = {
    "cut": (lambda run: os.truncate(run.at(300) / "model.safetensors", 100), "model.safetensors: damaged; 100 bytes"),
    "no manifest": (lambda run: (run.at(300) / MANIFEST).unlink(), f"{MANIFEST}: missing"),
    "state edited": (lambda run: run.flip(300, "state.json"), "state.json: damaged; found"),
    "nonsense": (lambda run: edit_state(run.at(300), "tokens", -1), "state.json: damaged, though its hash is right"),
    "renamed": (lambda run: run.at(300).rename(run.at(301)), "it was copied or renamed"),
    "a link": (lambda run: _link(run.at(300) / "model.safetensors"), "a link to /etc/hostname"),
    "a pipe": (lambda run: _pipe(run.at(300) / "state.json"), "a pipe or a device"),
}


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_with_its_place_and_hides_no_other(run: SmallRun, kind: str) -> None:
    damage, words = DAMAGE[kind]
    damage(run)
    said = run.says("list", run.folder)
    assert words in said and "damaged" in state_of(said, 301 if kind == "renamed" else 300)
    assert "4 whole checkpoints" in said
    assert words in run.says("verify", run.folder, code=74)


def test_what_a_write_has_left_and_what_is_elsewhere_is_listed(copied: SmallRun) -> None:
    left = copied.checkpoints / "step-00000600.partial-77"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"torn")
    odd = copied.checkpoints / "step-00000700x.partial"
    odd.mkdir()
    shutil.rmtree(copied.at(300))
    said = copied.says("list", copied.folder)
    assert "incomplete" in state_of(said, 600) and "a write broke off" in said
    assert "replica only" in state_of(said, 300)
    assert " yes " in state_of(said, 500) and " no " in state_of(said, 400)
    assert "replica" not in copied.says("list", copied.folder, "--local")
    shutil.rmtree(copied.at(500))
    copied.write(500, phase_end=True)  # the replica's copy differs
    assert " no " in state_of(copied.says("list", copied.folder), 500)


def test_a_replica_that_does_not_answer_is_a_warning(copied: SmallRun) -> None:
    copied.set_config(replace(copied.config, checkpoint=replace(copied.config.checkpoint, copy_to="nosuch://x/y")))
    said = copied.says("list", copied.folder)
    assert "5 whole checkpoints" in said and "cannot be read" in said


def test_copies_are_verified_too(copied: SmallRun) -> None:
    assert "store/small/step-00000500: valid" in copied.says("verify", copied.folder, "--copies")
    path = copied.there / "step-00000300/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    said = copied.says("verify", copied.folder, "--copies", code=74)
    assert "1 damaged" in said and "store/small/step-00000300/model.safetensors" in said


@pytest.mark.parametrize("action", ["list", "verify"])
def test_a_folder_that_is_no_run_is_reported(run: SmallRun, tmp_path: Path, action: str) -> None:
    assert "no such run" in run.says(action, tmp_path / "absent", code=78)
    (tmp_path / "empty").mkdir()
    assert "no run there" in run.says(action, tmp_path / "empty", code=78)


def test_a_step_that_is_not_there_is_answered_with_those_that_are(run: SmallRun) -> None:
    for words in (("verify", run.folder, "77"), ("restore", run.folder, "77")):
        said = run.says(*words, code=74)  # type: ignore[arg-type]
        assert "no checkpoint of step 77. There are steps 100, 200, 300, 400, 500." in said
    with pytest.raises(SystemExit) as ended:
        run.says("verify", run.folder, "newest")
    assert ended.value.code == 64


def test_a_run_without_a_checkpoint_is_no_error(run: SmallRun) -> None:
    shutil.rmtree(run.checkpoints)
    assert "no checkpoint yet" in run.says("list", run.folder)


def test_a_run_that_is_trained_may_be_looked_at(run: SmallRun) -> None:
    with take_lock(run.folder, "no"):
        run.says("list", run.folder)
        run.says("verify", run.folder)


def test_one_that_the_run_removes_meanwhile_is_no_damage(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise retention would raise a false alarm for users who monitor a run by `verify`."""
    real = checkpoint_list.look

    def look(folder: Path) -> object:
        if folder == run.at(300):
            shutil.rmtree(folder)
        return real(folder)

    monkeypatch.setattr(checkpoint_list, "look", look)
    assert "4 valid checkpoints" in run.says("verify", run.folder)


def test_both_schemas_whole_and_in_slices_are_understood(run: SmallRun) -> None:
    as_schema_4(run.at(400))
    write_sharded(run.checkpoints, 600, run.config)
    assert "6 valid checkpoints" in run.says("verify", run.folder)
    found = {each["step"]: each for each in json.loads(run.says("list", run.folder, "--json"))}
    assert found[400]["schema"] == 4 and found[600]["ranks"] == 2


def test_list_needs_no_torch(run: SmallRun) -> None:
    """It takes less than seconds on a login node."""
    done = call_probed("checkpoints", "list", str(run.folder))
    assert done.returncode == 0 and done.stdout.endswith("loaded:\n"), done.stdout + done.stderr
