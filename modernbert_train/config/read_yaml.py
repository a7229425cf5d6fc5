"""Read YAML files and a.b=c overrides into one plain tree, with the file and line of every key.

A file may begin with `include: [other.yaml]`, relative to itself: these files are read first, in order, and the file's
own keys take precedence. So a recipe's phases are written once and used alone or together.

A path `yamls/...` that does not exist here means the copy that is installed with the package, so the paths of the help
and of sweeps work in any folder. Messages name the file that was read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from modernbert_train.config.bounded_yaml import MAX_DEPTH, MAX_KEY, Loader, compose, read_bounded
from modernbert_train.core.installed import YAMLS
from modernbert_train.core.text import first_line

Origins = dict[tuple[str, ...], str]
INCLUDE = "include"
INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")  # as in omegaconf, where a backslash before it makes it text
_RUNS_NAMED = 6
_Place = Callable[[yaml.Node], str]


def read_yaml(
    file: Path, origins: Origins, errors: list[str], including: tuple[Path, ...] = (), done: set[Path] | None = None
) -> dict[str, Any]:
    """Read one YAML file and the files that it includes, which it overrides.

    Args:
        file: its path.
        origins: filled with the file and line of every key.
        errors: filled with every mistake.
        including: files being read that include this one.
        done: files included already; a file that several others include is read once, at its first place.

    Returns:
        The merged tree, without parts that could not be read.
    """
    if len(including) > MAX_DEPTH:
        errors.append(f"{file}: more than {MAX_DEPTH} files include one another. Write fewer, larger files.")
        return {}
    file = _installed(file)
    try:
        if including and file.exists() and not file.is_file():  # reading a terminal or a pipe would block
            raise OSError("not a regular file")
        node = compose(read_bounded(file))
    except FileNotFoundError:
        if including or file.suffix in (".yaml", ".yml"):
            errors.append(f"{file}: no such file. Give the path of a YAML file, relative to the current folder.")
        else:
            errors.append(f"{file}: no such run, nor a YAML file. {runs_beside(file)}")
        return {}
    except (OSError, UnicodeDecodeError) as error:
        errors.append(f"{file}: cannot be read ({error}). Check that it is a readable UTF-8 text file.")
        return {}
    except yaml.YAMLError as error:
        errors.append(f"{file}: not valid YAML. {_invalid(error)}")
        return {}
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        errors.append(f"{file}: holds no keys. Expected `key: value` lines.")
        return {}
    own: Origins = {}
    own_tree = _construct(node, lambda node: f"{file}:{node.start_mark.line + 1}", (), own, errors)
    tree: dict[str, Any] = {}
    done = set() if done is None else done
    for included in _included(file, own_tree.pop(INCLUDE, []), own, errors):
        if included.resolve() in (path.resolve() for path in (*including, file)):
            errors.append(f"{own[INCLUDE,]}: {included} includes itself, by way of {file}. Remove one of the two.")
            continue
        if included.resolve() not in done:
            done.add(included.resolve())
            merge(tree, read_yaml(included, origins, errors, (*including, file), done))
    own.pop((INCLUDE,), None)
    origins.update(own)
    merge(tree, own_tree)
    return tree


def _installed(file: Path) -> Path:
    """Return the installed file of a path `yamls/...` that does not exist; any other path as it is."""
    if file.parts[:1] != ("yamls",) or file.exists():
        return file
    copy = YAMLS.joinpath(*file.parts[1:])
    return copy if copy.is_file() else file


def is_saved(file: Path) -> bool:
    """Return True if a run wrote this file: a config.yaml in the folder of a run or of a checkpoint."""
    others = ("checkpoints", "metrics.jsonl", ".lock", "MANIFEST.json")
    return file.name == "config.yaml" and any((file.parent / name).exists() for name in others)


def runs_beside(folder: Path) -> str:
    """Suggest existing runs in the folder of a missing one."""
    runs = sorted(str(path.parent) for path in folder.parent.glob("*/config.yaml"))
    if not runs:
        return f"No runs are in {folder.parent}; name a YAML file or a run's folder, relative to the current folder."
    more = f" and {len(runs) - _RUNS_NAMED} more" if len(runs) > _RUNS_NAMED else ""
    return f"Here are {', '.join(runs[:_RUNS_NAMED])}{more}."


def _invalid(error: yaml.YAMLError) -> str:
    """Describe a syntax error with its remedy; a limit of bounded_yaml.py names its own."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    remedy = "Close every bracket and quote, and put text with a colon, `#`, brackets or braces into quotes."
    if r"'\t'" in str(error.problem):
        remedy = "Use spaces instead of tabs."
    marks = ((error.context, error.context_mark), (error.problem, error.problem_mark))
    problems = [f"{text} (line {mark.line + 1}, column {mark.column + 1})" for text, mark in marks if text and mark]
    return f"{': '.join(problems)}. {remedy}"


def _included(file: Path, value: Any, origins: Origins, errors: list[str]) -> list[Path]:
    """Return the files of an `include:`, relative to the file with it."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        errors.append(
            f"{INCLUDE}={value!r} ({origins[INCLUDE,]}): expected a list of YAML files, relative to this one."
        )
        return []
    return [Path(os.path.normpath(file.parent / name)) for name in names]


def read_override(override: str, origins: Origins, errors: list[str]) -> dict[str, Any]:
    """Read `a.b=c`; for a mistake, append to `errors` and return an empty tree."""
    key, equals, text = override.partition("=")
    path = key.split(".")
    if any("\ud800" <= character <= "\udfff" for character in override):
        errors.append(
            f"{shown(override)}: not UTF-8, which YAML and JSON need. Rename the folder, or make a link and name that."
        )
        return {}
    if not equals or not all(path):
        errors.append(f"{shown(override)}: not an override. Write section.key=value, for example optim.lr=1e-3.")
        return {}
    if len(path) > MAX_DEPTH or max(map(len, path)) > MAX_KEY:
        errors.append(
            f"{shown(override)}: a key of {len(path)} parts, the longest of {max(map(len, path))} characters; the "
            f"limits are {MAX_DEPTH} and {MAX_KEY}. Write section.key=value, for example optim.lr=1e-3."
        )
        return {}
    try:
        # a pattern of files, not a YAML alias: an override cannot have anchors
        text = text if not text.startswith("*") else json.dumps(text)
        node = compose(text) or yaml.ScalarNode("tag:yaml.org,2002:null", "")
    except yaml.YAMLError as error:
        errors.append(f"{shown(override)}: the value is not valid YAML. {_invalid(error)}")
        return {}
    for part in reversed(path):
        node = yaml.MappingNode("tag:yaml.org,2002:map", [(yaml.ScalarNode("tag:yaml.org,2002:str", part), node)])
    assert isinstance(node, yaml.MappingNode)
    return _construct(node, lambda node: "command line", (), origins, errors)


def _construct(
    node: yaml.MappingNode, origin_of: _Place, path: tuple[str, ...], origins: Origins, errors: list[str]
) -> dict[str, Any]:
    """Return a mapping as plain values; report other values and leave them out."""
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = origin_of(key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            errors.append(f"{line}: a list or a section where a key is expected. Write `key: value`.")
            continue
        key = str(key_node.value)
        if len(key) > MAX_KEY:
            errors.append(
                f"{shown(key)} ({line}): a key of {len(key):,} characters; the limit is {MAX_KEY}. Shorten it."
            )
            continue
        here = (*path, key)
        dotted = ".".join(here)
        if key in values:
            errors.append(f"{dotted} ({line}): given twice. Remove one of the two.")
        origins[here] = line
        if isinstance(value_node, yaml.MappingNode):
            values[key] = _construct(value_node, origin_of, here, origins, errors)
            continue
        for scalar in _octals(value_node):
            errors.append(f"{dotted}={scalar} ({line}): a leading zero means octal. Write it without.")
        try:
            values[key] = Loader("").construct_object(value_node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            reason = first_line(error)
            errors.append(f"{dotted} ({line}): not a plain value ({reason}). Quote it if it is text.")
    return values


def _octals(node: yaml.Node) -> list[str]:
    if isinstance(node, yaml.SequenceNode):
        return [scalar for item in node.value for scalar in _octals(item) if item is not node]
    is_octal = node.tag == "tag:yaml.org,2002:int" and re.fullmatch(r"[-+]?0[0-9_]+", str(node.value))
    return [node.value] if is_octal else []


def literal(value: Any) -> Any:
    """Return values as they are written so that text with ${ is no interpolation."""
    if isinstance(value, dict):
        return {key: literal(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [literal(each) for each in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def shown(value: Any) -> str:
    """Format a value for messages, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:160]}... ({len(text):,} characters)"


def merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Merge `other` into `tree`, section by section; `other` takes precedence."""
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = value
