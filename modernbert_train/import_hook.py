"""Lets `import composer` and `import streaming` work in any program of this environment, whoever imports them first.

Our own modules call `import_stubs.install()` before they import either; a user's callback, test or notebook does not
know of it. A file `NAME.pth` beside the installed packages is read whenever this environment's Python starts; ours,
written by `python -m modernbert_train.import_stubs --environment`, calls `activate`, as `modernbert_train.train` does.
That puts a finder before all others, which calls `import_stubs.install()` when one of the two is about to run, and lets
it wait for transformers, see there. Until then nothing is imported, and nobody who looks for torchvision finds one that
is not there.

Composer also takes over SIGTERM and SIGINT when it is imported, to end the process with 143 and 130 whatever it is
doing. It is not let: whoever had the signals before keeps them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

LIBRARIES = ("composer", "composer.algorithms", "streaming")  # the second is imported late, by a Trainer


class _Finder(MetaPathFinder):
    """Finds the libraries where they are, and has the stand-ins made before they run."""

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
            # only now: it must cost nothing where neither library is used
            from modernbert_train import import_stubs
            from modernbert_train.ranks import stop_signals

            import_stubs.install()
            with stop_signals.kept(), import_stubs.imported_later():
                run(module)

        spec.loader.exec_module = prepare_and_run  # type: ignore[method-assign]
        return spec


def activate() -> None:
    """From now on in this process; calling it again does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
