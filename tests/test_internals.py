"""Private parts of other libraries that this project uses.

If this breaks, an upgrade has moved something: the failure names it, and its list says why it is used.
"""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any

import pytest

import modernbert_train.train  # noqa: F401  lets Composer be imported
from launch.sweeps import optuna_internals
from modernbert_train.core import torch_internals
from modernbert_train.train import composer_internals


def signature_of(path: str) -> str:
    place, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(place)
    static = inspect.getattr_static(owner, name, None)
    if static is None or (
        isinstance(owner, type) and not callable(getattr(owner, name)) and not isinstance(static, property)
    ):
        return "" if isinstance(owner, type) and f"self.{name}" in inspect.getsource(owner) else "gone"
    if isinstance(static, property):
        return "property"
    try:
        return str(inspect.signature(getattr(owner, name)))
    except ValueError:
        return "builtin"


@pytest.mark.runs
@pytest.mark.parametrize("library", [composer_internals, torch_internals, optuna_internals], ids=lambda m: m.__name__)
def test_what_is_private_is_still_there(library: Any) -> None:
    # an earlier test may have installed the patches
    patched = {"get_cpu_model", "meta_init", "get_device", "prepare_ddp_module"}
    moved = {}
    for path, expected in library.INTERNALS.items():
        found = signature_of(path)
        if found != expected and path.rsplit(".", 1)[1] not in patched:
            moved[path] = f"{expected or 'an attribute'} -> {found}"
    assert moved == {}
