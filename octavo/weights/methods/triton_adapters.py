"""Adapters around the weights of products on a GPU: the weight is held and multiplied by another method, and where rows of a step have an
adapter, its product is added to theirs (kernels/triton/gemm/adapters.py). A step without adapters runs the other method's kernels alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.device_ops import Activation, NormWeights
from octavo.kernels.torch_ops import activate
from octavo.kernels.triton.elementwise.activation import ACTIVATIONS
from octavo.kernels.triton.gemm.adapters import (
    BLOCK_FIELDS,
    MAX_SPLIT_ROWS,
    AdapterBlocks,
    Scratch,
    expand,
    expand_gated,
    make_scratch,
    shrink,
    take_changed,
)
from octavo.kernels.triton.runtime.side_stream import SideStream
from octavo.quants import Weight
from octavo.weights.methods.base import HeldWeight, WeightRequest

_FEW_ROWS = (1, 2, 4, 8, 16, 32, 64)  # products of so few rows have kernels of their own


class StepAdapters(NamedTuple):
    """Of one step."""

    rows: AdapterBlocks
    kinds: int  # a bit for each kind of sites that an adapter of the step may change


class AdapterSites:
    """The products of a rank that adapters may change, and the adapters of the step that runs."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: of activations."""
        self.dtype, self.device = dtype, device
        self.weights: list[AdaptedWeight] = []  # by site
        self.step: StepAdapters | None = None  # None: no row has one
        self._kinds: dict[WeightRequest, int] = {}  # products of one shape are of one kind
        self._scratch: Scratch | None = None
        self._side = SideStream(device)
        self._num_parts: list[int] = []
        self._max_tokens = 0

    def around(self, held: HeldWeight, request: WeightRequest) -> HeldWeight:
        """Give the product a number."""
        kind = self._kinds.setdefault(request, len(self._kinds))
        self.weights.append(AdaptedWeight(held, request, self, len(self.weights), 1 << kind))
        return self.weights[-1]

    def open(self, num_parts: list[int], max_tokens: int, max_rank: int) -> None:
        """Make room for what the kernels pass on. `num_parts`: for each site, the parts that an adapter may have there."""
        self._num_parts, self._max_tokens = num_parts, max_tokens
        shapes = [
            (weight.request.in_features, parts) for weight, parts in zip(self.weights, num_parts, strict=True) if parts
        ]
        self._scratch = make_scratch(shapes, max_tokens, max_rank, max(num_parts), self.dtype, self.device)

    @property
    def max_parts(self) -> int:
        """Of an adapter's table."""
        return max(self._num_parts)

    def begin(self, order: Tensor, blocks: Tensor, kinds: int) -> None:
        """The products from now on are of a step with adapters."""
        self.step = StepAdapters(AdapterBlocks(order, blocks), kinds)

    def end(self) -> None:
        self.step = None

    def begin_adding(self, x: Tensor, site: int, norm: tuple[Tensor, float] | None = None) -> "Adding":
        """Before a product of x, or of its RMSNorm (weight, epsilon): the adapters' first product needs x alone, and in a captured step it runs
        beside the base's. What is returned adds the second, after the base's."""
        assert self.step is not None and self._scratch is not None
        rows, num_parts, scratch = self.step.rows, self._num_parts[site], self._scratch
        join = self._side.run(lambda: shrink(x, rows, site, num_parts, scratch, norm))
        return Adding(rows, site, num_parts, scratch, join, x)

    def take_changed(self, target: Tensor, source: Tensor, site: int) -> None:
        """Copy the rows whose adapter changes the site."""
        assert self.step is not None and self._scratch is not None
        take_changed(target, source, self.step.rows, site, self._num_parts[site], self._scratch.max_parts)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def warm_up(self) -> None:
        """Launch every kernel of this file: those of steps with few rows and with many."""
        with self.rehearsed():
            for weight in {weight.kind: weight for weight in self.weights if self._num_parts[weight.site]}.values():
                for num_rows in {1, min(MAX_SPLIT_ROWS + 1, self._max_tokens)}:
                    request = weight.request
                    x, y = self.zeros(num_rows, request.in_features), self.zeros(num_rows, request.out_features)
                    for norm in (None, (x[0], 1.0)):
                        self.begin_adding(x, weight.site, norm).to(y)
                self.take_changed(y, y, weight.site)

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """The products inside take the way and the memory of a step in which adapters may change all of them, and no row has one."""
        order = torch.zeros(1, dtype=torch.int32, device=self.device)
        before = self.step
        self.begin(order, torch.zeros((1, BLOCK_FIELDS), dtype=torch.int64, device=self.device), -1)
        try:
            yield
        finally:
            self.step = before


class Adding(NamedTuple):
    """The second half of what the adapters of a step add to a product."""

    rows: AdapterBlocks
    site: int
    num_parts: int
    scratch: Scratch
    join: Callable[[], object]  # later launches wait for the first half
    x: Tensor  # which the first half may still read: its memory must not be reused before

    def to(self, y: Tensor) -> None:
        self.join()
        expand(y, self.rows, self.site, self.num_parts, self.scratch)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) · up of the sums, for all rows."""
        self.join()
        return expand_gated(gate_up, self.rows, self.site, self.num_parts, self.scratch, activation)


class AdaptedWeight(HeldWeight):
    def __init__(self, held: HeldWeight, request: WeightRequest, sites: AdapterSites, site: int, kind: int) -> None:
        super().__init__(held._ops)
        self.held, self.request, self.site, self.kind = held, request, site, kind
        self._sites = sites

    @property
    def nbytes(self) -> int:
        return self.held.nbytes

    @property
    def name(self) -> str:
        return self.held.name

    @property
    def numerics(self) -> frozenset[str]:
        return self.held.numerics

    def fill(self, part: int, rows: Weight) -> None:
        self.held.fill(part, rows)

    @property
    def _is_changed(self) -> bool:
        step = self._sites.step
        return step is not None and bool(step.kinds & self.kind)

    def product(
        self, x: Tensor, norm: NormWeights | None = None, bias: Tensor | None = None, activation: Activation = "none"
    ) -> Tensor:
        if not self._is_changed:
            return self.held.product(x, norm, bias, activation)
        x, norm = self._normed_for_both(x, norm)
        adding = self._begin_adding(x, norm)
        y = self.held.product(x, norm, bias)
        adding.to(y)
        return activate(y, activation)

    def product_add(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if not self._is_changed:
            return self.held.product_add(x, bias, residual)
        adding = self._sites.begin_adding(x, self.site)
        y = self.held.product_add(x, bias, residual)
        adding.to(y)
        return y

    def gated(self, x: Tensor, norm: NormWeights | None, bias: Tensor | None, activation: Activation) -> Tensor | None:
        """With adapters gate and up are stored before they are multiplied. With --deterministic, rows without an adapter of this product keep
        the bits that they have in steps without adapters."""
        if not self._is_changed:
            return self.held.gated(x, norm, bias, activation)
        if not self._ops.is_invariant:
            if activation not in ACTIVATIONS:
                return None
            x, norm = self._normed_for_both(x, norm)
            adding = self._begin_adding(x, norm)
            return adding.gated(self.held.product(x, norm, bias), activation)
        fused = self.held.gated(x, norm, bias, activation)
        if fused is not None:
            changed = self._ops.gate(self.product(x, norm, bias), activation)
            self._sites.take_changed(fused, changed, self.site)
        return fused

    def product_after_gate(
        self, gate_up: Tensor, activation: Activation, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        if not self._is_changed:
            return self.held.product_after_gate(gate_up, activation, bias, residual)
        inner = self._ops.gate(gate_up, activation)
        if type(self.held).product_after_gate is HeldWeight.product_after_gate:
            return self.product_add(inner, bias, residual)
        # It takes the gate in its own way, and adapters take what that gives without rounding it to 8 bits.
        adding = self._sites.begin_adding(inner, self.site)
        y = self.held.product_after_gate(gate_up, activation, bias, residual)
        adding.to(y)
        return y

    def warm_up_gate(self, activation: Activation, has_bias: bool, max_rows: int) -> None:
        self.held.warm_up_gate(activation, has_bias, max_rows)
        # With adapters gate and up are a product of their own, whose kernels no trial step meets.
        with self._sites.rehearsed():
            for num_rows in _FEW_ROWS:
                if num_rows <= max_rows:
                    x = self._sites.zeros(num_rows, self.request.in_features)
                    norm = NormWeights(x[0], None, 1.0)
                    if self._ops.is_invariant or self.gated(x, norm, None, activation) is None:
                        self._ops.gate(self.held.product(x, norm), activation)

    def _normed_for_both(self, x: Tensor, norm: NormWeights | None) -> tuple[Tensor, NormWeights | None]:
        """The norm as a launch of its own: the base's product often makes it so, and the adapters' is faster without. With --deterministic it
        stays where it is, so that rows without an adapter keep their bits."""
        return (x, norm) if self._ops.is_invariant else (self._normed(x, norm), None)

    def _begin_adding(self, x: Tensor, norm: NormWeights | None) -> Adding:
        if norm is None:
            return self._sites.begin_adding(x, self.site)
        # The kernel multiplies with the norm's factor last. In float16, numbers that are not normed yet could be too large.
        if norm.bias is not None or x.dtype == torch.float16:
            return self._sites.begin_adding(self._ops.norm(x, norm), self.site)
        return self._sites.begin_adding(x, self.site, (norm.weight, norm.epsilon))
