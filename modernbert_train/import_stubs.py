"""Lets Composer and Streaming be imported where torchvision or mosaicml-cli is absent or does not fit torch.

Both libraries import torchvision, and Composer imports mosaicml-cli, at their top, and use neither for anything that
we call. There is no CPU build of torchvision on the package index, and one built for CUDA does not load on a CPU
torch. `install()` stands an empty module in for each of them, only when the real one cannot be imported, and whoever
calls into it gets an error that says so. Call it before the first import of composer or streaming.
`imported_later()` keeps both, and torchmetrics for them, from importing transformers, peft and SciPy before their use.

    python -m modernbert_train.import_stubs composer.cli -n 2 -m modernbert_train train RUN.yaml

runs a module of theirs, here Composer's launcher, where its own command cannot start.

    python -m modernbert_train.import_stubs --environment

lets every program of this environment import both from now on, see import_hook.py; requirements/install.sh calls it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import runpy
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

# module -> names that Composer 0.32.1 and Streaming 0.13.0 import from it
_STUBS: dict[str, dict[str, tuple[str, ...]]] = {
    "torchvision": {
        "torchvision": (),
        "torchvision.datasets": ("VisionDataset",),
        "torchvision.transforms": ("Compose",),
        "torchvision.transforms.functional": ("to_tensor",),
        "torchvision.models": (),
        "torchvision.models.resnet": ("Bottleneck",),
        "torchvision.ops": ("box_convert",),
        "torchvision.utils": ("draw_segmentation_masks",),
    },
    "mcli": {"mcli": ()},
}
# what Composer, Streaming and torchmetrics import at their top, for nothing that we call; peft, which Composer imports
# where it is installed, makes subclasses of what is in transformers, so neither may be real alone
_LATER = ("transformers", "peft", "scipy")
# what a .pth file runs at every start of Python, so nothing is imported until one of the two is
_HOOK = """\
class ModernbertTrain:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ('composer', 'composer.algorithms', 'streaming'):
            try:
                from modernbert_train.import_hook import spec_of
            except ImportError:
                return None
            return spec_of(name, path, ours=False)
sys.meta_path.insert(0, ModernbertTrain)
"""


def install() -> list[str]:
    """Stand in for torchvision and mcli where they cannot be imported; calling it again does nothing.

    Returns:
        The packages that are stood in for in this process.
    """
    return [name for name, modules in _STUBS.items() if _is_stub(name) or not _importable(name, modules)]


def _is_stub(name: str) -> bool:
    return getattr(sys.modules.get(name), "__modernbert_train_stub__", False)


def _importable(name: str, modules: dict[str, tuple[str, ...]]) -> bool:
    try:
        importlib.import_module(name)
        return True
    except Exception:  # a torchvision built for another torch raises RuntimeError, not ImportError
        for loaded in [m for m in sys.modules if m.split(".")[0] == name]:
            del sys.modules[loaded]
    if name == "torchvision":
        with imported_later():
            import torchmetrics  # noqa: F401  it probes torchvision itself and must not find the stub
        sys.meta_path.insert(0, _TransformersFinder())
    for module, attributes in modules.items():
        _add_stub(module, attributes)
    return False


def _add_stub(name: str, attributes: tuple[str, ...]) -> None:
    module = ModuleType(name, f"Stand-in for {name}; see modernbert_train.import_stubs.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update({"__modernbert_train_stub__": True, "__version__": "0.0.0"})
    for attribute in attributes:
        setattr(module, attribute, type(attribute, (), {"__init__": _refuse, "__module__": name}))
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


class _TransformersFinder(importlib.abc.MetaPathFinder):
    """Lets transformers find no torchvision where there is none: it looks once, and would import from the stand-in."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname == "transformers" else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_without(module: ModuleType) -> None:
            stubs = {name: sys.modules.pop(name) for name in _STUBS["torchvision"] if _is_stub(name)}
            try:
                run(module)
                importlib.import_module("transformers.utils").is_torchvision_available()  # it remembers the answer
            finally:
                sys.modules.update(stubs)

        spec.loader.exec_module = run_without  # type: ignore[method-assign]
        return spec


@contextmanager
def imported_later() -> Iterator[None]:
    """Within it, imports from transformers, peft or SciPy give stand-ins, which import the real one on first use.

    Composer, Streaming and torchmetrics import them at their top, for what nothing here calls, and that is more than
    half of the time until a run's first step. All they offer is there, and works. What is loaded already, or
    absent, stays so.
    """
    packages = [name for name in _LATER if name not in sys.modules and _installed(name)]
    if _installed("transformers") and "transformers" not in packages:
        packages = []  # the real one imports scikit-learn where it is installed, and that the real SciPy
    finder = _LaterFinder(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.made:
            sys.modules.pop(name, None)


def _installed(name: str) -> bool:
    return importlib.machinery.PathFinder.find_spec(name) is not None


class _LaterFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes an empty module of whatever is asked for under some packages; its names are `_Later`.

    Attributes:
        made: names of these modules.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages
        self.made: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        self.made.append(module.__name__)
        vars(module)["__getattr__"] = partial(_later, module.__name__)


def _later(module: str, name: str) -> _Later:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Later(module, name)


class _Later:
    """Something in a package, imported when it is used. Of an `isinstance` it need not be: nothing is one of it."""

    def __init__(self, module: str, name: str) -> None:
        self._place = (module, name)

    def _real(self) -> Any:
        module, name = self._place
        return getattr(importlib.import_module(module), name)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._real(), attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        return self._place[0] in sys.modules and isinstance(instance, self._real())


def _refuse(self: object, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        f"{type(self).__module__}.{type(self).__name__} is not available: the package could not be imported here. "
        "Install the build that fits your torch."
    )


def write_hook(folder: Path) -> Path:
    """Have import_hook.py asked in every program whose packages are in a folder.

    Returns:
        The file that does it; it does nothing where this package is gone.
    """
    file = folder / "modernbert_train_import_hook.pth"
    file.write_text(f"import sys; exec({_HOOK!r})\n", encoding="utf-8")  # Python's site module reads it by lines
    return file


def _main() -> None:
    if sys.argv[1:] == ["--environment"]:
        write_hook(Path(sysconfig.get_path("purelib")))
        return
    if len(sys.argv) < 2:
        sys.exit("usage: python -m modernbert_train.import_stubs {--environment | MODULE [ARGUMENT ...]}")
    install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
