"""Compiles every Triton kernel of ours for GPUs that are not here: python -m tests.cuda_build.triton_kernels.

Needs no device, not even the null one: Triton brings its assembler. Prints JSON: GPU -> kernel -> what it needs, for
tensors that accesses of 16 bytes fit and for others.
"""

from __future__ import annotations

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

from modernbert_train.models.attention import tile_kernels
from modernbert_train.optim import fused

SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes that a block may have
AMD = {"gfx90a": 65_536, "gfx942": 65_536}  # MI250X, MI300X
MOST_REGISTERS = {"sm": 255, "gfx": 512}  # of a thread
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
TENSORS = {"q_TNH": "*bf16", "k_TNH": "*bf16", "v_TNH": "*bf16"}
ROWS = {"lse_NT": "*fp32", "first_T": "*i32", "end_T": "*i32", "num_tokens": "i32"}
STRIDES = dict.fromkeys(("q_token", "q_head", "k_token", "k_head", "v_token", "v_head"), "i32")
OF_GRADIENT = dict.fromkeys(("grad_token", "grad_head"), "i32")
SIGNATURES |= {
    tile_kernels._forward: TENSORS | {"out_TNH": "*bf16"} | ROWS | STRIDES | {"scale": "fp32"},
    tile_kernels._backward_queries: TENSORS
    | dict.fromkeys(("out_TNH", "grad_TNH", "dq_TNH"), "*bf16")
    | {"delta_NT": "*fp32", **ROWS, **STRIDES, **OF_GRADIENT, "scale": "fp32"},
    tile_kernels._backward_keys: TENSORS
    | dict.fromkeys(("grad_TNH", "dk_TNH", "dv_TNH"), "*bf16")
    | {"delta_NT": "*fp32", **ROWS, **STRIDES, **OF_GRADIENT, "scale": "fp32"},
}
CONSTANTS = {"ALIGNED": True, "CHUNK": fused.CHUNK, "WIDTH": fused.WIDTH}
FORMS = {"": CONSTANTS, ", not aligned": CONSTANTS | {"ALIGNED": False}}
TILES = {"": {"BEFORE": 64, "AFTER": 64, "WIDTH": 64, "TILE": tile_kernels.TILE}}
CASES = [
    (kernel, form, constants)
    for kernel in SIGNATURES
    for form, constants in (TILES if "TILE" in kernel.arg_names else FORMS).items()
]


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


def needs_of_amd(compiled: Any) -> dict[str, int]:
    """The same of an AMD GPU; of its instructions those that reach global memory."""
    code = compiled.asm["amdgcn"]

    def told(name: str) -> int:
        return sum(map(int, re.findall(rf"^\s+\.{name}:\s+(\d+)$", code, flags=re.MULTILINE)))

    accesses = re.findall(r"^\s+(?:global|buffer|flat)_(?:load|store)_(\w+)", code, flags=re.MULTILINE)
    return {
        "registers": told("vgpr_count"),
        "spilled_bytes": told("private_segment_fixed_size") + told("vgpr_spill_count") + told("sgpr_spill_count"),
        "shared_bytes": compiled.metadata.shared,
        "global_accesses": len(accesses),
        "wide_accesses": accesses.count("dwordx4"),
    }


def _tool(*command: Any) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout


def table() -> dict[str, dict[str, dict[str, int]]]:
    """What every kernel needs on every GPU."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    targets = {f"sm_{each}": GPUTarget("cuda", each, 32) for each in SHARED_MEMORY}
    targets |= {name: GPUTarget("hip", name, 64) for name in AMD}
    for gpu, target in targets.items():
        for kernel, form, constants in CASES:
            if gpu in AMD and "TILE" in constants:  # which it spills; refused there
                continue
            signature = SIGNATURES[kernel] | dict.fromkeys(constants, "constexpr")
            signature = {name: signature[name] for name in kernel.arg_names}
            whole = STRIDES.keys() | OF_GRADIENT.keys() | ROWS.keys() | TENSORS.keys()  # multiples of 16, as they are
            places = [place for place, name in enumerate(kernel.arg_names) if name in whole or name.endswith("_TNH")]
            source = ASTSource(
                kernel,
                signature,
                constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()},
                attrs={(place,): [["tt.divisibility", 16]] for place in places},
            )
            compiled = triton.compile(source, target=target)
            needed = needs_of_amd(compiled) if gpu in AMD else needs(compiled)
            found.setdefault(gpu, {})[kernel.fn.__name__ + form] = needed
    return found


if __name__ == "__main__":
    print(json.dumps(table()))
