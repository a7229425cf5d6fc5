"""Imported by the process from which tests' programs are forked: what numba reads at the first call of a kernel."""

from __future__ import annotations

import gc

from numba.core.registry import cpu_target

import modernbert_train.cli.training
import modernbert_train.data.shuffle_kernel
import modernbert_train.weights.names  # noqa: F401

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
gc.freeze()
