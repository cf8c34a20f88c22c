"""Weights in oneDNN's own blocked layout, multiplied by torch on a CPU. Measured by benchmarks/cpu_linear.py."""

import ctypes
import functools

import torch

from octavo.kernels.device_ops import Activation, NormWeights
from octavo.kernels.torch_ops import activate
from octavo.quants import Weight
from octavo.weights.methods.base import (
    HeldTable,
    HeldWeight,
    LinearMethod,
    Method,
    Settings,
    TableMethod,
    Use,
    WeightRequest,
    dtype_name,
)
from octavo.weights.methods.torch import PlainWeight

# Rows of the product the layout is chosen for. A layout for 32 rows is within a few percent of the best, or the best,
# from 1 to 512 rows, so one copy serves every batch.
_ROWS_HINT = 32

_LINEAR = torch.ops.mkldnn._linear_pointwise.default
_LINEAR_ADD = torch.ops.mkldnn._linear_pointwise.binary


# ── layout ──────────────────────────────────────────────────────────────────────────────────────────


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and _packs(dtype)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """An opaque tensor for the functions below; the caller drops the plain one."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return packed


def packed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "none"
) -> torch.Tensor:
    """activation(x · weightᵀ + bias) in one call."""
    name, by = {"gelu_tanh": ("gelu", "tanh"), "gelu": ("gelu", "none")}.get(activation, (activation, ""))
    y: torch.Tensor = _LINEAR(x, weight, bias, name, [], by)
    return y


def packed_linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """residual + x · weightᵀ + bias in one call."""
    y: torch.Tensor = _LINEAR_ADD(x, residual, weight, bias, "add")
    return y


@functools.cache
def _packs(dtype: torch.dtype) -> bool:
    """Whether this torch, on this CPU, multiplies packed weights of that type."""
    has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    if not has_onednn or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return False
    weight, x = torch.eye(32, dtype=dtype), torch.arange(64, dtype=dtype).view(2, 32)
    try:
        return torch.equal(packed_linear_add(x, pack(weight), None, x), x + x)
    except (RuntimeError, NotImplementedError):
        # A build without oneDNN, or for a CPU on which it has no kernel for this type.
        return False


def packed_bytes(weight: torch.Tensor) -> int:
    num_bytes: int = torch.ops.mkldnn._nbytes(weight)
    return num_bytes


class PackedRows:
    """Reads single rows out of a packed weight, so that an embedding tied to the head needs no second copy."""

    def __init__(self, weight: torch.Tensor, cells: torch.Tensor, num_rows_together: int) -> None:
        self._weight = weight  # keeps the memory alive that `cells` looks at
        self._cells = cells  # [N / together, K / v, together, v]
        self._together = num_rows_together

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] → [T, K], a copy."""
        return self._cells[ids // self._together, :, ids % self._together].flatten(1)

    @classmethod
    def of(cls, weight: torch.Tensor, plain: torch.Tensor) -> "PackedRows | None":
        """None where the layout is none of the known ones: found out by comparing rows with the plain weight's."""
        memory = (ctypes.c_char * packed_bytes(weight)).from_address(torch.ops.mkldnn.data_ptr(weight))
        cells = torch.frombuffer(memory, dtype=plain.dtype)
        num_rows, width = plain.shape
        ids = torch.arange(0, num_rows, max(1, num_rows // 1009))
        ids = torch.cat((ids, torch.tensor([num_rows - 1])))
        for together in (64, 48, 32, 16):
            for depth in (1, 2, 4):  # 16-bit types keep neighbours of a row together, for instructions that add pairs
                if width % depth or cells.numel() != -(-num_rows // together) * together * width:
                    continue
                rows = cls(weight, cells.view(-1, width // depth, together, depth), together)
                if torch.equal(rows[ids], plain[ids]):
                    return rows
        return None


# ── method ──────────────────────────────────────────────────────────────────────────────────────────


class OneDnnWeight(HeldWeight):
    """Packed when the last part is in: the plain copy is freed before the next layer's weights arrive.
    `filled`: all of it, for a head that is tied to an embedding."""

    def __init__(self, request: WeightRequest, settings: Settings, filled: PlainWeight | None = None) -> None:
        super().__init__(settings.ops)
        self._plain: PlainWeight | None = PlainWeight(request, settings) if filled is None else filled
        self._num_missing = 0 if filled is not None else len(request.part_sizes)
        self._dtype = settings.dtype
        self.packed: torch.Tensor
        if filled is not None:
            self._pack(filled)

    @property
    def nbytes(self) -> int:
        return packed_bytes(self.packed)

    @property
    def name(self) -> str:
        return dtype_name(self._dtype)

    def fill(self, part: int, rows: Weight) -> None:
        assert self._plain is not None
        self._plain.fill(part, rows)
        self._num_missing -= 1
        if not self._num_missing:
            self._pack(self._plain)

    def _pack(self, plain: PlainWeight) -> None:
        self.packed = pack(plain.tensor)
        self._plain = None

    def product(
        self,
        x: torch.Tensor,
        norm: NormWeights | None = None,
        bias: torch.Tensor | None = None,
        activation: Activation = "none",
    ) -> torch.Tensor:
        x = self._normed(x, norm)
        if activation == "silu":  # not supported by torch's fused call
            return activate(packed_linear(x, self.packed, bias), activation)
        return packed_linear(x, self.packed, bias, activation)

    def product_add(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
        if residual is None:
            return packed_linear(x, self.packed, bias)
        return packed_linear_add(x, self.packed, bias, residual)


class OneDnnTable(HeldTable):
    """A plain tensor, given up where a tied head holds the same rows in a layout from which they can be read."""

    def __init__(self, request: WeightRequest, settings: Settings) -> None:
        self._request, self._settings = request, settings
        self._plain = PlainWeight(request, settings)
        self._packed: PackedRows | None = None

    @property
    def nbytes(self) -> int:
        return self._plain.nbytes

    @property
    def name(self) -> str:
        return self._plain.name

    def fill(self, part: int, rows: Weight) -> None:
        self._plain.fill(part, rows)

    def look_up(self, ids: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        if self._packed is None:
            return self._plain.look_up(ids, factor)
        rows = self._packed[ids]
        return rows if factor == 1.0 else rows.mul_(factor)

    def as_head(self) -> HeldWeight:
        head = OneDnnWeight(self._request, self._settings, self._plain)
        self._packed = PackedRows.of(head.packed, self._plain.tensor)
        if self._packed is not None:
            self._plain.tensor = self._plain.tensor.new_empty(0)
        return head


def supports_table(request: WeightRequest, settings: Settings) -> str | None:
    is_packable = can_pack(settings.device, settings.dtype)
    return None if is_packable else f"no packed layout for {dtype_name(settings.dtype)} on this device"


def supports(request: WeightRequest, settings: Settings) -> str | None:
    if request.use is Use.ROUTER:
        return "a router is too small to be packed"
    return supports_table(request, settings)


LINEAR: LinearMethod = Method("onednn", supports, OneDnnWeight)
TABLE: TableMethod = Method("onednn", supports_table, OneDnnTable)
