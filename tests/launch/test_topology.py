"""Number of processes and machines. If it is wrong, paid GPUs stay idle, or a job waits for ever."""

from __future__ import annotations

import re
from typing import Any

import pytest

from launch.topology import (
    Topology,
    find_topology,
    first_host,
    is_rank,
    seconds_until_stop,
    usable_gpus,
    with_fewer_machines,
)
from modernbert_train.config.check import check
from modernbert_train.config.launch import LaunchConfig, split_endpoint
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import PhaseConfig
from modernbert_train.errors import ConfigError
from tests.support.pages import PAGES
from tests.support.paths import ROOT

SLURM_STEP = {
    "SLURM_JOB_ID": "70123",
    "SLURM_NNODES": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[003-005,12]",
    "SLURM_NODEID": "2",
}


def found(environment: dict[str, str] | None = None, launch: LaunchConfig | None = None, **words: Any) -> Topology:
    return find_topology(launch or LaunchConfig(), environment or {}, **({"gpus": 0} | words))


def test_what_to_type_with_fewer_machines_is_a_number_that_shares_the_batches() -> None:
    """Eight rows a batch on 4 machines of 2: 3 machines cannot share them, and 2 can."""
    phases = {"only": PhaseConfig(tokens=100, row_tokens=64, batch_rows=8)}
    line = with_fewer_machines(phases, Topology(4, 2), {})
    assert "the same command with --nodes 2 continues this run on 4 ranks" in line
    assert "rendered again with --on slurm --nodes 2 " in with_fewer_machines(phases, Topology(4, 2), SLURM_STEP)
    assert with_fewer_machines(phases, Topology(1, 2), {}) == ""


# sweeps and runs that a page or a file's first lines name after `launch` and `sweep`
NAMED = re.compile(r"modernbert-train (?:launch|sweep) (yamls/\S+\.yaml)")
SMALL = {"quickstart": 2, "tiny": 2, "tiny/1-stable": 4, "tiny/2-context": 2, "tiny/3-decay": 2, "tiny-large": 2}


def named_yamls() -> set[str]:
    pages = [ROOT / "README.md", ROOT / "launch/run.py", *PAGES, *(ROOT / "yamls").rglob("*.yaml")]
    return {name for page in pages for name in NAMED.findall(page.read_text(encoding="utf-8"))}


def test_pages_name_yamls_to_launch() -> None:
    assert {
        "yamls/quickstart.yaml",
        "yamls/recipes/modernbert-base.yaml",
        "yamls/sweeps/mask_rate.yaml",
    } <= named_yamls()


@pytest.mark.runs  # a third of a second each
@pytest.mark.parametrize("name", sorted(name for name in named_yamls() if "/sweeps/" not in name))
def test_the_first_line_of_a_page_starts_on_any_number_of_gpus(name: str) -> None:
    """A batch that 8 cannot share evenly, in a warmup too, would be refused; recipes made for 8 leave none idle."""
    config = load_run([ROOT / name])
    most = SMALL.get(name.removeprefix("yamls/").removeprefix("recipes/").removesuffix(".yaml"), 8)
    for gpus in (1, 2, 4, 8):
        topology = find_topology(LaunchConfig(), {}, gpus=gpus, usable=usable_gpus(config.phases, gpus))
        check(config, topology.num_ranks)
        used = min(gpus, most)
        assert (topology.num_ranks, topology.idle_gpus) == (used, gpus - used)


YAML = LaunchConfig(nodes=3, ranks_per_node=4, rendezvous="yaml:1")
TORCHRUN = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "6", "PET_NODE_RANK": "1", "MASTER_ADDR": "m"}
KUBEFLOW = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "MASTER_ADDR": "job-0", "MASTER_PORT": "23456"}
WORDS = {"nodes": 5, "ranks": 7, "node_rank": 0, "rendezvous": "me:9"}


@pytest.mark.parametrize(
    ("environment", "words", "expected"),
    [
        pytest.param({}, {}, Topology(1, 1), id="a laptop"),
        pytest.param({}, {"gpus": 8}, Topology(1, 8), id="a process for each GPU"),
        # an explicit number is obeyed or refused; several machines are paid for as a whole
        pytest.param({}, {"gpus": 8, "usable": 2}, Topology(1, 2, idle_gpus=6), id="a single machine leaves GPUs idle"),
        ({}, {"gpus": 8, "usable": 2, "ranks": 8}, Topology(1, 8)),
        ({}, {"gpus": 8, "usable": 2, "launch": LaunchConfig(ranks_per_node=8)}, Topology(1, 8)),
        (SLURM_STEP, {"gpus": 8, "usable": 2}, Topology(4, 8, 2, "gpu003:20123")),
        pytest.param({"SLURM_JOB_ID": "1", "SLURM_NNODES": "1"}, {"gpus": 2}, Topology(1, 2), id="a job without srun"),
        pytest.param(KUBEFLOW, {}, Topology(2, 1, 0, "job-0:23456"), id="Kubeflow says where to meet"),
        # the command line wins over the environment, and that over the YAML
        ({}, {"gpus": 8, "launch": YAML}, Topology(3, 4, None, "yaml:1")),
        (TORCHRUN, {"gpus": 8, "launch": YAML}, Topology(2, 6, 1, "yaml:1")),
        (TORCHRUN, {"gpus": 8, "launch": YAML, **WORDS}, Topology(5, 7, 0, "me:9")),
        pytest.param({}, {"launch": YAML, "nodes": 1}, Topology(1, 4), id="a YAML of a cluster on one machine"),
    ],
)
def test_processes_and_machines_are_found(
    environment: dict[str, str], words: dict[str, Any], expected: Topology
) -> None:
    assert found(environment, **words) == expected


@pytest.mark.parametrize(
    ("environment", "words", "message"),
    [
        ({"SLURM_JOB_ID": "1", "SLURM_NNODES": "2"}, {}, "was not started by srun"),
        (SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "32"}, {}, r"SLURM_STEP_NUM_TASKS=32 .* --ntasks-per-node=1"),
        ({}, {"nodes": 2}, "2 machines and rendezvous=None: no address at which they meet"),
        ({}, {"nodes": 2, "rendezvous": "host"}, "rendezvous=host: no address at which they meet"),
        ({}, {"nodes": 2, "rendezvous": "host:1", "node_rank": 2}, "numbered 0 to 1"),
    ],
)
def test_what_would_wait_for_ever_is_refused(environment: dict[str, str], words: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        found(environment, **words)


def test_a_process_of_torchrun_or_composer_is_a_rank() -> None:
    """It starts no further ranks."""
    assert is_rank({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"})
    assert not is_rank({"RANK": "0", "WORLD_SIZE": "2"})  # an operator's, which numbers machines


def test_a_run_saves_before_its_time_ends() -> None:
    """Slurm's end of the job takes precedence over the YAML's limit, which counts from the launcher's start."""
    limit = LaunchConfig(time_limit_minutes=10, save_seconds=100)
    assert seconds_until_stop(LaunchConfig(), {}, 5000.0) is None
    assert seconds_until_stop(limit, {}, 5000.0) == 500
    assert seconds_until_stop(limit, {"SLURM_JOB_END_TIME": "5180"}, 5000.0) == 80
    with pytest.raises(ConfigError, match=r"save_seconds=100: the job ends in 90 s"):  # or it would restart for ever
        seconds_until_stop(limit, {"SLURM_JOB_END_TIME": "5090"}, 5000.0)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [("gpu003", "gpu003"), ("gpu[003-010,12]", "gpu003"), ("a,b", "a"), ("r1n[5]-ib,x", "r1n5-ib"), ("a[1,3],b", "a1")],
)
def test_the_first_machine_of_slurms_short_form(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


@pytest.mark.parametrize(
    ("text", "parts"),
    [("node-1:29500", ("node-1", 29500)), ("[fd00::1]:80", ("fd00::1", 80)), ("a:b", None), ("a", None), ("a:0", None)],
)
def test_endpoints(text: str, parts: tuple[str, int] | None) -> None:
    assert split_endpoint(text) == parts
