"""What setuptools does besides, see pyproject.toml: a wheel brings Composer, Streaming and the recipes with it.

The releases of mosaicml and mosaicml-streaming that this project uses declare caps (torch < 2.7.1, transformers < 5,
numpy < 2.2) that their code does not need, and pip has no way to overrule what a package declares. So a wheel holds
their modules, unchanged and with their licences (Apache 2.0), and declares what they really need. They lie within the
package, so that releases that an environment has of its own are neither overwritten nor taken away with ours, and a
.pth file lets every program find them where there are none; see import_hook.py.

They are taken from this environment, if it has these releases and each file has the hash that its own record names;
otherwise pip downloads them, and they must have the hashes in requirements/pinned.txt. An editable install brings
neither: `make venv` and `uv sync` install the packages themselves.
"""

import base64
import csv
import hashlib
import json
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent.parent
BUNDLED = {"mosaicml": "composer", "mosaicml-streaming": "streaming"}  # package -> the folder of its modules


class BuildWithLibraries(build_py):
    """Also copies yamls/ and what stands in BUNDLED into the package, and puts the hook beside it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib)
        shutil.copytree(ROOT / "yamls", target / "modernbert_train/yamls", dirs_exist_ok=True)
        versions, bundled = {}, target / "modernbert_train/bundled"
        shutil.rmtree(bundled, ignore_errors=True)
        for package, folder in BUNDLED.items():
            pin = _pinned(package)
            versions[package] = pin["version"]
            _from_here(package, folder, pin["version"], bundled) or _from_index(package, folder, pin["text"], bundled)
        (bundled / "versions.json").write_text(json.dumps(versions, indent=1) + "\n", encoding="utf-8")
        # by its path: the environment that builds may have a modernbert_train of its own
        runpy.run_path(str(ROOT / "modernbert_train/import_stubs.py"))["write_hook"](target)


class SourceWithFiles(sdist):
    """Also holds what building a wheel reads."""

    def add_defaults(self) -> None:
        super().add_defaults()
        self.filelist.extend(["requirements/bundle.py", "requirements/pinned.txt"])
        self.filelist.extend(str(path.relative_to(ROOT)) for path in sorted((ROOT / "yamls").rglob("*.yaml")))


def _pinned(package: str) -> dict[str, str]:
    text = (ROOT / "requirements/pinned.txt").read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(package)}==(\S+) .*\n(?: .*\n?)+", text, re.MULTILINE)
    assert found is not None, f"requirements/pinned.txt: {package} is not in it"
    return {"version": found.group(1), "text": found.group(0)}


def _from_here(package: str, folder: str, version: str, target: Path) -> bool:
    try:
        there = distribution(package)
    except PackageNotFoundError:
        return False
    if there.version != version:
        return False
    files = [(str(each), each.hash) for each in there.files or () if _belongs(str(each), folder)]
    for name, expected in files:
        content = Path(there.locate_file(name)).read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        if expected is None or expected.value != digest:
            return False
    for name, _ in files:
        _write(target, folder, name, Path(there.locate_file(name)).read_bytes())
    return bool(files)


def _from_index(package: str, folder: str, pin: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch, "wanted.txt")
        wanted.write_text(pin, encoding="utf-8")
        options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-d", scratch, "-r", str(wanted)]
        done = subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options], check=False)
        if done.returncode != 0:
            raise SystemExit(
                f"{package}: could not be downloaded, see above, and a wheel brings it along. Build where pip reaches "
                "its index, or in an environment made by `make venv`, with --no-build-isolation."
            )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
            for name, *_ in csv.reader(archive.read(record).decode().splitlines()):
                if _belongs(name, folder):
                    _write(target, folder, name, archive.read(name))


def _belongs(name: str, folder: str) -> bool:
    licence = re.search(r"\.dist-info/(licenses/)?(LICENSE|NOTICE)[^/]*$", name)
    return (name.startswith(f"{folder}/") and not name.endswith(".pyc")) or licence is not None


def _write(target: Path, folder: str, name: str, content: bytes) -> None:
    path = target / (name if name.startswith(f"{folder}/") else f"{folder}/{Path(name).name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
