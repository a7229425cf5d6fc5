"""Every Triton kernel of ours is compiled for every GPU we name, by the assembler of a user's run."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import modernbert_train
from tests.cuda_build.tables import compare
from tests.support.paths import ROOT

pytestmark = [pytest.mark.runs, pytest.mark.timeout(300)]


def compiled() -> dict[str, dict[str, dict[str, int]]]:
    command = [sys.executable, "-m", "tests.cuda_build.triton_kernels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, dict[str, int]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_kernel_fits_every_gpu() -> None:
    """Only a few tile kernels spill registers, all fit into shared memory, and aligned tensors are accessed 16 bytes at
    a time; the rest is recorded. A kernel that exceeds the tensor memory of sm_100 is compiled without an error, to 16
    instructions."""
    from tests.cuda_build.triton_kernels import AMD, MAX_REGISTERS, MAX_SPILLED, SHARED_MEMORY

    found = compiled()
    shared = {f"sm_{each}": size for each, size in SHARED_MEMORY.items()} | AMD
    assert found.keys() == shared.keys()
    for gpu, kernels in found.items():
        for name, needs in kernels.items():
            assert needs["spilled_bytes"] <= (MAX_SPILLED if "heads" in name else 0), (gpu, name)
            assert needs.get("instructions", 100) >= 100, (gpu, name)
            assert needs["registers"] <= MAX_REGISTERS["gfx" if gpu in AMD else "sm"], (gpu, name)
            assert (needs["wide_accesses"] == 0) == name.endswith("not aligned"), (gpu, name)
            assert needs["shared_bytes"] <= shared[gpu], (gpu, name)
    compare("triton_kernels", found)


def test_no_kernel_is_left_out() -> None:
    """Every function with @triton.jit that a program launches; functions called only by kernels are part of them."""
    from tests.cuda_build.triton_kernels import SIGNATURES

    kernels, called = set(), set()
    for file in Path(modernbert_train.__file__).parent.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(each) == "triton.jit" for each in node.decorator_list
            ):
                kernels.add(node.name)
                called |= {ast.unparse(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)}
    assert kernels - called == {kernel.fn.__name__ for kernel in SIGNATURES}
