"""Averages of checkpoints: correct numbers, usable like a run, and refused if a mean would be meaningless."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from modernbert_train.__main__ import main
from modernbert_train.checkpoints.checkpoint import Checkpoint, commit, verify
from tests.support.front_door import Cli
from tests.support.runs import newest
from tests.support.small_checkpoint import sign
from tests.support.tiny_run import TINY_YAML, TinyRun

# one phase that decays from 1,000 tokens on, with checkpoints kept every 300
DECAY = (
    "phases.long=null",
    "phases.short={tokens: 2500, batch_warmup: null, schedule: {warmup_tokens: 300, decay_tokens: 1500}}",
    "checkpoint.interval_tokens=300",
    "checkpoint.keep=1",
)


def checkpoints(run: Path) -> list[Checkpoint]:
    return [verify(folder) for folder in sorted((run / "checkpoints").iterdir())]


def trained(folder: Path, data: Path, *overrides: str) -> Path:
    (folder / "tiny.yaml").write_text(TINY_YAML.format(runs=folder, data=data), encoding="utf-8")
    assert main(["train", f"{folder}/tiny.yaml", *DECAY, *overrides]) == 0
    return folder / "tiny"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    return trained(tmp_path_factory.mktemp("run"), tiny_data)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    return trained(tmp_path_factory.mktemp("other"), tiny_data, "seed=6")


@pytest.mark.runs
def test_the_last_checkpoints_of_a_decay_are_averaged_measured_and_exported(
    run: Path,
    tiny_run: TinyRun,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    """Like the published base. `eval` and `export` accept the folder; a run can start from it, but not resume."""
    out = tmp_path / "runs/mean"
    cli("average", run, "--last", "3", "--out", out)
    kept, mean = checkpoints(run), newest(out)
    assert len(kept) == 5  # keep is 1: the others are kept by interval_tokens
    for name, tensor in mean.weights().items():
        stacked = torch.stack([each.weights()[name].double() for each in kept[-3:]])
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, stacked.mean(0).float(), rtol=1.2e-7, atol=0)  # the last bit
        assert tensor.ndim < 2 or not torch.equal(tensor, kept[-1].weights()[name])
    parts = mean.state.average
    assert [part.checkpoint for part in parts] == [str(each.folder) for each in kept[-3:]]
    assert [part.weight for part in parts] == [pytest.approx(1 / 3)] * 3

    measured = cli("eval", out).out
    assert re.search("(better|worse) by", measured) and measured != cli("eval", run).out
    monkeypatch.chdir(tmp_path)  # its tokenizer is in it, as in any run
    shutil.copytree(out, tmp_path / "copy")
    (tmp_path / "copy/config.yaml").write_text((out / "config.yaml").read_text().replace(str(tiny_data), "gone"))
    assert main(["export", "copy"]) == 0 and (tmp_path / "copy/hf/tokenizer.json").is_file()
    cli("export", out)
    card = (out / "hf/README.md").read_text(encoding="utf-8")
    assert all(f"| {each.folder.name} | {each.step:,} | " in card for each in kept[-3:])
    assert "| measured afterwards | figure | value |" in card and "Not measured" not in card

    one_step = ("phases.short={tokens: 200, batch_warmup: null, schedule: {warmup_tokens: 0}}", "phases.long=null")
    still = ("optim.lr=1e-30", "optim.weight_decay=0", "name=next", f"weights.init_from={out}")  # changes no weight
    cli("train", *tiny_run(*one_step, *still))
    for name, tensor in newest(tmp_path / "runs/next").weights().items():
        torch.testing.assert_close(tensor, mean.weights()[name], rtol=0, atol=1e-25)

    cli("train", out, "phases.short.tokens=9000", "phases.short.schedule.decay_tokens=0", code=78)
    assert f"Start another run with weights.init_from={out}" in cli("train", out, code=78).err
    assert "holds weights only" in cli("train", *tiny_run("name=branch", f"start={{checkpoint: {out}}}"), code=78).err


@pytest.mark.runs
def test_checkpoints_of_several_runs_are_weighed_as_given(run: Path, other: Path, tmp_path: Path) -> None:
    """Runs of other seeds with one start may be averaged too; only ratios of the weights count."""
    first, out = checkpoints(run)[0], tmp_path / "mean"
    words = ["average", str(first.folder), str(other), "--weights", "1", "3", "--out", str(out)]
    assert main(words) == 0
    one, two = first.weights(), checkpoints(other)[-1].weights()
    for name, tensor in newest(out).weights().items():
        torch.testing.assert_close(tensor, (one[name].double() / 4 + two[name].double() * 0.75).float(), rtol=0, atol=0)


@pytest.mark.runs
def test_what_has_no_mean_is_refused_with_both_values(
    run: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another architecture, RoPE base or tokenizer, damage, too few; in each case no files are written."""
    changes = ("model.local_attention=8", "phases.short.model.global_rope_theta=1e5", "phases.short.tokens=2000")
    moved = checkpoints(trained(tmp_path, tiny_data, *changes))[-1].folder
    state = json.loads((moved / "state.json").read_text(encoding="utf-8"))
    state["data"]["tokenizer"] = "0" * 64
    (moved / "state.json").write_text(json.dumps(state), encoding="utf-8")
    out = tmp_path / "out"

    def refused(*words: str) -> str:
        assert main(["average", *words, "--out", str(out)]) in (74, 78)
        assert not out.exists()
        return capsys.readouterr().err

    assert "damaged" in refused(str(run), str(moved))
    sign(moved)
    said = refused(str(run), str(moved))
    assert "model.local_attention: 16 and 8" in said and "model.global_rope_theta: 10000.0 and 100000.0" in said
    assert "sha256 of the tokenizer: " in said and "0" * 64 in said

    assert "4 whole checkpoints of its decay, which begins at 1,000 tokens" in refused(str(run), "--last", "5")
    assert "its own average" in refused(str(run))
    assert "give 2 numbers above 0" in refused(str(run), str(run), "--weights", "1", "0")
    assert "needs the folder of one run" in refused(str(run), str(run), "--last", "2")


def copy_of(folder: Path, step: int, tokens: int, copies: Path) -> Path:
    """Copy a checkpoint of a run under another step."""
    found = verify(folder)
    assert found.state.training is not None
    training = replace(
        found.state.training,
        timestamp=found.state.training.timestamp | {"batch": step, "token": tokens},
        loader=found.state.training.loader | {"tokens": tokens},
    )
    made = commit(
        copies / "checkpoints",
        weights=found.weights(),
        optimizer=found.optimizer(),
        state=replace(found.state, step=step, tokens=tokens, training=training),
        config_yaml=(folder / "config.yaml").read_text(encoding="utf-8"),
        phase_end=False,
    )
    (copies / "config.yaml").write_text((folder / "config.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    return made


@pytest.mark.runs
def test_an_average_is_as_old_as_the_newest_of_them_and_of_the_decay_alone(run: Path, tmp_path: Path, cli: Cli) -> None:
    """In any order: its tokens are on the card. The checkpoint at which the decay begins is excluded, since its
    learning rate was not lowered yet."""
    copies, last = tmp_path / "runs/copies", checkpoints(run)[-1].folder
    old, new = (str(copy_of(last, step, tokens, copies)) for step, tokens in ((3, 1000), (7, 2222)))
    for number, names in enumerate(((old, new), (new, old))):
        out = tmp_path / f"mean{number}"
        cli("average", *names, "--out", out)
        assert (newest(out).step, newest(out).state.tokens) == (7, 2222)
    assert (
        "1 whole checkpoints of its decay, which begins at 1,000 tokens"
        in cli("average", copies, "--last", "2", "--out", tmp_path / "third", code=74).err
    )


@pytest.mark.runs
def test_nothing_that_is_there_is_overwritten(run: Path, tmp_path: Path, cli: Cli) -> None:
    before = checkpoints(run)
    assert "already exists" in cli("average", run, "--last", "2", "--out", run, code=78).err
    assert checkpoints(run) == before
    assert "becomes a run's name" in cli("average", run, "--last", "2", "--out", tmp_path / "a b", code=78).err


@pytest.mark.runs
def test_two_runs_of_one_start_are_joined_on_their_arc_and_by_signs(run: Path, other: Path, tmp_path: Path) -> None:
    """slerp by its formula, ties by the published steps, computed apart; the record names the method."""
    base, end = checkpoints(run)[0], checkpoints(run)[-1]
    names = [str(end.folder), str(other)]
    arc, signs = tmp_path / "arc", tmp_path / "signs"
    assert main(["average", *names, "--how", "slerp", "--weights", "3", "1", "--out", str(arc)]) == 0
    one, two, start = (each.weights() for each in (end, checkpoints(other)[-1], base))
    for name, tensor in newest(arc).weights().items():
        a, b = one[name].double().flatten().numpy(), two[name].double().flatten().numpy()
        angle = np.arccos(np.clip(a @ b / np.linalg.norm(a) / np.linalg.norm(b), -1, 1))
        straight = angle < 1e-4
        expected = (
            0.75 * a + 0.25 * b if straight else (np.sin(0.75 * angle) * a + np.sin(0.25 * angle) * b) / np.sin(angle)
        )
        np.testing.assert_allclose(tensor.flatten().numpy(), expected, rtol=1e-5, atol=1e-7)
    words = ["average", *names, "--how", "ties", "--base", str(base.folder), "--keep", "0.3", "--out", str(signs)]
    assert main(words) == 0
    found = newest(signs)
    assert found.state.averaged_by == f"ties, 0.3 kept of what changed since {base.folder}"
    name = "model.layers.1.mlp.Wo.weight"
    expected_numbers = by_signs([one[name], two[name]], start[name], 0.3)
    np.testing.assert_allclose(found.weights()[name].flatten().numpy(), expected_numbers, rtol=1e-6, atol=1e-8)


def by_signs(tensors: list[torch.Tensor], base: torch.Tensor, keep: float) -> np.ndarray:
    start = base.double().flatten().numpy()
    moved_KV = np.stack([tensor.double().flatten().numpy() for tensor in tensors]) - start
    least_K1 = np.sort(abs(moved_KV))[:, [-math.ceil(keep * len(start))]]
    kept_KV = np.where(abs(moved_KV) >= least_K1, moved_KV, 0.0)
    agrees_KV = kept_KV * np.sign(kept_KV.sum(0)) > 0
    return start + kept_KV.sum(0, where=agrees_KV) / np.maximum(agrees_KV.sum(0), 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--how", "slerp"], "--how=slerp with 3 checkpoints: interpolates between exactly two."),
        (["--how", "ties"], "--how=ties with --base=None"),
        (["--how", "mean", "--base", "RUN"], "--how=mean with --base="),
        (["--how", "ties", "--base", "RUN", "--keep", "0"], "--keep=0: not a share of the numbers"),
    ],
)
@pytest.mark.runs
def test_ways_that_cannot_be_are_refused(run: Path, tmp_path: Path, cli: Cli, words: list[str], message: str) -> None:
    out = ["--out", str(tmp_path / "none")]
    assert (
        message
        in cli("average", run, "--last", "3", *(str(run) if w == "RUN" else w for w in words), *out, code=78).err
        and not (tmp_path / "none").exists()
    )
