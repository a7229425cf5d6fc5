"""BEIR's public sets by name: downloaded once, compared with their published hash, unpacked atomically.

Hashes: the table of datasets in BEIR's documentation (github.com/beir-cellar/beir). They are MD5, which tells a damaged
download; a set is text that is read as data alone.
"""

from __future__ import annotations

import hashlib
import shutil
import urllib.request
import zipfile
from pathlib import Path

from modernbert_train.core.files import lock, os_errors_as, publish
from modernbert_train.errors import DataError

URL = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets"
MD5 = {
    "arguana": "8ad3e3c2a5867cdced806d6503f29b99",
    "climate-fever": "8b66f0a9126c521bae2bde127b4dc99d",
    "cqadupstack": "4e41456d7df8ee7760a7f866133bda78",
    "dbpedia-entity": "c2a39eb420a3164af735795df012ac2c",
    "fever": "5a818580227bfb4b35bb6fa46d9b6c03",
    "fiqa": "17918ed23cd04fb15047f73e6c3bd9d9",
    "hotpotqa": "f412724f78b0d91183a0e86805e16114",
    "msmarco": "444067daf65d982533ea17ebd59501e4",
    "nfcorpus": "a89dba18a62ef92f7d323ec890a0d38d",
    "nq": "d4d3d2e48787a744b6f6e691ff534307",
    "quora": "18fb154900ba42a600f84b839c173167",
    "scidocs": "38121350fc3a4d2f48850f6aff52e4a9",
    "scifact": "5f7d1de60b170fc8027bb7898e2efca1",
    "trec-covid": "ce62140cb23feb9becf6270d0d1fe6d1",
    "webis-touche2020": "46f650ba5a527fc69e0a6521c5a23563",
}
_SECONDS = 60  # without a byte, after which a download has failed
_BLOCK = 1 << 20


def beir_folder(name: str, home: str) -> Path:
    """Return the named folder, or the folder of a set of MD5 in `home`, downloaded if it is missing.

    Args:
        name: a folder; or a public set, or a folder within one, as cqadupstack/android.
        home: where public sets are.

    Raises:
        DataError: it cannot be downloaded, or is damaged.
    """
    known = Path(name).parts[:1]
    if Path(name).exists() or known[0:1] == () or known[0] not in MD5:
        return Path(name)
    if not (Path(home) / known[0]).exists():
        _download(known[0], Path(home))
    return Path(home) / name


def _download(name: str, home: Path) -> None:
    url, aside = f"{URL}/{name}.zip", home / f".{name}.partial"
    missing = f"{name}: BEIR's set is not in {home} and cannot be downloaded"
    remedy = f"Where there is a network: curl -O {url} && unzip {name}.zip -d {home}. Or name a folder."
    try:
        with os_errors_as(DataError, missing, remedy, zipfile.BadZipFile):
            home.mkdir(parents=True, exist_ok=True)
            with (home / f".{name}.lock").open("a") as file:
                lock(file)  # other runs of a suite may ask for it too
                if (home / name).exists():
                    return
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir()
                print(f"downloading {url}", flush=True)
                _fetch(url, aside / "set.zip", MD5[name])
                with zipfile.ZipFile(aside / "set.zip") as packed:
                    packed.extractall(aside)
                publish(aside / name, home / name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fetch(url: str, file: Path, md5: str) -> None:
    """Download a file; raise OSError if it is truncated or has another hash."""
    digest = hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(url, timeout=_SECONDS) as answer, file.open("wb") as out:
        size = int(answer.headers.get("Content-Length") or 0)
        while block := answer.read(_BLOCK):
            digest.update(block)
            out.write(block)
    if size and file.stat().st_size != size:
        raise OSError(f"{file.stat().st_size:,} of {size:,} bytes came")
    if digest.hexdigest() != md5:
        raise OSError(f"its MD5 is {digest.hexdigest()}, and should be {md5}")
