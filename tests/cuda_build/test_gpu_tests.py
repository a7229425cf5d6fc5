"""The tests for GPUs: they are collected and imported in a CUDA build, and fail when something is wrong.

A test that has never failed proves little. Most tests of tests/gpu are meaningful on the CPU or on the null device:
they run there with a planted mistake, and must fail, and without, and must pass. Tests with the same setup share a
process.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

import pytest

from tests.cuda_build import null
from tests.cuda_build.planted import NO_GLOO, OTHER_NOISE, STAND_IN

pytestmark = [pytest.mark.runs, pytest.mark.timeout(3200)]

COMPILED = "test_parity.py::test_compiled_layers_compute_what_eager_ones_do_and_compile_once[sdpa-fp32]"
KERNEL = "test_kernels.py::test_kernel_equals_sdpa[varlen-torch.bfloat16-[1, 64, 65, 128, 129, 300]-5-True-all]"
MEMORY = "test_memory.py::test_a_step_takes_the_memory_that_plan_says"
CURVES = "test_curves.py::test_the_fast_path_follows_fp32_as_plain_bf16_does[eager]"
WINDOW = "test_kernels.py::test_a_token_sees_64_to_each_side_and_no_more[sdpa]"
# device on which it is meaningful, test, planted mistake of the second run
PLANTED = (
    ("cpu", "test_parity.py::test_the_model_equals_transformers[fp32]", "a window one token wider"),
    ("cpu", "test_parity.py::test_the_model_equals_transformers[bf16]", "a window one token wider"),
    ("cpu", WINDOW, "a window one token wider"),
    ("cpu", "test_parity.py::test_dropout_of_compiled_layers_has_the_right_share", "half the dropout"),
    ("cpu", COMPILED, "compiled layers are off"),
    ("cpu", COMPILED, "compiled anew for each call"),
    ("cpu", "test_curves.py::test_training_in_bf16_follows_fp32", "bf16 with the first weights"),
    ("cpu", CURVES, "bf16 with the first weights"),
    ("cpu", "test_muon.py::test_a_step_in_bf16[None]", "Muon with another polynomial"),
    ("cpu", "test_train.py::test_fsdp2_trains_on_one_rank_as_no_sharding_does", "no gradient of one weight"),
    ("cpu", "test_train.py::test_a_killed_run_resumes_as_if_nothing_had_happened", OTHER_NOISE),
    (STAND_IN, KERNEL, "a kernel that sees across boundaries"),
    (STAND_IN, KERNEL, "a kernel without a gradient of v"),
    ("null", "test_train.py::test_a_run_waits_for_the_device_once_a_step", "the optimizer reads a number"),
    ("null", "test_step.py::test_nothing_in_a_step_waits_for_the_device[varlen-False]", "the optimizer reads a number"),
    ("null", f"{MEMORY}[eager]", "each output is kept"),
    ("null", "test_trials.py::test_what_does_not_refuse_a_gpu_is_usable[gloo]", NO_GLOO),
)


@functools.cache
def outcomes(device: str, planted: str = "") -> str:
    """Return pytest's output of all tests with this setup: on the CPU, on the CPU with the plain kernel instead of a
    GPU kernel, or on the null device."""
    on_cpu = {"MODERNBERT_TEST_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(null.ROOT)}
    here = null.environment() | {"NULL_DEVICE_GB": "200"} if device == "null" else on_cpu
    mistakes = " + ".join(filter(None, (device if device == STAND_IN else "", planted)))
    environment = os.environ | here | {"PLANTED": mistakes}
    chosen = {test for at, test, mistake in PLANTED if at == device and planted in ("", mistake)}
    if device == "null" and not planted:
        chosen |= {f"{MEMORY}[compiled]"}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rA", "-o", "timeout=1500", "-p", PLUGIN]
    words = [f"tests/gpu/{test}" for test in sorted(chosen)]
    if planted == EVERYTHING:
        words = ["--collect-only", "tests/gpu"]
    done = subprocess.run(
        [*command, *words], cwd=null.ROOT, env=environment, capture_output=True, text=True, timeout=3000
    )
    return f"{done.stdout}\n{done.stderr}"


PLUGIN = "tests.cuda_build.planted"
EVERYTHING = "everything"


def test_every_gpu_test_is_found_and_imports() -> None:
    said = outcomes("null", EVERYTHING)
    found = set(re.findall(r"^(tests/gpu/test_\w+\.py)::", said, re.MULTILINE))
    files = {str(path.relative_to(null.ROOT)) for path in null.ROOT.glob("tests/gpu/test_*.py")}
    assert found == files and "error" not in said.lower(), said


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_memory_is_what_plan_says(how: str) -> None:
    """The allocator is torch's own: base at 98,304 tokens, on a device of 200 GB."""
    said = outcomes("null")
    assert f"PASSED tests/gpu/{MEMORY}[{how}]" in said, said


@pytest.mark.parametrize(("device", "test", "planted"), PLANTED)
def test_it_fails_when_something_is_wrong(device: str, test: str, planted: str) -> None:
    whole, broken = outcomes(device), outcomes(device, planted)
    assert f"PASSED tests/gpu/{test}" in whole, whole
    assert f"FAILED tests/gpu/{test}" in broken, broken
