"""What is left to choose once it is known who computes: the type of pages, and a GPU's kernels.
Knows nothing of steps, nor of how weights are read."""

import importlib
import importlib.util

import torch

from octavo.config import Config
from octavo.device import Device
from octavo.kernels.cpu.device_ops import NativeOps
from octavo.kernels.cpu.native import Native
from octavo.kernels.device_ops import DeviceOps
from octavo.kernels.torch_ops import torch_ops
from octavo.limits import Limits
from octavo.weights.formats.checkpoint import Weights

_PAGE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "float16": torch.float16, "float32": torch.float32}


def page_dtype(
    config: Config, limits: Limits, weights: Weights | None, is_native: bool, dtype: torch.dtype
) -> torch.dtype:
    """`dtype`: of the arithmetic. auto is that, but weights that are rounded to a few bits leave nothing for float32 pages to
    be exact about."""
    if (named := config.cache.kv_cache_dtype) in _PAGE_DTYPES:
        return _PAGE_DTYPES[named]
    if not is_native:
        return dtype
    is_rounded = config.model.quantization in ("int8", "int4")
    is_packed = limits.keeps_packed and not limits.decodes_packed and weights is not None and weights.has_packed
    return torch.float16 if is_rounded or is_packed else dtype


def name_of(dtype: torch.dtype) -> str:
    return next((name for name, kind in _PAGE_DTYPES.items() if kind == dtype), str(dtype).removeprefix("torch."))


def choose_ops(device: Device, dtype: torch.dtype, native: Native | None, is_invariant: bool) -> DeviceOps:
    """Triton's fused kernels where they can run: they need tensor cores for 16-bit types."""
    if native is not None:
        return NativeOps(native)
    if not has_triton(device) or dtype == torch.float32:
        return torch_ops(device.torch_device, dtype)
    kernels = importlib.import_module("octavo.kernels.triton.device_ops")  # by name: Triton may be missing
    ops: DeviceOps = kernels.InvariantTritonOps() if is_invariant else kernels.TritonOps()
    return ops


def has_triton(device: Device) -> bool:
    return device.is_cuda and importlib.util.find_spec("triton") is not None
