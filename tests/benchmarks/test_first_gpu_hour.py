"""The one hour that somebody has on a node. If it stops half way, or a command is wrong, the hour is lost."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks import first_gpu_hour as hour
from benchmarks import hour_numbers as read
from benchmarks.collectives import TYPES, values
from benchmarks.corpus import write_corpus
from benchmarks.first_gpu_hour import FAILED, MARK, PASSED, SKIPPED, STOPPED, Running, do
from benchmarks.hour_numbers import Wrong
from benchmarks.hour_parts import PARTS, Part, Place, sizes
from benchmarks.interrupted import environments
from benchmarks.train_step import PRESETS
from launch.run import make_parser
from launch.topology import usable_gpus
from modernbert_train.cli.arguments import read_run
from modernbert_train.plan.resolve import resolve
from tests.support.paths import ROOT

HANGS = '-c \'import subprocess; subprocess.Popen(["sleep", "600"], start_new_session=True).wait()\''
NODES = [tuple(map(str, range(number))) for number in (1, 8)]


def python(code: str) -> str:
    return f"-c {shlex.quote(code)}"


def outcomes(done: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: record["outcome"] for name, record in done.items()}


@pytest.mark.runs
def test_a_part_that_fails_hangs_or_is_wrong_leaves_the_others_alone(tmp_path: Path) -> None:
    parts = (
        Part("fails", "", "all", 1, python("print('error: no file'); raise SystemExit(3)"), otherwise="buy a file"),
        Part("hangs", "", "all", 0.02, HANGS),
        Part("wrong", "", "all", 1, python(""), Mock(side_effect=Wrong("it lost", {"speed": 3.0}))),
        Part("unreadable", "", "all", 1, python(""), Mock(side_effect=KeyError("ms"))),
        Part("many", "", "all", 1, python(""), min_gpus=2),
        Part("works", "", "all", 1, python("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"),
             lambda out, name: {"speed": 3.0, "size": 2.0}, {"speed": (4, None), "size": (2, 2)}, "go faster"),
    )  # fmt: skip
    done: dict[str, dict[str, Any]] = {}
    do(parts, Place(tmp_path, ("5",)), "a machine", done)
    assert outcomes(done) == {
        "fails": FAILED, "hangs": STOPPED, "wrong": FAILED, "unreadable": FAILED, "many": SKIPPED, "works": PASSED,
    }  # fmt: skip
    assert (tmp_path / "parts/works.log").read_text() == "5\n"
    assert not [pid for pid, environment in environments() if environment.get(MARK, "").startswith(str(tmp_path))]
    text = (tmp_path / "summary.md").read_text()
    assert "3 failed, 1 stopped at its limit, 1 skipped, 1 passed" in text
    assert "exit code 3: error: no file. What to do: buy a file" in text
    assert "not done after 0.02 minutes" in text and "it lost" in text and "needs 2 GPUs, and there is 1 GPU" in text
    assert "| works | speed | 3 | at least 4 | below |" in text and "speed is below. What to do: go faster" in text
    assert [part["outcome"] for part in json.loads((tmp_path / "summary.json").read_text())["parts"]][-1] == PASSED


@pytest.mark.runs
def test_the_same_command_resumes(tmp_path: Path) -> None:
    """Passed parts are not repeated; failed and requested ones are."""
    count = "import pathlib; file = pathlib.Path({!r}); file.open('a').write('x'); assert {}"
    parts = (
        Part("good", "", "all", 1, python(count.format(str(tmp_path / "good"), True))),
        Part("bad", "", "all", 1, python(count.format(str(tmp_path / "bad"), False))),
    )
    place = Place(tmp_path, ("0",))
    for only in (None, None, ("good",)):
        done = hour.records_of(parts, tmp_path)
        if only:
            done.pop("good")
        do(parts, place, "a machine", done, only)
    assert (tmp_path / "good").read_text() == "xx" and (tmp_path / "bad").read_text() == "xx"
    assert "1 passed, 1 not yet" in (tmp_path / "summary.md").read_text()


@pytest.mark.runs
def test_parts_for_different_gpus_run_together_and_none_overtakes_one_that_waits_for_all(tmp_path: Path) -> None:
    meet = f"import pathlib, time; here = pathlib.Path({str(tmp_path)!r}); (here / 'A').touch()\n"
    meet += "while not (here / 'B').exists(): time.sleep(0.01)\ntime.sleep(0.3)\nassert not (here / 'all').exists()"
    parts = (
        Part("first", "", "one", 0.2, python(meet)),
        Part(
            "second", "", "other", 0.2, python(meet.replace("'A'", "'X'").replace("'B'", "'A'").replace("'X'", "'B'"))
        ),
        Part("both", "", "all", 0.2, python(f"open({str(tmp_path / 'all')!r}, 'w')")),
        Part("later", "", "other", 0.2, python(f"open({str(tmp_path / 'all')!r})")),
    )
    done: dict[str, dict[str, Any]] = {}
    do(parts, Place(tmp_path, ("0", "1")), "a machine", done)
    assert set(outcomes(done).values()) == {PASSED}, done


@pytest.mark.runs
def test_ctrl_c_ends_what_runs_and_keeps_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a process stays on the GPU, and the numbers so far are lost."""
    sleep, began = time.sleep, time.monotonic()

    def interrupt(seconds: float) -> None:
        if (tmp_path / "parts/works.json").exists() or time.monotonic() > began + 60:
            monkeypatch.setattr(time, "sleep", sleep)
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", interrupt)
    parts = (Part("hangs", "", "one", 5, HANGS), Part("works", "", "other", 1, python("")))
    with pytest.raises(KeyboardInterrupt):
        do(parts, Place(tmp_path, ("0", "1")), "a machine", {})
    assert not [pid for pid, environment in environments() if environment.get(MARK, "").startswith(str(tmp_path))]
    assert "1 not yet, 1 passed" in (tmp_path / "summary.md").read_text()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Folders of an hour and of a rehearsal with the texts that their parts train on."""
    found = {}
    for tiny in (False, True):
        found[tiny] = out = tmp_path_factory.mktemp("an hour ")
        write_corpus(out / "work/quickstart", 8192, 30_000, 300, 4096)
        (out / "work/quickstart/validation").symlink_to(out / "work/quickstart/train")
        write_corpus(out / "work/drawn", 512 if tiny else 50_368, 30_000, 300, 4096)
    return found


@pytest.mark.runs
@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("gpus", NODES, ids=len)
def test_every_command_is_one_that_exists(
    gpus: tuple[str, ...], tiny: bool, texts: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that is refused tells nothing, and the node is paid for all the same."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("modernbert_train.plan.resolve.missing_packages", lambda *_, **__: iter(()))  # Triton, for flex
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        if part.min_gpus > len(gpus):
            continue
        place = Place(texts[tiny], gpus, tiny=tiny)
        words = shlex.split(part.command.format(**sizes(part, place)))
        assert (ROOT / words[0]).is_file() or words[0] == "-m"
        if "launch/run.py" in words:
            options = make_parser().parse_intermixed_args(words[words.index("launch/run.py") + 1 :])
            config = read_run(options.run)
            assert options.ranks == place.ranks(part) == usable_gpus(config.phases, options.ranks)
            assert Path(config.folder) == Path(texts[tiny], "work", "runs", part.name)
            resolve(config, options.ranks)
        if words[1] == "benchmarks.train_step" and not tiny:
            assert words[words.index("--only") + 1] in PRESETS["gpu"]


def test_a_smaller_gpu_gets_smaller_microbatches() -> None:
    """80 GB hold the recipe's; with them the parts would end out of memory on 40."""
    part = next(part for part in PARTS if part.name == "base-one")
    for gigabytes, tokens in ((141.0, 98_304), (85.0, 98_304), (42.5, 49_152), (24.0, 24_576)):
        words = sizes(part, Place(Path("out"), ("0",), gigabytes))["base"]
        assert f"microbatch_tokens={tokens} " in words


def test_losses_that_are_apart_or_of_other_batches_fail(tmp_path: Path) -> None:
    def train(name: str, *losses: float) -> None:
        folder = tmp_path / "work/runs" / name
        folder.mkdir(parents=True)
        lines = [json.dumps({"kind": "step", "step": i, "loss": loss}) for i, loss in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/one-varlen.json").write_text('{"outcome": "passed"}')
    train("one-varlen", 9.2, 9.0, 8.0)
    train("two-ddp", 9.21, 9.0, 8.01)
    train("all-ddp", 9.2, 9.0, 8.2)
    train("two-fsdp2", 9.2, 9.0)
    assert read.losses(tmp_path, "one-varlen") == {"first loss": 9.2, "last loss": 9.0}
    assert read.losses(tmp_path, "two-ddp")[read.APART] == pytest.approx(0.125)
    with pytest.raises(Wrong, match="8.2000 at step 3, and 8.0000 of one-varlen"):
        read.losses(tmp_path, "all-ddp")
    with pytest.raises(Wrong, match="2 steps, and 3"):
        read.losses(tmp_path, "two-fsdp2")
    (tmp_path / "parts/one-varlen.json").write_text('{"outcome": "failed"}')
    assert read.losses(tmp_path, "two-fsdp2") == {"first loss": 9.2, "last loss": 9.1}


def test_what_ended_with_0_and_is_wrong_fails(tmp_path: Path) -> None:
    """`doctor` ends with 0 for any findings."""
    (tmp_path / "parts").mkdir()
    lines = ["ok    GPU 0: H100", *(f"ok    {need}: usable here" for need in read.NEEDED)]
    (tmp_path / "parts/doctor.log").write_text("\n".join(lines))
    assert read.doctor(tmp_path, "doctor") == {"GPUs": 1}
    (tmp_path / "parts/doctor.log").write_text("\n".join(lines).replace("ok    optim", "warn  optim"))
    with pytest.raises(Wrong, match=r"not usable: optim\.fused"):
        read.doctor(tmp_path, "doctor")


@pytest.mark.slow
def test_without_a_gpu_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(Running, "__init__", lambda *given: pytest.fail("a part was begun"))
    assert hour.main(["--out", str(tmp_path / "hour")]) == 78
    said = capsys.readouterr().err
    assert said.startswith("error: the first GPU hour needs a GPU") and said.count("\n") == 1
    assert not (tmp_path / "hour").exists()


@pytest.mark.runs
@pytest.mark.parametrize(("ranks", "number"), [(2, 25), (4, 23)])  # 2 values cannot be split over 4 ranks
def test_collectives_are_held_against_sums_on_the_host(ranks: int, number: int) -> None:
    """Over gloo here; the part of the hour runs them over NCCL."""
    command = [sys.executable, "-m", "benchmarks.collectives", "--ranks", str(ranks), "--bytes", "8", "4096"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "WRONG"))]
    assert done.returncode == 0 and len(lines) == number, done.stderr[-2000:]
    assert not any(line.startswith("WRONG") for line in lines)


@pytest.mark.parametrize("size", [8, 4 << 20])
@pytest.mark.parametrize("dtype", TYPES)
def test_no_two_ranks_expect_the_same_piece(size: int, dtype: torch.dtype) -> None:
    """Else a piece that went to another rank would pass; and every sum is exact in bf16."""
    number, ranks = size // dtype.itemsize, 2 if size == 8 else 4
    sent = [values(rank, number, dtype) for rank in range(ranks)]
    total = torch.stack([each.float() for each in sent]).sum(0)
    assert torch.equal(total, total.to(dtype).float())
    for each in (total, *sent):
        pieces = each.view(ranks, -1)
        assert len({tuple(piece[:64].tolist()) for piece in pieces}) == ranks


def test_ranks_share_a_gpu_where_there_are_fewer() -> None:
    """The same parts on one GPU and on several, where each rank has its own."""
    part = next(part for part in PARTS if part.name == "shared-hsdp")
    for gpus, shares in ((("0",), True), (("0", "1"), True), (("0", "1", "2", "3"), False)):
        place = Place(Path("out"), gpus)
        assert place.ranks(part) == 4 and (place.ranks(part) > len(place.of(part))) == shares
