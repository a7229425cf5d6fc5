"""Many tasks, many processes, kills: the dataset must be the same to the byte, or its hash is meaningless."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.prepare import main
from data_prep.tasks.task_workers import Workers
from data_prep.write.workspace import is_at_work
from modernbert_train.errors import DataError, RunError
from tests.data_prep.fake_tasks import BadData, KilledAtTwo, Squares
from tests.support import forked
from tests.support.corpora import Files, report_of, write_corpus
from tests.support.killed_tasks import run_and_kill, start
from tests.support.paths import ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.runs
Words = Callable[..., list[str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the corpus and all its outputs, which contain its path."""
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture(scope="module")
def words(home: Path, texts: list[str]) -> Words:
    """Return a command line with three sources, duplicates between them, and a dozen tasks."""
    corpus = write_corpus(home / "corpus", texts)
    backwards = [text[::-1] for text in texts[:18]]
    every = enumerate([*texts[5:20], *(f"{text}more" for text in texts[:30]), *backwards, "", "x"])
    lines = [json.dumps({"text": text, "by": {"licence": ["MIT", "CC0", None][i % 3]}}) for i, text in every]
    (corpus / "a.jsonl").write_text("\n".join([*lines, "{", '{"text": null}']))
    (home / "near.txt").write_text(texts[3].replace(texts[3].split()[50], "replaced"))

    def line(out: str, *more: str) -> list[str]:
        usual = [f"out={home / out}", "tokenizer.vocab_size=384", "validation_share=0.2", "task_bytes=10000"]
        usual += ["sources.lines.max_left_out=0.1"]
        usual += ["sources.texts.kind=text", f"sources.texts.path={corpus}"]
        usual += ["sources.lines.kind=jsonl", f"sources.lines.path={corpus}"]
        usual += ["sources.lines.fields.licence=by.licence", "sources.texts.fixed_fields.licence=mine"]
        usual += ["sources.near.kind=text", f"sources.near.path={home}/near.txt"]
        return [*usual, *more]

    return line


@pytest.fixture(scope="module")
def one(words: Words, home: Path) -> Path:
    """Return the output of one uninterrupted process."""
    assert main(words("one")) == 0
    return home / "one"


def test_killed_anywhere_and_started_again_gives_the_same_bytes(
    words: Words, one: Path, home: Path, files_of: Files
) -> None:
    """A preemption in hour ten must cost minutes, and must leave no doubt about the data."""
    near = ["duplicates=near", "near_duplicates.buckets=4", "near_duplicates.hashes_per_bucket=6"]
    near += ["streams.field=licence", "streams.values={open: [MIT, CC0], own: [mine]}"]
    started = time.monotonic()
    assert main(words("whole", *near)) == 0
    whole = time.monotonic() - started
    draw = random.Random(3)
    completed = []
    while not run_and_kill(words("killed", *near), draw.uniform(0.02, 0.4) * whole):
        completed.append(sum(1 for _ in (home / "killed.work").rglob("completions/*")))
        if (home / "killed").exists():  # otherwise killed during the clean-up
            break
        assert len(completed) < 200
    assert len(set(completed)) >= 3  # it made progress each time
    assert main(words("killed", *near)) == 0
    assert files_of(home / "killed") == files_of(home / "whole")
    assert {path.name for path in (home / "killed").glob("train-*")} == {"train-open", "train-own", "train-rest"}
    assert not list(home.glob("killed.*"))


@pytest.mark.slow
def test_two_processes_killed_with_all_their_children(words: Words, one: Path, home: Path, files_of: Files) -> None:
    """The scheduler kills the command, and its processes must not write on into the next one's files."""
    line = [sys.executable, f"{ROOT}/data_prep/prepare.py", *words("two")]
    process = forked.Popen([*line, "executor.workers=2"], stdout=subprocess.DEVNULL)
    completions = home / "two.work/stages/tokenise/completions"
    while len(list(completions.glob("*"))) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    process.kill()
    process.wait()
    until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))  # or one outlives its parent
    assert forked.run(line, stdout=subprocess.DEVNULL).returncode == 0
    assert files_of(home / "two") == files_of(one)
    assert len(list((home / "two/train").glob("shard.*"))) > 10  # there were many tasks


def test_machines_that_disagree_on_their_number_are_reported(
    words: Words, one: Path, home: Path, files_of: Files, capfd: Any
) -> None:
    """Parts of two divisions would wait for each other for ever; a missing part is named, and can still be started. Two
    machines with a shared folder write what one writes."""
    child = start([*words("parted"), "--part", "1/2"])
    lock = home / "parted.work" / ".lock-1-of-2"
    until(lambda: lock.exists() and is_at_work(home / "parted.work", (1, 2)), 120)
    assert main([*words("parted"), "--part", "2/3"]) == 78
    said = "--part 2/3: another machine works on"
    assert f"{said} {home}/parted.work as part 1/2. Give every machine the same number" in capfd.readouterr().err
    waits, begun = "", time.monotonic()
    while "survey: waits for part 2/2. No machine does --part 2/2: start the same command" not in waits:
        assert time.monotonic() < begun + 120, waits
        time.sleep(0.1)
        waits += capfd.readouterr().err
    assert main([*words("parted"), "--part", "2/2"]) == 0
    assert os.waitpid(child, 0)[1] == 0
    assert files_of(home / "parted") == files_of(one) and not (home / "parted.work").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_tasks_need_no_thousand_open_files(tmp_path: Path, texts: list[str]) -> None:
    """A corpus of 130 GB has that many, and fails after its whole survey if a merge opens a file for each."""
    distinct = [f"{i} {texts[i % 60]} {texts[(i * 7 + 1) % 60]} {texts[(i * 11 + 2) % 60]}" for i in range(700)]
    rows = [*distinct, *distinct[:9], *(f"{text} more" for text in distinct[:9])]
    lines = "\n".join(json.dumps({"text": text}) for text in rows)
    (tmp_path / "many.jsonl").write_text(lines)
    line = [f"out={tmp_path}/out", "tokenizer.vocab_size=384", "validation_share=0.1", "task_bytes=1024"]
    line += ["duplicates=near", "near_duplicates.buckets=2", "near_duplicates.hashes_per_bucket=12"]
    line += ["sources.a.kind=jsonl", f"sources.a.path={tmp_path}/many.jsonl"]
    # a process of its own: this one may have more than 128 open files already
    command = ["bash", "-c", 'ulimit -n 128 && exec "$@"', "bash", sys.executable, "-m", "data_prep.prepare", *line]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = report_of(tmp_path / "out")
    assert report["tasks"] >= 1_100 and report["dropped"]["duplicate"] == 9 and report["dropped"]["near_duplicate"] >= 9
    assert " documents/s, " in done.stderr


def test_a_machine_that_fails_ends_the_others(words: Words, capfd: Any) -> None:
    """Seven machines that wait for ever for the eighth cost more than the eighth's failure."""
    child = start([*words("out", "tokenizer.vocab_size=65536"), "--part", "1/2"])
    assert main([*words("out", "tokenizer.vocab_size=65536"), "--part", "2/2"]) == 65  # the last part runs single tasks
    assert os.waitpid(child, 0)[1] != 0
    said = capfd.readouterr().err
    assert said.count("the training documents hold too little text") == 2
    assert "error: another machine failed: part 2 of 2: tokenizer.vocab_size=65536" in said


def test_unfinished_work_of_another_spec_is_not_mixed_in(words: Words, home: Path, capsys: Any) -> None:
    """Half the tasks with one filter and half with another would make a dataset that no spec describes."""
    child = start(words("changed"))
    until((home / "changed.work/tasks.json").exists, 120)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert main(words("changed", "min_characters=2")) == 78
    assert "spec.min_characters: 1 -> 2" in capsys.readouterr().err
    assert main([*words("changed", "min_characters=2"), "--overwrite"]) == 0
    assert report_of(home / "changed")["dropped"]["too_short"] == 1


def test_number_of_tasks_changes_no_document(words: Words, one: Path, home: Path) -> None:
    """The division of the corpus affects speed only; the kept documents must not depend on it."""
    assert main(words("uncut", "task_bytes=1000000000")) == 0
    uncut, cut = map(report_of, (home / "uncut", one))
    assert uncut["tasks"] == 1 and cut["tasks"] > 10
    assert uncut["sources"] == cut["sources"]


def test_a_worker_that_dies_ends_the_run_by_name() -> None:
    """The kernel kills a process that takes too much memory; a pool would wait for it for ever."""
    with Workers(2) as workers, pytest.raises(RunError, match=r"a process was killed by SIGKILL.*resumes"):
        workers.run(KilledAtTwo(), list(range(20)), "tasks", 20)
    with Workers(2) as workers, pytest.raises(DataError, match="bad line 3"):
        workers.run(BadData(), [3, 3], "tasks", 2)


def test_workers_do_every_task_once(tmp_path: Path) -> None:
    """They also serve several stages."""
    with Workers(2) as workers:
        for stage in ("a", "b"):
            workers.run(Squares(tmp_path / stage), list(range(25)), stage, 25)
            done = sorted(int(line) for line in (tmp_path / stage).read_text().split())
            assert done == [i * i for i in range(25)]


SBATCH = """#!/bin/sh
for script; do :; done
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
for i in $(seq 0 "$last"); do
    SLURM_ARRAY_TASK_ID=$i SLURM_NODELIST=here bash "$script" >>"$0.log" 2>&1 || exit 1
done
echo "Submitted batch job $$"
"""


@pytest.mark.slow
def test_slurm_runs_the_stages_as_job_arrays(words: Words, home: Path, tmp_path: Path, files_of: Files) -> None:
    """datatrove's scripts and pickles, with an sbatch that runs every job at once on this machine."""
    assert main(words("few", "task_bytes=50000")) == 0
    folder = tmp_path / "bin"
    folder.mkdir()
    srun = '#!/bin/sh\nwhile [ "$1" != launch_pickled_pipeline ]; do shift; done\nexec "$@"\n'
    for name, text in (("sbatch", SBATCH), ("srun", srun), ("scontrol", "#!/bin/sh\necho here\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    slurm = ["executor.name=slurm", "executor.options={time: '1:00:00', partition: p}"]
    line = [sys.executable, f"{ROOT}/data_prep/prepare.py", *words("slurm", "task_bytes=50000", *slurm)]
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    first = subprocess.run(line, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert "submitted to Slurm" in first.stdout, first.stderr
    second = subprocess.run(line, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert "already complete" in second.stdout, second.stderr + (folder / "sbatch.log").read_text()
    assert files_of(home / "slurm") == files_of(home / "few")
