"""Whether a process computes on a GPU. If this breaks, a run trains for days on the CPU of a machine full of GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.__main__ import main
from modernbert_train.distributed import compute, visible_gpus
from modernbert_train.distributed.visible_gpus import (
    count_gpus,
    use_expandable_segments,
    uses_gpu,
    why_torch_sees_none,
)
from modernbert_train.errors import ConfigError
from tests.support.waiting import stand_in


@pytest.fixture(autouse=True)
def blind_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("0,1", 2), ("GPU-8932f937-d72c, GPU-1f3", 2), ("MIG-GPU-1/0/1", 1), ("", 0), ("-1", 0), ("NoDevFiles", 0)],
)
def test_what_the_variable_shows_is_counted(monkeypatch: pytest.MonkeyPatch, visible: str, gpus: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == gpus


@pytest.mark.runs
def test_what_the_driver_shows_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its files; under WSL, which has none, nvidia-smi."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(visible_gpus.glob, "glob", lambda pattern: {"/dev/nvidia[0-9]*": ["/dev/nvidia0"]}[pattern])
    assert count_gpus() == 1
    monkeypatch.setattr(visible_gpus.glob, "glob", lambda pattern: [])
    stand_in(tmp_path, "nvidia-smi", "echo 'GPU 0: NVIDIA RTX 4090 (UUID: x)\nGPU 1: NVIDIA RTX 4090 (UUID: y)'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert count_gpus() == 2


def test_gpus_that_torch_does_not_see_are_no_reason_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(visible_gpus, "driver_version", lambda: "470.1")
    expected = r"compute\.device=auto: this machine shows 2 GPUs, but torch sees none\. NVIDIA driver 470\.1; torch .*="
    with pytest.raises(ConfigError, match=expected.removesuffix("=") + r"set compute\.device=cpu"):
        uses_gpu("auto", "compute.device")
    assert not uses_gpu("cpu", "compute.device"), "then it is meant"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not uses_gpu("auto", "compute.device"), "none is shown, on purpose"


@pytest.mark.runs
def test_a_requested_gpu_is_not_replaced_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"device=cuda: no GPU here\."):
        uses_gpu("cuda", "device")


@pytest.mark.parametrize(
    ("driver", "platform", "begin", "end"),
    [
        ("470.1", "CUDA 13.0", "NVIDIA driver 470.1", ", which needs driver 580 or newer."),
        ("535.5", "CUDA 12.9", "NVIDIA driver 535.5", ", which needs driver 525 or newer."),
        ("", "CPUs", "nvidia-smi finds no NVIDIA driver", "."),
        ("", "ROCm 7.2", "nvidia-smi finds no NVIDIA driver", "."),
    ],
)
def test_versions_are_reported(driver: str, platform: str, begin: str, end: str) -> None:
    assert why_torch_sees_none(driver, "2.13.0", platform) == f"{begin}; torch 2.13.0 is built for {platform}{end}"


def test_a_gpu_too_old_for_this_torch_is_reported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    supported: Any = lambda: ["sm_75", "sm_80", "sm_90a", "compute_120"]  # noqa: E731
    monkeypatch.setattr("torch.cuda.get_arch_list", supported)
    compute._refuse_older("Tesla T4", (7, 5))
    with pytest.raises(ConfigError, match=r"GTX 1080 has capability 6\.1, and torch .* 7\.5 and newer"):
        compute._refuse_older("GTX 1080", (6, 1))
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["gfx942"])
    monkeypatch.setattr("torch.version.hip", "7.2.0")
    compute._refuse_older("AMD Instinct MI300X", (9, 4))


def test_memory_is_extended_in_place_unless_somebody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run whose plan fits may end for want of memory that lies idle in pieces."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(visible_gpus, "_has_nvml", lambda: True)

    def chosen(visible: str, **given: str) -> str | None:
        with monkeypatch.context() as now:
            for name, value in {"CUDA_VISIBLE_DEVICES": visible, "PYTORCH_ALLOC_CONF": "", **given}.items():
                now.setenv(name, value)
            if "PYTORCH_ALLOC_CONF" not in given:
                now.delenv("PYTORCH_ALLOC_CONF")
            use_expandable_segments()
            return os.environ.get("PYTORCH_ALLOC_CONF")

    assert chosen("0") == "expandable_segments:True"
    assert chosen("") is None, "no GPU"
    assert chosen("0", PYTORCH_ALLOC_CONF="backend:cudaMallocAsync") == "backend:cudaMallocAsync"
    assert chosen("0", PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64") is None
    monkeypatch.setattr(visible_gpus, "_has_nvml", lambda: False)
    assert chosen("0") is None, "torch would crash"


@pytest.mark.runs
def test_gpus_are_listed_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By nvidia-smi, and only if this process may see GPUs; one without separate memory is skipped."""
    stand_in(tmp_path, "nvidia-smi", "echo 'NVIDIA H100 80GB HBM3, 81559\nMIG, [N/A]'")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert visible_gpus.shown_gpus() == [("NVIDIA H100 80GB HBM3", 81_559 << 20)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus.shown_gpus() == []


@pytest.mark.parametrize("verb", ["train", "finetune", "eval", "report"])
def test_every_verb_that_may_compute_asks_for_it(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that it starts inherit it: the launcher's ranks, a sweep's trials."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(visible_gpus, "_has_nvml", lambda: True)
    assert main([verb, *(["rte", "--model", "/none"] if verb == "finetune" else ["/none.yaml"])]) != 0
    assert os.environ.pop("PYTORCH_ALLOC_CONF") == "expandable_segments:True"
