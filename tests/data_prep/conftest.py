"""A small corpus of distinct texts, and a function that runs the command."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.prepare import main
from tests.support.corpora import Command, write_corpus


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Return 60 distinct documents of some 100 words, the same in every run."""
    draw = random.Random(7)
    words = ["".join(draw.choices("aeioubdklmnrst", k=draw.randint(2, 9))) for _ in range(300)]
    return [f"Document {i}\n" + " ".join(draw.choices(words, k=100)) + ".\n" for i in range(60)]


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    """Write the texts as files, some of them in folders."""
    return write_corpus(tmp_path / "corpus", texts)


@pytest.fixture
def command(tmp_path: Path, corpus: Path) -> Command:
    """Prepare `corpus` into tmp_path/out; given words override the usual ones."""

    def run(*words: str) -> int:
        usual = [f"out={tmp_path / 'out'}", "sources.mine.kind=text", f"sources.mine.path={corpus}"]
        return main([*usual, "tokenizer.vocab_size=384", "validation_share=0.2", *words])

    return run


@pytest.fixture
def refusal(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command, which must end with this code and make no dataset; return its message."""

    def run(code: int, *words: str) -> str:
        capsys.readouterr()
        assert command(*words) == code
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    return run


@pytest.fixture
def files_of() -> Callable[[Path], dict[str, bytes]]:
    """Return all files of a dataset by name, without time and place in its report."""

    def read(folder: Path) -> dict[str, bytes]:
        files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        report = json.loads(files["prepare_report.json"])
        assert report.pop("seconds")
        return files | {"prepare_report.json": json.dumps(report).encode()}

    return read
