"""Shards of other projects are read like the same documents prepared here, or refused with the reason.

If this breaks, a model is trained on other text than its corpus contains, or on two [CLS] in a row.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from data_prep.adopt import adopt, main
from data_prep.adoption import survey
from modernbert_train.__main__ import main as run
from modernbert_train.config.schema import DataConfig
from modernbert_train.data.dataset_card import read_card
from modernbert_train.errors import ConfigError, DataError, StorageError
from modernbert_train.vocabulary import Vocabulary, read_vocabulary
from tests.support import opened_shards
from tests.support.layouts import LAYOUTS, around, llm_foundry, write_mds
from tests.support.make_shards import make_documents, make_shards, make_texts, make_tokenizer
from tests.support.tiny_run import TinyRun

# merge_index leaves files open
pytestmark = [pytest.mark.timeout(120), pytest.mark.runs, pytest.mark.filterwarnings("ignore::ResourceWarning")]
LENGTHS = [30, 7, 90, 41, 1, 200, 12, 64, 33, 150, 8, 77]
Documents = list[NDArray[np.int64]]


@pytest.fixture(scope="session")
def tokenizer(tiny_data: Path) -> str:
    return str(tiny_data / "tokenizer")


@pytest.fixture(scope="session")
def vocabulary(tokenizer: str) -> Vocabulary:
    return read_vocabulary(tokenizer)


@pytest.fixture(scope="session")
def documents(tokenizer: str) -> Documents:
    return make_documents(Path(tokenizer), LENGTHS, seed=31)


def read_all(folder: Path, tokenizer: str) -> list[list[int]]:
    return opened_shards.read_all(opened_shards.opened(DataConfig(train=str(folder), tokenizer=tokenizer)))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def theirs(tmp_path: Path, documents: Documents, vocabulary: Vocabulary) -> Callable[[str], Path]:
    """Return a function that writes a dataset in another project's layout."""

    def write(layout: str) -> Path:
        LAYOUTS[layout](tmp_path / "theirs", documents, vocabulary)
        return tmp_path / "theirs"

    return write


REPORTED = {
    "answerdotai": (
        "100.0% of the documents begin with [CLS] (2): removed, the loader adds its own",
        "100.0% of the documents end with [PAD] (0)",
        "12 [SEP]",
        "(ndarray, int64)",
        "0 computed",
    ),
    "ettin": ("hashes: 0 right",),
}


@pytest.mark.parametrize(("layout", "apart"), [*((layout, False) for layout in LAYOUTS), ("ettin", True)])
def test_documents_are_those_of_prepared_shards_to_the_bit(
    theirs: Callable[[str], Path], documents: Documents, tokenizer: str, tmp_path: Path, layout: str, apart: bool
) -> None:
    """Special tokens at the ends are skipped, because the loader adds its own; the original files are unchanged."""
    folder = theirs(layout)
    before = files_of(folder)
    out = tmp_path / "out" if apart else folder
    dtype = "int64" if layout == "raw bytes" else None
    said = adopt(str(folder), tokenizer, out=str(out) if apart else None, dtype=dtype)
    assert read_all(out, tokenizer) == [document.tolist() for document in documents]
    after = files_of(folder)
    assert {name: after[name] for name in before} == before and (apart or len(after) == len(before) + 5)
    assert not list(out.glob(".*"))
    make_shards(tmp_path / "ours", documents, Path(tokenizer))
    for name in ("lengths.npy", "token_counts.npy"):
        assert np.array_equal(np.load(out / name), np.load(tmp_path / "ours" / name)), name
    ours, card = read_card(tmp_path / "ours"), read_card(out)
    assert (card.documents, card.tokens, card.tokenizer_sha256) == (ours.documents, ours.tokens, ours.tokenizer_sha256)
    assert card.shards == (str(folder) if apart else None)
    assert f"{len(documents)} documents, {sum(LENGTHS):,} tokens" in said and "100.0% of" in said
    assert all(words in said for words in REPORTED.get(layout, ())), said
    assert "already adopted" in adopt(str(folder), tokenizer, out=str(out) if apart else None, dtype=dtype)


def test_blocks_of_joined_documents_are_recognised(tmp_path: Path, tokenizer: str, vocabulary: Vocabulary) -> None:
    """Joined documents cannot be separated; the user should know that texts see their neighbours."""
    stream = np.concatenate(
        [np.append(each, vocabulary.sep_id) for each in make_documents(Path(tokenizer), [50] * 40, seed=4)]
    )
    blocks = stream[: len(stream) // 64 * 64].reshape(-1, 64).astype(np.int32)
    write_mds(tmp_path / "a", {"tokens": "ndarray:int32:64"}, [{"tokens": block} for block in blocks])
    said = adopt(str(tmp_path / "a"), tokenizer)
    assert "concatenated: " in said and "of the documents have special tokens in their middle ([SEP] (3) " in said


def test_documents_of_special_tokens_alone_are_counted_and_empty(
    tmp_path: Path, tokenizer: str, vocabulary: Vocabulary, documents: Documents
) -> None:
    some = [documents[0], documents[0][:0], documents[1]]
    samples = [{"input_ids": around(each, vocabulary).astype(np.uint16)} for each in some]
    write_mds(tmp_path / "a", {"input_ids": "ndarray:uint16"}, samples)
    assert "1 document of them hold only special" in adopt(str(tmp_path / "a"), tokenizer)
    assert read_all(tmp_path / "a", tokenizer) == [each.tolist() for each in some]


def test_shards_that_no_index_names_are_reported(theirs: Callable[[str], Path], tokenizer: str) -> None:
    folder = theirs("ettin")
    (folder / "more").mkdir()
    (folder / "more/shard.00007.mds.zstd").write_bytes(b"left over")
    assert "1 file of shards that no index names, such as more/shard.00007.mds.zstd" in adopt(str(folder), tokenizer)


# possible mistakes: (layout, change to the folder, arguments, message)
def truncate_one(folder: Path) -> None:
    path = sorted(folder.rglob("*.mds*"))[1]
    path.write_bytes(path.read_bytes()[:-9])


def flip_one(folder: Path) -> None:
    path = sorted(folder.rglob("*.mds*"))[1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit_indexes(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        for path in folder.rglob("index.json"):
            index = json.loads(path.read_text())
            for shard in index["shards"]:
                change(shard)
            path.write_text(json.dumps(index))

    return edit


def rename_splits(folder: Path) -> None:
    (folder / "lang0").rename(folder / "train")
    (folder / "lang1").rename(folder / "validation")


def cut_index(folder: Path) -> None:
    os.truncate(folder / "index.json", 200)


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def other_type(folder: Path) -> None:
    shutil.rmtree(folder / "lang1")
    write_mds(folder / "lang1", {"input_ids": "ndarray:uint16"}, [{"input_ids": np.arange(20, 60, dtype=np.uint16)}])


def pickled(folder: Path) -> None:
    shutil.rmtree(folder)
    write_mds(folder, {"tokens": "ndarray:int32", "more": "pkl"}, [{"tokens": np.ones(3, np.int32), "more": {1}}])


def link_out(folder: Path) -> None:
    path = sorted(folder.rglob("*.mds*"))[0]
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


BAD: dict[str, tuple[str, Callable[[Path], object], dict[str, Any], str]] = {
    "a file is missing": (
        "ettin",
        lambda folder: next(folder.rglob("*.mds*")).unlink(),
        {},
        "index.json: names 1 file of ",
    ),
    "a file is cut": ("llm-foundry", truncate_one, {}, "that is missing or of another size: shard.00001.mds."),
    "a bit is flipped": ("answerdotai", flip_one, {}, "is damaged: its sha1 is "),
    "a writer was killed": (
        "mmbert",
        lambda folder: (folder / "lang1/shard_00000/index.json").unlink(),
        {},
        "and no index.json, which is written last: its writer was interrupted",
    ),
    "no index at all": ("llm-foundry", lambda folder: (folder / "index.json").unlink(), {}, "writer was interrupted"),
    "nothing there": ("llm-foundry", empty, {}, "no index.json here"),
    "the index is cut": ("llm-foundry", cut_index, {}, "index.json: not a readable MDS index ("),
    "a column is pickled": ("llm-foundry", pickled, {}, "column 'more' is pickled, and unpickling could run code"),
    "types differ": ("mmbert", other_type, {}, "different programs wrote them. Adopt the folders one by one"),
    "train and held-out": ("mmbert", rename_splits, {}, "train, validation, which must not be trained on together"),
    "no such column": ("llm-foundry", lambda folder: None, {"column": "ids"}, "no column 'ids' among tokens"),
    "bytes of no type": ("raw bytes", lambda folder: None, {}, "holds raw bytes of unknown type"),
    "bytes of another type": ("raw bytes", lambda folder: None, {"dtype": "uint16"}, "are the same, which happens if"),
    "no type of ids": ("raw bytes", lambda folder: None, {"dtype": "float32"}, "--dtype=float32: not a type of"),
    "a type too many": ("llm-foundry", lambda folder: None, {"dtype": "int64"}, "already. Leave it out"),
    "an index that climbs out": (
        "llm-foundry",
        edit_indexes(lambda shard: shard["raw_data"].update(basename="../x")),
        {},
        "names a file outside its folder: '../x'",
    ),
    "a link to elsewhere": ("llm-foundry", link_out, {}, "which is not followed"),
    "no sizes of columns": (
        "llm-foundry",
        edit_indexes(lambda shard: shard.pop("column_sizes")),
        {},
        "a shard lacks the size of each column (column_sizes)",
    ),
    "another format": ("llm-foundry", edit_indexes(lambda shard: shard.update(format="json")), {}, "of format 'json'"),
    "a number of documents that is wrong": (
        "llm-foundry",
        edit_indexes(lambda shard: shard.update(samples=shard["samples"] + 1)),
        {},
        "documents, index.json says",
    ),
    "no such folder": ("llm-foundry", lambda folder: shutil.rmtree(folder), {}, "no such folder. Correct the path."),
    "a file of somebody else's": (
        "llm-foundry",
        lambda folder: (folder / "lengths.npy").touch(),
        {},
        "contains lengths.npy, which this program did not write and will not replace",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_reported_and_nothing_looks_adopted(
    theirs: Callable[[str], Path], tokenizer: str, case: str
) -> None:
    layout, hurt, arguments, message = BAD[case]
    folder = theirs(layout)
    hurt(folder)
    with pytest.raises((DataError, ConfigError)) as error:
        adopt(str(folder), tokenizer, **arguments)
    assert message in str(error.value)
    assert not (folder / "dataset.json").exists()


def test_shards_of_another_tokenizer_are_shown(theirs: Callable[[str], Path], tmp_path: Path, tokenizer: str) -> None:
    """Every token would have another meaning, and no loss would show it."""
    folder = theirs("llm-foundry")
    other = make_tokenizer(tmp_path / "other", make_texts(40, seed=99))
    with pytest.raises(DataError, match="in order when their text is encoded again with .*They decode to:\n  "):
        adopt(str(folder), str(other))
    small = make_tokenizer(tmp_path / "small", make_texts(40), 384)
    with pytest.raises(DataError, match="holds token id .* has 384 entries. The shards belong to another tokenizer"):
        adopt(str(folder), str(small))
    assert not (folder / "dataset.json").exists()
    adopt(str(folder), str(other), anyway=True)
    with pytest.raises(DataError, match="made with another tokenizer"):
        read_all(folder, tokenizer)


def test_a_tokenizer_without_cls_is_refused_with_a_remedy(tmp_path: Path, theirs: Callable[[str], Path]) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"lacks \[CLS\]. .*tokenizer adapt data/tokenizer .* --extend"):
        adopt(str(theirs("ettin")), str(tmp_path))


def test_text_is_for_prepare(tmp_path: Path, tokenizer: str) -> None:
    write_mds(tmp_path / "a", {"text": "str", "id": "str"}, [{"text": "one", "id": "1"}])
    with pytest.raises(ConfigError, match=r"holds text \(column text\).*sources.mine.path=.*/a sources.mine.text_f"):
        adopt(str(tmp_path / "a"), tokenizer)


def test_prepared_shards_need_nothing(tiny_data: Path, tokenizer: str) -> None:
    with pytest.raises(ConfigError, match=r"can be trained on as it is: data\.train="):
        adopt(str(tiny_data / "train"), tokenizer)


def test_shards_that_changed_since_are_not_passed_over(
    theirs: Callable[[str], Path], tokenizer: str, documents: Documents, vocabulary: Vocabulary
) -> None:
    folder = theirs("llm-foundry")
    adopt(str(folder), tokenizer)
    for path in [*folder.glob("shard.*"), folder / "index.json"]:
        path.unlink()
    llm_foundry(folder.parent / "new", documents[:5], vocabulary)
    for path in (folder.parent / "new").iterdir():
        path.rename(folder / path.name)
    with pytest.raises(ConfigError, match=r"the shards have changed:\n(.|\n)*--overwrite"):
        adopt(str(folder), tokenizer)
    adopt(str(folder), tokenizer, overwrite=True)
    assert len(read_all(folder, tokenizer)) == 5


def test_a_folder_that_cannot_be_written_asks_for_another(
    theirs: Callable[[str], Path], tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = theirs("llm-foundry")
    made = Path.mkdir

    def refuse(self: Path, *arguments: Any, **keys: Any) -> None:
        if self == folder / ".adopt":
            raise PermissionError(13, "Permission denied", str(self))
        made(self, *arguments, **keys)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match=r"\.adopt: Permission denied .* or another folder with --out"):
        adopt(str(folder), tokenizer)
    adopt(str(folder), tokenizer, out=str(tmp_path / "out"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/a").touch()
    with pytest.raises(ConfigError, match="contains a, which this program did not write"):
        adopt(str(folder), tokenizer, out=str(tmp_path / "full"))


def test_a_killed_pass_resumes_where_it_was(
    theirs: Callable[[str], Path], tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished parts are not repeated, and the result is the same to the byte."""
    folder = theirs("mmbert")
    monkeypatch.setattr(survey, "PART_BYTES", 1 << 9)
    adopt(str(folder), tokenizer, out=str(tmp_path / "whole"))
    done: list[int] = []
    real = survey.Survey.run_task

    def stop_at_third(self: survey.Survey, rank: int) -> None:
        done.append(rank)
        if len(done) == 3:
            raise StorageError("no space")
        real(self, rank)

    monkeypatch.setattr(survey.Survey, "run_task", stop_at_third)
    with pytest.raises(StorageError):
        adopt(str(folder), tokenizer, out=str(tmp_path / "out"))
    assert os.listdir(tmp_path / "out") == [".adopt"]
    adopt(str(folder), tokenizer, out=str(tmp_path / "out"))
    assert done[:4] == [0, 1, 2, 2] and len(set(done)) == len(done) - 1
    for name in ("dataset.json", "adopted_index.json", "lengths.npy", "token_counts.npy"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_damage_after_the_adoption_is_found_when_it_is_read(theirs: Callable[[str], Path], tokenizer: str) -> None:
    """The original had no hashes; now it has."""
    folder = theirs("llm-foundry")
    adopt(str(folder), tokenizer)
    flip_one(folder)
    with pytest.raises(DataError, match=r"shard\.00001\.mds: is damaged: its xxh64 is"):
        read_all(folder, tokenizer)


def test_the_command_ends_with_the_usual_codes_and_its_folder_can_be_trained_on(
    theirs: Callable[[str], Path], tokenizer: str, tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = theirs("raw bytes")
    assert main([str(folder), "--tokenizer", tokenizer]) == 78
    assert main([str(folder), "--tokenizer", tokenizer, "--dtype", "int64", "--workers", "1"]) == 0
    named = f"data.train={folder} data.tokenizer={tokenizer}"
    assert f"train on it with {named}" in capsys.readouterr().out
    assert run(["train", *tiny_run(*named.split(), "data.validation=null", "phases.long=null")]) == 0
    assert main([str(folder / "gone"), "--tokenizer", tokenizer]) == 65
