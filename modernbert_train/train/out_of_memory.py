"""A GPU that has no memory for a step: what it holds and what to set, in place of a traceback."""

from __future__ import annotations

import os

import torch
from composer.core import State

from modernbert_train.clock import position_at
from modernbert_train.config.schema import RunConfig
from modernbert_train.distributed.group import num_ranks
from modernbert_train.errors import OutOfMemory
from modernbert_train.plan.halved import is_full

_MUCH = 0.05  # of a GPU's memory: worth a sentence


def out_of_memory(error: Exception, config: RunConfig, state: State, device: torch.device) -> OutOfMemory | None:
    """The error to end with; None where it is another.

    Args:
        error: that a step raised.
        config: the run.
        state: as it was then.
        device: of this rank.
    """
    if not isinstance(error, RuntimeError) or not is_full(error):
        return None
    plan = getattr(state.batch, "plan", None)  # a microbatch has none, and then its step has not been counted yet
    phase = position_at(config, state.timestamp.token.value).name if plan is None else plan.phase
    now, key = config.phases[phase], f"phases.{phase}.microbatch_tokens"
    where = ""
    remedies: list[str] = []
    if device.type == "cuda":
        where = _holdings(device, remedies)
    if now.microbatch_rows > 1:
        remedies.append(f"{key}={now.microbatch_rows // 2 * now.row_tokens}")
    if not config.compute.activation_checkpointing:
        remedies.append("compute.activation_checkpointing=true")
    if num_ranks() > 1 and config.distributed.strategy == "ddp":
        remedies.append("distributed.strategy=fsdp2")
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    said, *_ = said.split(" GPU ")  # torch goes on with what is said here in other words
    return OutOfMemory(
        f"step {state.timestamp.batch.value + 1} ran out of memory with microbatches of {now.microbatch_rows} rows of "
        f"{now.row_tokens:,} tokens ({key}={now.tokens_at_once}){where}: {said} Set "
        f"{', or '.join(remedies) or 'smaller rows'}; the same command then resumes."
    )


def _holdings(device: torch.device, remedies: list[str]) -> str:
    """Who holds the memory of a GPU; and what helps where it is another process, or pieces."""
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
