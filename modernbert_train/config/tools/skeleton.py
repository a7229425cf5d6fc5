"""Create a package for a new extension from the files of skeletons/: the output of `init extension`."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

from modernbert_train.config.schema import VARIANTS
from modernbert_train.core.files import os_errors_as, whole_folder
from modernbert_train.errors import ConfigError, StorageError

_TEMPLATES = Path(__file__).parent / "skeletons"
# kind -> the section of a run's YAML
KINDS = {"encoder": "model", "objective": "objective", "optimizer": "optim", "evaluation": "evals"}


def write_skeleton(kind: str, name: str, out: Path) -> str:
    """Write a package with one extension, its test and its pyproject.toml.

    Args:
        kind: of KINDS.
        name: of the package, and in a run's YAML.
        out: a folder that does not exist; written atomically.

    Returns:
        The next steps, as text.

    Raises:
        ConfigError: the name is invalid or taken, or the folder exists.
        StorageError: the folder cannot be written.
    """
    where = f"init extension {kind} {name}"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{where}: cannot be a module's name. Use small letters, digits and '_', and begin with a letter."
        )
    if name in VARIANTS[KINDS[kind]] or importlib.util.find_spec(name) is not None:
        raise ConfigError(f"{where}: a module, or a {KINDS[kind]}.name, already has that name. Choose another.")
    if out.exists():
        raise ConfigError(f"--out={out}: exists already. Name a folder that does not.")
    title = "".join(part.capitalize() for part in name.split("_"))
    places = {"pyproject.toml.txt": "pyproject.toml", "test.py.txt": f"test_{name}.py"}
    with (
        os_errors_as(StorageError, f"--out={out}: cannot be written", "Choose another folder."),
        whole_folder(out) as staging,
    ):
        (staging / name).mkdir()
        for file in (_TEMPLATES / "pyproject.toml.txt", *sorted((_TEMPLATES / kind).iterdir())):
            text = file.read_text(encoding="utf-8").replace("my_plugin", name).replace("MyPlugin", title)
            place = places.get(file.name, f"{name}/{file.name.removesuffix('.txt')}")
            (staging / place).write_text(text, encoding="utf-8")
    section = (
        f"evals: {{{name}: {{name: {name}}}}}" if kind == "evaluation" else f"{KINDS[kind]}: {{name: {name}, ...}}"
    )
    return (
        f"{out}: written. Its test: python -m pytest {out}\n"
        f"To train with it: pip install -e {out}, or PYTHONPATH={out}; and in a run's YAML:\n"
        f"  plugins: [{name}]\n  {section}"
    )
