"""Explain a GPU's out-of-memory error: memory in use, by this run and others, and the keys to change."""

from __future__ import annotations

import os

import torch

from modernbert_train.clock import Position
from modernbert_train.config.schema import ComputeConfig, DistributedConfig
from modernbert_train.core.text import first_line
from modernbert_train.distributed.group import num_ranks
from modernbert_train.errors import OutOfMemory

_MUCH = 0.05  # share of a GPU's memory that is worth reporting


def out_of_memory(
    error: Exception,
    now: Position,
    compute: ComputeConfig,
    distributed: DistributedConfig,
    step: int,
    device: torch.device,
) -> OutOfMemory:
    """Build the error that ends the run.

    Args:
        error: raised by the step; `is_full` is true for it.
        now: phase of the step.
        compute, distributed: the run's sections `compute` and `distributed`.
        step: number of the step, from 1.
        device: this rank's device.
    """
    phase, key = now.phase, f"phases.{now.name}.microbatch_tokens"
    where = ""
    remedies: list[str] = []
    if device.type == "cuda":
        where = _holdings(device, remedies)
    if phase.microbatch_rows > 1:
        remedies.append(f"{key}={phase.microbatch_rows // 2 * phase.row_tokens}")
    if not compute.activation_checkpointing:
        remedies.append("compute.activation_checkpointing=true")
    if num_ranks() > 1 and distributed.strategy == "ddp":
        remedies.append("distributed.strategy=fsdp2")
    request, *_ = first_line(error).split(" GPU ")  # the rest of torch's message repeats the figures given below
    return OutOfMemory(
        f"step {step} ran out of memory with microbatches of {phase.microbatch_rows} rows of "
        f"{phase.row_tokens:,} tokens ({key}={phase.tokens_at_once}){where}: {request} Set "
        f"{', or '.join(remedies) or 'smaller rows'}; the same command then resumes."
    )


def _holdings(device: torch.device, remedies: list[str]) -> str:
    """Describe who uses a GPU's memory; append remedies if that is another process or fragmentation."""
    free, total = torch.cuda.mem_get_info(device)
    used, held = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    text = (
        f" on {torch.cuda.get_device_name(device)}, of whose {_gb(total)} {_gb(free)} are free; this run "
        f"uses {_gb(used)} and holds {_gb(held - used)} in pieces"
    )
    if total - free - held > _MUCH * total:
        text += f", all else takes {_gb(total - free - held)} (`nvidia-smi` says who)"
    if held - used > _MUCH * total and "expandable_segments" not in os.environ.get("PYTORCH_ALLOC_CONF", ""):
        remedies.append("PYTORCH_ALLOC_CONF=expandable_segments:True in the environment")
    return text


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
