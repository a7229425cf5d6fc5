"""Shards in a store, read through the cache, against a real S3 API on loopback.

If this breaks, a run from s3:// trains on other text than one from a disk, downloads everything again, fills the disk,
or hangs when the store does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from modernbert_train.__main__ import main
from modernbert_train.config.schema import DataConfig
from modernbert_train.data.dataset_card import file_sha256, read_card, write_card
from modernbert_train.data.download import Downloader
from modernbert_train.data.mds import TokenShards
from modernbert_train.data.open_shards import cache_holds_next_block, shuffle_chunks
from modernbert_train.data.remote import local_folder
from modernbert_train.data.shard_index import read_index
from modernbert_train.data.shared_files import try_lock
from modernbert_train.errors import ConfigError, DataError, StorageError
from tests.support.make_shards import make_documents, make_shards
from tests.support.opened_shards import opened, read_all
from tests.support.runs import records
from tests.support.s3 import Store
from tests.support.store import forget, server, store  # noqa: F401
from tests.support.tiny_run import TinyRun
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(60), pytest.mark.runs]  # each has a separate store
SMALL_FILES = ("dataset.json", "index.json", "lengths.npy", "token_counts.npy")


@pytest.fixture
def url(store: Store, tiny_data: Path, tmp_path: Path) -> str:
    """The small training shards in the store, under a name of this test's own."""
    return store.upload(tiny_data / "train", tmp_path.name)


@pytest.fixture
def data(tmp_path: Path, tiny_data: Path, url: str) -> DataConfig:
    tokenizer = str(tiny_data / "tokenizer")
    return DataConfig(
        train=url, tokenizer=tokenizer, cache_folder=str(tmp_path / "cache"), download_timeout_seconds=30.0
    )


def local_shards(tiny_data: Path) -> TokenShards:
    return TokenShards(tiny_data / "train", "tokens", 512, max_open_shards=2)


def expected(tiny_data: Path) -> list[list[int]]:
    return read_all(local_shards(tiny_data))


def cached(data: DataConfig) -> list[Path]:
    return sorted(Path(str(data.cache_folder)).glob("*/shards/*"))


def refusal(data: DataConfig, kind: type[Exception] = DataError) -> str:
    forget()
    with pytest.raises(kind) as error:
        read_all(opened(data))
    message = str(error.value)
    assert len(message.splitlines()) == 1 and not list(Path(str(data.cache_folder)).glob("*/partial/*"))
    return message.replace(f"{data.train}/", "")


def test_remote_documents_are_the_local_ones_and_are_fetched_once(
    store: Store, data: DataConfig, tiny_data: Path
) -> None:
    assert read_all(opened(data)) == expected(tiny_data)
    assert set(store.downloads.values()) == {1} and len(store.downloads) == len(cached(data)) + len(SMALL_FILES)
    store.downloads.clear()
    forget()
    assert read_all(opened(data)) == expected(tiny_data)
    assert {key.rpartition("/")[2] for key in store.downloads} == {"dataset.json"}  # is it still the same data?


def read_in_a_process(data: DataConfig, tell: Any) -> None:
    tell.send(read_all(opened(data)))


def test_processes_of_a_machine_share_the_cache(store: Store, data: DataConfig, tiny_data: Path) -> None:
    """Every rank's every worker reads every shard; a node must not pay for each."""
    fork = multiprocessing.get_context("fork")  # a pool would fork from a thread, beside the store's
    pipes = [fork.Pipe(duplex=False) for _ in range(3)]
    processes = [fork.Process(target=read_in_a_process, args=(data, tell)) for _, tell in pipes]
    for process, (_, tell) in zip(processes, pipes, strict=True):
        process.start()
        tell.close()  # the child has its own; if it dies, that shows as the end of the pipe
    found = [told.recv() if told.poll(50) else None for told, _ in pipes]
    for process in processes:
        process.join()
    assert found == [expected(tiny_data)] * 3
    assert {store.downloads[key] for key in store.downloads if "shard." in key} == {1}


def test_what_was_not_read_for_longest_makes_room(store: Store, data: DataConfig, tiny_data: Path) -> None:
    sizes = local_shards(tiny_data).shard_bytes
    limited = replace(data, cache_limit_bytes=2 * max(sizes) + 1, shuffle_block_shards=1)
    shards = opened(limited)
    first = np.cumsum([0, *shards.shard_documents])
    most = 0
    for document, tokens in enumerate(expected(tiny_data)):
        assert shards.read(document).tolist() == tokens
        most = max(most, sum(path.stat().st_size for path in cached(data)))
    assert max(sizes) < most <= 2 * max(sizes) + 1

    forget()
    shards = opened(replace(limited, shuffle_block_shards=0))  # nothing stays in memory
    for shard in (0, 1, 0, 2):
        shards.read(int(first[shard]))
    names = {path.name[:11] for path in cached(data)}
    assert "shard.00000" in names and "shard.00002" in names and "shard.00001" not in names


def test_a_download_under_way_takes_its_room_from_the_others(
    store: Store, data: DataConfig, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or ranks that fetch at the same moment would together write more than the limit, and fill the disk."""
    sizes = local_shards(tiny_data).shard_bytes
    limited = replace(data, cache_limit_bytes=max(sizes) + 1, shuffle_block_shards=1)
    shards = opened(limited)
    assert shards.remote is not None
    other = Path(str(data.cache_folder)) / "another-folder"
    reserved = other / "partial/shard.00007.mds.zstd/reserved"
    reserved.parent.mkdir(parents=True)
    reserved.write_bytes(bytes(max(sizes)))
    alive = try_lock(other / "locks" / reserved.parent.name)  # held by the process that fetches it
    with alive, monkeypatch.context() as impatient:
        impatient.setattr(shards.remote, "_timeout", 0.3)
        with pytest.raises(StorageError, match="other downloads under way take up"):
            shards.read(0)
    assert shards.read(0).tolist() == expected(tiny_data)[0]


def test_a_limit_that_no_block_fits_into_is_refused(data: DataConfig, tiny_data: Path) -> None:
    """Else each shard would be fetched again for each of its chunks."""
    local = local_shards(tiny_data)
    two = int(sum(sorted(local.shard_bytes)[-2:]))
    small = replace(data, cache_limit_bytes=two - 1, shuffle_block_shards=2)
    with pytest.raises(ConfigError, match=rf"cache_limit_bytes={two - 1}: .* takes up to {two} bytes.* at least {two}"):
        cache_holds_next_block([opened(small)], small)
    for limit, next_block in ((two, False), (2 * two, True), (None, True)):
        enough = replace(small, cache_limit_bytes=limit)
        assert cache_holds_next_block([opened(enough), local], enough) is next_block
    with pytest.raises(ConfigError, match="do not fit into data.cache_limit_bytes=5"):
        opened(replace(data, cache_limit_bytes=5)).read(0)


@pytest.mark.parametrize("next_block", [False, True])
def test_a_block_and_the_next_are_fetched_before_they_are_read(
    data: DataConfig, tiny_data: Path, next_block: bool
) -> None:
    shards = opened(data)
    chunks = shuffle_chunks(shards, 2, 5, next_block=next_block)
    local = shuffle_chunks(local_shards(tiny_data), 2, 5, next_block=next_block)
    last = chunks.num_blocks - 1
    assert (chunks.block(0, last, 62) == local.block(0, last, 62)).all()
    wanted = {*local.block(0, last, 62)[:, 0]} | ({*local.block(1, 0, 62)[:, 0]} if next_block else set())
    ends = np.cumsum(shards.shard_documents)
    names = {f"shard.{np.searchsorted(ends, document, side='right'):05}.mds.zstd" for document in wanted}
    until(lambda: {path.name for path in cached(data)} >= names)
    assert {path.name for path in cached(data)} == names


def test_a_missing_object(store: Store, data: DataConfig, tmp_path: Path) -> None:
    store.delete(f"{tmp_path.name}/shard.00001.mds.zstd")
    assert refusal(data).startswith("shard.00001.mds.zstd: no such object, or no such bucket. Correct the URL")
    assert "dataset.json: no such object" in refusal(replace(data, train="s3://shards/nowhere"))
    assert "dataset.json: no such object" in refusal(replace(data, train="s3://no-such-bucket/x"))


@pytest.mark.parametrize("fault", ["flipped", "larger"])
def test_an_object_that_is_not_what_the_index_says(store: Store, data: DataConfig, tmp_path: Path, fault: str) -> None:
    """It is fetched once more, in case the way was to blame, and never seen by a reader."""
    key = f"{tmp_path.name}/shard.00001.mds.zstd"
    content = store.get(key)
    middle = len(content) // 2
    broken, message = {
        "flipped": (content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :], "is damaged: its xxh64"),
        "larger": (content * 1000, "bytes, index.json says"),
    }[fault]
    store.put(key, broken)
    found = refusal(data)
    assert found.startswith("shard.00001.mds.zstd: ") and message in found
    assert "fetched twice. Upload the folder again from a whole copy" in found
    assert store.downloads[key] == 2 and not any(path.name.startswith("shard.00001") for path in cached(data))
    store.put(key, content)
    assert len(read_all(opened(data))) == 60


def test_small_files_that_do_not_belong_to_the_card(store: Store, data: DataConfig, tmp_path: Path) -> None:
    for name, message in (("index.json", "sha256"), ("lengths.npy", "sha256"), ("token_counts.npy", "cannot be read")):
        key = f"{tmp_path.name}/{name}"
        content = store.get(key)
        store.put(key, content[:-3])
        found = refusal(data)
        assert found.startswith(f"{name}: {message}") and "fetched twice" in found
        store.put(key, content)
    store.put(f"{tmp_path.name}/dataset.json", b"{}")
    assert refusal(data).startswith("dataset.json: holds no dataset card (")


def test_a_folder_that_was_replaced_in_the_store_is_fetched_again(
    store: Store, data: DataConfig, tiny_data: Path, tmp_path: Path
) -> None:
    """The same names with other bytes: copies of an earlier run must not be trained on."""
    read_all(opened(data))
    documents = make_documents(tiny_data / "tokenizer", [30] * 60, seed=77)
    make_shards(tmp_path / "other", documents, tiny_data / "tokenizer")
    store.upload(tmp_path / "other", tmp_path.name)
    forget()
    assert read_all(opened(data)) == [document.tolist() for document in documents]


def test_a_copy_that_has_gone_bad_on_the_disk_is_fetched_again(store: Store, data: DataConfig, tiny_data: Path) -> None:
    read_all(opened(data))
    for path, content in zip(cached(data)[:3], (b"", b"junk", None), strict=True):
        path.write_bytes(content) if content is not None else path.unlink()
    store.downloads.clear()
    assert read_all(opened(data)) == expected(tiny_data)
    assert sum("shard." in key for key in store.downloads) == 3


@pytest.mark.parametrize("fault", ["drop", "busy"])
def test_a_store_that_stumbles_is_asked_again(store: Store, data: DataConfig, tiny_data: Path, fault: str) -> None:
    shards = opened(data)
    store.fault, store.faults_left = fault, 2
    assert read_all(shards) == expected(tiny_data)
    assert store.faults_left == 0


def test_gs_with_keys_that_stumbles_is_asked_again(
    store: Store, url: str, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streaming's downloader says nothing of a 503 there: no error, and no file, which ended the run."""
    from boto3.session import Session

    library = ModuleType("google.cloud.storage")  # imported with keys too, and then not used
    monkeypatch.setattr(library, "Client", type("Client", (), {}), raising=False)
    monkeypatch.setitem(sys.modules, "google.cloud", ModuleType("google.cloud"))
    monkeypatch.setitem(sys.modules, "google.cloud.storage", library)
    monkeypatch.setenv("GCS_KEY", "test")
    monkeypatch.setenv("GCS_SECRET", "test")
    client, here = Session.client, {"endpoint_url": store.url, "region_name": "us-east-1"}  # theirs is written down
    monkeypatch.setattr(Session, "client", lambda self, name, **keys: client(self, name, **keys | here))
    google = url.replace("s3://", "gs://")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # boto's own
    store.fault, store.faults_left = "busy", 2
    fetched = Downloader(google, 30.0).fetch("index.json", tmp_path)
    assert fetched.read_bytes() == (tiny_data / "train/index.json").read_bytes() and store.faults_left == 0
    store.faults_left = 10_000
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match=r"index\.json: not fetched in \d+ attempts; .*the file has not come"):
        Downloader(google, 4.0).fetch("index.json", empty)


def test_a_store_that_dies_ends_the_run_in_the_time_stated(store: Store, data: DataConfig) -> None:
    opened(data)  # the first answer, with all that is imported for it, can take longer than what follows allows
    shards = opened(replace(data, download_timeout_seconds=4.0))
    shards.read(0)
    port = store.port
    store.stop()
    started = time.monotonic()
    try:
        with pytest.raises(StorageError, match=r"00001.*not fetched in \d+ attempts; .* 4 s "):
            read_all(shards)
    finally:
        store.start(port)
    assert time.monotonic() - started < 15  # a bound that a user waits for, not a measurement
    assert len(read_all(shards)) == 60  # and the same process could continue


def test_a_store_that_falls_silent(store: Store, data: DataConfig) -> None:
    shards = opened(replace(data, download_timeout_seconds=4.0))
    store.fault, store.faults_left = "hang", 100
    with pytest.raises(StorageError, match="TimeoutError: the store does not answer, or stopped in the middle"):
        shards.read(0)


def test_refused_credentials(store: Store, data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    store.allow_anyone(False)
    try:
        found = refusal(data, ConfigError)
    finally:
        store.allow_anyone(True)
    assert found.startswith("dataset.json: access refused (403). Give this machine credentials that may read it")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    assert "access refused (NoCredentialsError" in refusal(data, ConfigError)


def test_a_store_that_cannot_be_read_from_here(data: DataConfig) -> None:
    for train in ("foo://bucket/x", "oci://bucket/x"):  # the scheme; a package that is missing
        assert "Streaming cannot read from this store here" in refusal(replace(data, train=train), ConfigError)


def test_a_cache_that_cannot_be_written(data: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="the cache of remote shards cannot be written .*data.cache_folder"):
        local_folder(data.train, replace(data, cache_folder=str(tmp_path / "file")))


def test_a_kill_leaves_nothing_in_the_way(store: Store, data: DataConfig, tiny_data: Path) -> None:
    """kill -9 in the middle of a download: the next start takes over at once, and cleans up."""
    limited = replace(data, cache_limit_bytes=1 << 20)
    opened(limited)
    store.fault, store.faults_left = "hang", 100
    process = multiprocessing.get_context("fork").Process(target=lambda: opened(limited).read(0))
    process.start()
    root = Path(str(data.cache_folder))
    until(lambda: list(root.glob("*/partial/shard.00000*/reserved")) != [])
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert list(root.glob("*/partial/*")) != []
    store.fault = None
    forget()
    assert read_all(opened(limited)) == expected(tiny_data)
    assert list(root.glob("*/partial/*")) == []


def test_a_local_folder_is_never_written_to(tiny_data: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_data / "train", tmp_path / "train"))
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir()}
    tokenizer, cache = str(tiny_data / "tokenizer"), str(tmp_path / "cache")
    data = DataConfig(train=str(folder), tokenizer=tokenizer, cache_folder=cache, cache_limit_bytes=1)
    shards = opened(data)
    assert cache_holds_next_block([shards], data)
    read_all(shards)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir()} == before
    assert not (tmp_path / "cache").exists()


def test_the_url_of_a_broken_index_is_reported(store: Store, data: DataConfig, tiny_data: Path, tmp_path: Path) -> None:
    """An index that climbs out of its folder writes nothing outside the cache."""
    folder = Path(shutil.copytree(tiny_data / "train", tmp_path / "train"))
    index = json.loads((folder / "index.json").read_text())
    index["shards"][1]["zip_data"]["basename"] = "../../../outside"
    (folder / "index.json").write_text(json.dumps(index))
    for nested in (False, True):  # as prepared folders are read, and adopted ones
        with pytest.raises(DataError, match="names a file outside its folder"):
            read_index(folder / "index.json", "tokens", nested=nested)
    write_card(folder, replace(read_card(tiny_data / "train"), index_sha256=file_sha256(folder / "index.json")))
    url = store.upload(folder, "climbs")
    assert "names a file outside its folder: '../../../outside'" in refusal(replace(data, train=url))
    assert not (tmp_path / "outside").exists()


@pytest.mark.timeout(150)
def test_a_run_from_a_store_is_the_run_from_a_disk(
    store: Store, tiny_run: TinyRun, tiny_data: Path, url: str, tmp_path: Path
) -> None:
    """Batch for batch, validation and baseline included, with a cache for a single block."""
    held_out = store.upload(tiny_data / "validation", "held-out")
    common = ["phases.long=null", "phases.short.tokens=2500", "data.num_workers=1", "data.shuffle_block_shards=2"]
    sizes = sorted(local_shards(tiny_data).shard_bytes)
    far = [f"data.train={url}", f"data.validation={held_out}", f"data.cache_folder={tmp_path / 'cache'}"]
    runs = {"near": common, "far": [*common, *far, f"data.cache_limit_bytes={sum(sizes[-2:])}"]}
    found = {}
    for name, words in runs.items():
        assert main(["train", *tiny_run(*words, f"name={name}")]) == 0
        found[name] = [records(tmp_path / "runs" / name, kind) for kind in ("step", "validation")]
    assert sum("shard." in key for key in store.downloads) >= 4
    assert found["far"] == found["near"] and len(found["near"][0]) > 5
