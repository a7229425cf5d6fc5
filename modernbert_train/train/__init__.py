"""Running: the only package that knows Composer. Start reading at build.py.

What `check` asks of it (preflight.py and what that imports) is imported without torch: compat.install(), which needs
it, waits for the first import of Composer.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from modernbert_train import compat


class _BeforeComposer(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "composer":
            compat.install()
        return None  # who finds it is another's business


if "composer" not in sys.modules:
    sys.meta_path.insert(0, _BeforeComposer())
