"""The tests that wait for a GPU: they are found and import in a CUDA build, and fail when something is wrong.

A test that never failed is no evidence. Most tests of tests/gpu mean something without a GPU, on the CPU or on the
device that computes nothing: they are run there with a mistake planted, and must fail, and without, and must pass.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.cuda_build import null
from tests.cuda_build.planted import OTHER_NOISE

pytestmark = [pytest.mark.runs, pytest.mark.timeout(3200)]

COMPILED = "test_compiled_layers_compute_what_eager_ones_do_and_compile_once"
# where it means something, test, what is wrong in the second run
PLANTED = (
    ("cpu", "test_parity.py::test_the_model_equals_transformers[fp32]", "a window one token wider"),
    ("cpu", "test_parity.py::test_the_model_equals_transformers[bf16]", "a window one token wider"),
    ("cpu", "test_parity.py::test_dropout_of_compiled_layers_has_the_right_share", "half the dropout"),
    ("cpu", f"test_parity.py::{COMPILED}[sdpa-fp32]", "compiled layers are off"),
    ("cpu", f"test_parity.py::{COMPILED}[sdpa-fp32]", "compiled anew for each call"),
    ("cpu", "test_kernels.py::test_a_token_sees_64_to_each_side_and_no_more[sdpa]", "a window one token wider"),
    ("cpu", "test_curves.py::test_training_in_bf16_follows_fp32", "bf16 with the first weights"),
    ("cpu", "test_curves.py::test_the_fast_path_follows_fp32_as_plain_bf16_does[eager]", "bf16 with the first weights"),
    ("cpu", "test_muon.py::test_a_step_in_bf16[None]", "Muon with another polynomial"),
    ("cpu", "test_train.py::test_fsdp2_trains_on_one_rank_as_no_sharding_does", "no gradient of one weight"),
    ("cpu", "test_train.py::test_a_killed_run_goes_on_as_if_nothing_had_happened", OTHER_NOISE),
    ("null", "test_train.py::test_a_run_waits_for_the_device_once_a_step", "the optimizer reads a number"),
    ("null", "test_step.py::test_nothing_in_a_step_waits_for_the_device[varlen-False]", "the optimizer reads a number"),
    ("null", "test_memory.py::test_a_step_takes_the_memory_that_plan_says[eager]", "each output is kept"),
)


def pytest_on(device: str, *words: str, planted: str = "") -> subprocess.CompletedProcess[str]:
    """Run pytest on the CPU, or on the null device."""
    library = null.build()
    folder = str(library.parent)
    where = {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": folder,
        "TRITON_LIBCUDA_PATH": folder,
        "NULL_DEVICE_GB": "200",
    }
    here = {"MODERNBERT_TEST_DEVICE": "cpu"} if device == "cpu" else where
    environment = os.environ | here | {"PLANTED": planted, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(null.ROOT)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-o",
        "timeout=1500",
        "-p",
        "tests.cuda_build.planted",
        *words,
    ]
    return subprocess.run(command, cwd=null.ROOT, env=environment, capture_output=True, text=True, timeout=1500)


def test_every_gpu_test_is_found_and_imports() -> None:
    done = pytest_on("null", "--collect-only", "tests/gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    found = set(re.findall(r"^(tests/gpu/test_\w+\.py)::", done.stdout, re.MULTILINE))
    files = {str(path.relative_to(null.ROOT)) for path in null.ROOT.glob("tests/gpu/test_*.py")}
    assert found == files and "error" not in done.stdout.lower()


def test_memory_is_what_plan_says() -> None:
    """The allocator is torch's own: base at 98,304 tokens, eager and compiled, on a device of 200 GB."""
    done = pytest_on("null", "tests/gpu/test_memory.py")
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("device", "test", "planted"), PLANTED)
def test_it_fails_when_something_is_wrong(device: str, test: str, planted: str) -> None:
    whole = pytest_on(device, f"tests/gpu/{test}")
    assert whole.returncode == 0 and "1 passed" in whole.stdout, whole.stdout + whole.stderr
    broken = pytest_on(device, f"tests/gpu/{test}", planted=planted)
    assert broken.returncode == 1 and "1 failed" in broken.stdout, broken.stdout + broken.stderr
