"""The allowed imports, read from the source.

If this breaks, `check` needs a GPU machine, the model cannot be tested without Composer, or a folder can no longer be
changed alone. The rooms are in ORDER; the allowed imports are the last line of each __init__.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
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
from tests.support.program_texts import parsed

MAX_FILES = 190  # that `train` is imported with
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

# library -> the modules and packages that may import it; of several that contain a module the most exact one counts
DOORS: dict[str, tuple[str, ...]] = {
    "nothing": (
        "checkpoints.tools", "data.check_shards", "data.facts", "data.field_counts", "data.fingerprint", "data.mixing",
        "distributed", "evaluate.retrieval", "evaluate.suite", "optim.schedules", "plan.resolve", "weights.formats",
        "weights.model_card",
    ),
    "charset_normalizer": ("data.read.encodings",),
    "composer": ("api", "train", "train.composer_internals", "train.loggers"),
    "datasets": ("data.read.hub", "evaluate.retrieval.mine", "evaluate.retrieval.sets"),
    "datatrove": ("data_prep", "data_prep.clean.filters", "data_prep.clean.word_filters", "data_prep.tasks.executors"),
    "fasttext": ("data_prep.clean.word_filters",),
    "flash_attn": ("models.attention",),
    "flash_attn_interface": ("models.attention",),
    "fsspec": ("checkpoints.store",),
    "huggingface_hub": ("weights.names", "weights.push"),
    "inscriptis": ("data_prep.read.html",),
    "llvmlite": ("data.pack_kernel",),
    "loguru": ("data_prep.tasks.executors",),
    "mteb": (
        "evaluate.retrieval.bm25", "evaluate.retrieval.rerank", "evaluate.retrieval.sets",
        "evaluate.retrieval.vectors",
    ),
    "numba": ("data.pack_kernel", "data.shuffle_kernel"),
    "numpy": (
        "api", "batch", "core.keyed_random", "core.tensor_files", "data", "data.microbatches", "data.pack_kernel",
        "data.read.encodings", "data.shard_file", "data.shard_writer", "data.shuffle_kernel", "data_prep",
        "data_prep.adoption", "evaluate", "evaluate.embed_file", "evaluate.finetune", "evaluate.finetune.shards",
        "evaluate.loaded", "evaluate.metrics", "evaluate.retrieval.mine", "evaluate.suite.efficiency", "objectives",
        "optim.fused", "plan", "report", "train", "train.measure_speed", "train.retrieval", "vocabulary",
        "weights.token_effect", "weights.token_rows",
    ),
    "omegaconf": ("config",),
    "optuna": ("launch.sweeps",),
    "packaging": ("config.packages", "core.versions"),
    "pyarrow": ("data.read.parquet", "evaluate.embed_file"),
    "regex": ("data_prep.clean.filters", "data_prep.clean.split_words"),
    "safetensors": ("core.tensor_files",),
    "sentence_transformers": (
        "evaluate.retrieval.mine", "evaluate.retrieval.rerank", "evaluate.retrieval.sentence_model",
        "evaluate.retrieval.vectors",
    ),
    "sqlalchemy": ("launch.sweeps",),
    "streaming": ("data.download", "data.shard_file", "data.shard_writer"),
    "tokenizers": ("api", "data_prep", "data_prep.adoption", "evaluate.loaded", "vocabulary"),
    "torch": (
        "api", "batch", "checkpoints.checkpoint", "collate", "core.tensor_files", "core.torch_internals",
        "data.loader", "data.microbatches", "data.workers", "distributed.bf16", "distributed.compute",
        "distributed.fail_together", "distributed.gpus", "distributed.group", "evaluate",
        "evaluate.finetune.predictions", "evaluate.loaded", "evaluate.metrics", "evaluate.retrieval.kept",
        "evaluate.retrieval.mine", "evaluate.retrieval.rerank", "evaluate.retrieval.sentence_model",
        "evaluate.retrieval.vectors", "evaluate.suite.efficiency", "launch", "models", "models.attention",
        "models.attention.tile_kernels", "optim", "optim.fused", "plan.doctor", "plan.speed_settings", "plan.trials",
        "report.banner", "report.record", "report.throughput", "train", "train.composer_internals",
        "train.measure_speed", "weights", "weights.fill", "weights.formats.tensors", "weights.token_rows",
    ),
    "torchmetrics": ("evaluate.metrics", "import_stubs"),
    "tqdm": ("data_prep",),
    "trackio": ("train.loggers",),
    "transformers": (
        "evaluate.retrieval.runs", "evaluate.retrieval.sentence_model", "evaluate.suite.efficiency", "weights.fill",
    ),
    "triton": ("models.attention.tile_kernels", "optim.fused"),
    "wandb": ("train.composer_internals",),
    "xxhash": ("checkpoints.manifest", "checkpoints.store", "core.tensor_files", "data.dataset_card"),
    "yaml": ("config", "launch.sweeps", "train.recipes", "train.retrieval"),
    "zstandard": ("data.read.unpacked",),
}  # fmt: skip


def whole(name: str) -> str:
    """Return the name of a module from one without `modernbert_train`."""
    return name if name.split(".")[0] in PACKAGES else f"modernbert_train.{name}"


# module or package -> the libraries it may import, besides the standard one
LIBRARIES: dict[str, set[str]] = {}
for library, doors in DOORS.items():
    for door in doors:
        LIBRARIES.setdefault(whole(door), set()).add(library)


class Import(NamedTuple):
    source: str  # the module that imports
    target: str  # the module that is imported, or where it comes from
    place: str  # file and line


def module_of(path: Path) -> str:
    name = ".".join(path.with_suffix("").parts)
    return name if name == "modernbert_train.__init__" else name.removesuffix(".__init__")  # its row is not all's


def imports_in(path: Path, tree: ast.Module) -> Iterator[Import]:
    """Every import of a file, also those inside functions and under TYPE_CHECKING; the path is relative to the root."""
    modules = {module_of(each) for each in parsed()}  # tell `from package import module` from `from module import name`
    for node in ast.walk(tree):
        place = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from (Import(module_of(path), alias.name, place) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield Import(module_of(path), full if full in modules else node.module or "", place)


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def row_of(module: str, table: Collection[str]) -> str:
    """Return the most exact row of a module; empty without one."""
    return max((row for row in table if inside(module, row)), key=len, default="")


def violation(found: Import) -> str | None:
    """Return the problem with an import, or None."""
    source, target = (
        re.sub(r"^modernbert_train\.errors\b", "modernbert_train.core.errors", each) for each in found[:2]
    )
    library = target.split(".")[0]
    if library in PACKAGES:
        row = row_of(source, PROJECT)
        if not row:
            return f"{found.place}: {source} is in no room, and {Path(__file__).name} lacks a row for it."
        allowed = [row, *map(whole, PROJECT[row])]
        if any(inside(target, name) for name in allowed):
            return None
        return f"{found.place}: {source} imports {target}; {row} may import only {', '.join(allowed)}."
    row = row_of(source, LIBRARIES)
    if library in sys.stdlib_module_names or library in LIBRARIES.get(row, ()):
        return None
    return f"{found.place}: {source} imports {library}, which {row or source} may not. Its door is another module."


@pytest.mark.runs
def test_imports_point_one_way_and_each_library_has_its_door() -> None:
    found = [each for path, tree in parsed().items() for each in imports_in(path, tree)]
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


@pytest.mark.parametrize(
    ("path", "line", "message"),
    [
        ("modernbert_train/config/load.py", "import torch", "modernbert_train.config may not"),
        ("modernbert_train/data/loader.py", "from modernbert_train.objectives import mlm", "data may import only"),
        ("modernbert_train/weights/push.py", "from modernbert_train import __version__", "weights may import only"),
        ("modernbert_train/new.py", "from modernbert_train.errors import RunError", "lacks a row for it"),
    ],
)
def test_a_forbidden_import_is_found_with_its_line(path: str, line: str, message: str) -> None:
    """Also where it hides inside a function."""
    text = f'"""A module."""\n\ndef call() -> None:\n    {line}\n'
    (found,) = imports_in(Path(path), ast.parse(text))
    said = violation(found)
    assert said is not None and said.startswith(f"{path}:4: ") and message in said


@cache
def imported_by_a_start() -> dict[str, ast.Module]:
    """Return the project's modules that are imported with `train`."""
    program = "import sys, modernbert_train.train.session; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    names = {module_of(path).removesuffix(".__init__"): tree for path, tree in parsed().items()}
    return {name: tree for name, tree in names.items() if name in done.stdout.split()}


@pytest.mark.runs
def test_a_start_imports_the_kinds_that_it_uses() -> None:
    """Encoders, objectives, heads and evaluations are rows of tables, imported when a run has one.

    A reader of a run's start must know these files, and every start pays for them.
    """
    found = imported_by_a_start()
    assert "modernbert_train.models.albert" not in found and "modernbert_train.objectives.mlm" not in found
    assert len(found) <= MAX_FILES, sorted(found)


@pytest.mark.runs
def test_the_path_of_a_run_has_few_modules() -> None:
    """A part of the program receives only its sections of the configuration, and few parts the whole run.

    A function can only depend on its arguments: one with `config.checkpoint` cannot depend on other sections. The
    effect of a key is then found in few files, and a part can be tried or reused without inventing a whole run around
    it. Give a new part its own sections, or a small object that is built from them once, like clock.py's from phases.
    """
    run = re.compile(r": [^()=`\n]*\bRunConfig\b")  # the annotation of an argument or an attribute
    texts = {name: ast.unparse(tree) for name, tree in imported_by_a_start().items()}
    classes = [node for tree in imported_by_a_start().values() for node in tree.body if isinstance(node, ast.ClassDef)]
    keepers = [each.name for each in classes if each.name != "Checkpoint" and run.search(ast.unparse(each))]
    kept = re.compile(rf"\b(\w+): [^()=\n]*\b(?:{'|'.join(keepers)})\b[\s\S]*\b\1\.(?:config|written)\b")
    found = sorted(name for name, text in texts.items() if run.search(text) or kept.search(text))
    assert "modernbert_train.train.build_trainer" in found
    assert len(found) <= MAX_MODULES, found


@pytest.mark.parametrize("table", [ENCODERS, HEADS, OBJECTIVES, EVALUATORS], ids=lambda table: table._table)
def test_every_row_of_a_table_can_be_imported(table: Rows[Any, Any]) -> None:
    for key in [*table]:
        assert callable(table[key])


@pytest.mark.runs
def test_no_question_of_kind_is_asked_outside_the_configuration() -> None:
    """It would miss a user's own architecture or objective. A property of the configuration decides instead."""
    asked = [
        f"{path}:{node.lineno}"
        for path, tree in parsed().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and re.match(r"isinstance\(.*Config\b", ast.unparse(node))
    ]
    assert [place for place in asked if not place.startswith("modernbert_train/config/")] == []
