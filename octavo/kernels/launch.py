"""Launches a Triton kernel that has been launched before without the 30 to 90 µs that Triton takes to find it again.
Knows nothing of what kernels compute. OCTAVO_PLAIN_LAUNCH=1 leaves every launch to Triton."""

import inspect
import os
from functools import cache
from itertools import repeat
from typing import Any

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
    """`Launcher(kernel)(grid, *args, **constants)` is `kernel[grid](*args, **constants)`.

    The first launch of its kind goes through Triton, which compiles and loads the kernel; the next ones call what it
    loaded. Two launches are of one kind if Triton's own function says so of each argument (type, alignment, whether 16
    divides it, whether it is 1) and all constants and options are equal: a kernel that Triton would not have chosen is
    never run. `args` are all arguments but constants, which come last in the kernel's signature."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        # The interpreter's functions are of another type.
        self._is_direct = IS_DIRECT and isinstance(kernel, JITFunction)
        self._loaded: dict[tuple[Any, ...], tuple[Any, Any, Any, tuple[Any, ...]]] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        # Somebody replaces Triton's launches in a rehearsal: theirs is what is wanted then.
        if not self._is_direct or JITFunction.run is not _RUN or self.kernel.pre_run_hooks or _is_watched():
            self.kernel[grid](*args, **constants)
            return
        active = driver.active
        device = active.get_current_device()
        specialise = jit.native_specialize_impl
        facts = map(specialise, repeat(_backend(device)), args, repeat(False), repeat(True), repeat(True))
        modes = knobs.runtime.debug, knobs.compilation.instrumentation_mode
        key = (device, modes, *facts, *constants, *constants.values())
        loaded = self._loaded.get(key)
        if loaded is None:
            self._launch_first(key, grid, args, constants)
            return
        run, function, metadata, values = loaded
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        run(x, y, z, active.get_current_stream(device), function, metadata, None, None, None, *args, *values)

    def _launch_first(
        self, key: tuple[Any, ...], grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        parameters = self.kernel.params
        names = [parameter.name for parameter in parameters[len(args) :]]
        assert not any(parameter.is_constexpr for parameter in parameters[: len(args)])
        assert all(name in constants for name in names)
        loaded = self.kernel[grid](*args, **constants)
        if loaded is None:  # a hook of Triton's cache may refuse to compile
            return
        values = tuple(constants[name] for name in names)
        self._loaded[key] = loaded.run, loaded.function, loaded.packed_metadata, values
