"""Each error of data/ that names a key or a command leads to a run that `check` accepts, or to a file that is read."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.__main__ import main
from tests.support.advice import follow_advice
from tests.support.tiny_run import TinyRun

ROWS = [{"text": f"text {i} with words", "label": ["up", "down"][i % 2]} for i in range(20)]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def probe_of(name: str, content: bytes, **keys: Any) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / name).write_bytes(content)
        return [f"evals.x={json.dumps({'name': 'probe', 'train': str(folder / name), **keys})}"]

    return write


def words(*given: str) -> Callable[[Path], list[str]]:
    return lambda _: [*given]


# mistake -> what is written, the advice in the message, and the words that a user adds for it
CASES: dict[str, tuple[Callable[[Path], list[str]], str, str]] = {
    "a small embedding": (words("model.vocab_size=64"), r"Set (model\.vocab_size=\d+)\.", "{0}"),
    "shards without words": (
        words("objective={name: mlm, masking: ngram, words: segmenter}"),
        r"or set (objective\.words=tokenizer)",
        "{0}",
    ),
    "other columns": (
        probe_of("t.jsonl", lines([{"body": row["text"], "label": row["label"]} for row in ROWS])),
        r"no column 'text' among '(body)', 'label'\. Set (text_columns) and label_column",
        "evals.x.{1}=[{0}]",
    ),
    "rare classes": (
        probe_of("t.jsonl", lines([{"text": f"text {i}", "label": i % 10} for i in range(20)]), max_examples=11),
        r"Raise (evals\.x\.max_examples)",
        "{0}=20",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_advice_of_an_error_leads_to_a_run(tiny_run: TinyRun, tmp_path: Path, capsys: Any, case: str) -> None:
    write, advice, taken = CASES[case]
    follow_advice(main, ["check", *tiny_run(*write(tmp_path))], advice, taken, capsys)


# mistake -> name and content of a file of labelled texts, and the command in the message that mends it
COMMANDS: dict[str, tuple[str, bytes, str]] = {
    "another encoding": (
        "t.jsonl",
        lines([{"text": f"caf\xe9 {i}", "label": i % 2} for i in range(9)]).decode().encode("latin-1"),
        r"(iconv -f )ENCODING( -t UTF-8)\.",
    ),
    "an array": ("t.jsonl", json.dumps(ROWS).encode(), r"(jq -c '\.\[\]' )FILE > FILE\.jsonl"),
    "lines of an array": ("t.jsonl", json.dumps(ROWS, indent=0).encode(), r"(jq -c '\.\[\]' )FILE > FILE\.jsonl"),
}


@pytest.mark.runs
@pytest.mark.parametrize("case", COMMANDS)
def test_the_command_of_an_error_makes_a_file_that_is_read(
    tiny_run: TinyRun, tmp_path: Path, capsys: Any, case: str
) -> None:
    name, content, advice = COMMANDS[case]
    given = probe_of(name, content)(tmp_path)
    assert main(["check", *tiny_run(*given)]) == 65
    error = capsys.readouterr().err
    found = re.search(advice, error)
    assert found, error
    command = "latin1".join(found.groups()).split() if case == "another encoding" else found[1].replace("'", "").split()
    try:
        mended = subprocess.run([*command, str(tmp_path / name)], capture_output=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    given = probe_of("mended.jsonl", mended)(tmp_path)
    assert main(["check", *tiny_run(*given)]) == 0, capsys.readouterr().err


def test_quotes_in_a_csv_are_doubled_as_the_error_says(tiny_run: TinyRun, tmp_path: Path, capsys: Any) -> None:
    broken = "text,label\n" + "".join(f'"She said "so" {i}",{i % 2}\n' for i in range(9))
    assert main(["check", *tiny_run(*probe_of("t.csv", broken.encode())(tmp_path))]) == 65
    assert "doubles quotes in them" in capsys.readouterr().err
    mended = broken.replace('"so"', '""so""')
    assert main(["check", *tiny_run(*probe_of("t.csv", mended.encode())(tmp_path))]) == 0, capsys.readouterr().err


CONLLU = """\
# sent_id = 1
1\tDogs\tdog\tNOUN\t_\t_\t2\tnsubj\t_\t_
2\tbark\tbark\tVERB\t_\t_\t0\troot\t_\t_
2.1\t_\t_\t_\t_\t_\t_\t_\t_\t_

"""


def error_of_finetune(file: Path, metric: str, folder: Path, capsys: Any) -> str:
    """Return the error of `finetune` with a file, and with a model that is missing, which is found after the file."""
    task = {"kind": "tokens", "train": str(file), "validation": {"dev": str(file)}, "metrics": [metric]}
    (folder / "task.yaml").write_text(json.dumps(task))
    assert main(["finetune", str(folder / "task.yaml"), "--model", str(folder / "gone")]) == 65
    return str(capsys.readouterr().err)


@pytest.mark.runs
def test_the_command_of_an_error_makes_conll_of_conllu(tmp_path: Path, capsys: Any) -> None:
    """The numbers of the first column would be taken for the words."""
    (tmp_path / "t.conll").write_text(CONLLU)
    error = error_of_finetune(tmp_path / "t.conll", "accuracy", tmp_path, capsys)
    found = re.search(r"line 2: .* (grep -vP .* FILE \| cut -f 2,4) > FILE\.conll", error)
    assert found, error
    mended = subprocess.run(found[1].replace("FILE", str(tmp_path / "t.conll")), shell=True, capture_output=True)
    (tmp_path / "mended.conll").write_bytes(mended.stdout)
    assert "Dogs\tNOUN\nbark\tVERB\n" in mended.stdout.decode()
    assert "gone: no such folder" in error_of_finetune(tmp_path / "mended.conll", "accuracy", tmp_path, capsys)


def test_tags_of_bilou_are_renamed_as_the_error_says(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "t.conll").write_text("aki\tU-PER\nkelo\tO\n")
    error = error_of_finetune(tmp_path / "t.conll", "entity_f1", tmp_path, capsys)
    assert "line 1: the tag 'U-PER'" in error and "L- and U- of BILOU as E- and S-" in error
    (tmp_path / "t.conll").write_text("aki\tS-PER\nkelo\tO\n")
    assert "gone: no such folder" in error_of_finetune(tmp_path / "t.conll", "entity_f1", tmp_path, capsys)
