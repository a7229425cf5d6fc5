"""BEIR's public sets by name: fetched once and atomically; without a network the message has the command."""

from __future__ import annotations

import functools
import hashlib
import shutil
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from modernbert_train.errors import DataError
from modernbert_train.evaluate.retrieval import beir_sets
from modernbert_train.evaluate.retrieval.beir import read_beir
from modernbert_train.evaluate.retrieval.beir_sets import beir_folder
from tests.support.beir import WriteBeir

pytestmark = pytest.mark.runs


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path, write_beir: WriteBeir, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Serve scifact.zip; yield the folder that is served."""
    folder = write_beir({"d1": "one"}, {"q1": "which"}, name="packed/scifact", test=[("q1", "d1", 1)])
    (tmp_path / "served").mkdir()
    packed = Path(shutil.make_archive(str(tmp_path / "served/scifact"), "zip", folder.parent, "scifact"))
    monkeypatch.setitem(beir_sets.MD5, "scifact", hashlib.md5(packed.read_bytes()).hexdigest())
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(tmp_path / "served")))
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(beir_sets, "URL", f"http://127.0.0.1:{server.server_port}")
    yield tmp_path / "served"
    server.shutdown()
    server.server_close()


def test_a_set_is_fetched_once_and_a_folder_of_that_name_wins(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "data/beir"
    found = beir_folder("scifact", str(home))
    assert found == home / "scifact" and read_beir(found, "test").counts["documents"] == 1
    (served / "scifact.zip").unlink()
    assert beir_folder("scifact", str(home)) == found
    assert beir_folder("scifact/within", str(home)) == found / "within"
    assert sorted(path.name for path in home.iterdir()) == [".scifact.lock", "scifact"]
    monkeypatch.chdir(found.parent)
    assert beir_folder("scifact", "elsewhere") == Path("scifact")
    assert beir_folder("my/own", "elsewhere") == Path("my/own")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-9]), "its MD5 is [0-9a-f]{32}, and should be"),
        (lambda file: file.unlink(), "[Nn]ot [Ff]ound"),
    ],
)  # fmt: skip
def test_a_download_that_fails_leaves_nothing_and_says_what_to_do(
    served: Path, tmp_path: Path, spoil: object, reason: str
) -> None:
    home = tmp_path / "data/beir"
    spoil(served / "scifact.zip")  # type: ignore[operator]
    with pytest.raises(DataError, match=reason) as raised:
        beir_folder("scifact", str(home))
    assert f"/scifact.zip && unzip scifact.zip -d {home}" in str(raised.value)
    assert [path.name for path in home.iterdir()] == [".scifact.lock"]


def test_without_a_network_it_is_reported_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beir_sets, "URL", "http://127.0.0.1:9")
    with pytest.raises(DataError, match="nfcorpus: BEIR's set is not in .*Connection refused.*Or name a folder"):
        beir_folder("nfcorpus", str(tmp_path))
