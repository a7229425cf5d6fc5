"""The allowed imports, read from the source with `ast`.

If this breaks, `check` needs a GPU machine, the model cannot be tested without Composer, or a folder can no longer be
changed alone. The rooms are in ORDER; the allowed imports are the last line of each __init__.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from modernbert_train.config.plugins import Rows
from modernbert_train.evaluate.evaluators import EVALUATORS
from modernbert_train.models.build import ENCODERS, HEADS
from modernbert_train.objectives import OBJECTIVES
from tests.support.bounds import MAX_MODULES
from tests.support.packages import PACKAGES
from tests.support.paths import ROOT

# from the ground up: each may import the ones before it that its row or its docstring names
ORDER = (
    "core", "import_stubs", "config", "vocabulary", "batch", "clock", "distributed", "import_hook", "data",
    "objectives", "models", "optim", "collate", "checkpoints", "weights", "plan", "report", "evaluate", "train", "cli",
    "api", "__init__", "__main__",
)  # fmt: skip
LOOSE: dict[str, tuple[str, ...]] = {
    "import_stubs": (),
    "vocabulary": ("core",),
    "batch": ("config.objective", "core.keyed_random"),
    "clock": ("config",),
    "import_hook": ("core", "distributed.stop_signals", "import_stubs"),
    "collate": ("data.packing",),
    "api": (
        "cli.arguments", "config", "data", "distributed", "evaluate", "models", "plan", "train", "vocabulary",
        "weights",
    ),
    "__init__": ("api", "config", "core"),
    "__main__": ("cli", "core", "distributed"),
}  # fmt: skip
OUTSIDE: dict[str, tuple[str, ...]] = {
    "data_prep": (
        "cli.parser", "config", "core", "data.arrays", "data.dataset_card", "data.download", "data.field_counts",
        "data.mds", "data.read", "data.remote", "data.shard_file", "data.shard_index",
        "data.shard_writer", "data.statistics", "distributed.orphans", "import_hook", "vocabulary",
    ),
    "launch": (
        "__main__", "checkpoints.manifest", "checkpoints.evaluations", "cli.arguments", "cli.parser", "clock", "config",
        "core", "data.check_shards", "distributed", "plan", "report", "weights.names", "data_prep.report",
        "data_prep.sample",
    ),
}  # fmt: skip
ROOMS = [name for name in ORDER if name not in LOOSE]


def row_of_room(room: str) -> tuple[str, ...]:
    """Return the allowed imports of a room, by the docstring of its __init__."""
    text = (ROOT / "modernbert_train" / room / "__init__.py").read_text("utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert len(docstring.splitlines()) >= 3, f"modernbert_train/{room}: its purpose, its decisions, its imports"
    found = re.search(r"^Imports: ([^.]+(?:\.\w[^.]*)*)\.$", docstring, flags=re.MULTILINE)
    assert found is not None, f"modernbert_train/{room}/__init__.py: its docstring lacks a line `Imports: room, room.`"
    return tuple(name for name in re.split(r",\s+", found[1]) if name != "nothing")


# module or package -> what of the project it may import, besides itself; a package stands for everything in it
PROJECT = {f"modernbert_train.{room}": row_of_room(room) for room in ROOMS}
PROJECT |= {f"modernbert_train.{name}": row for name, row in LOOSE.items()} | OUTSIDE

# module or package -> the libraries it may import, besides the standard one; the most exact row counts
LIBRARIES: dict[str, tuple[str, ...]] = {
    "modernbert_train": (),
    "modernbert_train.core.keyed_random": ("numpy",),
    "modernbert_train.import_stubs": ("torchmetrics",),
    "modernbert_train.batch": ("numpy", "torch"),
    "modernbert_train.core.tensor_files": ("numpy", "safetensors", "torch", "xxhash"),
    "modernbert_train.core.torch_internals": ("torch",),
    "modernbert_train.core.versions": ("packaging",),
    "modernbert_train.distributed.compute": ("torch",),
    "modernbert_train.config": ("omegaconf", "yaml"),
    "modernbert_train.config.packages": ("packaging",),
    "modernbert_train.vocabulary": ("numpy", "tokenizers"),
    "modernbert_train.data": ("numpy",),
    "modernbert_train.data.check_shards": (),
    "modernbert_train.data.pack_kernel": ("llvmlite", "numba", "numpy"),
    "modernbert_train.data.shuffle_kernel": ("numba", "numpy"),
    "modernbert_train.data.dataset_card": ("xxhash",),
    "modernbert_train.data.facts": (),
    "modernbert_train.data.field_counts": (),
    "modernbert_train.data.fingerprint": (),
    "modernbert_train.data.loader": ("torch",),
    "modernbert_train.data.microbatches": ("numpy", "torch"),
    "modernbert_train.data.mixing": (),
    "modernbert_train.data.mds": ("numpy",),
    "modernbert_train.data.read.encodings": ("charset_normalizer", "numpy"),
    "modernbert_train.data.read.hub": ("datasets",),
    "modernbert_train.data.read.parquet": ("pyarrow",),
    "modernbert_train.data.read.unpacked": ("zstandard",),
    "modernbert_train.data.shard_file": ("numpy", "streaming"),
    "modernbert_train.data.shard_writer": ("numpy", "streaming"),
    "modernbert_train.data.workers": ("torch",),
    "modernbert_train.data.download": ("streaming",),
    "modernbert_train.checkpoints.tools": (),
    "modernbert_train.collate": ("torch",),
    "modernbert_train.report.inspection": ("numpy",),
    "modernbert_train.objectives": ("numpy",),
    "modernbert_train.models": ("torch",),
    "modernbert_train.models.attention": ("flash_attn", "flash_attn_interface", "torch"),
    "modernbert_train.models.attention.tile_kernels": ("torch", "triton"),
    "modernbert_train.optim": ("torch",),
    "modernbert_train.optim.fused": ("numpy", "torch", "triton"),
    "modernbert_train.optim.schedules": (),
    "modernbert_train.plan": ("numpy",),
    "modernbert_train.plan.resolve": (),
    "modernbert_train.distributed": (),
    "modernbert_train.report": ("numpy",),
    "modernbert_train.distributed.bf16": ("torch",),
    "modernbert_train.distributed.visible_gpus": ("torch",),
    "modernbert_train.distributed.group": ("torch",),
    "modernbert_train.distributed.fail_together": ("torch",),
    "modernbert_train.report.record": ("torch",),
    "modernbert_train.report.banner": ("torch",),
    "modernbert_train.checkpoints.checkpoint": ("torch",),
    "modernbert_train.checkpoints.manifest": ("xxhash",),
    "modernbert_train.report.throughput": ("torch",),
    "modernbert_train.plan.speed_settings": ("torch",),
    "modernbert_train.checkpoints.store": ("fsspec", "xxhash"),
    "modernbert_train.weights": ("torch",),
    "modernbert_train.weights.fill": ("torch", "transformers"),
    "modernbert_train.weights.formats": (),
    "modernbert_train.weights.formats.tensors": ("torch",),
    "modernbert_train.weights.names": ("huggingface_hub",),
    "modernbert_train.weights.push": ("huggingface_hub",),
    "modernbert_train.weights.model_card": (),
    "modernbert_train.weights.token_effect": ("numpy",),
    "modernbert_train.weights.token_rows": ("numpy", "torch"),
    "modernbert_train.evaluate": ("numpy", "torch"),
    "modernbert_train.evaluate.embed_file": ("numpy", "pyarrow"),
    "modernbert_train.evaluate.loaded": ("numpy", "tokenizers", "torch"),
    "modernbert_train.evaluate.retrieval": (),
    "modernbert_train.evaluate.metrics": ("numpy", "torch", "torchmetrics"),
    "modernbert_train.evaluate.retrieval.runs": ("transformers",),
    "modernbert_train.evaluate.suite": (),
    "modernbert_train.evaluate.suite.efficiency": ("numpy", "torch", "transformers"),
    "modernbert_train.evaluate.finetune": ("numpy",),
    "modernbert_train.evaluate.finetune.predictions": ("torch",),
    "modernbert_train.train.recipes": ("yaml",),
    "modernbert_train.train.retrieval": ("numpy", "yaml"),
    "modernbert_train.evaluate.finetune.shards": ("numpy",),
    "modernbert_train.evaluate.retrieval.kept": ("torch",),
    "modernbert_train.evaluate.retrieval.mine": ("datasets", "numpy", "sentence_transformers", "torch"),
    "modernbert_train.evaluate.retrieval.bm25": ("mteb",),
    "modernbert_train.evaluate.retrieval.rerank": ("mteb", "sentence_transformers", "torch"),
    "modernbert_train.evaluate.retrieval.sets": ("datasets", "mteb"),
    "modernbert_train.evaluate.retrieval.vectors": ("mteb", "sentence_transformers", "torch"),
    "modernbert_train.evaluate.retrieval.sentence_model": ("sentence_transformers", "torch", "transformers"),
    "modernbert_train.train": ("composer", "numpy", "torch"),
    "modernbert_train.train.composer_internals": ("composer", "torch", "wandb"),
    "modernbert_train.train.loggers": ("composer", "trackio"),
    "modernbert_train.api": ("composer", "numpy", "tokenizers", "torch"),
    "modernbert_train.plan.trials": ("torch",),
    "modernbert_train.train.measure_speed": ("numpy", "torch"),
    "modernbert_train.plan.doctor": ("torch",),
    "data_prep": ("datatrove", "numpy", "tokenizers", "tqdm"),
    "data_prep.adoption": ("numpy", "tokenizers"),
    "data_prep.tasks.executors": ("datatrove", "loguru"),
    "data_prep.clean.word_filters": ("datatrove", "fasttext"),
    "data_prep.clean.filters": ("datatrove", "regex"),
    "data_prep.clean.split_words": ("regex",),
    "data_prep.read.html": ("inscriptis",),
    "launch": ("torch",),
    "launch.sweeps": ("optuna", "sqlalchemy", "yaml"),
}


class Import(NamedTuple):
    source: str  # the module that imports
    target: str  # the module that is imported, or where it comes from
    place: str  # file and line


def module_of(path: Path) -> str:
    name = ".".join(path.with_suffix("").parts)
    return name if name == "modernbert_train.__init__" else name.removesuffix(".__init__")  # its row is not all's


def project_modules() -> set[str]:
    return {module_of(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}


@cache
def parsed() -> dict[Path, ast.Module]:
    """Every file of the project by its path, relative to the root."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT): ast.parse(path.read_text("utf-8")) for path in files}


def imports_in(path: Path, tree: ast.Module, modules: set[str]) -> Iterator[Import]:
    """Every import of a file, also those inside functions and under TYPE_CHECKING.

    Args:
        path: relative to the root.
        tree: its source.
        modules: of the project; tells `from package import module` from `from module import name`.
    """
    for node in ast.walk(tree):
        place = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from (Import(module_of(path), alias.name, place) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(module_of(path), full if full in modules else base, place)


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def row_of(module: str, table: dict[str, tuple[str, ...]]) -> str | None:
    return max((row for row in table if inside(module, row)), key=len, default=None)


def violation(found: Import) -> str | None:
    """Return the problem with an import, or None."""
    source, target, place = found
    source = re.sub(r"^modernbert_train\.errors\b", "modernbert_train.core.errors", source)
    if target.startswith("."):
        return f"{place}: a relative import. Write the whole name."
    if target.split(".")[0] in PACKAGES:
        row = row_of(source, PROJECT)
        if row is None:
            return f"{place}: {source} is in no room, and {Path(__file__).name} lacks a row for it."
        packages = tuple(f"{name}." for name in PACKAGES)
        allowed = [row, *(n if n.startswith(packages) else f"modernbert_train.{n}" for n in PROJECT[row])]
        target = re.sub(r"^modernbert_train\.errors\b", "modernbert_train.core.errors", target)  # its room
        if target == "modernbert_train":
            return f"{place}: {source} imports the root, which imports everything. Import the module that has the name."
        if not any(inside(target, name) for name in allowed):
            return f"{place}: {source} imports {target}; {row} may import only {', '.join(allowed)}."
        return None
    library = target.split(".")[0]
    row = row_of(source, LIBRARIES)
    if library in sys.stdlib_module_names or (row is not None and library in LIBRARIES[row]):
        return None
    return f"{place}: {source} imports {library}, which {row} may not. Its door is another module."


@pytest.mark.runs
def test_imports_point_one_way_and_each_library_has_its_door() -> None:
    modules = project_modules()
    found = [each for path, tree in parsed().items() for each in imports_in(path, tree, modules)]
    assert len(found) > 300
    assert [message for each in found if (message := violation(each))] == []


def test_the_rooms_are_few_and_in_order() -> None:
    """A room that imports one above it cannot be changed, tested or left out without that one."""
    there = {path.name for path in (ROOT / "modernbert_train").iterdir() if (path / "__init__.py").exists()}
    loose = {path.stem for path in (ROOT / "modernbert_train").glob("*.py")}
    assert there == set(ROOMS) and loose - {"errors"} == set(LOOSE) and len(there) <= 14 and len(loose) <= 10
    for place, name in enumerate(ORDER):
        for below in PROJECT[f"modernbert_train.{name}"]:
            assert below.split(".")[0] in ORDER[:place], f"{name} may not import {below}: it is not below"


def test_a_file_is_named_by_what_it_holds() -> None:
    """A traceback shows `table.py`: which? Only parts of one kind share a name: keys, model, objective, format."""
    facets = {"config", "models", "objectives", "formats", "cli"}
    names: dict[str, list[Path]] = {}
    for path in parsed():
        if path.name != "__init__.py" and not facets & set(path.parts):
            names.setdefault(path.name, []).append(path)
    assert [paths for paths in names.values() if len(paths) > 1] == []


@pytest.mark.parametrize(
    ("path", "line", "message"),
    [
        ("modernbert_train/config/load.py", "import torch", "modernbert_train.config may not"),
        ("modernbert_train/models/heads.py", "from transformers import AutoModel", "modernbert_train.models may not"),
        (
            "modernbert_train/data/loader.py",
            "from modernbert_train.objectives.mlm import MaskedLM",
            "data may import only",
        ),
        ("modernbert_train/batch.py", "from modernbert_train.config.schema import RunConfig", "batch may import only"),
        ("modernbert_train/weights/push.py", "from modernbert_train import __version__", "imports the root"),
        ("modernbert_train/data/loader.py", "from .mds import TokenShards", "a relative import"),
        ("modernbert_train/new.py", "from modernbert_train.errors import RunError", "lacks a row for it"),
    ],
)
def test_a_forbidden_import_is_found_with_its_line(path: str, line: str, message: str) -> None:
    """Also where it hides inside a function."""
    text = f'"""A module."""\n\ndef call() -> None:\n    {line}\n'
    (found,) = imports_in(Path(path), ast.parse(text), project_modules())
    said = violation(found)
    assert said is not None and said.startswith(f"{path}:4: ") and message in said


# A part of the program receives only its sections of the configuration, and few parts the whole run. A function can
# only depend on its arguments: one with `config.checkpoint` cannot depend on other sections of a run. The effect of a
# key is then found in few files, and a part can be tried or reused without inventing a whole run around it.

MAX_FILES = 189  # that `train` is imported with; the hook of imports loads one more
WHOLE = "RunConfig"
Node = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Place(NamedTuple):
    module: str
    name: str


@cache
def trees() -> dict[str, ast.Module]:
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): tree for path, tree in parsed().items()}


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
    """Return the project's definitions behind a module's names; the name is empty for a module."""
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
    """Return the project's definitions that code refers to, without annotations; for a class, its methods'."""
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


@pytest.mark.runs
def test_the_path_of_a_run_has_few_modules() -> None:
    """Else the files that a key reaches are unknown, and a part cannot be built without a whole run.

    Give a new part its own sections, or a small object that is built from them once, like clock.py's from the phases.
    """
    found = followed(Place("modernbert_train.train.session", "train"))
    assert found["modernbert_train.train.build_trainer"] and found["modernbert_train.config.check"], "it follows calls"
    assert len(found) <= MAX_MODULES, "\n".join(
        f"{module}: {', '.join(sorted(found[module]))}" for module in sorted(found)
    )


def first_imports(node: ast.AST) -> Iterator[ast.ImportFrom | ast.Import]:
    """Imports that happen when a module is imported, but for those that only types need."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.Import | ast.ImportFrom):
            yield each
        elif not isinstance(each, ast.FunctionDef | ast.ClassDef) and "TYPE_CHECKING" not in names_in(
            getattr(each, "test", None)
        ):
            yield from first_imports(each)


def imports_of_a_start(first: str) -> set[str]:
    """Every module of the project, its packages too, that is imported with one."""
    found: set[str] = set()
    todo = [first]
    while todo:
        name = todo.pop()
        todo += [name.rpartition(".")[0]] * ("." in name)
        if name in found or name not in trees():
            continue
        found.add(name)
        for node in first_imports(trees()[name]):
            base = [node.module] * len(node.names) if isinstance(node, ast.ImportFrom) else [""] * len(node.names)
            for module, alias in zip(base, node.names, strict=True):
                todo += [f"{module}.{alias.name}".lstrip("."), module or ""]
    return found


@pytest.mark.runs
def test_a_start_imports_the_kinds_that_it_uses() -> None:
    """Encoders, objectives, heads and evaluations are rows of tables, imported when a run has one.

    A reader of a run's start must know these files, and every start pays for them.
    """
    found = imports_of_a_start("modernbert_train.train.session")
    assert "modernbert_train.train.step" in found and "modernbert_train.config.albert" in found, "it follows imports"
    assert "modernbert_train.models.albert" not in found and "modernbert_train.objectives.mlm" not in found
    assert len(found) <= MAX_FILES, sorted(found)


@pytest.mark.parametrize("table", [ENCODERS, HEADS, OBJECTIVES, EVALUATORS], ids=lambda table: table._table)
def test_every_row_of_a_table_can_be_imported(table: Rows[Any, Any]) -> None:
    for key in [*table]:
        assert callable(table[key])


@pytest.mark.runs
def test_no_question_of_kind_is_asked_outside_the_configuration() -> None:
    """It would miss a user's own architecture or objective. A property of the configuration decides instead."""
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
