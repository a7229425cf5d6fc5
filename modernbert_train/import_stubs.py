"""Lets Composer and Streaming be imported where torchvision or mosaicml-cli is absent or does not fit torch.

Both libraries import torchvision, and Composer imports mosaicml-cli, at their top, and use neither for anything that
we call. There is no CPU build of torchvision on the package index, and one built for CUDA does not load on a CPU
torch. `install()` stands an empty module in for each of them, only when the real one cannot be imported, and whoever
calls into it gets an error that says so. Call it before the first import of composer or streaming.

    python -m modernbert_train.import_stubs composer.cli -n 2 -m modernbert_train train RUN.yaml

runs a module of theirs, here Composer's launcher, where its own command cannot start.

    python -m modernbert_train.import_stubs --environment

lets every program of this environment import both from now on, see import_hook.py; requirements/install.sh calls it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import runpy
import sys
import sysconfig
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
# one line, for Python's site module
_HOOK = (
    "import sys; exec('try:\\n from modernbert_train.import_hook import activate\\nexcept ImportError:\\n pass\\n"
    "else:\\n activate()')"
)


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
        import torchmetrics  # noqa: F401  it probes torchvision itself and must not find the stub
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


def _refuse(self: object, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        f"{type(self).__module__}.{type(self).__name__} is not available: the package could not be imported here. "
        "Install the build that fits your torch."
    )


def write_hook(folder: Path) -> Path:
    """Have import_hook.py activated in every program whose packages are in a folder.

    Returns:
        The file that does it; it does nothing where this package is gone.
    """
    file = folder / "modernbert_train_import_hook.pth"
    file.write_text(f"{_HOOK}\n", encoding="utf-8")
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
