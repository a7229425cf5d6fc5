"""Compiles every Triton kernel of ours for GPUs that are not here: python -m tests.cuda_build.triton_kernels.

Needs no device, not even the null one: Triton brings its assembler. Prints JSON: GPU -> kernel -> what it needs, for
tensors that accesses of 16 bytes fit and for others.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from modernbert_train.optim import fused

SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes that a block may have
MOST_REGISTERS = 255  # of a thread
# kernel -> types of its arguments, as they are called; what is missing is a constant
SIGNATURES: dict[Any, dict[str, str]] = {
    fused._move_moments: {
        "table": "*i64", "owner_K": "*i32", "start_K": "*i64", "size_P": "*i64", "sums_K3": "*fp64",
        "num_params": "i32", "new1": "fp32", "new2": "fp32", "eps": "fp32", "decay": "fp32",
    },
    fused._apply: {
        "table": "*i64", "owner_K": "*i32", "start_K": "*i64", "size_P": "*i64", "rate_P": "*fp32",
        "num_params": "i32", "eps": "fp32", "decay": "fp32",
    },
}  # fmt: skip
CONSTANTS = {"ALIGNED": True, "CHUNK": fused.CHUNK, "WIDTH": fused.WIDTH}
FORMS = {"": CONSTANTS, ", not aligned": CONSTANTS | {"ALIGNED": False}}


def needs(compiled: Any) -> dict[str, int]:
    """Registers, spilled bytes and shared memory of a compiled kernel, and its instructions."""
    tools = Path(triton.backends.nvidia.__file__).parent / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool(tools / "cuobjdump", "--dump-resource-usage", file.name)
        code = _tool(tools / "nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, _, local = map(int, found.groups())
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)", code, flags=re.MULTILINE)
    return {
        "registers": registers,
        "spilled_bytes": stack + local,
        "shared_bytes": compiled.metadata.shared,
        "instructions": len(instructions),
        "global_accesses": sum(name.startswith(("LDG", "STG")) for name in instructions),
        "wide_accesses": sum(name.startswith(("LDG", "STG")) and ".128" in name for name in instructions),
    }


def _tool(*command: Any) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout


def table() -> dict[str, dict[str, dict[str, int]]]:
    """What every kernel needs on every GPU."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for capability in SHARED_MEMORY:
        for (kernel, types), (form, constants) in itertools.product(SIGNATURES.items(), FORMS.items()):
            signature = types | dict.fromkeys(constants, "constexpr")
            source = ASTSource(
                kernel, signature, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()}
            )
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            found.setdefault(f"sm_{capability}", {})[kernel.fn.__name__ + form] = needs(compiled)
    return found


if __name__ == "__main__":
    print(json.dumps(table()))
