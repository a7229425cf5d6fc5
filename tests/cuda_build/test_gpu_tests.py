"""The tests that wait for a GPU: they are found and import in a CUDA build, and fail when something is wrong.

A test that never failed is no evidence. Some tests of tests/gpu mean something without a GPU: they are run here on the
CPU with a mistake planted, and must fail, and without, and must pass.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.cuda_build import null

pytestmark = [pytest.mark.runs, pytest.mark.timeout(3200)]

TWIN = "tests/gpu/test_parity.py::test_the_model_equals_transformers[fp32]"
DROPOUT = "tests/gpu/test_parity.py::test_dropout_of_compiled_layers_has_the_right_share"
FSDP2 = "tests/gpu/test_train.py::test_fsdp2_trains_on_one_rank_as_no_sharding_does"


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


@pytest.mark.parametrize(
    ("test", "planted"),
    [
        (TWIN, "a window one token wider"),
        (DROPOUT, "half the dropout"),
        (FSDP2, "no gradient of one weight"),
    ],
)
def test_it_fails_when_something_is_wrong(test: str, planted: str) -> None:
    whole = pytest_on("cpu", test)
    assert whole.returncode == 0 and "1 passed" in whole.stdout, whole.stdout + whole.stderr
    broken = pytest_on("cpu", test, planted=planted)
    assert broken.returncode == 1 and "1 failed" in broken.stdout, broken.stdout + broken.stderr
