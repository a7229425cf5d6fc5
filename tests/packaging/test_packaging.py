"""The installed forms: the wheel, the pinned list, the image."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import files, requires, version
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from modernbert_train import __version__
from modernbert_train.config.packages import FLASH_4_INSTALL, FLASH_4_OLDEST
from modernbert_train.import_stubs import write_hook
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture
def declared(project: dict[str, Any]) -> list[str]:
    extras = project["project"]["optional-dependencies"].values()
    return [*project["project"]["dependencies"], *project["dependency-groups"]["dev"], *chain(*extras)]


def pins(name: str) -> dict[str, tuple[str, ...]]:
    """Return each package of a list, with its version and hashes."""
    blocks = re.split(r"\n(?=\S)", (ROOT / "requirements" / name).read_text().strip())
    found = [block.partition("==") for block in blocks if "==" in block and not block.startswith(("#", "-r"))]
    return {package: tuple(rest.split()) for package, _, rest in found}


def version_of(package: str) -> str:
    return pins("pinned.txt")[package.lower()][0]


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


@pytest.mark.parametrize("name", ["pinned.txt", "image.txt", "flash.txt"])
def test_every_pin_has_a_hash_and_no_index_is_named(name: str) -> None:
    """A pin without a hash is not installed at all; an index would bind the list to one place."""
    pin, hashed = r"[a-z0-9.-]+==\S+ \\\n", r"    --hash=sha256:[0-9a-f]{64}"
    assert re.fullmatch(rf"({pin}({hashed} \\\n)*{hashed}\n)+", (ROOT / "requirements" / name).read_text())


def test_exact_versions_agree_everywhere(project: dict[str, Any], declared: list[str]) -> None:
    """Else `make venv` and `uv sync` train with different libraries."""
    for package in project["tool"]["uv"]["dependency-metadata"]:
        declared += [f"{package['name']}=={package['version']}", *package["requires-dist"]]
    names = ("in.txt", "image-in.txt", "overrides.txt")
    inputs = "\n".join((ROOT / "requirements" / name).read_text() for name in names)
    declared += [line for line in inputs.splitlines() if "==" in line and "sys_platform" not in line]
    exact = [requirement.split("==") for requirement in declared if "==" in requirement]
    assert {"mosaicml", "mosaicml-streaming", "transformers"} <= {name for name, _ in exact}
    assert [name for name, wanted in exact if version_of(name) != wanted] == []


def test_everything_declared_is_in_the_list_but_for_torch(declared: list[str]) -> None:
    """The list is installed without looking at requirements, so a new one must be put into it by hand. The build of
    torch depends on the machine; a pin would bring CUDA to every laptop, or take it from a GPU."""
    names, pinned = {name_of(requirement) for requirement in declared}, pins("pinned.txt").keys()
    # torch is built for one CUDA and installed first, flash-attn-4 is in flash.txt; the others are loggers to choose
    assert names - pinned == {"torch", "flash-attn-4", "mlflow", "tensorboard", "trackio"}
    assert not [name for name in pinned if name in ("torchvision", "triton") or name.startswith("nvidia")]


def test_requirements_for_uv_are_the_true_ones_without_the_caps(project: dict[str, Any]) -> None:
    """The correction and overrides.txt must drop the same requirements, for the releases in use. And a wheel, which
    bundles both libraries, declares the same for them."""
    own = project["project"]["dependencies"]
    overrides = (ROOT / "requirements/overrides.txt").read_text()
    never = set(re.findall(r"^([\w-]+) ; sys_platform", overrides, re.MULTILINE))
    for package in project["tool"]["uv"]["dependency-metadata"]:
        if version(package["name"]) != package["version"]:
            pytest.skip(f"{package['name']} {version(package['name'])} is installed, not {package['version']}")
        true = {name_of(r) for r in requires(package["name"]) or [] if "extra ==" not in r}
        told = {name_of(r) for r in package["requires-dist"]}
        assert true - told == (true & never) - {"torch"}, package["name"]
        assert told <= true
        for requirement in package["requires-dist"]:
            name = name_of(requirement)
            assert requirement == name or name == "tqdm" or requirement in own, requirement
            assert name in {name_of(each) for each in own}


@pytest.mark.slow
def test_the_wheel_holds_all_that_is_needed_and_nothing_else(tmp_path: Path, project: dict[str, Any]) -> None:
    """A build forgets py.typed, styles and recipes silently; tests must not be installed. Composer and Streaming are in
    it unchanged, since pip could not install their declared requirements."""
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("building offline needs setuptools 77 in this environment")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE", "modernbert_train", "tests", "data_prep", "launch", "yamls"):
        (source / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "requirements", source / "requirements")  # bundle.py asks where it stands
    build = f"{sys.executable} -m pip wheel --quiet --no-deps --no-index --no-build-isolation -w {tmp_path} {source}"
    subprocess.run(build.split(), check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"modernbert_train-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"modernbert_train-{__version__}.dist-info/METADATA").decode()
        bundled = json.loads(archive.read("modernbert_train/bundled/versions.json"))
        composer = archive.read("modernbert_train/bundled/composer/trainer/trainer.py")
        hook = archive.read("modernbert_train_import_hook.pth").decode()
    packages = {"modernbert_train", "data_prep", "launch"}
    others = {"modernbert_train_import_hook.pth", f"modernbert_train-{__version__}.dist-info"}
    assert {n.split("/")[0] for n in names} == packages | others, "a release that an environment has is overwritten"
    assert hook == write_hook(tmp_path).read_text(encoding="utf-8")
    assert bundled == {name: version_of(name) for name in ("mosaicml", "mosaicml-streaming")}
    (original,) = [each for each in files("mosaicml") or [] if str(each) == "composer/trainer/trainer.py"]
    assert composer == Path(str(original.locate())).read_bytes()
    others = ("bundled/composer/LICENSE", "bundled/streaming/LICENSE", "py.typed", "report/page.css", "report/page.js")
    others += tuple(f"report/vendor/{name}" for name in ("uplot.js", "uplot.css", "LICENSE.txt"))
    recipes = [path.relative_to(ROOT) for path in (ROOT / "yamls").rglob("*.yaml")]
    assert {f"modernbert_train/{each}" for each in (*others, *recipes)} | {"launch/templates/slurm.sh"} <= names
    skeletons = [*(ROOT / "modernbert_train/config/tools/skeletons").rglob("*.txt")]
    modules = [path for name in packages for path in (ROOT / name).rglob("*.py")]
    assert len(skeletons) > 10 and {str(path.relative_to(ROOT)) for path in (*skeletons, *modules)} <= names
    assert "mosaicml" not in metadata and "License-Expression: Apache-2.0" in metadata
    assert any(n.endswith("licenses/LICENSE") for n in names)


@pytest.fixture
def dockerfile() -> list[list[str]]:
    """Return the commands of the image: their first word, and the rest."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]


def test_the_image_is_pinned_and_runs_without_root(dockerfile: list[list[str]]) -> None:
    """A moving base breaks builds months later; root in a container writes root's files into users' folders. NCCL loads
    InfiniBand's libraries at run time, and without them uses TCP without a word."""
    (base,) = [rest.split()[0] for word, rest in dockerfile if word == "FROM"]
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", base)
    assert [rest for word, rest in dockerfile if word == "USER"][-1] not in ("root", "0")
    assert "ADD" not in [word for word, _ in dockerfile]
    assert not re.search(r"latest|https?://", (ROOT / "Dockerfile").read_text())
    (installed,) = [rest for word, rest in dockerfile if word == "RUN" and "apt-get install" in rest]
    assert "--no-install-recommends" in installed and "rm -rf /var/lib/apt/lists" in installed
    assert {"libibverbs1", "ibverbs-providers", "rdma-core"} <= {*installed.partition("rm -rf")[0].split()}


def test_the_image_installs_its_packages_before_it_copies_the_project(dockerfile: list[list[str]]) -> None:
    """Else every change of a line of code downloads and installs all of CUDA again."""
    copies = [number for number, (word, _) in enumerate(dockerfile) if word == "COPY"]
    installs = [n for n, (word, rest) in enumerate(dockerfile) if word == "RUN" and re.match("sh .*install.sh", rest)]
    assert [dockerfile[number][1].split()[1] for number in copies] == ["requirements", "."]
    assert copies[0] < installs[0] < copies[1] < installs[1]
    assert any("MODERNBERT_LIST=image.txt" in rest for _, rest in dockerfile[: installs[0]])


def test_the_image_has_the_tested_versions_and_no_tools_of_developers() -> None:
    whole, image = pins("pinned.txt"), pins("image.txt")
    assert image.items() <= whole.items()  # versions and hashes
    tools = {"pytest", "hypothesis", "ruff", "pyrefly", "moto", "flask", "mkdocs", "mkdocs-material", "torch-optimi"}
    assert tools <= whole.keys() and not tools & image.keys()
    wanted = [re.split(r"[\[=<> #]", line)[0] for line in (ROOT / "requirements/image-in.txt").read_text().splitlines()]
    assert {name for name in wanted if name} <= image.keys()


def test_the_cuda_build_is_tested_with_the_same_versions() -> None:
    assert "-r image.txt" in (ROOT / "requirements/cuda.txt").read_text()
    assert "pytest" in pins("cuda.txt") and pins("cuda.txt").items() <= pins("pinned.txt").items()


def test_the_extra_brings_a_flash_attention_that_is_taken(project: dict[str, Any]) -> None:
    """And the one that is compiled in the tests is another that would be."""
    (wanted,) = project["project"]["optional-dependencies"]["flash"]
    assert wanted == f"flash-attn-4[cu13]>={FLASH_4_OLDEST}" and wanted in FLASH_4_INSTALL
    assert Version(pins("flash.txt")["flash-attn-4"][0]) >= Version(FLASH_4_OLDEST)


def test_no_registry_is_written_into_the_files_that_install() -> None:
    """Users behind mirrors configure pip; a host written here would go around them."""
    files = [ROOT / name for name in ("pyproject.toml", "Makefile", "Dockerfile", ".ci/run")]
    files += [path for path in (ROOT / "requirements").iterdir() if path.is_file()]
    host = re.compile(r"https?://|file://|--(extra-)?index-url|--find-links")
    assert [path.name for path in files if host.search(path.read_text())] == []


@pytest.mark.runs
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("venv", "requirements/install.sh"),
        ("test-quick", "not gpu and not slow and not runs"),
        ("test-slow", "slow and not weekly and not gpu"),
        ("format", "ruff format"),
        ("test-cuda", "tests/cuda_build/run.sh"),
        ("first-gpu-hour", "benchmarks.first_gpu_hour"),
        ("test-pythons", "tests/other_pythons.sh"),
    ],
)
def test_the_targets_that_pages_name_do_what_they_say(target: str, said: str) -> None:
    """Typed by newcomers first; `venv`, `test-quick`, `test-cuda` and the others are shown without being run."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and said in done.stdout, done.stderr
    assert all((ROOT / path.split("::")[0]).exists() for path in re.findall(r"\btests/\S+", done.stdout))


@pytest.mark.runs
def test_a_python_that_is_not_here_is_named_and_one_that_fails_fails_all(tmp_path: Path) -> None:
    """Else CI is green on untested Pythons. `make` and the other Pythons are stand-ins."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "dirname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    others = [version for version in ("3.11", "3.12", "3.13") if version != own]
    scripts = {f"python{others[1]}": "exit 0", "make": 'echo "make $*"; case $1 in test-quick) exit 2;; esac'}
    command = ["sh", str(ROOT / "tests/other_pythons.sh"), sys.prefix]
    for expected in (0, 1):
        done = subprocess.run(command, env={"PATH": str(tools), "HOME": str(tmp_path)}, capture_output=True, text=True)
        assert done.returncode == expected, done.stderr
        assert f"Python {others[0]} is not installed, so it is not tested" in done.stdout
        assert (f"Python {others[1]} is not installed" in done.stdout) == (expected == 0)
        for name, body in scripts.items():
            (tools / name).write_text(f"#!/bin/sh\n{body}\n")
            (tools / name).chmod(0o755)
    assert f"make test-quick VENV=.venv-{others[1]}" in done.stdout
    assert f"failed with Python {others[1]}" in done.stderr


@pytest.mark.runs
def test_the_repository_holds_no_packages_and_nothing_large() -> None:
    """A downloaded file in the folder would stay in every clone forever."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]
    assert len(files) > 300
    assert [
        file.name for file in files if file.suffix in (".whl", ".gz", ".zip", ".pt") or file.stat().st_size > 1e6
    ] == []
