"""Shards of other projects in a store: adopted without a copy, and read from there through the cache.

If this breaks, a corpus of terabytes has to be copied, or an untrusted card makes a machine fetch files of its choice.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep.adopt import adopt
from modernbert_train.config.schema import DataConfig
from modernbert_train.data.dataset_card import read_card
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.vocabulary import read_vocabulary
from tests.support import layouts, opened_shards
from tests.support.make_shards import make_documents
from tests.support.s3 import Store
from tests.support.store import forget, server, store

pytestmark = [pytest.mark.timeout(120), pytest.mark.runs, pytest.mark.filterwarnings("ignore::ResourceWarning")]
__all__ = ["server", "store"]  # fixtures


def read_all(path: str, tokenizer: Path, cache: Path) -> list[list[int]]:
    forget()
    data = DataConfig(train=path, tokenizer=str(tokenizer), cache_folder=str(cache), download_timeout_seconds=30.0)
    shards = opened_shards.opened(data)
    assert shards.remote is not None
    shards.fetch_ahead(len(shards.shard_documents) - 1)
    return opened_shards.read_all(shards)


def test_shards_in_a_store_are_adopted_and_read(store: Store, tiny_data: Path, tmp_path: Path) -> None:
    """By a local folder of small files, or by the same files in the store; each shard is fetched once."""
    tokenizer = tiny_data / "tokenizer"
    documents = make_documents(tokenizer, [40] * 20, seed=12)
    layouts.ettin(tmp_path / "theirs", documents, read_vocabulary(tokenizer))
    url = store.upload(tmp_path / "theirs", f"{tmp_path.name}/theirs")
    with pytest.raises(ConfigError, match="the card cannot be written there. Give a local folder with --out"):
        adopt(url, str(tokenizer))
    adopt(url, str(tokenizer), out=str(tmp_path / "out"))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "dataset.json", "adopted_index.json", "lengths.npy", "token_counts.npy", "adopt_report.json"
    }  # fmt: skip
    expected = [document.tolist() for document in documents]
    for _ in range(2):
        store.downloads.clear()
        assert read_all(str(tmp_path / "out"), tokenizer, tmp_path / "cache") == expected
        fetched = {key: count for key, count in store.downloads.items() if count}
    assert fetched == {}, "a second run reads the cache"
    shards = json.loads((tmp_path / "out/adopted_index.json").read_text())["shards"]
    assert len(list((tmp_path / "cache").glob("*/shards/*"))) == len(shards) > 2

    adopt(str(tmp_path / "theirs"), str(tokenizer))
    whole = store.upload(tmp_path / "theirs", f"{tmp_path.name}/whole")
    assert read_all(whole, tokenizer, tmp_path / "cache") == expected

    pointing = store.upload(tmp_path / "out", f"{tmp_path.name}/pointing")
    assert read_card(tmp_path / "out").shards == url
    with pytest.raises(DataError, match="its card points at shards elsewhere"):
        read_all(pointing, tokenizer, tmp_path / "cache")


@pytest.mark.slow
def test_archives_that_were_unpacked_before_the_upload(store: Store, tiny_data: Path, tmp_path: Path) -> None:
    """Their index names archives; the files extracted from them were uploaded."""
    tokenizer = tiny_data / "tokenizer"
    documents = make_documents(tokenizer, [40] * 20, seed=12)
    layouts.unpacked_ettin(tmp_path / "theirs", documents, read_vocabulary(tokenizer))
    url = store.upload(tmp_path / "theirs", f"{tmp_path.name}/theirs")
    assert "which are missing; the plain files are read" in adopt(url, str(tokenizer), out=str(tmp_path / "out"))
    found = read_all(str(tmp_path / "out"), tokenizer, tmp_path / "cache")
    assert found == [document.tolist() for document in documents]


def test_what_a_store_does_not_have(store: Store, tiny_data: Path, tmp_path: Path) -> None:
    tokenizer = tiny_data / "tokenizer"
    layouts.mmbert(tmp_path / "theirs", make_documents(tokenizer, [40] * 60, seed=12), read_vocabulary(tokenizer))
    url = store.upload(tmp_path / "theirs", f"{tmp_path.name}/theirs")
    with pytest.raises(DataError, match="A folder in a store needs its own index.json"):
        adopt(url, str(tokenizer), out=str(tmp_path / "out"))
    part = "lang0/shard_00000"
    store.delete(f"{tmp_path.name}/theirs/{part}/shard.00001.mds")
    with pytest.raises(DataError, match=r"shard\.00001\.mds: no such object"):
        adopt(f"{url}/{part}", str(tokenizer), out=str(tmp_path / "out"))
    assert not (tmp_path / "out/dataset.json").exists()
