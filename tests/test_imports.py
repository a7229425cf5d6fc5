"""Who may import whom, read out of the source with `ast`.

If this breaks, `check` needs a GPU machine, the model cannot be tested without Composer, or a folder can no longer be
changed alone. A new module needs a row here: say what it stands on before it stands on everything.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("modernbert_train", "data_prep", "launch")

# module or package -> what of the project it may import, besides itself; a package stands for everything in it
PROJECT: dict[str, tuple[str, ...]] = {
    # the ground floor: what everybody may stand on
    "modernbert_train.version": (),
    "modernbert_train.redact": (),
    "modernbert_train.errors": ("redact", "text"),
    "modernbert_train.files": (),
    "modernbert_train.text": (),
    "modernbert_train.read_json": (),
    "modernbert_train.read_once": (),
    "modernbert_train.tensor_files": (),
    "modernbert_train.keyed_random": (),
    "modernbert_train.import_stubs": (),
    "modernbert_train.installed": (),
    "modernbert_train.lasting_output": (),
    "modernbert_train.effective": ("provenance", "read_json", "text"),
    "modernbert_train.training_loss": ("read_json",),
    "modernbert_train.provenance": ("installed", "read_json", "redact", "text", "version"),
    "modernbert_train.results": ("files", "read_json", "text", "version"),
    "modernbert_train.torch_internals": (),
    "modernbert_train.tokenizer_threads": (),
    "modernbert_train.batch": ("config.objective", "keyed_random"),
    "modernbert_train.own_files": ("errors",),
    "modernbert_train.import_hook": ("errors", "import_stubs", "installed", "ranks.stop_signals"),
    "modernbert_train.vocabulary": ("errors", "own_files", "read_json", "read_once"),
    "modernbert_train.cli.parser": (),
    "modernbert_train.cli.verbs": ("cli.parser", "text"),
    # rooms
    "modernbert_train.config": ("errors", "redact", "text"),
    "modernbert_train.clock": ("config",),
    "modernbert_train.compute": ("config", "errors", "ranks.gpus"),
    "modernbert_train.ranks": (
        "config", "errors", "files", "installed", "read_once", "redact", "text", "torch_internals",
    ),
    "modernbert_train.data": (
        "batch", "clock", "config", "errors", "files", "import_hook", "keyed_random", "own_files", "ranks.orphans",
        "read_json", "read_once", "text", "torch_internals", "version", "vocabulary",
    ),
    "modernbert_train.objectives": ("batch", "config", "errors", "keyed_random", "vocabulary"),
    "modernbert_train.models": ("batch", "config", "errors", "keyed_random"),
    "modernbert_train.optim": ("clock", "config", "errors"),
    "modernbert_train.report": (
        "config.evals", "config.read", "data.statistics", "effective", "errors", "files", "provenance", "read_json",
        "results", "text", "training_loss",
    ),
    "modernbert_train.plan": (
        "clock", "config", "data.batch_warmup", "data.check", "data.dataset_card", "data.facts", "data.mixing",
        "data.packing", "data.path", "data.shard_index", "errors", "optim.schedules", "report", "text",
    ),
    "modernbert_train.run": (
        "clock", "compute", "config", "data", "errors", "files", "models", "own_files", "plan", "provenance", "ranks",
        "read_json", "read_once", "redact", "tensor_files", "text", "training_loss",
    ),
    "modernbert_train.copies": ("config", "errors", "files", "ranks.orphans", "read_json", "run.manifest"),
    "modernbert_train.checkpoint_tools": (
        "clock", "config", "copies", "errors", "optim.schedules", "own_files", "provenance", "run", "tensor_files",
        "text",
    ),
    "modernbert_train.weights": (
        "config", "data", "errors", "files", "models", "own_files", "provenance", "read_json", "results", "run",
        "tensor_files", "text", "version", "vocabulary",
    ),
    "modernbert_train.evals": (
        "batch", "compute", "config", "data", "errors", "import_stubs", "keyed_random", "models", "objectives", "ranks",
        "results", "run", "text", "vocabulary", "weights",
    ),
    "modernbert_train.finetune": (
        "batch", "compute", "config", "data", "errors", "evals.scores", "files", "installed", "models.build",
        "own_files", "preflight", "ranks", "read_json", "report", "results", "run", "text", "tokenizer_threads",
        "train", "version", "vocabulary", "weights",
    ),
    "modernbert_train.downstream": (
        "cli.arguments", "cli.parser", "config", "data.conll", "data.labelled", "data.tables", "errors",
        "evals.metrics", "files", "finetune", "keyed_random", "own_files", "ranks.gpus", "ranks.stop_signals",
        "read_json", "tensor_files", "text", "tokenizer_threads", "version", "weights",
    ),
    "modernbert_train.preflight": (
        "config", "copies.store", "data.check", "data.labelled", "data.remote", "data.shard_sizes", "errors",
        "plan", "ranks.gpus", "run", "weights.hub", "weights.named_source",
    ),
    "modernbert_train.train": (
        "batch", "clock", "compute", "config", "copies", "data", "effective", "errors", "evals", "import_hook",
        "keyed_random", "models", "objectives", "optim", "plan", "preflight", "provenance", "ranks", "read_json",
        "report", "run", "text", "torch_internals", "training_loss", "vocabulary", "weights",
    ),
    # beside training
    "modernbert_train.collate": ("data.packing",),
    "modernbert_train.inspection": ("batch", "config", "data", "errors", "objectives", "text", "vocabulary"),
    "modernbert_train.__init__": ("api", "config", "errors", "version"),
    "modernbert_train.api": (
        "cli.arguments", "compute", "config", "data", "errors", "evals", "finetune", "models", "plan", "preflight",
        "train",
        "vocabulary", "weights",
    ),
    "modernbert_train.trials": ("batch", "config", "models", "optim"),
    "modernbert_train.tune": (
        "batch", "clock", "compute", "config", "data", "doctor", "errors", "files", "models", "objectives", "optim",
        "plan.room", "ranks.orphans", "read_json", "run.card", "run.run_folder", "run.tuned", "text", "train.gradients",
    ),
    "modernbert_train.doctor": (
        "config", "errors", "import_hook", "import_stubs", "installed", "models", "ranks.gpus", "trials", "version",
    ),
    "modernbert_train.cli": (
        "checkpoint_tools", "config", "data.check", "data.facts", "data.labelled", "doctor", "errors", "evals",
        "inspection", "finetune", "installed", "plan", "preflight", "ranks.gpus", "report", "results", "run", "text",
        "train", "tune", "weights",
    ),
    "modernbert_train.__main__": ("cli", "errors", "lasting_output", "ranks", "redact", "version"),
    "data_prep": (
        "cli.parser", "config", "data.dataset_card", "data.download", "data.field_counts", "data.mds", "data.remote",
        "data.shard_file", "data.shard_index", "data.shard_writer", "data.statistics", "errors", "files", "own_files",
        "ranks.orphans", "read_json", "text", "tokenizer_threads", "version", "vocabulary",
    ),
    "launch": (
        "__main__", "cli.arguments", "cli.parser", "config", "data.check", "errors", "files", "installed",
        "lasting_output", "preflight", "ranks", "read_json", "report", "text", "weights.named_model",
    ),
}  # fmt: skip

# module or package -> the libraries it may import, besides the standard one; the most exact row counts
LIBRARIES: dict[str, tuple[str, ...]] = {
    "modernbert_train": (),
    "modernbert_train.keyed_random": ("numpy",),
    "modernbert_train.import_stubs": ("torchmetrics",),
    "modernbert_train.batch": ("numpy", "torch"),
    "modernbert_train.tensor_files": ("numpy", "safetensors", "torch", "xxhash"),
    "modernbert_train.torch_internals": ("torch",),
    "modernbert_train.compute": ("torch",),
    "modernbert_train.config": ("omegaconf", "yaml"),
    "modernbert_train.vocabulary": ("numpy",),
    "modernbert_train.data": ("numpy",),
    "modernbert_train.data.check": (),
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
    "modernbert_train.data.shard_file": ("numpy", "streaming"),
    "modernbert_train.data.shard_writer": ("numpy", "streaming"),
    "modernbert_train.data.workers": ("torch",),
    "modernbert_train.data.download": ("streaming",),
    "modernbert_train.checkpoint_tools": (),
    "modernbert_train.collate": ("torch",),
    "modernbert_train.inspection": ("numpy", "tokenizers"),
    "modernbert_train.objectives": ("numpy",),
    "modernbert_train.models": ("torch",),
    "modernbert_train.models.attention": ("flash_attn", "flash_attn_interface", "torch"),
    "modernbert_train.optim": ("torch",),
    "modernbert_train.optim.fused": ("numpy", "torch", "triton"),
    "modernbert_train.optim.schedules": (),
    "modernbert_train.plan": ("numpy",),
    "modernbert_train.ranks": (),
    "modernbert_train.report": ("numpy",),
    "modernbert_train.ranks.gpus": ("torch",),
    "modernbert_train.ranks.group": ("torch",),
    "modernbert_train.ranks.fail_together": ("torch",),
    "modernbert_train.run": (),
    "modernbert_train.run.async_scalar": ("torch",),
    "modernbert_train.run.banner": ("torch",),
    "modernbert_train.run.card": ("torch",),
    "modernbert_train.run.checkpoint": ("torch",),
    "modernbert_train.run.manifest": ("xxhash",),
    "modernbert_train.run.throughput": ("torch",),
    "modernbert_train.run.tuned": ("torch",),
    "modernbert_train.copies.store": ("fsspec", "xxhash"),
    "modernbert_train.weights": ("torch",),
    "modernbert_train.weights.fill": ("torch", "transformers"),
    "modernbert_train.weights.formats": (),
    "modernbert_train.weights.formats.tensors": ("torch",),
    "modernbert_train.weights.hub": ("huggingface_hub",),
    "modernbert_train.weights.push": ("httpx", "huggingface_hub"),
    "modernbert_train.weights.model_card": (),
    "modernbert_train.weights.named_source": (),
    "modernbert_train.weights.token_effect": ("numpy",),
    "modernbert_train.weights.token_rows": ("numpy", "tokenizers", "torch"),
    "modernbert_train.evals": ("numpy", "torch"),
    "modernbert_train.evals.metrics": ("torch", "torchmetrics"),
    "modernbert_train.evals.probe": ("numpy", "tokenizers", "torch"),
    "modernbert_train.downstream.runs": ("transformers",),
    "modernbert_train.finetune": ("numpy",),
    "modernbert_train.finetune.hub": ("datasets",),
    "modernbert_train.finetune.predictions": ("torch",),
    "modernbert_train.finetune.run": ("yaml",),
    "modernbert_train.finetune.shards": ("numpy", "tokenizers"),
    "modernbert_train.downstream.ranking": ("numpy", "torch"),
    "modernbert_train.downstream.retrieval": ("datasets", "sentence_transformers", "torch", "transformers"),
    "modernbert_train.downstream.sentence_model": ("sentence_transformers", "transformers"),
    "modernbert_train.train": ("composer", "numpy", "torch"),
    "modernbert_train.train.composer_internals": ("composer", "torch", "wandb"),
    "modernbert_train.api": ("numpy", "tokenizers", "torch"),
    "modernbert_train.trials": ("torch",),
    "modernbert_train.tune": (),
    "modernbert_train.tune.loop": ("torch",),
    "modernbert_train.tune.parity": ("torch",),
    "modernbert_train.tune.timing": ("torch",),
    "modernbert_train.tune.worker": ("torch",),
    "modernbert_train.doctor": ("torch",),
    "data_prep": ("datatrove", "numpy", "tokenizers", "tqdm"),
    "data_prep.adoption": ("numpy", "tokenizers"),
    "data_prep.adoption.convert": ("numpy", "pyarrow"),
    "data_prep.tasks.executors": ("datatrove",),
    "data_prep.read.lines": ("zstandard",),
    "data_prep.read.tables": ("datasets", "pyarrow"),
    "data_prep.clean.words": ("datatrove", "fasttext"),
    "data_prep.clean.split_words": ("regex",),
    "data_prep.read.encodings": ("charset_normalizer", "numpy"),
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


def imports_in(path: Path, text: str, modules: set[str]) -> Iterator[Import]:
    """Every import of a file, also those inside functions and under TYPE_CHECKING.

    Args:
        path: relative to the root.
        text: the source.
        modules: of the project; tells `from package import module` from `from module import name`.
    """
    for node in ast.walk(ast.parse(text)):
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
    """What is wrong with an import, or None."""
    source, target, place = found
    if target.startswith("."):
        return f"{place}: a relative import. Write the whole name."
    if target.split(".")[0] in PACKAGES:
        row = row_of(source, PROJECT)
        if row is None:
            return f"{place}: {source} has no row in PROJECT of {Path(__file__).name}. Add what it may import."
        allowed = [row, *(f"modernbert_train.{name}" for name in PROJECT[row])]
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
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = [each for path in files for each in imports_in(path.relative_to(ROOT), path.read_text("utf-8"), modules)]
    assert len(found) > 300
    assert [message for each in found if (message := violation(each))] == []


def test_the_table_itself_has_no_circle() -> None:
    """Two folders that import each other are one folder."""
    above = {row.removeprefix("modernbert_train."): {name.split(".")[0] for name in PROJECT[row]} for row in PROJECT}
    while free := [name for name, below in above.items() if not below & above.keys()]:
        for name in free:
            del above[name]
    assert above == {}


@pytest.mark.parametrize(
    ("path", "line", "message"),
    [
        ("modernbert_train/config/load.py", "import torch", "modernbert_train.config may not"),
        ("modernbert_train/config/load.py", "import numpy as np", "modernbert_train.config may not"),
        ("modernbert_train/data/packing.py", "import torch", "modernbert_train.data may not"),
        ("modernbert_train/data/check.py", "import numpy", "modernbert_train.data.check may not"),
        ("modernbert_train/data/loader.py", "from streaming.base import x", "modernbert_train.data.loader may not"),
        ("modernbert_train/models/layers.py", "import flash_attn", "modernbert_train.models may not"),
        ("modernbert_train/models/heads.py", "from transformers import AutoModel", "modernbert_train.models may not"),
        ("modernbert_train/optim/groups.py", "import composer.core", "modernbert_train.optim may not"),
        (
            "modernbert_train/data/loader.py",
            "from modernbert_train.objectives.mlm import MaskedLM",
            "data may import only",
        ),
        ("modernbert_train/data/loader.py", "from modernbert_train import objectives", "data may import only"),
        ("modernbert_train/models/init.py", "from modernbert_train.optim import groups", "models may import only"),
        ("modernbert_train/batch.py", "from modernbert_train.config.schema import RunConfig", "batch may import only"),
        ("modernbert_train/config/check.py", "import modernbert_train.data.check", "config may import only"),
        ("launch/run.py", "from modernbert_train.train.session import train", "launch may import only"),
        (
            "data_prep/write/merging.py",
            "from modernbert_train.data.loader import StepBatch",
            "data_prep may import only",
        ),
        ("modernbert_train/weights/push.py", "from modernbert_train import __version__", "imports the root"),
        ("modernbert_train/data/loader.py", "from .mds import TokenShards", "a relative import"),
        ("modernbert_train/new.py", "from modernbert_train.errors import RunError", "has no row in PROJECT"),
    ],
)
def test_a_forbidden_import_is_found_with_its_line(path: str, line: str, message: str) -> None:
    """Also where it hides inside a function."""
    text = f'"""A module."""\n\ndef call() -> None:\n    {line}\n'
    (found,) = imports_in(Path(path), text, project_modules())
    said = violation(found)
    assert said is not None and said.startswith(f"{path}:4: ") and message in said


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("modernbert_train/config/load.py", "import dataclasses, re"),
        ("modernbert_train/data/shard_writer.py", "from modernbert_train import import_hook, version"),
        ("modernbert_train/train/build.py", "from modernbert_train.data.check import check_data"),
        ("launch/run.py", "from modernbert_train.preflight import preflight"),
        ("modernbert_train/models/attention/flash.py", "from flash_attn import flash_attn_func"),
    ],
)
def test_a_permitted_import_passes(path: str, line: str) -> None:
    assert [violation(each) for each in imports_in(Path(path), line, project_modules())] in ([None], [None, None])
