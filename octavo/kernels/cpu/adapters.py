"""Low-rank adapters in the form that the native kernels read (adapters.h): y += scale · (x · Aᵀ) · Bᵀ for the rows that have one."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.cpu.library import Kind, Threads, aligned, check, pack, packed_bytes, whole_pages
from octavo.kernels.cpu.ops import Step

NO_SITE = -1  # no adapter changes this product
NO_ADAPTER = -1  # of a row
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
        self,
        threads: Threads,
        sites: Mapping[int, Sequence[AdapterPart]],
        num_sites: int,
        dtype: torch.dtype,
        packed: Callable[[], None] = lambda: None,
    ) -> None:
        """`dtype`: float32 or bfloat16. `threads`: not those of a running step: a pool has one caller at a time. `packed`: called after
        each matrix."""
        self._packed = packed
        self._arrays: list[object] = []  # what the structures point to
        self._kind, self._dtype, self._threads = _KINDS[dtype], dtype, threads
        matrices = [matrix for parts in sites.values() for part in parts for matrix in (part.down, part.up)]
        # One piece of memory for all, so that it is free again when the adapter is dropped.
        self._memory = aligned(whole_pages(sum(self._size(matrix) for matrix in matrices)))
        self._taken = 0
        table = (_Site * max(num_sites, 1))()
        for number, parts in sites.items():
            check(0 <= number < num_sites, f"there is no product {number} for an adapter")
            array = (_Part * len(parts))(
                *(self._part(part) for part in sorted(parts, key=lambda part: part.first_column))
            )
            table[number] = _Site(array, len(parts))
            self._arrays.append(array)
        self._arrays.append(table)
        self.entry = _Adapter(table, num_sites)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def _size(self, matrix: Tensor) -> int:
        return packed_bytes(self._kind, *matrix.shape)

    def _part(self, part: AdapterPart) -> _Part:
        rank = part.down.shape[0]
        check(part.up.shape[1] == rank, f"an adapter's A has rank {rank}, and its B {part.up.shape[1]}")
        addresses = self._pack(part.down), self._pack(part.up)
        return _Part(*addresses, part.first_column, part.up.shape[0], rank, part.scale, self._kind)

    def _pack(self, matrix: Tensor) -> int:
        room = self._memory[self._taken : self._taken + self._size(matrix)]
        self._taken += len(room)
        pack(self._threads, matrix.to(self._dtype).contiguous(), self._kind, room)
        self._packed()
        return room.data_ptr()


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
