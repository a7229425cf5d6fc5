"""Compile every Triton kernel of ours for absent GPUs: python -m tests.cuda_build.triton_kernels.

Needs no device, not even the null one: Triton brings its assembler. Prints JSON: GPU -> kernel -> resources, for
tensors aligned to 16 bytes and for others.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from modernbert_train.models.attention import tile_kernels
from modernbert_train.optim import fused

SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448}  # maximum bytes of a block
AMD = {"gfx90a": 65_536, "gfx942": 65_536}  # MI250X, MI300X
MAX_REGISTERS = {"sm": 255, "gfx": 512}  # of a thread
# bytes of a thread of a tile kernel: 16 registers of 255, in a loop of more than 2,000 instructions; `_backward_wide`
# for heads of 128 on Hopper spills 128 with Triton 3.8 (torch 2.14) and 104 with Triton 3.9 (torch 2.15)
MAX_SPILLED = 64 if version("triton") < "3.8" else 128
# kernel -> types of its arguments, as called; missing ones are constants
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
TENSORS = dict.fromkeys(("q_TNH", "k_TNH", "v_TNH", "cos_TE", "sin_T2E", "out_TNH"), "*bf16")
ROWS = {"lse_NT": "*fp32", "first_T": "*i32", "end_T": "*i32", "num_tokens": "i32"}
STRIDES = dict.fromkeys(("q_token", "q_head", "k_token", "k_head", "v_token", "v_head"), "i32")
OF_GRADIENT = dict.fromkeys(("grad_token", "grad_head"), "i32")
FORWARD = TENSORS | ROWS | STRIDES | {"qk_T2NH": "*bf16", "heads": "i32", "scale": "fp32"}
BACKWARD = TENSORS | ROWS | STRIDES | OF_GRADIENT | {"grad_TNH": "*bf16", "grad_T3NH": "*bf16"}
BACKWARD |= {"heads": "i32", "scale": "fp32"}
SIGNATURES |= {
    tile_kernels._forward: FORWARD,
    tile_kernels._backward: BACKWARD | {"delta_PR": "*fp32", "run": "i32"},
    tile_kernels._backward_wide: BACKWARD,
}
CONSTANTS = {"ALIGNED": True, "CHUNK": fused.CHUNK, "WIDTH": fused.WIDTH}
FORMS = {"": CONSTANTS, ", not aligned": CONSTANTS | {"ALIGNED": False}}
TILES = {
    f", heads of {width}": {"BEFORE": 64, "AFTER": 64, "WIDTH": width, "TILE": tile_kernels.TILE} for width in (64, 128)
}
CASES = [
    (kernel, form, constants)
    for kernel in SIGNATURES
    for form, constants in (TILES if "TILE" in kernel.arg_names else FORMS).items()
]


def is_started(kernel: Any, constants: dict[str, Any], gpu: str) -> bool:
    """Return True if a kernel is ever launched on a GPU; heads of 128 are tested with Hopper's settings only."""
    if "TILE" not in constants:
        return True
    if gpu in AMD:  # it would spill there, and is refused
        return False
    if kernel is tile_kernels._backward:
        return tile_kernels.walks(constants["WIDTH"], constants["AFTER"], major(gpu))
    return constants["WIDTH"] == 64 or gpu == "sm_90"


def major(gpu: str) -> int:
    return int(gpu.removeprefix("sm_")) // 10


def needs(compiled: Any) -> dict[str, int]:
    """Return registers, spilled bytes, shared memory and instructions of a compiled kernel."""
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
    """Return the same for an AMD GPU; of the instructions only accesses to global memory."""
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
    """Return the resources of every kernel on every GPU."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    targets = {f"sm_{each}": GPUTarget("cuda", each, 32) for each in SHARED_MEMORY}
    targets |= {name: GPUTarget("hip", name, 64) for name in AMD}
    for gpu, target in targets.items():
        for kernel, form, constants in CASES:
            if not is_started(kernel, constants, gpu):
                continue
            signature = SIGNATURES[kernel] | dict.fromkeys(constants, "constexpr")
            signature = {name: signature[name] for name in kernel.arg_names}
            whole = STRIDES.keys() | OF_GRADIENT.keys()  # multiples of 16, like tensors and the number of tokens
            whole |= {name for name in kernel.arg_names if name.endswith(("NH", "_NT", "_T", "E", "PR", "num_tokens"))}
            places = [
                place
                for place, name in enumerate(kernel.arg_names)
                if "TILE" in constants and name in whole and name not in constants
            ]
            source = ASTSource(
                kernel,
                signature,
                constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()},
                attrs={(place,): [["tt.divisibility", 16]] for place in places},
            )
            options = None
            if "TILE" in constants:
                options = tile_kernels.launch_options(kernel.fn.__name__, constants["WIDTH"], major(gpu))
            compiled = triton.compile(source, target=target, options=options)
            needed = needs_of_amd(compiled) if gpu in AMD else needs(compiled)
            found.setdefault(gpu, {})[kernel.fn.__name__ + form] = needed
    return found


if __name__ == "__main__":
    print(json.dumps(table()))
