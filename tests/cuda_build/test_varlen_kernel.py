"""Our choice of attention's kernel, on each torch. If this breaks, an encoder runs at a fifth of its speed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_build import null

pytestmark = [pytest.mark.cuda_quick, pytest.mark.runs, pytest.mark.timeout(300)]

SOURCE = Path(__file__).with_name("null_cudnn.c")
FLASH = {"flash": [True, True], "cudnn": 0, "cudnn_graphs": 0, "cudnn_tensors": [], "faults": []}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    library = tmp_path_factory.mktemp("cudnn") / "libnull_cudnn.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-w", str(SOURCE), "-o", str(library)], check=True)
    preload = f"{library}:{null.environment()['LD_PRELOAD']}"
    seen: dict[str, Any] = null.run("varlen_kernel", LD_PRELOAD=preload)
    return seen


def release(found: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(part) for part in found["torch"].split(".")[:2])


def test_varlen_calls_flash_attention_whatever_torch_prefers(found: dict[str, Any]) -> None:
    """Eager and compiled, global and local, in both orders; a compiled layer is one graph. torch's own function uses
    cuDNN in the same situation, which validates the test."""
    assert found["torch's own"] == {"flash": False, "cudnn": 1}
    ours = {name: each for name, each in found.items() if name.startswith("varlen ")}
    assert len(ours) == 8 and all(each == FLASH for each in ours.values()), ours
    assert found["said"] == "varlen (FlashAttention-2)" and found["varlen_refused"] is None


def test_the_switch_to_flash_attention_3_reaches_the_same_calls(found: dict[str, Any]) -> None:
    assert found["third_said"] == "flash (FlashAttention-3)"
    assert found["third"] == {**FLASH, "flash": [False, False]}
    assert found["third_windows"] == [["bwd", 64, 64], ["fwd", 64, 64]]


def test_cudnn_is_refused_by_name_where_torch_or_cudnn_is_too_old(found: dict[str, Any]) -> None:
    """torch 2.13 rebuilds its graph in each call, and its backward pass reads beyond a buffer; cuDNN before 9.25 gives
    NaN for the empty sequences that pad the boundaries."""
    refused = found["cudnn_refused"]
    if release(found) < (2, 14):
        assert refused.startswith(f"torch {found['torch']} has a _cudnn_attention_forward without seqused_k: ")
        assert "install a torch from 2.14 to " in refused and "microbatch first" not in found
        return
    assert found["cudnn_refused_from_9.25"] is None and found["cudnn_said"] == "cudnn (cuDNN 9.25.0)"
    assert refused is None or refused.startswith("it needs cuDNN 9.25.0, and torch ")


def test_cudnn_computes_global_layers_and_varlen_local_ones(found: dict[str, Any]) -> None:
    if "microbatch first" not in found:
        pytest.skip("cuDNN attention cannot train with this torch")
    wholes = [found[f"cudnn {order} {compiled=}"] for order in ("all", "causal") for compiled in (False, True)]
    for whole in wholes:
        assert whole["flash"] == [False, False] and whole["cudnn"] == 2 and whole["faults"] == []
    assert found["cudnn local"] == FLASH


def test_cudnn_reads_the_packed_buffer_as_it_lies(found: dict[str, Any]) -> None:
    """q, k and v are not copied: strides locate tokens, boundaries locate documents; gradients are packed separately.
    The graph serves later microbatches of other documents, up to an eighth of the row longer or shorter."""
    if "microbatch first" not in found:
        pytest.skip("cuDNN attention cannot train with this torch")
    first, alike, longer = (found[f"microbatch {name}"] for name in ("first", "like it", "longer"))
    tensors = {(uid, dims, strides): ragged for uid, dims, strides, ragged in first["cudnn_tensors"]}
    sizes = "7,2,512,64"  # eight boundaries, two heads of 64; 400 tokens rounded up to quarters of a row of 1,024
    packed, as_it_lies = "2147483647,64,128,1", "2147483647,64,384,1"  # q, k and v are thirds of one tensor
    expected = {
        0: as_it_lies,
        3: packed,
        9: packed,
        10: packed,
        11: packed,
        12: packed,
    }  # q, out, its gradient, dq to dv
    for uid, strides in expected.items():
        assert tensors.get((str(uid), sizes, strides)) == "1", (uid, tensors)
    assert [each["cudnn_graphs"] for each in (first, alike, longer)] == [2, 0, 2]
