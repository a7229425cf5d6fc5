"""Pretraining of ModernBERT-class encoders: raw text to a published Hugging Face model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from modernbert_train.core.version import __version__ as __version__

# torch reads this while it is imported. Since 2.15 its default backend for NCCL is another one, whose watchdog does not
# report which collective each GPU has reached: a hanging GPU would end a run without being named (heartbeat.py).
os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")

if TYPE_CHECKING:
    from modernbert_train.api import (
        LoadedEncoder,
        build_model,
        check_run,
        evaluate_run,
        export_run,
        finetune_model,
        iter_batches,
        load_config,
        load_model,
        plan_run,
        train_run,
    )
    from modernbert_train.config.schema import RunConfig
    from modernbert_train.errors import RunError

__all__ = [
    "LoadedEncoder",
    "RunConfig",
    "RunError",
    "build_model",
    "check_run",
    "evaluate_run",
    "export_run",
    "finetune_model",
    "iter_batches",
    "load_config",
    "load_model",
    "plan_run",
    "train_run",
]


def __getattr__(name: str) -> Any:
    """Import a name of the interface on first use, so that commands that do not need it start faster."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from modernbert_train import api, errors

    return getattr(errors if name == "RunError" else api, name)
