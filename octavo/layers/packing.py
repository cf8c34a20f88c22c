"""Weights in oneDNN's own blocked layout, for products with few rows on a CPU.
Knows nothing of layers. Measured by benchmarks/cpu_linear.py."""

import ctypes
import functools

import torch

# Rows of the product the layout is chosen for. A layout for 32 rows is within a few percent of the best, or the best,
# from 1 to 512 rows, so one copy serves every batch.
_ROWS_HINT = 32

_LINEAR = torch.ops.mkldnn._linear_pointwise.default
_LINEAR_ADD = torch.ops.mkldnn._linear_pointwise.binary


def can_pack(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and _packs(weight.dtype)


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
