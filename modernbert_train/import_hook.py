"""Lets `import composer` and `import streaming` work in any program of this environment, whoever imports them first.

Our own modules call `compat.install()` before they import either; a user's callback, test or notebook does not know of
it. A file `NAME.pth` beside the installed packages is read whenever this environment's Python starts; ours, which
`python -m modernbert_train.compat --environment` writes, calls `activate`. That puts a finder before all others, which
does nothing but call `compat.install()` when one of the two libraries is about to run. Until then nothing is imported,
and nobody who looks for torchvision finds one that is not there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

LIBRARIES = ("composer", "streaming")


class _Finder(MetaPathFinder):
    """Finds the two libraries where they are, and has the stand-ins made before they run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in LIBRARIES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def prepare_and_run(module: ModuleType) -> None:
            from modernbert_train import compat  # only now: it must cost nothing where neither library is used

            compat.install()
            run(module)

        spec.loader.exec_module = prepare_and_run  # type: ignore[method-assign]
        return spec


def activate() -> None:
    """From now on in this process; calling it again does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
