"""A part of the program is given its own sections of the configuration, and the whole run stays with a few.

What a function is given is what it can depend on: `config.checkpoint` says that nothing else of a run changes when a
checkpoint is written. Somebody who changes a key reads few files to know what it does, and a part can be tried or
reused without a whole run made up around it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("modernbert_train", "launch", "data_prep")
WHOLE = "RunConfig"
MOST_MODULES = 14  # that get the whole run between the call of `train` and the first step
Node = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Place(NamedTuple):
    module: str
    name: str


@cache
def trees() -> dict[str, ast.Module]:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return {name: ast.parse(file.read_text("utf-8")) for name, file in zip(names, files, strict=True)}


@cache
def defined(module: str) -> dict[str, Node]:
    """Functions, classes and tables at the top of a module."""
    found: dict[str, Node] = {}
    for node in trees()[module].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id: node for each in targets if isinstance(each, ast.Name)}
    return found


@cache
def imported(module: str) -> dict[str, Place]:
    """What a module's names stand for, of the project; the name is empty where it is a module."""
    found = {name: Place(module, name) for name in defined(module)}
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found[alias.asname or alias.name] = (
                    Place(full, "") if full in trees() else Place(node.module or "", alias.name)
                )
    return found


def names_in(node: ast.AST | None) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} if node is not None else set()


@cache
def holders() -> dict[str, set[str]]:
    """Classes that keep a whole run, and the attributes in which they do; a checkpoint's is the run as it was then."""
    found: dict[str, set[str]] = {}
    for node in (node for module in trees() for node in defined(module).values()):
        if isinstance(node, ast.ClassDef) and node.name != "Checkpoint":
            kept = {
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign)
                and isinstance(each.target, ast.Name)
                and WHOLE in names_in(each.annotation)
            }
            if any(
                isinstance(each, ast.FunctionDef) and each.name == "__init__" and is_given(each) for each in node.body
            ):
                kept |= {"config", "_config"}
            if kept:
                found[node.name] = kept
    return found


def arguments(function: ast.FunctionDef) -> list[ast.arg]:
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


def is_given(function: ast.FunctionDef) -> bool:
    return any(WHOLE in names_in(each.annotation) for each in arguments(function))


def reaches_into(function: ast.FunctionDef) -> bool:
    """Whether it takes the whole run out of something that keeps one."""
    read = {
        (node.value.id, node.attr)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return any(
        (each.arg, attribute) in read
        for each in arguments(function)
        for name in names_in(each.annotation) & holders().keys()
        for attribute in holders()[name]
    )


def mentioned(module: str, node: ast.AST) -> Iterator[tuple[Place, str]]:
    """What code refers to, annotations left out: a definition of the project, and of a class the method."""
    skipped: set[int] = set()
    for each in ast.walk(node):
        kinds = [getattr(each, "annotation", None), getattr(each, "returns", None)]
        skipped |= {id(part) for kind in kinds if kind is not None for part in ast.walk(kind)}
    known = imported(module)
    for each in ast.walk(node):
        if id(each) in skipped:
            continue
        if isinstance(each, ast.Name) and each.id in known:
            yield known[each.id], ""
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in known:
            place = known[each.value.id]
            yield (place, each.attr) if place.name else (Place(place.module, each.attr), "")


def followed(start: Place) -> dict[str, set[str]]:
    """Module -> functions and classes that get the whole run, from one that has it to those that it refers to."""
    found: dict[str, set[str]] = {}
    seen: set[tuple[Place, str]] = set()
    todo: list[tuple[Place, str]] = [(start, "")]
    while todo:
        place, method = todo.pop()
        node = defined(place.module).get(place.name) if place.module in trees() else None
        if node is None:  # handed on by a package's face
            again = imported(place.module).get(place.name) if place.module in trees() else None
            todo += [(again, method)] if again is not None and again != place else []
            continue
        if isinstance(node, ast.ClassDef) and place.name not in holders():
            node = next((m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == method), None)
        else:
            method = ""
        if node is None or (place, method) in seen:
            continue
        if isinstance(node, ast.FunctionDef) and not (is_given(node) or reaches_into(node)):
            continue
        seen.add((place, method))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.setdefault(place.module, set()).add(f"{place.name}.{method}".rstrip("."))
        todo += mentioned(place.module, node)
    return found


def test_whoever_follows_a_run_from_train_passes_few_modules() -> None:
    """Else nobody can say which files a key reaches, or build a part without a whole run.

    Give a new part its own sections, or a small object that is made of them once, as clock.py's of the phases.
    """
    found = followed(Place("modernbert_train.train.session", "train"))
    assert found["modernbert_train.train.build"] and found["modernbert_train.config.check"], "it follows calls"
    assert len(found) <= MOST_MODULES, "\n".join(
        f"{module}: {', '.join(sorted(found[module]))}" for module in sorted(found)
    )


def test_no_question_of_kind_is_asked_outside_the_configuration() -> None:
    """An architecture or an objective of one's own would be missed by it. A property of the configuration tells."""
    asked = [
        f"{module}:{node.lineno}"
        for module, tree in trees().items()
        if not module.startswith("modernbert_train.config")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and any(name.endswith("Config") for name in names_in(node.args[1]))
    ]
    assert asked == [], "ask a property of the configuration instead"
