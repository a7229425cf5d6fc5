"""`push`, against a local hub. If this breaks, other weights are published than the trained ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load
from torch.testing import assert_close

from modernbert_train.__main__ import main
from modernbert_train.weights import push
from tests.support.front_door import Cli
from tests.support.hub_stand_in import StandIn, running
from tests.support.tiny_run import TINY_YAML


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """Return a run that has learned almost nothing, so its first checkpoint has nearly its first weights."""
    folder = tmp_path_factory.mktemp("push")
    (folder / "tiny.yaml").write_text(TINY_YAML.format(runs=folder, data=tiny_data), encoding="utf-8")
    still = ["optim.lr=1e-30", "optim.weight_decay=0", "phases.short.tokens=1000", "phases.long.tokens=1100"]
    assert main(["train", str(folder / "tiny.yaml"), *still]) == 0
    return folder / "tiny"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with running() as hub:
        monkeypatch.setattr(push, "HfApi", partial(push.HfApi, endpoint=hub.address))
        monkeypatch.setattr(push, "get_token", lambda: "hf_none")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))  # retries
        yield hub


@pytest.mark.runs
def test_every_checkpoint_becomes_a_revision_step_0_included_and_the_newest_is_main(
    trained: Path, hub: StandIn, cli: Cli, tmp_path: Path
) -> None:
    words = ["push", str(trained), "me/tiny", "--every-checkpoint", "--private", "--licence", "mit"]
    assert cli(*words).out.splitlines()[-1] == f"{hub.address}/me/tiny" and hub.private == {"me/tiny": True}
    names = sorted(path.name for path in (trained / "checkpoints").glob("step-*"))
    assert len(names) == 2 and hub.commits == ["step-00000000", *names, "main"]
    model = hub.models["me/tiny"]
    marks = {branch: json.loads(files["checkpoint.json"]) for branch, files in model.items()}
    assert {branch: mark["checkpoint"] for branch, mark in marks.items()} == {
        "main": names[-1], "step-00000000": "step-00000000", **{name: name for name in names},
    }  # fmt: skip
    first, after = (load(model[name]["model.safetensors"]) for name in ("step-00000000", names[0]))
    assert first.keys() == after.keys()
    for name, tensor in first.items():
        assert_close(tensor, after[name], atol=1e-20, rtol=1e-7)
    card = model["main"]["README.md"].decode()
    assert 'license: "mit"' in card and "Trained by modernbert-train" in card and str(trained.parent) not in card
    assert "0 tokens of 2,100 planned, in 0 steps" in model["step-00000000"]["README.md"].decode()

    told = cli(*words).out  # only main, whose card may have changed
    assert hub.commits[4:] == ["main"] and told.count("there already") == 3
    del model[names[0]]
    assert main(words) == 0 and hub.commits[5:] == [names[0], "main"]


@pytest.mark.runs
@pytest.mark.parametrize("every", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_damaged_newest_checkpoint_is_not_published(
    trained: Path, hub: StandIn, every: bool, cli: Cli, tmp_path: Path
) -> None:
    run = tmp_path / "tiny"
    shutil.copytree(trained, run)
    before, newest = sorted((run / "checkpoints").glob("step-*"))
    weights = next(newest.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    told = cli("push", run, "me/tiny", *(["--every-checkpoint"] if every else []))
    assert "passed over" in told.out + told.err and newest.name in told.out + told.err
    assert hub.commits == (["step-00000000", before.name, "main"] if every else ["main"])
    assert json.loads(hub.models["me/tiny"]["main"]["checkpoint.json"])["checkpoint"] == before.name


@pytest.mark.runs
def test_a_hub_that_fails_halfway_is_resumed(trained: Path, hub: StandIn, cli: Cli) -> None:
    hub.fails_after = 2
    words = ["push", str(trained), "me/tiny", "--every-checkpoint"]
    assert "the hub failed (500" in cli(*words, code=74).err
    hub.fails_after = None
    cli(*words)
    assert len(hub.commits) == 4, "existing files are not sent again"


@pytest.mark.runs
def test_what_a_user_has_to_mend_is_reported(
    trained: Path, hub: StandIn, monkeypatch: pytest.MonkeyPatch, cli: Cli, tmp_path: Path
) -> None:
    for wrong in ("tiny", "me/../tiny", "me/tiny/more", "me/ti ny", "https://huggingface.co/me/tiny"):
        assert "not an id of the hub. Write it as owner/model" in cli("push", trained, wrong, code=78).err
    assert "not the folder of a run" in cli("push", tmp_path, "me/tiny", code=78).err
    hub.refuses = 403
    assert "the hub refuses (403" in cli("push", trained, "me/tiny", code=78).err
    monkeypatch.setattr(push, "get_token", lambda: None)
    assert "not logged in" in cli("push", trained, "me/tiny", code=78).err
    assert hub.models == {}


@pytest.mark.runs
def test_without_a_network_the_command_says_so(
    trained: Path, hub: StandIn, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr(push, "HfApi", partial(push.HfApi, endpoint="http://127.0.0.1:9"))
    assert "the hub cannot be reached" in cli("push", trained, "me/tiny", code=74).err


@pytest.mark.runs
@pytest.mark.parametrize("every", [False, True])
def test_a_dry_run_lists_what_would_be_sent_and_calls_nobody(
    trained: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, every: bool
) -> None:
    """Without a login and without a network; it lists exactly the files of a real upload."""
    monkeypatch.setattr(push, "HfApi", partial(push.HfApi, endpoint="http://127.0.0.1:9"))
    monkeypatch.setattr(push, "get_token", lambda: None)
    listed = cli("push", trained, "me/tiny", "--dry-run", "--private", *["--every-checkpoint"] * every).out
    assert listed.startswith("would make me/tiny, private, unless it is there\n")
    names = sorted(path.name for path in (trained / "checkpoints").glob("step-*"))
    revisions = re.findall(r"^would send to revision (\S+) \(", listed, re.MULTILINE)
    assert revisions == [*(["step-00000000", *names] if every else []), "main"]
    sizes = dict(re.findall(r"^  (\S+)  ([\d,]+) bytes$", listed, re.MULTILINE))
    assert {"README.md", "checkpoint.json", "config.json", "model.safetensors", "tokenizer.json"} <= sizes.keys()
    assert int(sizes["model.safetensors"].replace(",", "")) > 10_000
    assert listed.splitlines()[-1] == (
        "http://127.0.0.1:9/me/tiny: nothing was sent. Without --dry-run the same command uploads these files."
    )


def test_a_lost_connection_is_known_by_whichever_library_the_hub_was_built_on() -> None:
    """huggingface_hub 1 brings httpx and version 2 brings httpx2; neither is a dependency of ours."""
    assert len(push._NO_CONNECTION) == 1 and push._NO_CONNECTION[0].__module__.startswith("httpx")


@pytest.mark.runs
def test_first_weights_from_a_model_that_is_gone_are_left_out_with_a_warning(
    trained: Path, hub: StandIn, cli: Cli, tmp_path: Path
) -> None:
    """Otherwise a revision would claim wrong initial weights."""
    copy = Path(shutil.copytree(trained, tmp_path / "tiny"))
    begun = tmp_path / "begun.yaml"
    text = (
        (trained.parent / "tiny.yaml")
        .read_text(encoding="utf-8")
        .replace(f"runs_folder: {trained.parent}", f"runs_folder: {tmp_path}")
    )
    begun.write_text(text.replace("name: tiny", "name: second"), encoding="utf-8")
    more = ["phases.short.tokens=1000", "phases.long.tokens=1100", f"weights.init_from={copy}"]
    cli("train", begun, *more)
    shutil.rmtree(copy)
    assert (
        "warning: no revision step-00000000" in cli("push", tmp_path / "second", "me/second", "--every-checkpoint").err
        and "step-00000000" not in hub.commits
    )
