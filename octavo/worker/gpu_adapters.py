"""Adapters in the memory of a GPU: one piece of memory for all, in which each matrix has its place, and copies that no step waits for."""

import bisect
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.batch import Batch
from octavo.device import Device
from octavo.kernels.cpu.adapters import AdapterPart
from octavo.kernels.triton.gemm.adapters import FIELDS, block_plan
from octavo.layers.experts import Experts
from octavo.layers.linear import Linear
from octavo.weights.adapters.adapter_file import padded_rank
from octavo.weights.methods.triton_adapters import AdaptedWeight, AdapterSites
from octavo.worker.adapters import NoRoom
from octavo.worker.staging import Staging

_ALIGNMENT = 256  # bytes
_STAGING_BYTES = 4 * 2**20  # of each of two buffers on the way to the device


class Arena:
    """Places in one piece of memory. Free ones are kept in order and joined; the first that is large enough is taken."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()  # places are taken by the thread that loads, and given back by the one that steps
        self._starts, self._sizes = [0], {0: size}  # free places
        self._taken: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return sum(self._sizes.values())

    def take(self, num_bytes: int) -> int | None:
        """The start of a place, at a multiple of 256; None: there is none."""
        num_bytes = _rounded(num_bytes)
        with self._lock:
            for at, start in enumerate(self._starts):
                size = self._sizes[start]
                if size < num_bytes:
                    continue
                del self._starts[at], self._sizes[start]
                if size > num_bytes:
                    self._starts.insert(at, start + num_bytes)
                    self._sizes[start + num_bytes] = size - num_bytes
                self._taken[start] = num_bytes
                return start
        return None

    def give_back(self, start: int) -> None:
        with self._lock:
            self._give_back(start, self._taken.pop(start))

    def _give_back(self, start: int, size: int) -> None:
        at = bisect.bisect(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start + size:
            size += self._sizes.pop(self._starts.pop(at))
        if at and self._starts[at - 1] + self._sizes[self._starts[at - 1]] == start:
            self._sizes[self._starts[at - 1]] += size
        else:
            self._starts.insert(at, start)
            self._sizes[start] = size


def _rounded(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT


class GpuAdapter(NamedTuple):
    address: int  # of its table on the device
    kinds: int  # of the sites that it changes
    places: list[int]  # in the arena
    nbytes: int


class HostBlocks(NamedTuple):
    """Which rows of a step have which adapter, on the host."""

    order: NDArray[np.int32]  # [T]
    blocks: NDArray[np.int64]  # [n, BLOCK_FIELDS], n at most T
    kinds: int


class GpuHolder:
    """An AdapterHolder of GpuAdapters."""

    def __init__(self, sites: AdapterSites, num_bytes: int, device: Device) -> None:
        self._sites, self._device, self._dtype = sites, device, sites.dtype
        # A little more than the budget: places that others leave do not always fit.
        size = num_bytes + num_bytes // 16 + 2**20
        self._arena = Arena(size // _ALIGNMENT * _ALIGNMENT)
        self._memory = torch.empty(self._arena.size, dtype=torch.uint8, device=device.torch_device)
        self._buffers = [device.pinned((_STAGING_BYTES,), torch.uint8) for _ in range(2)]
        self._copied = [device.event() for _ in self._buffers]
        self._current, self._used = 0, 0  # which buffer is filled, and how far
        self._stream = device.stream()

    @property
    def itemsize(self) -> int:
        return self._dtype.itemsize

    def taken_bytes(self, num_bytes: int) -> int:
        return num_bytes

    def site_of(self, linear: Linear) -> int | None:
        weight = linear.weight
        return weight.site if isinstance(weight, AdaptedWeight) else None

    def sites_of(self, experts: Experts) -> tuple[int, int] | None:
        """Experts have no kernels for adapters here."""
        return None

    # ── loading, by one thread at a time, beside steps ──

    def hold(self, sites: Mapping[int, Sequence[AdapterPart]]) -> GpuAdapter:
        """Copy an adapter to the device, and wait until it is there. Raises NoRoom."""
        places: list[int] = []
        try:
            with torch.inference_mode():
                return self._hold(sites, places)
        except BaseException:
            self._give_back(places)
            raise

    def _hold(self, sites: Mapping[int, Sequence[AdapterPart]], places: list[int]) -> GpuAdapter:
        self._device.use()
        table = np.zeros((len(self._sites.weights), self._sites.max_parts, FIELDS), dtype=np.int64)
        nbytes = kinds = 0
        for site, parts in sites.items():
            kinds |= self._sites.weights[site].kind
            assert len(parts) <= self._sites.max_parts
            for number, part in enumerate(parts):
                rank = part.down.shape[0]
                held_rank = padded_rank(rank)
                down, up = (
                    self._room(held_rank, part.down.shape[1], places),
                    self._room(len(part.up), held_rank, places),
                )
                self._copy(down, part.down)
                self._copy(up, part.up)
                (bits,) = struct.unpack("i", struct.pack("f", part.scale))
                table[site, number] = (
                    down.data_ptr(),
                    up.data_ptr(),
                    held_rank,
                    part.first_column,
                    len(part.up),
                    bits,
                )
                nbytes += down.nbytes + up.nbytes
        here = self._room_for(table.nbytes, places).view(torch.int64).view(table.shape)
        self._copy_rows(here, torch.from_numpy(table))
        for copied in self._copied:
            copied.wait_asleep()
        return GpuAdapter(here.data_ptr(), kinds, places, nbytes + table.nbytes)

    def _room(self, rows: int, columns: int, places: list[int]) -> Tensor:
        num_bytes = rows * columns * self.itemsize
        return self._room_for(num_bytes, places).view(self._dtype).view(rows, columns)

    def _room_for(self, num_bytes: int, places: list[int]) -> Tensor:
        start = self._arena.take(num_bytes)
        if start is None:
            raise NoRoom(f"no place of {num_bytes} bytes is free")
        places.append(start)
        return self._memory[start : start + num_bytes]

    def _copy(self, target: Tensor, source: Tensor) -> None:
        """The source's rank may be smaller: the rest is zeros."""
        if source.shape != target.shape:
            padded = source.new_zeros(target.shape)
            padded[: source.shape[0], : source.shape[1]] = source
            source = padded
        self._copy_rows(target, source)

    def _copy_rows(self, target: Tensor, source: Tensor) -> None:
        """Through the pinned buffers: one is filled while the other is copied."""
        to, numbers, size = target.view(-1), source.reshape(-1), target.dtype.itemsize
        first = 0
        while first < len(to):
            if self._used + size > _STAGING_BYTES:
                self._current, self._used = 1 - self._current, 0
                self._copied[self._current].wait_asleep()
            count = min(len(to) - first, (_STAGING_BYTES - self._used) // size)
            staged = self._buffers[self._current][self._used : self._used + count * size].view(to.dtype)
            staged.copy_(numbers[first : first + count])
            with self._stream.queue():
                to[first : first + count].copy_(staged, non_blocking=True)
                self._copied[self._current].record()
            first += count
            self._used += _rounded(count * size)

    def release(self, adapter: GpuAdapter) -> None:
        """No step reads it any more."""
        self._give_back(adapter.places)

    def _give_back(self, places: list[int]) -> None:
        for start in places:
            self._arena.give_back(start)
        places.clear()

    # ── steps ──

    def begin(self, adapters: Sequence[GpuAdapter], batch: Batch, staging: Staging) -> None:
        assert batch.adapter_of is not None
        plan = self.plan(adapters, batch.adapter_of.numpy())
        order, blocks = staging.send([plan.order, plan.blocks])
        self._sites.begin(order, blocks, plan.kinds)

    def end(self) -> None:
        self._sites.end()

    def plan(self, adapters: Sequence[GpuAdapter], of_rows: NDArray[Any]) -> HostBlocks:
        """`of_rows` [T]: each row's adapter, −1: none."""
        kinds = 0
        for adapter in adapters:
            kinds |= adapter.kinds
        order, blocks = block_plan(of_rows, [adapter.address for adapter in adapters])
        return HostBlocks(order, blocks, kinds)

    def warm_up(self) -> None:
        self._sites.warm_up()
