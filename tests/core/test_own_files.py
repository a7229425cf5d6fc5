"""Links inside folders of shards and tokenizers; tests/weights/test_hostile.py covers models.

If this breaks, an archive from the internet reads files outside it, and publishes them with the next export; or a user
whose data is behind a link cannot train.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from tests.support.tiny_run import TinyRun


@pytest.fixture
def data(tiny_data: Path, tmp_path: Path) -> Path:
    """A copy that may be harmed, and a file elsewhere."""
    shutil.copytree(tiny_data, tmp_path / "data")
    return tmp_path / "data"


def move_out(path: Path, elsewhere: Path) -> None:
    """Put a link in the place of a file."""
    elsewhere.mkdir(exist_ok=True)
    shutil.move(path, elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)


def run_with(tiny_run: TinyRun, data: Path) -> list[str]:
    return tiny_run(
        f"data.train={data}/train", f"data.validation={data}/validation", f"data.tokenizer={data}/tokenizer"
    )


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        ("check", "train/index.json"),
        ("check", "tokenizer/tokenizer.json"),
        ("inspect", "train/shard."),
        ("plan", "validation/shard."),
    ],
)
def test_a_link_out_of_the_folder_is_refused_before_anything_is_read(
    tiny_run: TinyRun, data: Path, tmp_path: Path, name: str, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next(data.glob(name + "*"))
    words = run_with(tiny_run, data)
    move_out(path, tmp_path / "elsewhere")
    assert main([verb, *words]) == 65
    error = capsys.readouterr().err
    assert f"{path}: a link to {tmp_path / 'elsewhere' / path.name}, outside its folder" in error
    assert "move the whole folder, and name it or link to it as a whole" in error


def test_a_folder_may_be_a_link_and_hold_links_to_its_own_files(tiny_run: TinyRun, data: Path, tmp_path: Path) -> None:
    """Data on another disk, and files that have two names."""
    moved = tmp_path / "other disk"
    shutil.move(data / "train", moved)
    (data / "train").symlink_to(moved)
    shard = next(moved.glob("shard.*"))
    (moved / "real").mkdir()
    shutil.move(shard, moved / "real" / shard.name)
    shard.symlink_to(Path("real") / shard.name)
    assert main(["check", *run_with(tiny_run, data)]) == 0
    assert main(["inspect", *run_with(tiny_run, data)]) == 0
