"""Imports torch without the submodules that a CPU engine does not use.

`import torch` loads everything: compilers, optimizers, distributions, data loaders. The submodules named here take a third of the
import time and 25 MB, and torch uses none of them while it is imported. A submodule is imported when it is first used. The first
import of another torch submodule loads torch._meta_registrations before it, which the compiler modules expect."""

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from octavo.config import AUTO, Config

_TORCH = "torch"
_FOR_COMPILERS = "torch._meta_registrations"
_PARTS = (
    _FOR_COMPILERS,
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.nn.intrinsic",
    "torch.optim",
    "torch.profiler",
    "torch.quantization",
    "torch.utils.data",
)
_GPUS = ("/dev/nvidiactl", "/dev/nvgpu", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")


def can_be_lazy(config: Config) -> bool:
    """Whether the engine can do without these submodules: on a CPU and with real weights. GPU engines and random weights use
    random number generators, for which torch needs one of the submodules."""
    model = config.model
    is_for_cpu = model.device == "cpu" or (model.device == AUTO and not any(Path(gpu).exists() for gpu in _GPUS))
    return is_for_cpu and model.load_format != "dummy"


@contextlib.contextmanager
def lazy_torch() -> Iterator[None]:
    """Put stubs in place of the submodules during the first import of torch. Only for our own processes."""
    if _TORCH in sys.modules:
        yield
        return
    parts = [_Stub(name) for name in _PARTS]
    sys.modules.update({part.__name__: part for part in parts})
    sys.meta_path.insert(0, _Finder(parts))
    try:
        yield
    finally:
        for part in parts:
            part.remove()


class _Stub(types.ModuleType):
    """A stub for a submodule. Imports the real one on the first access to an attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # attributes that the import system reads
            raise AttributeError(name)
        self.remove()
        return getattr(importlib.import_module(self.__name__), name)

    def remove(self) -> None:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


class _Finder:
    """Meta-path finder: before the first import of a submodule after torch itself, removes the stubs and imports the real
    torch._meta_registrations."""

    def __init__(self, parts: list[_Stub]) -> None:
        self._parts = parts
        self._has_noticed = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if self._has_noticed or not name.startswith(f"{_TORCH}.") or _is_being_imported(_TORCH):
            return None
        self._has_noticed = True
        for part in self._parts:
            part.remove()
        if name == _FOR_COMPILERS:
            return None
        importlib.import_module(_FOR_COMPILERS)
        # That may have imported the requested module, which must not run twice.
        return ModuleSpec(name, _LoadedModule(sys.modules[name])) if name in sys.modules else None  # type: ignore[arg-type]


class _LoadedModule:
    """Loader for a module that has been imported meanwhile."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module, self._spec = module, module.__spec__
        module.__spec__ = None  # otherwise the import system uses that spec and runs the module again

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec


def _is_being_imported(name: str) -> bool:
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", True)
