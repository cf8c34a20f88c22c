"""Experts for the native CPU kernels, in which the bits of a token do not depend on the other tokens."""

from collections import Counter

from torch import Tensor

from octavo.kernels.cpu.adapters import NO_SITE
from octavo.kernels.cpu.experts import ExpertChoice, ExpertWeights
from octavo.kernels.cpu.library import Kind, PackedWeight
from octavo.quants import Quants, Weight
from octavo.quants.exact import HELD_SIZES, held_exactly
from octavo.weights.methods.base import ExpertsMethod, ExpertsRequest, HeldExperts, Method, Settings
from octavo.weights.methods.cpu_native import NativeHeld, NativeWeight, native_ops, supports


class NativeExperts(NativeHeld, HeldExperts):
    def __init__(self, request: ExpertsRequest, settings: Settings) -> None:
        self._native, self._request = native_ops(settings).native, request
        experts = range(request.num_experts)
        self.gate_up = [self._room((request.inner_size,) * 2, settings) for _ in experts]
        self.down = [self._room((request.hidden_size,), settings) for _ in experts]
        self._weights: ExpertWeights | None = None  # as the call reads them, made by the first call
        self._num_missing = 3 * request.num_experts  # gates, ups and downs
        self.sites = (NO_SITE, NO_SITE)  # numbers of gate_up and of down for adapters
        if settings.adapts:
            self.sites = (self._native.new_site(), self._native.new_site())

    @staticmethod
    def _room(part_sizes: tuple[int, ...], settings: Settings) -> NativeWeight:
        ops, dtype, quantization = native_ops(settings), settings.weight_dtype, settings.quantization
        return NativeWeight(ops, part_sizes, dtype, quantization, is_one=True, decodes=settings.decodes)

    @property
    def bytes_of_kinds(self) -> Counter[Kind]:
        return sum((weight.bytes_of_kinds for weight in (*self.gate_up, *self.down)), Counter[Kind]())

    def fill_gate_up(self, expert: int, part: int, rows: Weight) -> None:
        self.gate_up[expert].fill(part, rows)
        self._settle()

    def fill_down(self, expert: int, columns: Weight) -> None:
        self.down[expert].fill(0, columns)
        self._settle()

    def _settle(self) -> None:
        """With the last part. A checkpoint that stores each expert by itself may have one that cannot be held as the others
        are, and the kernels take all in one form: then all are decoded."""
        self._num_missing -= 1
        if self._num_missing:
            return
        for weights in (self.gate_up, self.down):
            if len({packed.kind for weight in weights for packed in weight.packed}) > 1:
                for weight in weights:
                    weight.decode()

    def alike(self, stack: Weight) -> Weight:
        """Where one number of one expert cannot be held packed, all are decoded."""
        if not isinstance(stack, Quants):
            return stack
        held = held_exactly(stack)
        return stack.dequantise() if held is None else held

    def weighted_sum(
        self, x: Tensor, logits: Tensor, num_chosen: int, is_normalised: bool, residual: Tensor | None
    ) -> Tensor:
        if self._weights is None:
            request, gate = self._request, self._request.gate
            self._weights = ExpertWeights(
                [_single(weight) for weight in self.gate_up],
                [_single(weight) for weight in self.down],
                request.gate_up_bias,
                request.down_bias,
                ExpertChoice(
                    num_chosen,
                    is_normalised,
                    gate.alpha,
                    gate.limit,
                    gate.offset,
                    request.num_routed,
                    request.first,
                ),
            )
        return self._native.experts(x, logits, self._weights, residual, self.sites)


def _single(weight: NativeWeight) -> PackedWeight:
    (packed,) = weight.packed
    return packed


EXPERTS: ExpertsMethod = Method("cpu_native_experts", supports, NativeExperts, packings=HELD_SIZES)
