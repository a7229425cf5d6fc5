"""Imported by the process from which pytest's workers are forked: every test is read, rewritten and collected once."""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
from multiprocessing import forkserver

import pytest

from tests.warm import COLLECTED

with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
    pytest.main([*shlex.split(os.environ[COLLECTED]), "-n0", "--dist=no", "--collect-only", "-qq"])
gc.freeze()  # else each run in a fork looks at a million objects, and copies their pages
gc.enable()
# the workers' own programs and ranks are forked from here as well, and not from one more process for each worker
forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
