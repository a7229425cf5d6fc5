"""Opens hostile files, each in a separate process that is forked from one with all imports.

    python -m tests.security.opening FOLDER few|first|all [NAME ...]

`few`: one of each sort of file and harm, by one verb; `first`: each by one verb; `all`: each by every verb. Prints a
line of JSON for each file and verb. A file is opened in a copy of a good folder: data, tokenizer, a trained run, its
export, texts, their YAML. A process may take 3 GB more than the imports, and 40 seconds.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.drill import lab
from benchmarks.drill.warm import _print_to, prepare
from modernbert_train.data.dataset_card import CARD, LENGTHS, file_sha256
from tests.support import forked
from tests.support.jobs import environment
from tests.support.paths import ROOT

SECRET = "pl4nted-s3cret-value"
VICTIM = "this text must stay\n"
ADDRESSES, SECONDS = 3 << 30, 40
SPEC = """\
out: prepared
sources:
  jsonl: {kind: jsonl, path: text}
  plain: {kind: text, path: text}
  parquet: {kind: parquet, path: text}
tokenizer: {path: data/tokenizer}
max_characters: 100000
"""


def lines_of(module: str, *arguments: Path | str) -> list[dict[str, Any]]:
    """Run a program of this folder; return its lines of JSON."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = forked.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def make_good(folder: Path) -> None:
    """The original that every case copies; its paths are relative."""
    folder.mkdir(parents=True)
    lab.write_data(folder / "data")
    text = lab.YAML.format(folder="runs", data="data")
    text = text.replace("tokens: 10000", "tokens: 2000").replace("tokens: 3000", "tokens: 1000")
    (folder / "run.yaml").write_text(text)
    (folder / "prepare.yaml").write_text(SPEC)
    (folder / "text").mkdir()
    (folder / "text/good.jsonl").write_text("".join(f'{{"text": "w{i} w7 w9"}}\n' for i in range(10, 60)))
    (folder / "text/good.txt").write_text("w11 w12")
    # by another process: pyarrow starts threads, and a process with threads must not be forked
    code = "import sys, pyarrow as a, pyarrow.parquet as p\np.write_table(a.table({'text': ['w13 w14']}), sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder / "text/good.parquet")], check=True)
    for words in (["train", "run.yaml"], ["export", "runs/run", "--out", "hf"]):
        found = open_in(folder, words, folder.parent / "good.txt")
        if found["code"] != 0:
            raise RuntimeError(found["said"])


def sign(folder: Path) -> None:
    """Update the card's hashes to the present files, as an attacker would."""
    path = folder / CARD
    if path.is_symlink() or path.stat().st_size > 1 << 20:
        return
    content = json.loads(path.read_text())
    for key, name in {"index_sha256": "index.json", "lengths_sha256": LENGTHS}.items():
        file = folder / name
        if key in content and file.is_file() and file.resolve().is_relative_to(folder.resolve()):
            content[key] = file_sha256(file)
    path.write_text(json.dumps(content))


def open_in(
    folder: Path, words: Sequence[str], output: Path, before: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Run one verb in a separate process; return how it ended, its peak memory in bytes, and its output."""
    sys.stdout.flush()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.chdir(folder)
            _print_to(output)
            os.environ.update(HOME=str(folder), TMPDIR=str(folder.parent / "tmp"), PLANTED_SECRET=SECRET)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESSES, used + ADDRESSES))
            signal.alarm(SECONDS)
            from modernbert_train.__main__ import main

            before()
            sys.argv = ["modernbert-train", *words]
            code = main(list(words))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException as error:
            print(f"Traceback (most recent call last): {type(error).__name__}: {error}")
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status, usage = os.wait4(pid, 0)
    said = output.read_text(errors="replace")
    return {
        "code": os.waitstatus_to_exitcode(status),
        "memory": usage.ru_maxrss * 1024,
        "seconds": time.monotonic() - began,
        "said": said if len(said) < 6000 else said[:3000] + " ... " + said[-3000:],
        "length": len(said),
        "escapes": said.count("\x1b") - said.count("\x1b["),
    }


def main(arguments: Sequence[str]) -> None:
    from tests.security.hostile import HOSTILE, VERBS

    base, which, *names = arguments
    folder = Path(base)
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    prepare()
    make_good(folder / "good")
    sorts = {(name.split(":")[0], kind): name for name, (kind, _) in reversed(HOSTILE.items())}
    for name in names or (reversed(sorts.values()) if which == "few" else HOSTILE):
        kind, plant = HOSTILE[name]
        for words in VERBS[kind] if which == "all" else VERBS[kind][:1]:
            case = folder / "case"
            shutil.rmtree(case, ignore_errors=True)
            shutil.copytree(folder / "good", case, symlinks=True)
            (folder / "secret").write_text(json.dumps({"secret": SECRET}))
            (folder / "victim").write_text(VICTIM)
            before = {path.name for path in folder.iterdir()} | {"output.txt"}
            plant(case)
            if kind == "data":
                sign(case / "data/train")
            found = open_in(case, words, folder / "output.txt")
            found["beside"] = sorted({path.name for path in folder.iterdir()} - before)
            found["victim"] = (folder / "victim").read_text() == VICTIM
            pages = [path.read_text(errors="replace") for path in case.rglob("*.html")]
            found["script"] = any("<script>alert(1)" in page or "<img src=x" in page for page in pages)
            copied = [path for path in case.rglob("*") if path.is_file() and not path.is_symlink()]
            small = [path for path in copied if path.stat().st_size < 1 << 24]
            found["leaked"] = [str(path) for path in small if SECRET.encode() in path.read_bytes()]
            for path in [folder / each for each in found["beside"]]:
                path.unlink(missing_ok=True)
            print(json.dumps({"name": name, "verb": " ".join(words)} | found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
