"""Contexts for tests that build layers or models: who computes is named, everything else has a default."""

import importlib
from collections.abc import Callable

import torch

from octavo.attention.base import AttentionBackend
from octavo.attention.reference import ReferenceAttention
from octavo.kernels.cpu.device_ops import NativeOps
from octavo.kernels.cpu.native import Native
from octavo.kernels.device_ops import DeviceOps
from octavo.kernels.torch_ops import torch_ops
from octavo.layers.context import BuildContext
from octavo.parallel import Group
from octavo.weights.methods.base import HeldWeight, Settings, WeightRequest
from octavo.weights.methods.registry import Methods

CPU = torch.device("cpu")
_TRITON = {"triton": "TritonOps", "invariant": "InvariantTritonOps"}


def context(
    group: Group | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    attention: AttentionBackend | None = None,
    *,
    kernels: str = "",
    native: Native | None = None,
    quantization: str = "",
    weight_dtype: torch.dtype = torch.float32,
    packed_types: frozenset[str] = frozenset(),
    decodes: bool = False,
    has_triton: bool = False,
    around: Callable[[HeldWeight, WeightRequest], HeldWeight] | None = None,
    max_len: int = 0,
) -> BuildContext:
    """`kernels`: "triton", "invariant" or neither. Without them and without native ones, torch computes alone."""
    settings = Settings(
        device,
        dtype,
        _ops(kernels, native, device, dtype),
        quantization=quantization,
        weight_dtype=weight_dtype,
        packed_types=packed_types,
        decodes=decodes,
        has_triton=has_triton or bool(kernels),
        around=around,
    )
    return BuildContext(group or Group.single(), attention or ReferenceAttention(), Methods(settings), max_len)


def _ops(kernels: str, native: Native | None, device: torch.device, dtype: torch.dtype) -> DeviceOps:
    if native is not None:
        return NativeOps(native)
    if not kernels:
        return torch_ops(device, dtype)
    ops: DeviceOps = getattr(importlib.import_module("octavo.kernels.triton.device_ops"), _TRITON[kernels])()
    return ops
