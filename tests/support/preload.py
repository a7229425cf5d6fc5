"""Imported by the process that tests fork: everything that a run, its ranks and its tools import."""

from __future__ import annotations

import gc

import pytest  # noqa: F401
import torch.distributed.fsdp
import torch.distributed.run  # noqa: F401
from numba.core.registry import cpu_target

import modernbert_train.cli.training
import modernbert_train.data.pack_kernel
import modernbert_train.data.shuffle_kernel
import modernbert_train.report
import modernbert_train.train.session
import modernbert_train.weights.export
import modernbert_train.weights.names  # noqa: F401
from tests.support import small_checkpoint  # noqa: F401

cpu_target.typing_context.refresh()  # numba would do it at the first call of a kernel, in each fork
cpu_target.target_context.refresh()
gc.freeze()  # a collection in a fork would copy all these pages
