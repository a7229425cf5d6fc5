"""Make Composer and Streaming importable where torchvision or mosaicml-cli is absent or does not fit torch.

Both libraries import torchvision at module level, and Composer imports mosaicml-cli; we call nothing that uses either.
The package index lacks a CPU build of torchvision, and one built for CUDA does not load on a CPU torch. `install()`
adds an empty stub module for each of them that cannot be imported; any use of a stub raises an error that explains it.
Call it before the first import of composer or streaming. `imported_later()` delays the imports of transformers, peft
and SciPy by both, and by torchmetrics, until they are used.

    python -m modernbert_train.import_stubs composer.cli -n 2 -m modernbert_train train RUN.yaml

runs one of their modules, here Composer's launcher, which cannot start by its own command.

    python -m modernbert_train.import_stubs --environment

lets every program of this environment import both, see import_hook.py; requirements/install.sh calls it.
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
# imported at module level by Composer, Streaming and torchmetrics, for features that we do not use. Composer imports
# peft if it is installed; peft subclasses classes of transformers, so both must be proxies or both real
_LATER = ("transformers", "peft", "scipy")
# a .pth file runs it at every start of Python, so it imports nothing until one of the two is imported
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
    """Add stubs for torchvision and mcli if they cannot be imported; a second call does nothing.

    Returns:
        The packages that are stubs in this process.
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
    """Lets transformers conclude that torchvision is absent: it checks once, and would import from the stub."""

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
                importlib.import_module("transformers.utils").is_torchvision_available()  # caches the answer
            finally:
                sys.modules.update(stubs)

        spec.loader.exec_module = run_without  # type: ignore[method-assign]
        return spec


@contextmanager
def imported_later(torch: bool = False) -> Iterator[None]:
    """Context in which imports of transformers, peft or SciPy return proxies, which import the package on first use.

    Composer, Streaming and torchmetrics import them at module level, for features that we do not use; that takes more
    than half of the time until a run's first step. All names work. Packages that are loaded already, or absent, are
    left alone.

    Args:
        torch: delay torch and torchvision too, and replace them as base classes by `object`: for programs that use
            only Streaming's shards, since its datasets and loaders then do not work.
    """
    packages = [name for name in _LATER if name not in sys.modules and _installed(name)]
    if _installed("transformers") and "transformers" not in packages:
        packages = []  # transformers imports scikit-learn if it is installed, which needs the real SciPy
    packages += ["torch", "torchvision"] if torch else []
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
    """Creates an empty module for any import below some packages; its names are `_Later` proxies.

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
    """A proxy for a package's name, imported on first use; `isinstance` with it is False without an import."""

    def __init__(self, module: str, name: str) -> None:
        self._place = (module, name)

    def _real(self) -> Any:
        module, name = self._place
        return getattr(importlib.import_module(module), name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("__parameters__", "__typing_")):  # typing asks every type in an annotation
            raise AttributeError(attribute)
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
    """Write the .pth file that enables import_hook.py for every program with packages in this folder.

    Returns:
        The file; it does nothing once this package is removed.
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
