"""Ranks that share a GPU: refused, unless the user asks for it. Otherwise NCCL ends a start with a riddle."""

from __future__ import annotations

import os
import socket

import pytest
import torch.distributed as dist

from modernbert_train.distributed.shared_gpu import ENABLE, HOST_ID, claim_gpu, gpu_of_rank
from modernbert_train.errors import ConfigError

HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (HOST_ID, ENABLE):
        monkeypatch.delenv(name, raising=False)


def claims(monkeypatch: pytest.MonkeyPatch, nccl: tuple[int, ...] = (2, 29, 7), **environment: str) -> list[str]:
    """Return the name that each rank of one GPU gives NCCL for its host."""
    store, names = dist.HashStore(), []  # type: ignore[attr-defined]
    for rank in range(3):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        claim_gpu(store, rank, "GPU-1", lambda: nccl)
        names.append(os.environ.get(HOST_ID, ""))
    return names


def test_the_second_rank_on_a_gpu_is_refused_with_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"rank 1 on {HOST} and rank 0 on {HOST} compute on the same GPU .GPU-1."):
        claims(monkeypatch)


def test_a_host_identity_lets_ranks_share_and_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rank looks like a separate host, and two machines with the same word are not mistaken for one."""
    assert claims(monkeypatch, NCCL_HOSTID="shared") == [f"shared-{HOST}", f"shared-{HOST}-1", f"shared-{HOST}-2"]
    said = capsys.readouterr().err
    assert said.count("warning: ") == 1 and "does not measure speed" in said


def test_a_name_of_a_host_that_the_user_gave_is_kept_for_ranks_with_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers of one machine have different names, and are given one so that NCCL uses NVLink between them."""
    assert claims(monkeypatch, NCCL_HOSTID="rack3") == ["rack3", "rack3-1", "rack3-2"]
    store = dist.HashStore()  # type: ignore[attr-defined]
    for rank in range(2):
        monkeypatch.setenv(HOST_ID, "rack3")
        claim_gpu(store, rank, f"GPU-{rank}", lambda: (2, 29, 7))
        assert os.environ[HOST_ID] == "rack3"


def test_the_switch_of_nccl_is_taken_from_the_version_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"NCCL_MULTI_RANK_GPU_ENABLE=1 is read from NCCL 2\.30 on; this is 2\.29\.7"):
        claims(monkeypatch, NCCL_MULTI_RANK_GPU_ENABLE="1")
    assert claims(monkeypatch, (2, 30, 7), NCCL_MULTI_RANK_GPU_ENABLE="1") == ["", "", ""]


def test_a_rank_takes_its_own_gpu_and_shares_if_configured() -> None:
    assert [gpu_of_rank(rank, 2, {}) for rank in (0, 1)] == [0, 1]
    assert gpu_of_rank(1, 1, {}) == 0  # a launcher shows each rank one
    with pytest.raises(ConfigError, match="LOCAL_RANK=2: this machine shows 2 GPUs"):
        gpu_of_rank(2, 2, {})
    assert [gpu_of_rank(rank, 2, {HOST_ID: "shared"}) for rank in range(4)] == [0, 1, 0, 1]
