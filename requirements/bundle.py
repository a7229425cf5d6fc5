"""Build commands of setuptools, named in pyproject.toml: they put Composer, Streaming and the recipes into a wheel.

The pinned releases of mosaicml and mosaicml-streaming cap torch, transformers and numpy (torch < 2.7.1, transformers
< 5, numpy < 2.2). Their code works without the caps, but pip cannot override a package's requirements. So a wheel
contains their modules, unchanged and with their licences (Apache 2.0), and declares their real requirements. The
modules are inside our package, so installing or removing it leaves other releases of the environment alone. A .pth file
makes them importable where no other release is installed; see import_hook.py.

The modules are copied from this environment if it has these releases and every file matches the hash in its record.
Otherwise pip downloads them and checks the hashes in requirements/pinned.txt. An editable install bundles nothing:
`make venv` and `uv sync` install the packages themselves.
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
    """Build the package, copy yamls/ and the packages of BUNDLED into it, and write the import hook next to it."""

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
        # by its path, since the building environment may have another modernbert_train installed
        runpy.run_path(str(ROOT / "modernbert_train/import_stubs.py"))["write_hook"](target)


class SourceWithFiles(sdist):
    """A source archive with the files that building a wheel reads."""

    def add_defaults(self) -> None:
        super().add_defaults()
        self.filelist.extend(["requirements/bundle.py", "requirements/pinned.txt"])
        self.filelist.extend(str(path.relative_to(ROOT)) for path in sorted((ROOT / "yamls").rglob("*.yaml")))


def _pinned(package: str) -> dict[str, str]:
    """Return the pinned version of a package, and its lines in pinned.txt with the hashes."""
    text = (ROOT / "requirements/pinned.txt").read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(package)}==(\S+) .*\n(?: .*\n?)+", text, re.MULTILINE)
    assert found is not None, f"requirements/pinned.txt: {package} is not in it"
    return {"version": found.group(1), "text": found.group(0)}


def _from_here(package: str, folder: str, version: str, target: Path) -> bool:
    """Copy a package from this environment; return False if it is absent, of another version or changed."""
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
    """Download a package with pip, and copy it."""
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch, "wanted.txt")
        wanted.write_text(pin, encoding="utf-8")
        options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-d", scratch, "-r", str(wanted)]
        done = subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options], check=False)
        if done.returncode != 0:
            raise SystemExit(
                f"{package}: could not be downloaded (see above), and a wheel contains it. Build where pip reaches its "
                "index, or in an environment made by `make venv`, with --no-build-isolation."
            )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
            for name, *_ in csv.reader(archive.read(record).decode().splitlines()):
                if _belongs(name, folder):
                    _write(target, folder, name, archive.read(name))


def _belongs(name: str, folder: str) -> bool:
    """Return True for the modules of a package and for its licences."""
    licence = re.search(r"\.dist-info/(licenses/)?(LICENSE|NOTICE)[^/]*$", name)
    return (name.startswith(f"{folder}/") and not name.endswith(".pyc")) or licence is not None


def _write(target: Path, folder: str, name: str, content: bytes) -> None:
    path = target / (name if name.startswith(f"{folder}/") else f"{folder}/{Path(name).name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
