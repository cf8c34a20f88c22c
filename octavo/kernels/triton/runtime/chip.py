"""GPU capabilities that decide how kernels are launched."""

from functools import cache

import torch

_SHARED_BYTES = 232448  # of an H200, for which tiles were chosen; used for the interpreter, which has no limit


@cache
def starts_early(device: torch.device) -> bool:
    """Whether the GPU has programmatic dependent launch: a kernel starts before the previous one has ended and waits for it
    inside. GPUs below compute capability 9.0 lack the instructions: kernels with them do not compile."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the GPU has compute capability 9.0, the only one with wgmma instructions."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory of one program: 227 KiB on an H200, 163 on an A100, 99 on most others."""
    if device.type != "cuda":
        return _SHARED_BYTES
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])
