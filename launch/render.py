"""Render job files for schedulers from the run's YAML: one template per scheduler, with names replaced.

A line of a template whose value is not set is left out. Values that a shell or YAML could misread are quoted here,
never in a template: text for shells by shlex, text for YAML as JSON, which is a subset of YAML.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Any

from modernbert_train.config.launch import split_resource
from modernbert_train.config.schema import RunConfig
from modernbert_train.errors import ConfigError
from modernbert_train.plan.gpus import DEVICE_NAMES, GPUS
from modernbert_train.plan.resolve import resolve

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = Path(__file__).resolve().parent / "templates"
IN_IMAGE = "/opt/modernbert-train"  # this project in the Dockerfile's image

GPU_NODES = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}  # taint of clusters' GPU nodes
_VARIANTS = {"a100-40gb": "NVIDIA A100-SXM4-40GB", "a100-pcie": "NVIDIA A100 80GB PCIe"}  # other labels of one key
# GPU feature discovery labels a node nvidia.com/gpu.product: the name in nvidia-smi with `-` for each space
LABELS = {
    key: name.replace(" ", "-")
    for key, name in {
        **{key: next(name for name, each in DEVICE_NAMES.items() if each == key) for key in GPUS if not GPUS[key].rocm},
        **_VARIANTS,
    }.items()
}

Values = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A scheduler: its template, the command that submits a file, and a function for its own values."""

    template: str
    submit: tuple[str, ...]
    values: Callable[[RunConfig, list[str], Values], Values]


def render(
    target: str, config: RunConfig, words: list[str], *, nodes: int | None = None, ranks_per_node: int | None = None
) -> str:
    """Return the job file of a run.

    Args:
        target: a key of TARGETS.
        config: the run.
        words: of the command that starts it: YAML files, overrides, options.
        nodes, ranks_per_node: override the YAML's.

    Raises:
        ConfigError: the run breaks a rule, or a key that the scheduler needs is not set.
    """
    nodes, ranks = nodes_and_ranks(config, nodes, ranks_per_node)
    resolve(config, nodes * ranks, purpose="submit")
    launch = config.launch
    common: Values = {
        **asdict(launch),
        "name": config.name,
        "nodes": nodes,
        "ranks": ranks,
        "gpus": None if config.compute.device == "cpu" else ranks,
        "cpus": ranks * launch.cpus_per_rank,
        "minutes": launch.time_limit_minutes,
    }
    values = common | TARGETS[target].values(config, words, common)
    lines = (TEMPLATES / TARGETS[target].template).read_text(encoding="utf-8").splitlines()
    return "".join(f"{text}\n" for line in lines if (text := _fill(line, values)) is not None)


def nodes_and_ranks(config: RunConfig, nodes: int | None, ranks_per_node: int | None) -> tuple[int, int]:
    """Return the machines of a job and the processes on each; the arguments override the YAML's.

    Raises:
        ConfigError: neither says how many processes.
    """
    ranks = ranks_per_node or config.launch.ranks_per_node or (1 if config.compute.device == "cpu" else None)
    if ranks is None:
        raise ConfigError(
            "launch.ranks_per_node is not set: how many GPUs has a machine there? Set launch.ranks_per_node=8, say."
        )
    return nodes or config.launch.nodes, ranks


def submit(target: str, file: Path) -> int:
    """Submit a job file to its scheduler; return the client's exit code.

    Raises:
        ConfigError: the client is not installed on this machine.
    """
    command = TARGETS[target].submit
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{file}: written, and not submitted: there is no {command[0]} here. Submit it on a machine that has one: "
            f"{' '.join(command)} {file}"
        )
    return subprocess.run([*command, str(file)], check=False).returncode


def _fill(line: str, values: Values) -> str | None:
    names = [identifier for identifier in Template(line).get_identifiers() if values[identifier] is None]
    return None if names else Template(line).substitute(values)


def product_label(gpu: str) -> str:
    """Return the label of a GPU named as in `plan --gpu`, or a label as it is.

    Raises:
        ConfigError: neither, so no node would match and the job would wait for ever.
    """
    if gpu.lower() in LABELS:
        return LABELS[gpu.lower()]
    if re.fullmatch(r"(NVIDIA|Tesla|Quadro)-[A-Za-z0-9._-]{0,55}[A-Za-z0-9]", gpu):
        return gpu
    raise ConfigError(
        f"launch.gpu={gpu}: on Kubernetes one of {', '.join(LABELS)}, or the label of a node as it is; "
        "`kubectl get nodes -L nvidia.com/gpu.product` shows them."
    )


def _command(words: list[str], common: Values, python: str = "python", folder: str = IN_IMAGE) -> list[str]:
    """Return the command that starts one machine's ranks."""
    return [python, str(Path(folder, "launch/run.py")), *words, "--ranks", str(common["ranks"])]


def _slurm(config: RunConfig, words: list[str], common: Values) -> Values:
    """Return Slurm's values. Its machines share a disk with this one, so the job runs from here with this Python."""
    launch = config.launch
    if launch.container is None:
        start = shlex.join(_command(words, common, sys.executable, str(ROOT)))
    else:
        inside = _command(words, common)
        gpu = "" if common["gpus"] is None else "--nv "
        start = f'apptainer exec {gpu}--bind "$PWD" --pwd "$PWD" {shlex.join([launch.container, *inside])}'
    gpus = None if common["gpus"] is None else f"{launch.gpu}:{common['gpus']}" if launch.gpu else str(common["gpus"])
    return {
        "folder": shlex.quote(str(Path.cwd())),
        "own": "\n".join(f"#SBATCH {option}" for option in launch.sbatch) or None,
        "setup": launch.setup,
        "gpus": gpus,
        "start": start,
        # a hung machine must not block the others for ever; the one that copies checkpoints may end much later
        "wait": "--wait=600 " if config.checkpoint.copy_to is None else "",
    }


def _kubernetes(config: RunConfig, words: list[str], common: Values) -> Values:
    launch = config.launch
    for key, value in (("image", launch.image), ("volume_claim", launch.volume_claim)):
        if value is None:
            raise ConfigError(f"launch.{key} is not set, and a Kubernetes job needs it. docs/clusters.md shows one.")
    label = re.sub(r"[^a-z0-9]+", "-", config.name.lower()).strip("-")[:50].strip("-")
    if not label[:1].isalpha():
        label = f"run-{label}".strip("-")
    start = _command(words, common)
    if common["nodes"] != 1:
        meeting = f'--nodes {common["nodes"]} --node-rank "$JOB_COMPLETION_INDEX" --rendezvous {label}-0.{label}:29500'
    else:
        meeting = "--nodes 1"
    script = "\n".join(filter(None, [launch.setup, f"exec {shlex.join(start)} {meeting}"]))
    requests: dict[str, str | int] = {"cpu": common["cpus"] or 1}
    limits: dict[str, str | int] = {}
    if common["memory_gib"] is not None:
        requests["memory"] = limits["memory"] = f"{common['memory_gib']}Gi"
    if common["gpus"] is not None:
        limits["nvidia.com/gpu"] = common["gpus"]
    rdma = None if launch.rdma_resource is None else split_resource(launch.rdma_resource)
    if rdma is not None:
        limits[rdma[0]] = rdma[1]
    return {
        "label": label,
        # Kubernetes counts pods, and a fault on one machine ends the pods of all
        "failures": launch.retries * int(common["nodes"] or 1),
        "namespace": launch.namespace,
        "script": json.dumps(script),
        "env": json.dumps([{"name": name, "value": value} for name, value in launch.env.items()]),
        "resources": json.dumps({"requests": requests, "limits": limits}),
        "gpu": None if launch.gpu is None or common["gpus"] is None else json.dumps(product_label(launch.gpu)),
        "tolerations": None if common["gpus"] is None else json.dumps([GPU_NODES]),
        "security": None if rdma is None else json.dumps({"capabilities": {"add": ["IPC_LOCK"]}}),  # RDMA locks memory
        "image": json.dumps(launch.image),
        "volume_claim": launch.volume_claim,
    }


def _skypilot(config: RunConfig, words: list[str], common: Values) -> Values:
    launch = config.launch
    if config.compute.device != "cpu" and launch.gpu is None:
        raise ConfigError(
            "launch.gpu is not set: which kind of GPU? Set launch.gpu=H100, say; `sky show-gpus` lists them."
        )
    start = [*_command(words, common, folder=""), "--nodes", str(common["nodes"])]
    meeting = ""
    if common["nodes"] != 1:
        meeting = ' --node-rank "$SKYPILOT_NODE_RANK" --rendezvous "$(echo "$SKYPILOT_NODE_IPS" | head -n 1):29500"'
    return {
        "gpus": None if common["gpus"] is None else json.dumps(f"{launch.gpu}:{common['gpus']}"),
        "image": None if launch.image is None else json.dumps(f"docker:{launch.image}"),
        "memory": None if launch.memory_gib is None else f"{launch.memory_gib}+",
        "envs": json.dumps(launch.env) if launch.env else None,
        "start": shlex.join(start) + meeting,
        "setup": None if launch.setup is None else launch.setup.strip().replace("\n", "\n  "),
    }


def _docker(config: RunConfig, words: list[str], common: Values) -> Values:
    launch = config.launch
    if launch.image is None:
        raise ConfigError("launch.image is not set: build one from the Dockerfile and name it, launch.image=mine:1.")
    if common["nodes"] != 1:
        raise ConfigError(f"launch.nodes={common['nodes']} with --on docker: it is for one machine. Use --nodes 1.")
    start = [*_command(words, common), "--nodes", "1"]
    if launch.setup is not None:
        start = ["sh", "-c", f"{launch.setup}\nexec {shlex.join(start)}"]
    return {
        "gpus": None if common["gpus"] is None else "all",
        "env": " ".join(f"--env {shlex.quote(f'{name}={value}')}" for name, value in launch.env.items()) or None,
        "image": shlex.quote(launch.image),
        "start": shlex.join(start),
    }


TARGETS: dict[str, Target] = {
    "slurm": Target("slurm.sh", ("sbatch",), _slurm),
    "kubernetes": Target("kubernetes.yaml", ("kubectl", "apply", "-f"), _kubernetes),
    "skypilot": Target("skypilot.yaml", ("sky", "jobs", "launch", "--yes"), _skypilot),
    "docker": Target("docker.sh", ("sh",), _docker),
}
