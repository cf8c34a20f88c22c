"""What is left to choose once it is known who computes: the type of pages, and a GPU's kernels.
Knows nothing of steps, nor of how weights are read."""

import importlib
import importlib.util
from types import ModuleType

import torch

from octavo.config import Config
from octavo.device import Device
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


def gpu_kernels(device: Device, dtype: torch.dtype, is_invariant: bool) -> ModuleType | None:
    """The fused kernels where they can run: they need Triton, and tensor cores for 16-bit types."""
    if not device.is_cuda or dtype == torch.float32 or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(
        "octavo.kernels.triton.kernel_set_invariant" if is_invariant else "octavo.kernels.triton.kernel_set"
    )
