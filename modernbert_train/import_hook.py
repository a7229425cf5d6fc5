"""Make `import composer` and `import streaming` work in any program of this environment.

Users' callbacks, tests and notebooks import neither import_stubs.py nor the releases that our wheel bundles in
modernbert_train/bundled. Python's site module reads a file `NAME.pth` among the installed packages at every start.
Ours, which a wheel contains and `python -m modernbert_train.import_stubs --environment` writes, adds a finder that
calls `spec_of` when one of the two is imported. Until then it imports nothing of ours, which would slow every program
of the environment. Our own programs call `activate` before they import either.

In an environment without these packages, the bundled release is imported. If the environment has another release, its
other programs get that one, unchanged; our programs get the bundled one, the only one that we test with.

Composer also installs handlers of SIGTERM and SIGINT when it is imported, which end the process with 143 and 130. The
hook restores the previous handlers.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from modernbert_train.core.installed import BUNDLED, bundled_versions
from modernbert_train.errors import ConfigError

LIBRARIES = ("composer", "composer.algorithms", "streaming")  # the second is imported late, by a Trainer
_PACKAGES = {"composer": "mosaicml", "streaming": "mosaicml-streaming"}


_only_shards = False


def only_shards() -> None:
    """Import Streaming without torch in this process, which takes a tenth of the time; only its shards then work."""
    global _only_shards
    _only_shards = True


class _Finder:
    """Finds the libraries for our own programs, and installs the stubs before they run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_of(fullname, path, ours=True) if fullname in LIBRARIES else None


def activate() -> None:
    """Install the finder in this process; a second call does nothing.

    Raises:
        ConfigError: a release other than the bundled one is imported already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name in _PACKAGES:
        if name in sys.modules and BUNDLED.is_dir():
            _require_ours(name, sys.modules[name])
    sys.meta_path.insert(0, _Finder())


def spec_of(fullname: str, path: Sequence[str] | None, ours: bool) -> ModuleSpec | None:
    """Return the spec of one of LIBRARIES; None leaves it to Python.

    Args:
        fullname, path: as a finder gets them.
        ours: True in our own programs; others may need the environment's own release.
    """
    spec = PathFinder.find_spec(fullname, path)
    if path is None and BUNDLED.is_dir() and (spec is None or (ours and _is_other(fullname))):
        spec = PathFinder.find_spec(fullname, [str(BUNDLED)])
    if not ours and _is_untouched(fullname, spec):
        return None
    if spec is None or spec.loader is None:
        return None
    run = spec.loader.exec_module

    def prepare_and_run(module: ModuleType) -> None:
        # only now, so that programs without either library pay nothing
        from modernbert_train import import_stubs
        from modernbert_train.distributed import stop_signals

        without_torch = _only_shards and fullname == "streaming" and "torch" not in sys.modules
        if not without_torch:
            import_stubs.install()
        with stop_signals.kept(), import_stubs.imported_later(without_torch):
            run(module)

    spec.loader.exec_module = prepare_and_run  # type: ignore[method-assign]
    return spec


def _is_untouched(fullname: str, spec: ModuleSpec | None) -> bool:
    """Return True for a spec of the environment's own release, which stays unchanged."""
    if spec is None or not BUNDLED.is_dir() or BUNDLED in Path(spec.origin or "").parents:
        return False
    return _is_other(fullname.partition(".")[0])


def _is_other(name: str) -> bool:
    """Return True if the environment's own release differs from the bundled one."""
    package = _PACKAGES[name]
    installed = next((each.version for each in importlib.metadata.distributions(name=package)), None)
    return installed != bundled_versions()[package]  # a module without metadata counts as another release


def _require_ours(name: str, module: ModuleType) -> None:
    where, release = Path(module.__file__ or ""), bundled_versions()[_PACKAGES[name]]
    if BUNDLED not in where.parents and _is_other(name):
        raise ConfigError(
            f"{name}: imported from {where.parent} before modernbert_train.train, which trains with release {release} "
            "alone and brings it. Import modernbert_train.train first, or use an environment without another release."
        )
