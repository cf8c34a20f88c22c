"""Matrix products with weights, whole or split over ranks by output (ColumnLinear) or by input (RowLinear).
Knows nothing of what the numbers mean."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from octavo.layers.context import BuildContext
from octavo.layers.fp8 import Fp8Weight, can_hold, saving
from octavo.layers.native import NativeWeight
from octavo.layers.norm import Norm, RMSNorm
from octavo.layers.packing import can_pack, pack, packed_linear, packed_linear_add
from octavo.layers.sharding import Slot, Slots, fill_share, padded_share, plain, share, share_columns, share_size
from octavo.quants import Quants, Weight


class Linear(nn.Module):
    """One rank's weight [out, in], filled part by part; on a CPU it is packed for oneDNN once the last part is in.

    It is held in `native` where the CPU has kernels of its own, in `fp8` where that is asked for and its shape allows it, else
    in `weight`. `is_vocabulary`: it is the head's, which stays more exact than others.
    `is_adopted`: no room for it is made, one that exists will be given to adopt()."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        num_parts: int,
        context: BuildContext,
        is_vocabulary: bool = False,
        is_adopted: bool = False,
    ) -> None:
        super().__init__()
        self.group = context.group
        self.native: NativeWeight | None = None
        if context.native is not None and not is_adopted:
            of_kind = NativeWeight.of_vocabulary if is_vocabulary else NativeWeight.of_parts
            self.native = of_kind(context, num_parts)
        self.fp8: Fp8Weight | None = None
        self.fp8_saving = 0  # bytes that 8 bits save, or would
        if not is_vocabulary and context.native is None and can_hold(out_features, in_features):
            self.fp8_saving = saving(out_features, in_features, context.dtype)
            if context.quantization == "fp8":
                self.fp8 = Fp8Weight(out_features, in_features, context)
        has_room = self.fp8 is None and context.native is None and not is_adopted
        self.weight = context.empty(out_features if has_room else 0, in_features)
        self.bias = context.empty(out_features) if bias else None
        self.is_packed = False
        self._kernels = context.kernels
        self._parts_to_fill = num_parts

    def adopt(self, weight: torch.Tensor) -> None:
        """Take this rank's weight whole, without a copy of it where it is not packed."""
        assert self.fp8 is None and self.native is None
        self.weight = weight
        self._pack()

    def _filled_part(self) -> None:
        self._parts_to_fill -= 1
        # Packed as soon as possible: the plain copy is freed before the next layer's weights arrive.
        if self._parts_to_fill == 0 and self.fp8 is None and self.native is None:
            self._pack()

    def _pack(self) -> None:
        if can_pack(self.weight):
            self.weight = pack(self.weight)
            self.is_packed = True


class ColumnLinear(Linear):
    """Each rank computes its share of the outputs of each part. Parts are checkpoint tensors fused into one product.

    Where a part does not split evenly, the last ranks' outputs end in zeros; a model that cannot use those checks first."""

    def __init__(
        self,
        in_features: int,
        part_sizes: Sequence[int],
        context: BuildContext,
        bias: bool = False,
        *,
        is_vocabulary: bool = False,
        is_adopted: bool = False,
    ) -> None:
        shares = [share_size(size, context.group) for size in part_sizes]
        super().__init__(in_features, sum(shares), bias, len(shares), context, is_vocabulary, is_adopted)
        self.in_features = in_features
        self.part_sizes = tuple(part_sizes)
        self._rows = [slice(sum(shares[:part]), sum(shares[: part + 1])) for part in range(len(shares))]

    def forward(self, x: torch.Tensor, norm: Norm | None = None, activation: str = "none") -> torch.Tensor:
        """[T, in] → [T, out / ranks] of norm(x). `activation`: none, gelu (by erf), gelu_tanh or relu."""
        if self.native is not None:
            return self.native.activated(x, norm, self.bias, activation)
        if self._has_few(x):
            y = self.few(x, norm)
        elif self.fp8 is not None:
            y = self.fp8(x, norm)
            if self.bias is not None:
                y.add_(self.bias)
        else:
            if norm is not None:
                x = norm(x)
            if self.is_packed:
                return packed_linear(x, self.weight, self.bias, activation)
            y = F.linear(x, self.weight, self.bias)
        match activation:
            case "gelu_tanh":
                return F.gelu(y, approximate="tanh")
            case "gelu":
                return F.gelu(y)
            case "relu":
                return F.relu(y)
        return y

    def _has_few(self, x: torch.Tensor) -> bool:
        """Whether x has so few rows that few() is the faster product."""
        if self._kernels is None or self.fp8 is not None:
            return False
        return bool(self._kernels.pays(x.shape[0], *self.weight.shape))

    def few(self, x: torch.Tensor, norm: Norm | None, gated: str = "") -> torch.Tensor:
        """The same for few rows, with an RMSNorm before it and the gate after it in the same launch."""
        assert self._kernels is not None
        if norm is not None and not isinstance(norm, RMSNorm):
            x, norm = norm(x), None
        before = None if norm is None else (norm.weight, norm.epsilon)
        y: torch.Tensor = self._kernels.few_rows_linear(
            x, self.weight, bias=self.bias, norm=before, gated=gated or None, pdl=True
        )
        return y

    def gates(self, num_rows: int, name: str) -> bool:
        """Whether gated() is faster than the product and then the gate. `name`: an activation, as kernels know it."""
        if self._kernels is None or self.fp8 is not None:
            return False
        few: bool = self._kernels.pays(num_rows, *self.weight.shape, True)
        return few or self._has_gate(num_rows, name)

    def _has_gate(self, num_rows: int, name: str) -> bool:
        """Whether a kernel for more than few rows applies the gate to its sums."""
        assert self._kernels is not None and self.fp8 is None
        return self.bias is None and bool(self._kernels.gated_pays(num_rows, self.weight, name))

    def gated(self, x: torch.Tensor, norm: Norm | None, name: str) -> torch.Tensor:
        """name(gate) * up of norm(x), [T, out / ranks / 2], in the launch of a product whose two parts are gate and up."""
        assert self._kernels is not None
        if not self._has_gate(x.shape[0], name):
            return self.few(x, norm, gated=name)
        y: torch.Tensor = self._kernels.gated_linear(x if norm is None else norm(x), self.weight, name, pdl=True)
        return y

    def warm_up_gates(self, max_rows: int, name: str) -> None:
        """Inside a rehearsal: have every kernel compiled that gated() of up to so many rows may take."""
        if self._kernels is None or self.fp8 is not None or self.bias is not None:
            return
        for num_rows in self._kernels.gated_row_counts(self.weight, name, max_rows):
            self.gated(self.weight.new_empty(num_rows, self.weight.shape[1]), None, name)

    def fill_weight(self, part: int, tensor: Weight) -> None:
        """`tensor` is the whole part, [out of the part, in]."""
        if self.native is not None:
            self.native.fill(part, padded_share(tensor, self.group))
        elif self.fp8 is not None:
            self.fp8.fill(self._rows[part].start, share(plain(tensor), 0, self.group))
        else:
            fill_share(self.weight[self._rows[part]], plain(tensor), self.group)
        self._filled_part()

    def fill_bias(self, part: int, tensor: torch.Tensor) -> None:
        assert self.bias is not None
        fill_share(self.bias[self._rows[part]], tensor, self.group)

    def fused_slots(self, name: str, arranged: Callable[[int, Any], Any] = lambda part, rows: rows) -> Slots:
        """One name for all parts, whose rows stand one after the other in the checkpoint's tensor. `arranged` is given the
        number of a part and its rows (or its bias) before they are stored."""

        def split(store: Callable[[int, Any], None]) -> Callable[[Any], None]:
            def stored(tensor: Weight) -> None:
                first = 0
                for part, size in enumerate(self.part_sizes):
                    if isinstance(tensor, Quants):
                        store(part, arranged(part, tensor.narrow_rows(first, size)))
                    else:
                        store(part, arranged(part, tensor[first : first + size]))
                    first += size

            return stored

        slots = {f"{name}.weight": Slot((sum(self.part_sizes), self.in_features), split(self.fill_weight))}
        if self.bias is not None:
            slots[f"{name}.bias"] = Slot((sum(self.part_sizes),), split(self.fill_bias))
        return slots

    def slots(self, *names: str) -> Slots:
        """One name for each part."""
        assert len(names) == len(self.part_sizes)
        slots: Slots = {}
        for part, (name, size) in enumerate(zip(names, self.part_sizes, strict=True)):
            slots[f"{name}.weight"] = Slot((size, self.in_features), lambda t, part=part: self.fill_weight(part, t))  # type: ignore[misc]
            if self.bias is not None:
                slots[f"{name}.bias"] = Slot((size,), lambda t, part=part: self.fill_bias(part, t))  # type: ignore[misc]
        return slots


class RowLinear(Linear):
    """Each rank multiplies its share of the inputs; the ranks' results are added up, residual and bias counted once."""

    def __init__(self, in_features: int, out_features: int, context: BuildContext, bias: bool = False) -> None:
        # Rank 0 adds bias and residual before the sum over ranks, so that they cost no operation of their own.
        self.is_first = context.group.rank == 0
        super().__init__(in_features // context.group.size, out_features, bias and self.is_first, 1, context)
        self.whole_shape = (out_features, in_features)
        self.has_bias = bias

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """[T, in / ranks] → residual + the product, [T, out], the same on every rank. The residual may be changed."""
        return self._summed(self._share(x, residual))

    def after_gate(self, gate_up: torch.Tensor, name: str, residual: torch.Tensor | None) -> torch.Tensor:
        """forward(name(gate) * up, residual) of gate_up [T, 2 in / ranks], in one pass less where the weight has 8 bits.
        Only with kernels, which know activations by `name`."""
        assert self._kernels is not None
        if self.fp8 is None:
            return self.forward(self._kernels.gate_mul(gate_up, name, pdl=True), residual)
        return self._summed(self._finished(self.fp8.after_gate(gate_up, name), residual))

    def _summed(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.group.size == 1 else self.group.all_reduce(y)

    def _finished(self, y: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if self.bias is not None:
            y.add_(self.bias)
        return y.add_(residual) if self.is_first and residual is not None else y

    def _share(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        residual = residual if self.is_first else None
        if self.native is not None:
            return self.native.product(x, None, self.bias, residual)
        if self.fp8 is not None:
            return self._finished(self.fp8(x), residual)
        if self.is_packed:
            if residual is None:
                return packed_linear(x, self.weight, self.bias)
            return packed_linear_add(x, self.weight, self.bias, residual)
        kernels = self._kernels if self.is_first or (self._kernels and self._kernels.IS_INVARIANT) else None
        if kernels is not None and kernels.pays(x.shape[0], *self.weight.shape):
            y: torch.Tensor = kernels.few_rows_linear(x, self.weight, bias=self.bias, residual=residual, pdl=True)
            return y
        if residual is None:
            return F.linear(x, self.weight, self.bias)
        if self._kernels is None:
            return F.linear(x, self.weight, self.bias).add_(residual)
        if self.bias is not None:
            residual.add_(self.bias)
        return residual.addmm_(x, self.weight.t())  # in place: the sum costs no pass of its own

    def fill_weight(self, tensor: Weight) -> None:
        mine = share_columns(tensor, self.group)
        if self.native is not None:
            self.native.fill(0, mine)
            return
        mine = plain(mine)
        if self.fp8 is not None:
            self.fp8.fill(0, mine)
        else:
            self.weight.copy_(mine)
        self._filled_part()

    def fill_bias(self, tensor: torch.Tensor) -> None:
        if self.bias is not None:
            self.bias.copy_(tensor)

    def slots(self, name: str) -> Slots:
        slots = {f"{name}.weight": Slot(self.whole_shape, self.fill_weight)}
        if self.has_bias:
            slots[f"{name}.bias"] = Slot(self.whole_shape[:1], self.fill_bias)
        return slots


def fp8_saving(model: nn.Module) -> int:
    """Bytes by which the model's weights on this rank are smaller with 8-bit products than without."""
    return sum(module.fp8_saving for module in model.modules() if isinstance(module, Linear))
