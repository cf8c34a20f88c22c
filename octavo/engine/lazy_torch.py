"""Has torch imported without the parts that a CPU's engine does not use. Knows nothing of torch but their names.

torch imports all that it has: compilers, optimizers, distributions, readers of training data. What is named here makes for a third of
the time and for 25 MB, and torch asks none of it for anything while it is imported. Whoever asks for a part later gets it then; and
whoever imports more of torch gets what compilers need before it, as its modules expect."""

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


def needs_little_of_torch(config: Config) -> bool:
    """A CPU's engine with weights of its own does. A GPU's, and one that makes random weights, has random number generators, which
    torch makes with the help of a part that is left out."""
    model = config.model
    is_for_cpu = model.device == "cpu" or (model.device == AUTO and not any(Path(gpu).exists() for gpu in _GPUS))
    return is_for_cpu and model.load_format != "dummy"


@contextlib.contextmanager
def light_torch() -> Iterator[None]:
    """For processes of our own, around their first import of torch."""
    if _TORCH in sys.modules:
        yield
        return
    parts = [_Later(name) for name in _PARTS]
    sys.modules.update({part.__name__: part for part in parts})
    sys.meta_path.insert(0, _More(parts))
    try:
        yield
    finally:
        for part in parts:
            part.step_aside()


class _Later(types.ModuleType):
    """Stands where a part would be, until it is asked for something."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # what importing itself looks at
            raise AttributeError(name)
        self.step_aside()
        return getattr(importlib.import_module(self.__name__), name)

    def step_aside(self) -> None:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


class _More:
    """Is asked where modules are, and notices who wants more of torch once that is imported."""

    def __init__(self, parts: list[_Later]) -> None:
        self._parts = parts
        self._has_noticed = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if self._has_noticed or not name.startswith(f"{_TORCH}.") or _is_being_imported(_TORCH):
            return None
        self._has_noticed = True
        for part in self._parts:
            part.step_aside()
        if name == _FOR_COMPILERS:
            return None
        importlib.import_module(_FOR_COMPILERS)
        # Which may have imported what is asked for, and that must not run twice.
        return ModuleSpec(name, _There(sys.modules[name])) if name in sys.modules else None  # type: ignore[arg-type]


class _There:
    """Of a module that has come in the meantime."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module, self._spec = module, module.__spec__
        module.__spec__ = None  # else importing takes that one, and runs the module again

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec


def _is_being_imported(name: str) -> bool:
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", True)
