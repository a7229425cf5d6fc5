"""Symlinks inside model folders.

If this breaks, an archive from the internet publishes a file from a user's home with the next export; or the hub's
cache, which consists of symlinks, cannot be read.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from modernbert_train.core.own_files import require_own_files
from modernbert_train.errors import DataError
from modernbert_train.weights.export import export_source
from modernbert_train.weights.hf_folder import load_weights
from modernbert_train.weights.source import open_model


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "special_tokens_map.json"])
def test_a_model_folder_has_no_links_to_elsewhere(
    exported: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (exported / "special_tokens_map.json").write_text("{}")
    shutil.move(exported / name, tmp_path / name)
    (exported / name).symlink_to(tmp_path / name)
    with pytest.raises(DataError, match="outside its folder"):
        open_model(exported)
    with pytest.raises(DataError, match="outside its folder"):
        load_weights(exported)
    assert main(["fill", str(exported), "a [MASK]"]) == 65
    assert f"{exported / name}: a link to " in capsys.readouterr().err


def test_an_export_publishes_no_file_that_a_tokenizer_folder_links_to(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    source = open_model(exported)
    (exported / "special_tokens_map.json").symlink_to(tmp_path / "key")
    with pytest.raises(DataError, match="outside its folder"):
        export_source(source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_the_cache_of_the_hub_is_one_folder(exported: Path, tmp_path: Path) -> None:
    """Every file of a model in it is a symlink."""
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(exported.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert open_model(snapshot).folder == snapshot
    assert load_weights(snapshot).keys() == load_weights(exported).keys()
    (snapshot / "own.json").symlink_to("../../../hf/config.json")
    with pytest.raises(DataError, match="outside its folder"):
        require_own_files(snapshot)
