"""Lets `import composer` and `import streaming` work in any program of this environment, whoever imports them first.

A user's callback, test or notebook does not know of import_stubs.py, nor of the releases that a wheel of this project
brings in modernbert_train/bundled. A file `NAME.pth` beside the installed packages is read whenever this environment's
Python starts. Ours, which a wheel holds and `python -m modernbert_train.import_stubs --environment` writes, adds a
finder that asks `spec_of` once one of the two is imported; until then nothing of ours is imported, which would cost
every program of the environment. Our own programs call `activate` before they import either.

Whose release is imported: of an environment without these packages, the bundled one. Where it has others, its own
programs get those, untouched; ours get the bundled ones, which are the only ones that it was tested with.

Composer also takes over SIGTERM and SIGINT when it is imported, to end the process with 143 and 130 whatever it is
doing. It is not let: whoever had the signals before keeps them.
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


class _Finder:
    """Finds the libraries for a program of ours, and has the stand-ins made before they run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_of(fullname, path, ours=True) if fullname in LIBRARIES else None


def activate() -> None:
    """From now on in this process; calling it again does nothing.

    Raises:
        ConfigError: another release than the bundled one is imported already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name in _PACKAGES:
        if name in sys.modules and BUNDLED.is_dir():
            _require_ours(name, sys.modules[name])
    sys.meta_path.insert(0, _Finder())


def spec_of(fullname: str, path: Sequence[str] | None, ours: bool) -> ModuleSpec | None:
    """Where one of LIBRARIES is; None leaves it to Python.

    Args:
        fullname, path: as a finder gets them.
        ours: for a program of ours, and not for one that may want the environment's own release.
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
        # only now: it must cost nothing where neither library is used
        from modernbert_train import import_stubs
        from modernbert_train.distributed import stop_signals

        import_stubs.install()
        with stop_signals.kept(), import_stubs.imported_later():
            run(module)

    spec.loader.exec_module = prepare_and_run  # type: ignore[method-assign]
    return spec


def _is_untouched(fullname: str, spec: ModuleSpec | None) -> bool:
    """Whether this is of a release that only the environment's own programs get."""
    if spec is None or not BUNDLED.is_dir() or BUNDLED in Path(spec.origin or "").parents:
        return False
    return _is_other(fullname.partition(".")[0])


def _is_other(name: str) -> bool:
    """Whether the environment's own release is another than the bundled one."""
    package = _PACKAGES[name]
    found = next((each.version for each in importlib.metadata.distributions(name=package)), None)
    return found != bundled_versions()[package]  # of modules without a record nobody knows the release


def _require_ours(name: str, module: ModuleType) -> None:
    where, wanted = Path(module.__file__ or ""), bundled_versions()[_PACKAGES[name]]
    if BUNDLED not in where.parents and _is_other(name):
        raise ConfigError(
            f"{name}: imported from {where.parent} before modernbert_train.train, which trains with release {wanted} "
            "alone and brings it. Import modernbert_train.train first, or use an environment without another release."
        )
