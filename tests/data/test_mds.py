"""Reading shards: the tokens that were written, and a name for every way in which a folder can be broken.

If this breaks, damaged text is trained on, a foreign file is read, or a run ends in a traceback that names no file.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modernbert_train.data.mds import TokenShards
from modernbert_train.data.shard_index import ShardIndex
from modernbert_train.errors import DataError
from tests.support.layouts import write_mds
from tests.support.make_shards import make_documents, make_shards

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
    assert str(folder) in str(error.value)  # the message names the file
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


def change(number: int, **values: object) -> Callable[[Path], None]:
    """Other values in an entry of the index."""
    return lambda folder: edit_index(folder, lambda index: index["shards"][number].update(values))


def move_a_document(folder: Path) -> None:
    def moved(index: Index) -> None:
        index["shards"][0]["samples"] += 1
        index["shards"][1]["samples"] -= 1

    edit_index(folder, moved)


def swap(folder: Path) -> None:
    first, second, *_ = shard_files(folder)
    aside = folder / "aside"
    first.rename(aside), second.rename(first), aside.rename(second)


def replace_by_folder(folder: Path) -> None:
    file = shard_files(folder)[0]
    file.unlink()
    file.mkdir()


def flip(at: float) -> Callable[[Path], None]:
    """A bit at this share of the second shard."""

    def flipped(folder: Path) -> None:
        file = shard_files(folder)[1]
        content = bytearray(file.read_bytes())
        content[round(at * (len(content) - 1))] ^= 1
        file.write_bytes(content)

    return flipped


def change_file(which: str, **values: object) -> Callable[[Path], None]:
    return lambda folder: edit_index(folder, lambda index: index["shards"][1][which].update(values))


def be(content: bytes, name: str = "index.json") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def pickle_lengths(folder: Path) -> None:
    np.save(folder / "lengths.npy", np.array([{}] * 60), allow_pickle=True)


def cut_lengths(folder: Path) -> None:
    np.save(folder / "lengths.npy", np.load(folder / "lengths.npy")[:-1])


def another_length(folder: Path) -> None:
    lengths = np.load(folder / "lengths.npy")
    np.save(folder / "lengths.npy", lengths + (np.arange(len(lengths)) == 1))


def only_document(kind: str, *ids: float) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        shutil.rmtree(folder)
        document = np.array(ids, kind)
        write_mds(folder, {"tokens": f"ndarray:{kind}"}, [{"tokens": document}], hashes=["xxh64"])
        np.save(folder / "lengths.npy", np.array([len(ids)], np.uint32))

    return write


FIRST, SECOND = "shard.00000.mds.zstd", "shard.00001.mds.zstd"
OUTSIDE = "index.json: names a file outside its folder: "
NO_INDEX = "index.json: not a readable MDS index ("
NO_CHECK = f"index.json: {SECOND} has no size or no hash to be checked by."
NO_LENGTHS = "lengths.npy: cannot be read ("
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    **{f"a flipped bit at {at}": (flip(at), f"{SECOND}: is damaged: its xxh64 is ") for at in (0.0, 0.3, 0.5, 1.0)},
    "a cut shard": (lambda folder: os.truncate(folder / SECOND, 99), f"{SECOND}: has 99 bytes, index.json says "),
    "a missing shard": (lambda folder: (folder / SECOND).unlink(), f"{SECOND}: cannot be read (No such file"),
    "two swapped shards": (swap, f"{FIRST}: "),
    "a folder in place of one": (replace_by_folder, f"{FIRST}: cannot be read (Is a directory)."),
    "a document moved": (move_a_document, f"{FIRST}: "),
    "a document invented": (change(-1, samples=1000), "lengths.npy: has 60 lengths, index.json has "),
    "a path out of the folder": (change_file("zip_data", basename="../outside"), f"{OUTSIDE}'../outside'."),
    "an absolute path": (change_file("raw_data", basename="/etc/passwd"), f"{OUTSIDE}'/etc/passwd'."),
    "no name": (change_file("zip_data", basename=""), f"{OUTSIDE}''."),
    "a size that lies": (
        change_file("raw_data", bytes=7),
        f"{SECOND}: cannot be opened as index.json says (unpacks to ",
    ),
    "a pickled column": (change(1, column_encodings=["pkl"]), "index.json: a column is pickled, and unpickling runs"),
    "another column": (change(1, column_names=["text"]), "index.json: no MDS column 'tokens' in ['text']."),
    "another format": (change(1, format="jsonl"), "index.json: a shard has the format 'jsonl', and not mds."),
    "a negative size": (change(1, samples=-1), NO_CHECK),
    "no file": (change(1, zip_data=None, raw_data=None), f"{NO_INDEX}TypeError"),
    "no sizes of columns": (change(1, column_sizes=[]), f"{SECOND}: "),
    "a compression of nobody": (change(1, compression="none"), f"{SECOND}: cannot be opened as index.json says"),
    "no hash": (change_file("zip_data", hashes={}), NO_CHECK),
    "a hash of nobody": (
        change_file("zip_data", hashes={"x": "0"}),
        f"{SECOND}: has a hash of an unknown kind in index",
    ),
    "an empty index": (be(b""), NO_INDEX),
    "a list": (be(b"[]"), NO_INDEX),
    "shards that are none": (be(b'{"shards": [3]}'), NO_INDEX),
    "no shards": (
        lambda folder: edit_index(folder, lambda index: index.update(shards=[])),
        "index.json: lists no shards.",
    ),
    "no index": (lambda folder: (folder / "index.json").unlink(), "index.json: no such file, so there are no shards"),
    "a length less": (cut_lengths, "lengths.npy: has 59 lengths, index.json has 60 documents."),
    "lengths that are none": (be(b"x", "lengths.npy"), NO_LENGTHS),
    "empty lengths": (be(b"", "lengths.npy"), NO_LENGTHS),
    "lengths with a program": (be(b"\x93NUMPY\x01\x00\x10\x00{'descr': f()}  \n", "lengths.npy"), NO_LENGTHS),
    "pickled lengths": (pickle_lengths, NO_LENGTHS),
    "no lengths": (lambda folder: (folder / "lengths.npy").unlink(), NO_LENGTHS),
    "another length": (another_length, f"{FIRST}: document 1 has 400 tokens, lengths.npy says 401."),
    "no token ids": (only_document("float32", 1.5, 2.5), "shard.00000.mds: document 0 is not a row of token ids."),
    "a negative token": (only_document("int32", 5, -1), "shard.00000.mds: document 0 holds token id -1, the tokenizer"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_with_its_file(folder: Path, case: str) -> None:
    """A small file can unpack to all of the memory; unpickling runs its writer's code; fractions would be rounded."""
    harm, message = BROKEN[case]
    harm(folder)
    assert refusal(folder).startswith(message)


def test_chunks_of_a_long_document_cost_nothing_more(folder: Path) -> None:
    """Each of its thousands of chunks asks for it; copying it whole each time would take hours."""
    shards = TokenShards(folder, "tokens", 512, max_open_shards=2)
    longest = int(np.argmax(shards.lengths))
    one, other = shards.read(longest), shards.read(longest)
    assert np.shares_memory(one, other) and not one.flags.writeable


def test_a_token_beyond_the_vocabulary(folder: Path) -> None:
    """It would read outside the embedding: a crash on a CPU, an assert that kills the process on a GPU."""
    found = refusal(folder, vocab_size=300)
    assert (
        "holds token id" in found and "the tokenizer has 300 entries. The shards belong to another tokenizer" in found
    )


JUNK = (None, -1, 0, 1, 10**9, 10**30, 1.5, "", "x", "../x", "a\0b", "pkl", "ndarray:int32", "str", [], ["x"], {}, True)


@pytest.mark.runs
def test_an_index_that_lies_in_any_place_is_refused_or_harmless(folder: Path) -> None:
    """Every value of it replaced by every kind of junk: either an error for the user, or the very same documents."""
    whole = json.loads((folder / "index.json").read_text())
    expected = [tokens.tolist() for tokens in read_all(folder)]
    refused = 0
    for keys in paths_in(whole["shards"][1]):
        for junk in JUNK:
            index = json.loads(json.dumps(whole))
            place = index["shards"][1]
            for key in keys[:-1]:
                place = place[key]
            place[keys[-1]] = junk
            (folder / "index.json").write_text(json.dumps(index))
            try:
                found = [tokens.tolist() for tokens in read_all(folder, max_open_shards=9)]
            except DataError:
                refused += 1
            else:
                assert found == expected, (keys, junk)
    assert refused > 100


def paths_in(tree: Any) -> list[list[Any]]:
    """The keys that lead to each value of a tree, inner nodes included."""
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    return [path for key, value in items for path in [[key], *([key, *rest] for rest in paths_in(value))]]


def test_what_was_read_goes_to_another_process_and_says_the_same(tiny_data: Path) -> None:
    """One process of a machine reads index.json for all: a rank would otherwise read other shards than the rest."""
    index = ShardIndex(tiny_data / "train" / "index.json")
    there: ShardIndex = pickle.loads(pickle.dumps(index))
    shards = json.loads((tiny_data / "train" / "index.json").read_text())["shards"]
    assert list(there) == list(index) == shards
    assert there.documents.tolist() == [each["samples"] for each in shards]
    assert (there.columns, there.below) == (index.columns, index.below)
    assert there.bytes.tolist() == index.bytes.tolist()
