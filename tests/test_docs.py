"""The documentation: every command is one that this version takes, every link leads somewhere, and the site builds.

The README is run (test_readme.py), and each feature has tests that run it. Here every command of every page is held
against the parser, and every run or spec that it names is loaded and checked with its overrides.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from modernbert_train.__main__ import _parser, read_run
from modernbert_train.config.check import check
from modernbert_train.config.load import load_typed
from modernbert_train.config.prepare import PrepareConfig, prepare_problems

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.split("  #")[0].strip() for line in lines]
    return [line for line in found if line.startswith(("python ", "make "))]


COMMANDS = [(page.name, command) for page in PAGES for command in commands(page)]


def test_the_pages_have_commands() -> None:
    assert len(COMMANDS) > 40


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}:{command[:60]}" for page, command in COMMANDS])
def test_a_command_is_one_that_this_version_takes(
    page: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert words[1] in targets
        return
    if words[1:3] == ["-m", "modernbert_train"]:
        options, rest = _parser().parse_known_args(words[3:])
        assert not any(word.startswith("-") for word in rest)
        _check_run([*getattr(options, "run", []), *rest])
    elif words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None
    else:
        script = ROOT / words[1]
        assert script.is_file(), f"{words[1]} is not in the repository"
        if script.name == "prepare.py":
            _check_spec([word for word in words[2:] if not word.startswith("-")])
        elif script.name == "run.py":
            _check_run([word for word in words[2:] if word.endswith(".yaml") or ("=" in word and word[0] != "-")])


def _check_run(words: list[str]) -> None:
    """Load and check what a command would train, if it is in the repository and not a run that exists elsewhere."""
    files = [word for word in words if "=" not in word]
    if files and all((ROOT / file).is_file() for file in files) and any("=" in w or w in files for w in words):
        check(read_run(words))


def _check_spec(words: list[str]) -> None:
    files, overrides = [w for w in words if "=" not in w], [w for w in words if "=" in w]
    if files and all((ROOT / file).is_file() for file in files):
        assert prepare_problems(load_typed(PrepareConfig, files, overrides)) == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'src="([^"]+)"', text)
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def test_every_page_is_in_the_navigation_and_the_site_builds(tmp_path: Path) -> None:
    navigation = re.findall(r"([\w-]+\.md)$", (ROOT / ".mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(navigation) == [page.name for page in PAGES]
    pytest.importorskip("material", reason="mkdocs-material is not installed; `make venv` installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ".mkdocs.yml", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/recipe/index.html").is_file()
