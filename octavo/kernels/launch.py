"""Launches a Triton kernel that has been launched before without the 30 to 90 µs that Triton takes to find it again.
Knows nothing of what kernels compute. OCTAVO_PLAIN_LAUNCH=1 leaves every launch to Triton."""

import inspect
import os
from collections.abc import Callable
from functools import cache
from itertools import repeat
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver, jit
from triton.runtime.jit import JITFunction

_RUN = JITFunction.run
# What Triton 3.6 does last, and what a Launcher does too. Where it does otherwise, all launches are left to it.
_LAST_STEPS = (
    "bound_args, specialization, options = binder(*args, **kwargs)",
    "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata, "
    "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())",
)
_LAUNCHER_STEP = (
    "self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl, "
    "global_scratch, profile_scratch, *args)"
)


def _knows_triton() -> bool:
    """Whether this Triton has what is used here of its inner parts, in the form in which it is used."""
    try:
        source = " ".join(inspect.getsource(_RUN).split())
        facts = jit.native_specialize_impl(triton.backends.compiler.BaseBackend, 32, False, True, True)
    except (AttributeError, OSError, TypeError):
        return False
    return all(step in source for step in _LAST_STEPS) and facts == ("i32", "D")


IS_DIRECT = os.environ.get("OCTAVO_PLAIN_LAUNCH", "0") in ("", "0") and _knows_triton()


@cache
def _knows_launcher(call: Any) -> bool:
    """Whether a launcher's call is that of Triton 3.6 for NVIDIA: allocate scratch memory and go on to `launch`."""
    return _LAUNCHER_STEP in " ".join(inspect.getsource(call).split())


def _is_known(launcher: Any) -> bool:
    return hasattr(type(launcher), "__call__") and _knows_launcher(type(launcher).__call__)  # noqa: B004


@cache
def _backend(device: int) -> Any:
    return triton.compiler.make_backend(driver.active.get_current_target())


def _is_watched() -> bool:
    """Whether somebody wants to hear of launches, a profiler say: Triton tells them."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        # None, or a chain that may be empty.
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


class Launcher:
    """`Launcher(kernel)(grid, args, constants, options)` is `kernel[grid](*args, *constants, **options)`.

    The first launch of its kind goes through Triton, which compiles and loads the kernel; the next ones call what it
    loaded. Two launches are of one kind if Triton's own function says so of each argument (type, alignment, whether 16
    divides it, whether it is 1) and all constants and options are equal: a kernel that Triton would not have chosen is
    never run. `constants` are the kernel's last parameters, all of them. The first `num_descriptors` arguments are from
    a `Descriptors`, which knows their kind: Triton takes longer to tell it than to launch."""

    def __init__(self, kernel: Any, num_descriptors: int = 0) -> None:
        self.kernel = kernel
        self.num_descriptors = num_descriptors
        # The interpreter's functions are of another type.
        self._is_direct = IS_DIRECT and isinstance(kernel, JITFunction)
        self._loaded: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        # Somebody replaces Triton's launches in a rehearsal: theirs is what is wanted then.
        if not self._is_direct or JITFunction.run is not _RUN or self.kernel.pre_run_hooks or _is_watched():
            self.kernel[grid](*args, *constants, **options)
            return
        active = driver.active
        device = active.get_current_device()
        count = self.num_descriptors
        facts = map(
            jit.native_specialize_impl,
            repeat(_backend(device)), args[count:] if count else args, repeat(False), repeat(True), repeat(True),
        )  # fmt: skip
        modes = knobs.runtime.debug, knobs.compilation.instrumentation_mode
        kinds = [descriptor.kind for descriptor in args[:count]] if count else ()
        key = (device, modes, constants, *options.items(), *kinds, *facts)
        loaded = self._loaded.get(key)
        if loaded is None:
            self._launch_first(key, grid, args, constants, options)
            return
        launch, rest = loaded
        launch(*grid, active.get_current_stream(device), *rest, *args, *constants)

    def _launch_first(
        self, key: tuple[Any, ...], grid: tuple[int, int, int], args: tuple[Any, ...],
        constants: tuple[Any, ...], options: dict[str, Any],
    ) -> None:  # fmt: skip
        is_constant = [parameter.is_constexpr for parameter in self.kernel.params]
        assert is_constant == [False] * len(args) + [True] * len(constants)
        kernel = self.kernel[grid](*args, *constants, **options)
        if kernel is None:  # a hook of Triton's cache may refuse to compile
            return
        launcher, metadata = kernel.run, kernel.packed_metadata
        if _is_known(launcher) and launcher.global_scratch_size == launcher.profile_scratch_size == 0:
            ways = launcher.launch_cooperative_grid, launcher.launch_pdl, None, None
            self._loaded[key] = launcher.launch, (kernel.function, *ways, metadata, None, None, None)
        else:
            self._loaded[key] = launcher, (kernel.function, metadata, None, None, None)


class Descriptors:
    """Makes descriptors of tensors in blocks of one layout: `make(base, shape, strides, block)` checks the first of its
    kind, and the next ones are copies of it that lie elsewhere."""

    def __init__(self, make: Callable[[torch.Tensor, list[int], list[int], list[int]], Any]) -> None:
        self._make = make
        self._models: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, base: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
    ) -> Any:
        key = (base.dtype, strides, block)
        model = self._models.get(key)
        if model is None:
            model = self._make(base, list(shape), list(strides), list(block))
            model.kind = object()  # finer than Triton's: strides belong to it
            self._models[key] = model
        # What the checks of a descriptor say of where it lies and how long it is; the rest is the model's.
        assert base.data_ptr() % 16 == 0 and min(shape) > 0 and len(shape) == len(strides)
        descriptor = object.__new__(type(model))
        descriptor.__dict__.update(model.__dict__)
        descriptor.base, descriptor.shape = base, list(shape)
        return descriptor
