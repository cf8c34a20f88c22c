"""Launch Triton kernels without the 30 to 90 µs that Triton takes to look up a kernel it has compiled before.
OCTAVO_PLAIN_LAUNCH=1 leaves every launch to Triton."""

import inspect
import os
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, cast

import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.backends.compiler import BaseBackend
from triton.runtime import driver, jit
from triton.runtime.jit import JITFunction

_RUN = JITFunction.run
# The last steps of a launch in Triton 3.6, which a Launcher repeats. If the source differs, all launches are left to Triton.
_LAST_STEPS = (
    "bound_args, specialization, options = binder(*args, **kwargs)",
    "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata, "
    "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())",
)
# How Triton specialises numbers: number, expected result.
_SPECIALISED = ((1, ("constexpr", 1)), (2, ("i32", "")), (32, ("i32", "D")), (0.5, ("fp32", None)))
_LAUNCHER_STEP = (
    "self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl, "
    "global_scratch, profile_scratch, *args)"
)

_GLUON_VERSIONS = ((3, 6), (3, 7), (3, 8))  # 3.9 changed the parts used here


def _knows_triton() -> bool:
    """Whether this Triton's internals are as this module expects."""
    try:
        source = " ".join(inspect.getsource(_RUN).split())
        is_same = all(jit.native_specialize_impl(BaseBackend, x, False, True, True) == y for x, y in _SPECIALISED)
    except (AttributeError, OSError, TypeError):
        return False
    return is_same and all(step in source for step in _LAST_STEPS)


IS_DIRECT = os.environ.get("OCTAVO_PLAIN_LAUNCH", "0") in ("", "0") and _knows_triton()


@cache
def knows_gluon() -> bool:
    """Whether this Triton's Gluon supports the Gluon kernels here."""
    return tuple(map(int, triton.__version__.split(".")[:2])) in _GLUON_VERSIONS


@cache
def _knows_launcher(kind: Any) -> bool:
    """Whether this is the NVIDIA launcher of Triton 3.6, whose call allocates scratch memory and calls `launch`."""
    try:
        return _LAUNCHER_STEP in " ".join(inspect.getsource(kind.__call__).split())
    except (OSError, TypeError):
        return False


def _is_watched() -> bool:
    """Whether launch hooks are installed, by a profiler for example. Triton calls them."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        # A hook is None or a chain, which may be empty.
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def _look_at(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]] | None:
    """Specialisation key and launch arguments; None if an argument's specialisation cannot be computed here.

    The key is at least as fine as Triton's own on NVIDIA GPUs: a tensor's type and whether it is aligned to 16 bytes;
    whether a number is 1 or a multiple of 16. (Triton's function takes twice as long, and returns no pointers.)"""
    facts: list[Any] = []
    values: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            pointer = arg.data_ptr()
            facts.append(arg.dtype if pointer & 15 == 0 else (arg.dtype,))
            # For a tensor in host memory the launcher asks the driver for its address on the GPU.
            values.append(pointer if arg.is_cuda else arg)
            continue
        if kind is int:
            if not -0x80000000 <= arg <= 0x7FFFFFFF:  # not an int32
                return None
            facts.append(1 if arg == 1 else 16 if arg & 15 == 0 else 0)
        elif kind is float or arg is None:
            facts.append(kind)
        elif (fact := getattr(arg, "kind", None)) is not None:  # from Descriptors
            facts.append(fact)
        else:
            return None
        values.append(arg)
    return facts, values


class Launcher:
    """`Launcher(kernel)(grid, args, constants, options)` is `kernel[grid](*args, *constants, **options)`.

    The first launch with a key goes through Triton, which compiles and loads the kernel; later launches call the loaded
    kernel. The key holds the specialisation of all arguments and the values of all constants and options, so a kernel that
    Triton would not have chosen is never run. `constants` are all constexpr parameters, which must be the kernel's last.
    Descriptors among `args` have a fast key if they come from `Descriptors`."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        # Functions of the interpreter have another type.
        self._is_direct = IS_DIRECT and isinstance(kernel, JITFunction)
        self._loaded: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        # warmup() replaces Triton's launch, and its replacement must run.
        is_direct = self._is_direct and JITFunction.run is _RUN and not self.kernel.pre_run_hooks and not _is_watched()
        seen = _look_at(args) if is_direct else None
        if seen is None:
            self.kernel[grid](*args, *constants, **options)
            return
        facts, values = seen
        active = driver.active
        device = active.get_current_device()
        modes = knobs.runtime.debug, knobs.compilation.instrumentation_mode
        key = (device, modes, constants, *options.items(), *facts)
        loaded = self._loaded.get(key)
        if loaded is None:
            self._launch_first(key, grid, args, constants, options)
            return
        launch, rest = loaded
        launch(*grid, active.get_current_stream(device), *rest, *values, *constants)

    def _launch_first(
        self, key: tuple[Any, ...], grid: tuple[int, int, int], args: tuple[Any, ...],
        constants: tuple[Any, ...], options: dict[str, Any],
    ) -> None:  # fmt: skip
        is_constant = [parameter.is_constexpr for parameter in self.kernel.params]
        assert is_constant == [False] * len(args) + [True] * len(constants)
        kernel = self.kernel[grid](*args, *constants, **options)
        if kernel is None:  # a hook of Triton's cache may prevent compilation
            return
        launcher, kind = kernel.run, cast(Hashable, type(kernel.run))
        if _knows_launcher(kind) and launcher.global_scratch_size == launcher.profile_scratch_size == 0:
            ways = launcher.launch_cooperative_grid, launcher.launch_pdl, None, None
            self._loaded[key] = launcher.launch, (kernel.function, *ways, kernel.packed_metadata, None, None, None)


class Descriptors:
    """Makes tensor descriptors of one layout. `make(base, shape, strides, block)` creates and checks the first of each kind;
    later ones are copies with another base and shape."""

    def __init__(self, make: Callable[[Tensor, list[int], list[int], list[int]], Any]) -> None:
        self._make = make
        self._models: dict[tuple[Any, ...], Any] = {}

    def __call__(self, base: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]) -> Any:
        key = (base.dtype, strides, block)
        model = self._models.get(key)
        if model is None:
            model = self._make(base, list(shape), list(strides), list(block))
            model.kind = object()  # a finer key than Triton's, because it includes the strides
            self._models[key] = model
        # The checks on base and shape; the model has passed the others.
        assert base.data_ptr() % 16 == 0 and min(shape) > 0 and len(shape) == len(strides)
        descriptor = object.__new__(type(model))
        descriptor.__dict__.update(model.__dict__)
        descriptor.base, descriptor.shape = base, list(shape)
        return descriptor
