"""Methods: picks for each weight the first method that can hold it here, in a fixed order, and remembers which and why.

To add a way of holding weights, write one file here (and its kernels in kernels/) and put its name into the order."""

import functools
import importlib
from collections import Counter
from collections.abc import Callable, Sequence
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
    Use,
    WeightRequest,
)

# Files of this folder, each of which has its method as LINEAR, TABLE, HEADS or EXPERTS. The first that supports a request
# holds it, so the special come before the general: native CPU kernels, which compute everything or nothing; then methods of
# few bits, whether --quantization or the checkpoint asks for them, because those after them would hold the weight decoded;
# then --deterministic; then a device's own kernels; at last torch, which holds everything. Where two hold the same form, as
# triton_fp8 and torch_fp8, the faster one comes first.
_LINEAR = (
    "cpu_native",
    "triton_fp8",
    "torch_fp8",
    "triton_int4",
    "triton_groups",
    "triton_invariant",
    "triton_bf16",
    "onednn",
    "torch",
)
_TABLE = ("cpu_native", "triton_groups", "triton_invariant", "triton_bf16", "onednn", "torch")
_HEADS = ("cpu_native", "torch")
_EXPERTS = ("cpu_native_experts", "triton_mxfp4", "triton_experts", "torch_experts")

MOST_DECODED = 0.5  # of a GPU's memory, for weights that could stay packed and whose products are faster decoded
_NEEDS_TRITON = "triton_"  # files that begin so import Triton, which may be missing and takes long to import


Reasons = tuple[tuple[str, str], ...]
"""Methods and why they cannot hold a weight."""


class Methods:
    """How one rank holds its weights."""

    def __init__(self, settings: Settings, rank: Settings | None = None) -> None:
        """`rank`: in a dry run, the settings of the rank it stands for. They decide what is picked, and `settings` what is
        held, because a device without memory has no kernels."""
        self.settings = settings
        self._rank = settings if rank is None else rank
        self.picked: Counter[tuple[str, Reasons]] = Counter()
        """How many weights each method holds: by its name and by why the methods before it do not."""
        self.packings: dict[str, tuple[int, int]] = {}
        """Those of the picked methods. A type that one of them holds packed and another decodes is in here, too."""

    def linear(self, request: WeightRequest) -> HeldWeight:
        held, around = self._held(_linear, request), self.settings.around
        return held if around is None or request.use is not Use.PRODUCT else around(held, request)

    def table(self, request: WeightRequest) -> HeldTable:
        return self._held(_table, request)

    def heads(self, request: HeadsRequest) -> HeldHeads:
        return self._held(_heads, request)

    def experts(self, request: ExpertsRequest) -> HeldExperts:
        return self._held(_experts, request)

    def in_words(self) -> str:
        """Which methods hold the weights, for the report of a start. Where several do: why a weight was not held by an earlier one."""
        names = {name for name, _ in self.picked}
        counts: Counter[str] = (
            Counter()
        )  # reasons against methods that hold nothing are not shown, and do not divide the counts
        for (name, reasons), count in self.picked.items():
            why = "; ".join(f"{other}: {reason}" for other, reason in reasons if other in names)
            counts[name + (f" ({why})" if why else "")] += count
        return f"weights held: {', '.join(f'{count} by {held}' for held, count in counts.most_common())}"

    def _held(self, order: Callable[[bool], Sequence[Method[RequestKind, HeldKind]]], request: RequestKind) -> HeldKind:
        method, reasons = pick(order(self._rank.has_triton), request, self._rank)
        self.picked[method.name, reasons] += 1
        self.packings |= method.packings
        if self._rank is not self.settings:
            method, _ = pick(order(self.settings.has_triton), request, self.settings)
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


def gpu_packings(keeping_up: bool = False) -> set[str]:
    """Types of Quants that some method's GPU kernels multiply as they are stored. Only where Triton is installed. `keeping_up`: only those whose
    products of many rows are about as fast as with 16 bits."""
    methods: list[Method[Any, Any]] = [*_linear(True), *_experts(True)]
    return {
        type
        for method in methods
        if method.name.startswith(_NEEDS_TRITON) and (method.keeps_up or not keeping_up)
        for type in method.packings
    }


def kept_on_gpu(types: frozenset[str]) -> frozenset[str]:
    """Of the packed types in a checkpoint, those that arrive packed on a GPU: all where its kernels multiply one of them, for methods decode
    what they cannot hold; else none. Only where Triton is installed."""
    return types if types and types & gpu_packings() else frozenset()


def packed_on_gpu(
    types: frozenset[str], *, is_tight: bool, has_experts: bool, has_8_bit_floats: bool
) -> frozenset[str]:
    """Of the types that some method keeps on a GPU, those that stay packed. Kinds whose products of many rows are slower than those of 16 bits
    do where memory is tight. Not where they are of experts, whose methods would decode them: that must be known before they are loaded.
    `has_8_bit_floats`: the chip converts them."""
    slower = types & (gpu_packings() - gpu_packings(keeping_up=True))
    if not is_tight or has_experts:
        types -= slower
    return types if has_8_bit_floats else types - {"FP8"}


def _linear(has_triton: bool) -> Sequence[LinearMethod]:
    return _methods("LINEAR", _LINEAR, has_triton)


def _table(has_triton: bool) -> Sequence[TableMethod]:
    return _methods("TABLE", _TABLE, has_triton)


def _heads(has_triton: bool) -> Sequence[HeadsMethod]:
    return _methods("HEADS", _HEADS, has_triton)


def _experts(has_triton: bool) -> Sequence[ExpertsMethod]:
    return _methods("EXPERTS", _EXPERTS, has_triton)


@functools.cache
def _methods(kind: str, files: tuple[str, ...], has_triton: bool) -> Sequence[Any]:
    found = [file for file in files if has_triton or not file.startswith(_NEEDS_TRITON)]
    return [getattr(importlib.import_module(f"octavo.weights.methods.{file}"), kind) for file in found]
