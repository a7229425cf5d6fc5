"""Every output path of a verb, on a disk that cannot be written: one line, code 74, no partial files.

A disk fills after hours of work; a traceback and the wrong code would then send the user to look for a bug.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from tests.support.tiny_run import TINY_YAML

pytestmark = pytest.mark.runs
# verb -> its words; RUN: a trained run, OUT: the output path
WORDS: dict[str, str] = {
    "report": "report RUN --out OUT/page.html",
    "init from": "init from HERE/config.json --out OUT/mine.yaml",
    "init": "init extension encoder my_encoder --out OUT/my_encoder",
    "embed": "embed RUN HERE/texts.txt --out OUT/v.npy",
    "average": "average STEP STEP --out OUT/averaged",
    "export": "export RUN --out OUT/model",
    "launch": "launch RUN --on slurm --out OUT/job",
    "finetune": "finetune HERE/task.yaml --model RUN --out OUT/judged",
    "eval": "eval RUN --suite quick --out OUT/judged",
    "tokenizer": "tokenizer train OUT/tokenizer HERE/texts.txt --entries 384 --kind text",
    "prepare": "prepare HERE/data.yaml out=OUT/data",
    "prepare of pairs": "prepare HERE/pairs.yaml out=OUT/pairs",
    "adopt": "adopt DATA/train --tokenizer DATA/tokenizer --out OUT/adopted",
    "pretrain": "pretrain HERE/texts --size tiny --yes --out OUT/all",
}
MAKES_FOLDERS = {  # the other verbs need an existing folder for their file
    *("init", "average", "export", "finetune", "eval", "tokenizer", "prepare", "prepare of pairs", "adopt", "pretrain")
}
Typed = Callable[[str, Path], list[str]]


@pytest.fixture(scope="module")
def typed(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Typed:
    here = tmp_path_factory.mktemp("here")
    file = here / "tiny.yaml"
    file.write_text(TINY_YAML.format(runs=here / "runs", data=tiny_data), encoding="utf-8")
    assert main(["train", str(file), "phases.long=null", "phases.short.tokens=1000"]) == 0
    run = here / "runs/tiny"
    (step,) = (run / "checkpoints").glob("step-*")
    assert main(["export", str(run), "--out", str(here / "hf")]) == 0
    (here / "config.json").write_bytes((here / "hf/config.json").read_bytes())
    lines = [f"a text of line {number} and some more words" for number in range(300)]
    (here / "texts.txt").write_text("\n".join(lines), encoding="utf-8")
    (here / "texts").mkdir()
    for number, line in enumerate(lines):
        (here / f"texts/{number}.txt").write_text(line * 50, encoding="utf-8")
    rows = [f'{{"query": "question {number}", "positive": "answer {number}"}}\n' for number in range(20)]
    (here / "pairs.jsonl").write_text("".join(rows), encoding="utf-8")
    labelled = [f'{{"text": "{line}", "label": "{number % 2}"}}\n' for number, line in enumerate(lines[:20])]
    (here / "labelled.jsonl").write_text("".join(labelled), encoding="utf-8")
    task = f"train: {here}/labelled.jsonl\nvalidation: {{test: {here}/labelled.jsonl}}\n"
    task += "label_column: label\nkind: single-label\ntext_columns: [text]\n"
    (here / "task.yaml").write_text(task, encoding="utf-8")
    data = f"tokenizer: {{path: {tiny_data}/tokenizer}}\nsources: {{own: {{path: {here}/texts, kind: text}}}}\n"
    (here / "data.yaml").write_text(data, encoding="utf-8")
    pairs = f"tokenizer: {{path: {tiny_data}/tokenizer}}\npairs: {{}}\n"
    pairs += f"sources: {{own: {{path: {here}/pairs.jsonl, kind: jsonl}}}}\n"
    (here / "pairs.yaml").write_text(pairs, encoding="utf-8")
    names = {"RUN": run, "STEP": step, "HERE": here, "DATA": tiny_data}

    def words(verb: str, out: Path) -> list[str]:
        line = WORDS[verb]
        for name, path in {**names, "OUT": out}.items():
            line = line.replace(name, str(path))
        return line.split()

    return words


@pytest.fixture(params=["full", "read-only"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of one page that is full, or one that is read-only."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"needs the right to mount: {made.stderr.decode().strip()}")
    try:
        (place / "taken").write_bytes(b"x" * 4096)
        if request.param == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("verb", WORDS)
def test_a_disk_that_refuses_is_reported_in_a_line(
    typed: Typed, disk: Path, verb: str, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    code, said = main(typed(verb, disk)), capfd.readouterr().err
    assert (code, "Traceback" in said) == (74, False), said
    assert str(disk) in said.splitlines()[-1], said
    left = [path for path in disk.rglob("*") if path.is_file() and path.name != "taken" and path.stat().st_size]
    assert left == [] and not [*disk.glob(".*.partial")]


@pytest.mark.parametrize("verb", [verb for verb in WORDS if verb not in MAKES_FOLDERS])
def test_a_missing_folder_of_a_file_is_reported_in_a_line(
    typed: Typed, tmp_path: Path, verb: str, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    code, said = main(typed(verb, tmp_path / "not/yet")), capfd.readouterr().err
    assert (code, "Traceback" in said) == (74, False), said
    assert f"{tmp_path}/not/yet" in said.splitlines()[-1] and not (tmp_path / "not").exists()


@pytest.mark.parametrize("verb", ["init", "average", "export", "tokenizer", "prepare of pairs"])
def test_a_missing_folder_of_a_folder_is_made(typed: Typed, tmp_path: Path, verb: str) -> None:
    place = tmp_path / "not/yet"
    assert main(typed(verb, place)) == 0
    (made,) = place.iterdir()
    assert made.is_dir() and os.listdir(made)


@pytest.mark.parametrize("verb", ["report", "init from", "embed", "export", "average"])
def test_what_a_killed_verb_leaves_is_removed_by_the_same_command(typed: Typed, tmp_path: Path, verb: str) -> None:
    """Each kill used to leave a file or a whole model, under a name that `ls` hides, until the disk was full."""
    words = typed(verb, tmp_path)
    code = (
        "import os, pathlib, sys; from modernbert_train.__main__ import main; from modernbert_train.core import files\n"
        "replace, sync = pathlib.Path.replace, files.sync\n"
        "end = lambda path: '.partial' in str(path) and os.kill(os.getpid(), 9)\n"
        "pathlib.Path.replace = lambda path, target: end(path) or replace(path, target)\n"
        "files.sync = lambda path: end(path) or sync(path)\n"
        "main(sys.argv[1:])"
    )
    killed = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr.decode()
    assert [*tmp_path.glob(".*.partial")]
    assert main(words) == 0 and not [*tmp_path.glob(".*.partial")]
