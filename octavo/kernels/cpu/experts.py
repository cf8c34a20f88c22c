"""The packed weights of experts in the form that the native call reads (experts.h), made once."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.cpu.library import PackedWeight, Product, check, library


class ExpertsCall(ctypes.Structure):
    """OctavoExperts of experts.h, field by field."""

    _fields_ = (
        ("x", c_void_p), ("logits", c_void_p), ("y", c_void_p), ("x_stride", c_int64), ("logits_stride", c_int64),
        ("y_stride", c_int64), ("gate_up", POINTER(Product)), ("down", POINTER(Product)), ("depth", c_int64),
        ("inner", c_int64), ("num_experts", c_int32), ("num_chosen", c_int32), ("first_held", c_int32),
        ("num_held", c_int32), ("is_normalised", c_int32), ("adds", c_int32), ("alpha", c_float), ("limit", c_float), ("offset", c_float), ("room", c_void_p),
        ("gate_up_site", c_int64), ("down_site", c_int64),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The number of experts per token, their weighting, and the gate between their two products."""

    num_chosen: int
    is_normalised: bool
    alpha: float
    limit: float
    offset: float
    num_experts: int = 0  # that are chosen from; 0: those whose weights are here
    first: int = 0  # the first of them whose weights are here


class ExpertWeights:
    def __init__(
        self,
        gate_up: Sequence[PackedWeight],  # per expert: [2 inner, depth]
        down: Sequence[PackedWeight],  # per expert: [depth, inner]
        gate_up_bias: Tensor | None,  # [experts, 2 inner] float32
        down_bias: Tensor | None,  # [experts, depth] float32
        choice: ExpertChoice,
    ) -> None:
        self.num_experts = choice.num_experts or len(gate_up)
        check(
            len(down) == len(gate_up)
            and 0 < choice.num_chosen <= self.num_experts
            and 0 <= choice.first <= self.num_experts - len(gate_up),
            f"{choice.num_chosen} of {self.num_experts} experts cannot be chosen with {len(gate_up)} and {len(down)} here",
        )
        num_kinds = [len({weight.kind for weight in weights}) for weights in (gate_up, down)]
        check(num_kinds == [1, 1], "the weights of experts must be of one kind")
        self._choice = choice
        self._depth, self._inner = gate_up[0].depth, down[0].depth
        check(
            all(w.num_columns == 2 * self._inner and w.depth == self._depth for w in gate_up)
            and all(w.num_columns == self._depth and w.depth == self._inner for w in down),
            "the weights of experts must have the same shapes",
        )
        for bias, width in ((gate_up_bias, 2 * self._inner), (down_bias, self._depth)):
            check(
                bias is None
                or (bias.shape == (len(gate_up), width) and bias.dtype == torch.float32 and bias.is_contiguous()),
                f"a bias must be float32 [{len(gate_up)}, {width}]",
            )
        self._gate_up, self._down = _products(gate_up, gate_up_bias), _products(down, down_bias)
        self._kept = (gate_up, down, gate_up_bias, down_bias)  # the products hold their addresses

    def describe(self, call: ExpertsCall) -> None:
        choice = self._choice
        call.gate_up, call.down, call.depth, call.inner = self._gate_up, self._down, self._depth, self._inner
        call.num_experts, call.num_chosen, call.is_normalised = (
            self.num_experts,
            choice.num_chosen,
            choice.is_normalised,
        )
        call.first_held, call.num_held = choice.first, len(self._kept[0])
        call.alpha, call.limit, call.offset = choice.alpha, choice.limit, choice.offset


def room_bytes(call: ExpertsCall, num_tokens: int) -> int:
    function = library().octavo_experts_bytes
    function.restype, function.argtypes = c_int64, (POINTER(ExpertsCall), c_int64)
    num_bytes: int = function(ctypes.byref(call), num_tokens)
    return num_bytes


def _products(weights: Sequence[PackedWeight], bias: Tensor | None) -> "ctypes.Array[Product]":
    products = (Product * len(weights))()
    for index, (product, weight) in enumerate(zip(products, weights, strict=True)):
        product.weights, product.kind = weight.memory.data_ptr(), weight.kind
        product.num_columns, product.depth = weight.num_columns, weight.depth
        product.bias = None if bias is None else bias[index].data_ptr()
    return products
