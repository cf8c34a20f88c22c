"""What a GPU can do, as far as it decides how kernels are launched on it.
Knows nothing of kernels."""

from functools import cache

import torch

_SHARED_BYTES = 232448  # what a program may have on the GPU that tiles were chosen on; the interpreter has no limit


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start before the one before it has ended and wait for it inside (programmatic dependent
    launch). Older GPUs than compute capability 9.0 do not even have the instructions: kernels with them do not compile."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def is_hopper(device: torch.device) -> bool:
    """Compute capability 9.0, whose matrix instructions (wgmma) no other has."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have. 227 KiB on an H200, 163 on an A100, 99 on most others."""
    if device.type != "cuda":
        return _SHARED_BYTES
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])
