"""Methods: picks for each weight the first method that can hold it here, in a fixed order, and remembers which and why.

To add a way of holding weights, write one file here (and its kernels in kernels/) and put its name into the order."""

import functools
import importlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from octavo.weights.methods.base import (
    ExpertsMethod,
    ExpertsRequest,
    HeadsMethod,
    HeadsRequest,
    HeldExperts,
    HeldHeads,
    HeldKind,
    HeldTable,
    HeldWeight,
    LinearMethod,
    Method,
    RequestKind,
    Settings,
    TableMethod,
    WeightRequest,
)

# Files of this folder, each of which has its method as LINEAR, TABLE, HEADS or EXPERTS. The first that supports a request
# holds it, so the special come before the general: native CPU kernels, which compute everything or nothing; then methods of
# few bits, whether --quantization or the checkpoint asks for them, because those after them would hold the weight decoded;
# then --deterministic; then a device's own kernels; at last torch, which holds everything. Where two hold the same form, as
# triton_fp8 and torch_fp8, the faster one comes first.
_LINEAR = ("cpu_native", "triton_fp8", "torch_fp8", "triton_invariant", "triton_bf16", "onednn", "torch")
_TABLE = ("cpu_native", "triton_invariant", "triton_bf16", "onednn", "torch")
_HEADS = ("cpu_native", "torch")
_EXPERTS = ("cpu_native_experts", "triton_mxfp4", "triton_experts", "torch_experts")

_NEEDS_TRITON = "triton_"  # files that begin so import Triton, which may be missing and takes long to import


Reasons = tuple[tuple[str, str], ...]
"""Methods and why they cannot hold a weight."""


class Methods:
    """How one rank holds its weights."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.picked: Counter[tuple[str, Reasons]] = Counter()
        """How many weights each method holds: by its name and by why the methods before it do not."""

    def linear(self, request: WeightRequest) -> HeldWeight:
        methods: Sequence[LinearMethod] = _methods("LINEAR", _LINEAR, self.settings.has_triton)
        return self._held(methods, request)

    def table(self, request: WeightRequest) -> HeldTable:
        methods: Sequence[TableMethod] = _methods("TABLE", _TABLE, self.settings.has_triton)
        return self._held(methods, request)

    def heads(self, request: HeadsRequest) -> HeldHeads:
        methods: Sequence[HeadsMethod] = _methods("HEADS", _HEADS, self.settings.has_triton)
        return self._held(methods, request)

    def experts(self, request: ExpertsRequest) -> HeldExperts:
        methods: Sequence[ExpertsMethod] = _methods("EXPERTS", _EXPERTS, self.settings.has_triton)
        return self._held(methods, request)

    def in_words(self) -> str:
        """Which methods hold the weights, and why not another that holds some, for the report of a start."""
        names = {name for name, _ in self.picked}
        parts = []
        for (name, reasons), count in self.picked.most_common():
            why = "; ".join(f"{other}: {reason}" for other, reason in reasons if other in names)
            parts.append(f"{count} by {name}" + (f" ({why})" if why else ""))
        return f"weights held: {', '.join(parts)}"

    def _held(self, methods: Sequence[Method[RequestKind, HeldKind]], request: RequestKind) -> HeldKind:
        method, reasons = pick(methods, request, self.settings)
        self.picked[method.name, reasons] += 1
        return method.hold(request, self.settings)


def pick(
    methods: Sequence[Method[RequestKind, HeldKind]], request: RequestKind, settings: Settings
) -> tuple[Method[RequestKind, HeldKind], Reasons]:
    """The first that supports the request, and why those before it do not."""
    reasons: list[tuple[str, str]] = []
    for method in methods:
        reason = method.supports(request, settings)
        if reason is None:
            return method, tuple(reasons)
        reasons.append((method.name, reason))
    raise AssertionError(f"no method holds {request}: {reasons}")


def gpu_packings() -> set[str]:
    """Types of Quants that some method's GPU kernels multiply as they are stored. Only where Triton is installed."""
    methods: list[Method[Any, Any]] = [
        *_methods("LINEAR", _LINEAR, has_triton=True),
        *_methods("EXPERTS", _EXPERTS, has_triton=True),
    ]
    return {packing for method in methods for packing in method.packings}


def kept_on_gpu(types: frozenset[str]) -> frozenset[str]:
    """Of the packed types in a checkpoint, those that are kept on a GPU: all where its kernels multiply every one of them, else
    none. Only where Triton is installed."""
    return types if types and types <= gpu_packings() else frozenset()


@functools.cache
def _methods(kind: str, files: tuple[str, ...], has_triton: bool) -> Sequence[Any]:
    found = [file for file in files if has_triton or not file.startswith(_NEEDS_TRITON)]
    return [getattr(importlib.import_module(f"octavo.weights.methods.{file}"), kind) for file in found]
