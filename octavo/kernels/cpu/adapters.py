"""Low-rank adapters in the form that the native kernels read (adapters.h): y += scale · (x · Aᵀ) · Bᵀ for the rows that have one."""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.cpu.library import PANEL, Kind, Threads, aligned, check, pack, packed_bytes
from octavo.kernels.cpu.ops import Step

NO_SITE = -1  # no adapter changes this product
NO_ADAPTER = -1  # of a row
QUARTERS = 4  # of A's K-values, each packed by itself (adapters.h)
_KINDS = {torch.float32: Kind.FLOAT32, torch.bfloat16: Kind.BFLOAT16}


class AdapterPart(NamedTuple):
    """What an adapter adds to one part of a product's columns."""

    down: Tensor  # A [rank, depth]
    up: Tensor  # B [columns of the part, rank]
    first_column: int
    scale: float


class _Part(ctypes.Structure):
    _fields_ = (
        ("down", c_void_p), ("up", c_void_p), ("first_column", c_int64), ("num_columns", c_int64), ("rank", c_int64),
        ("scale", c_float), ("kind", c_int32),
    )  # fmt: skip


class _Site(ctypes.Structure):
    _fields_ = (("parts", ctypes.POINTER(_Part)), ("num_parts", c_int64))


class _Adapter(ctypes.Structure):
    _fields_ = (("sites", ctypes.POINTER(_Site)), ("num_sites", c_int64))


class NativeAdapter:
    """An adapter's matrices, packed for the kernels. `sites`: the parts by the number of the product that they change."""

    def __init__(
        self, threads: Threads, sites: Mapping[int, Sequence[AdapterPart]], num_sites: int, dtype: torch.dtype
    ) -> None:
        """`dtype`: float32 or bfloat16. `threads`: not those of a running step: a pool has one caller at a time."""
        self._kind, self._dtype, self._threads = _KINDS[dtype], dtype, threads
        # In the order of steps: each product's A, then its B. One piece of memory for all, so that it is free again when the adapter is
        # dropped.
        ordered = sorted(sites.items())
        self._memory = aligned(sum(self._size(part) for _, parts in ordered for part in parts))
        self._taken = 0
        # The structures lie beside each other, too: a step reads them in this order.
        table = (_Site * max(num_sites, 1))()
        array = (_Part * sum(len(parts) for _, parts in ordered))()
        first = 0
        for number, parts in ordered:
            check(0 <= number < num_sites, f"there is no product {number} for an adapter")
            address = ctypes.addressof(array) + first * ctypes.sizeof(_Part)
            table[number] = _Site(ctypes.cast(address, ctypes.POINTER(_Part)), len(parts))
            for part in self._parts(sorted(parts, key=lambda part: part.first_column)):
                array[first] = part
                first += 1
        self._arrays = array, table  # what the structures point to
        self.entry = _Adapter(table, num_sites)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def _size(self, part: AdapterPart) -> int:
        rank, depth = part.down.shape
        return packed_bytes(self._kind, QUARTERS * _up(rank, PANEL), _quarter(depth)) + packed_bytes(
            self._kind, *part.up.shape
        )

    def _parts(self, parts: Sequence[AdapterPart]) -> list[_Part]:
        for part in parts:
            check(
                part.up.shape[1] == part.down.shape[0],
                f"an adapter's A has rank {part.down.shape[0]}, and its B {part.up.shape[1]}",
            )
        downs = [self._pack(_in_quarters(part.down)) for part in parts]
        ups = [self._pack(part.up) for part in parts]
        return [
            _Part(down, up, part.first_column, *part.up.shape, part.scale, self._kind)
            for part, down, up in zip(parts, downs, ups, strict=True)
        ]

    def _pack(self, matrix: Tensor) -> int:
        room = self._memory[self._taken : self._taken + packed_bytes(self._kind, *matrix.shape)]
        self._taken += len(room)
        pack(self._threads, matrix.to(self._dtype).contiguous(), self._kind, room)
        return room.data_ptr()


def _up(number: int, to: int) -> int:
    return -(-number // to) * to


def _quarter(depth: int) -> int:
    return _up(depth, QUARTERS * PANEL) // QUARTERS


def _in_quarters(down: Tensor) -> Tensor:
    """A [rank, depth] → its quarters of the K-values one below the other, [4 · rank, quarter], with zeros up to whole panels."""
    rank, depth = down.shape
    quarter = _quarter(depth)
    padded = torch.nn.functional.pad(down, (0, QUARTERS * quarter - depth, 0, _up(rank, PANEL) - rank))
    return padded.view(-1, QUARTERS, quarter).transpose(0, 1).reshape(-1, quarter)


class AdapterRows:
    """The adapters of a step's tokens. Holds what the step points to: it must outlive it."""

    def __init__(self, adapters: Sequence[NativeAdapter], of_tokens: Tensor) -> None:
        """of_tokens [T] int32: indices into `adapters`, or NO_ADAPTER."""
        check(of_tokens.dtype == torch.int32 and of_tokens.is_contiguous(), "adapters of tokens must be int32 [T]")
        self._adapters, self._of_tokens = adapters, of_tokens
        self._table = (_Adapter * len(adapters))(*(adapter.entry for adapter in adapters))

    def set_on(self, step: Step) -> None:
        check(step.num_tokens == len(self._of_tokens), "each token of a step has an adapter, or NO_ADAPTER")
        step.adapter_of = self._of_tokens.data_ptr()
        step.adapters = ctypes.addressof(self._table)
        step.num_adapters = len(self._adapters)
