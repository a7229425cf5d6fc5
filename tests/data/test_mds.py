"""Reading shards: the tokens that were written, and a name for every way in which a folder can be broken.

If this breaks, damaged text is trained on, a foreign file is read, or a run ends in a traceback that names no file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modernbert_train.data.mds import TokenShards
from modernbert_train.errors import DataError
from tests.data.make_shards import make_documents, make_shards

pytestmark = pytest.mark.timeout(60)
Index = dict[str, Any]


@pytest.fixture
def folder(tiny_data: Path, tmp_path: Path) -> Path:
    """A copy of the small training shards, to be broken."""
    return Path(shutil.copytree(tiny_data / "train", tmp_path / "shards"))


def read_all(folder: Path, vocab_size: int = 512, max_open_shards: int = 2) -> list[np.ndarray]:
    shards = TokenShards(folder, "tokens", vocab_size, max_open_shards)
    return [shards.read(document) for document in range(len(shards.lengths))]


def refusal(folder: Path, **settings: int) -> str:
    with pytest.raises(DataError) as error:
        read_all(folder, **settings)
    assert str(folder) in str(error.value)  # the user is told which file
    return str(error.value).replace(f"{folder}/", "")


def edit_index(folder: Path, change: Callable[[Index], object]) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard.*"))


def test_what_was_written_is_read_in_any_order(tiny_data: Path, tmp_path: Path) -> None:
    documents = make_documents(tiny_data / "tokenizer", [3, 900, 1, 40, 400, 7, 250], seed=5)
    make_shards(tmp_path / "shards", documents, tiny_data / "tokenizer", shard_bytes=1000)
    shards = TokenShards(tmp_path / "shards", "tokens", 512, max_open_shards=1)
    assert len(shards.shard_documents) > 2 and sum(shards.shard_documents) == 7
    assert shards.lengths.tolist() == [3, 900, 1, 40, 400, 7, 250]
    for document in (6, 0, 3, 1, 6, 2, 5, 4):
        assert shards.read(document).tolist() == documents[document].tolist()


def test_only_a_few_shards_stay_in_memory(folder: Path) -> None:
    """A file may go once it is in memory; a shard that was forgotten is read again."""
    shards = TokenShards(folder, "tokens", 512, max_open_shards=2)
    first = [sum(shards.shard_documents[:number]) for number in range(3)]
    for shard in (0, 1, 0, 2):  # the one not used for longest is forgotten
        shards.read(first[shard])
    for file in shard_files(folder):
        file.unlink()
    shards.read(first[0]), shards.read(first[2])
    with pytest.raises(DataError, match="shard.00001"):
        shards.read(first[1])


def test_a_flipped_bit(folder: Path) -> None:
    file = shard_files(folder)[1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert refusal(folder).startswith("shard.00001.mds.zstd: is damaged: its xxh64 is ")


def test_a_truncated_shard(folder: Path) -> None:
    file = shard_files(folder)[1]
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    assert refusal(folder).startswith(f"shard.00001.mds.zstd: has {size - 1} bytes, index.json says {size}. Restore it")


def test_a_missing_shard(folder: Path) -> None:
    shard_files(folder)[1].unlink()
    assert refusal(folder).startswith("shard.00001.mds.zstd: cannot be read (No such file or directory).")


def test_two_swapped_shards(folder: Path) -> None:
    first, second, *_ = shard_files(folder)
    aside = folder / "aside"
    first.rename(aside), second.rename(first), aside.rename(second)
    assert refusal(folder).startswith("shard.00000.mds.zstd: ")


def test_a_folder_in_the_place_of_a_shard(folder: Path) -> None:
    file = shard_files(folder)[0]
    file.unlink()
    file.mkdir()
    assert refusal(folder).startswith("shard.00000.mds.zstd: cannot be read (Is a directory).")


def test_an_index_that_moves_a_document_between_shards(folder: Path) -> None:
    def change(index: Index) -> None:
        index["shards"][0]["samples"] += 1
        index["shards"][1]["samples"] -= 1

    edit_index(folder, change)
    assert "documents, index.json says" in refusal(folder)


def test_an_index_that_invents_a_document(folder: Path) -> None:
    edit_index(folder, lambda index: index["shards"][-1].update(samples=index["shards"][-1]["samples"] + 1))
    assert refusal(folder).startswith("lengths.npy: has 60 lengths, index.json has 61 documents.")


@pytest.mark.parametrize("basename", ["../outside", "/etc/passwd", "a/b"])
@pytest.mark.parametrize("which", ["raw_data", "zip_data"])
def test_an_index_that_climbs_out_of_its_folder(folder: Path, basename: str, which: str) -> None:
    edit_index(folder, lambda index: index["shards"][1][which].update(basename=basename))
    assert refusal(folder).startswith(f"index.json: names a file outside its folder: '{basename}'.")


def test_a_pickled_column_is_not_unpickled(folder: Path) -> None:
    """Unpickling runs code of whoever wrote the shards."""
    edit_index(folder, lambda index: index["shards"][1].update(column_encodings=["pkl"]))
    assert refusal(folder).startswith("index.json: a column is pickled, and unpickling runs code.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"column_names": ["text"]}, "index.json: no MDS column 'tokens' in ['text']."),
        ({"format": "jsonl"}, "index.json: no MDS column 'tokens' in ['tokens']."),
        ({"samples": -1}, "index.json: shard.00001.mds.zstd has no size or no hash to be checked by."),
        ({"samples": "many"}, "index.json: not a readable MDS index (ValueError"),
        ({"zip_data": None, "raw_data": None}, "index.json: not a readable MDS index (TypeError"),
        ({"column_sizes": []}, "shard.00001.mds.zstd: "),
        ({"compression": "none such"}, "shard.00001.mds.zstd: cannot be opened as index.json says"),
    ],
)
def test_an_index_that_makes_no_sense(folder: Path, change: Index, message: str) -> None:
    edit_index(folder, lambda index: index["shards"][1].update(change))
    assert refusal(folder).startswith(message)


def test_shards_without_a_hash_cannot_be_trusted(folder: Path) -> None:
    edit_index(folder, lambda index: index["shards"][0]["zip_data"].update(hashes={}))
    assert refusal(folder).startswith("index.json: shard.00000.mds.zstd has no size or no hash")


def test_an_unknown_hash(folder: Path) -> None:
    edit_index(folder, lambda index: index["shards"][0]["zip_data"].update(hashes={"none such": "0"}))
    assert refusal(folder).startswith("shard.00000.mds.zstd: cannot be opened as index.json says")


@pytest.mark.parametrize("key", ["samples", "zip_data", "raw_data", "column_names", "column_encodings", "format"])
def test_an_index_that_lacks_a_key(folder: Path, key: str) -> None:
    edit_index(folder, lambda index: index["shards"][0].pop(key))
    assert refusal(folder).startswith(f"index.json: not a readable MDS index (KeyError: '{key}')")


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", "not json", '{"shards": 3}', '{"shards": [3]}'])
def test_an_index_that_is_none(folder: Path, content: str) -> None:
    (folder / "index.json").write_text(content)
    assert refusal(folder).startswith("index.json: not a readable MDS index (")


def test_no_index_and_no_shards(folder: Path) -> None:
    edit_index(folder, lambda index: index.update(shards=[]))
    assert refusal(folder).startswith("index.json: lists no shards.")
    (folder / "index.json").unlink()
    assert refusal(folder).startswith("index.json: no such file, so there are no shards in this folder.")


def test_lengths_that_do_not_fit_the_documents(folder: Path) -> None:
    lengths = np.load(folder / "lengths.npy")
    np.save(folder / "lengths.npy", lengths[:-1])
    assert refusal(folder).startswith("lengths.npy: has 59 lengths, index.json has 60 documents.")
    lengths[3] += 1
    np.save(folder / "lengths.npy", lengths)
    found = refusal(folder)
    assert f"document 3 has {lengths[3] - 1} tokens, lengths.npy says {lengths[3]}." in found


def test_lengths_that_cannot_be_read(folder: Path) -> None:
    path = folder / "lengths.npy"
    content = path.read_bytes()
    for damaged in (b"", content[:40], content[:-4], b"no array at all"):
        path.write_bytes(damaged)
        assert refusal(folder).startswith("lengths.npy: cannot be read (")
    np.save(path, np.array([{}] * 60), allow_pickle=True)
    assert refusal(folder).startswith("lengths.npy: cannot be read (")
    path.unlink()
    assert refusal(folder).startswith("lengths.npy: cannot be read (")


def test_a_token_beyond_the_vocabulary(folder: Path) -> None:
    """It would read outside the embedding: a crash on a CPU, an assert that kills the process on a GPU."""
    found = refusal(folder, vocab_size=300)
    assert (
        "holds token id" in found and "the tokenizer has 300 entries. The shards belong to another tokenizer" in found
    )
