"""Adapters in the memory of a GPU: one piece of memory for all, in which each matrix has its place, and copies that no step waits for."""

import struct
from collections.abc import Callable, Mapping, Sequence
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
from octavo.worker.arena import ALIGNMENT, Arena, rounded
from octavo.worker.file_layouts import TAIL_BYTES, FileLayout, layout_from
from octavo.worker.host_copies import Form, HostCopies, HostRoom
from octavo.worker.staging import Staging

_CHUNK_BYTES = 4 * 2**20  # of one copy to the device
# Of what is known of layouts. Beyond it, files with other layouts are held matrix by matrix: to learn them again and again would take longer.
_MOST_LAYOUT_BYTES = 256 * 2**20
_MAX_LAYOUTS = 4096


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

    def __init__(self, sites: AdapterSites, num_bytes: int, device: Device, host_bytes: int = 0) -> None:
        """`num_bytes`: of adapters on the device. `host_bytes`: of pinned host memory for copies of them; it is all taken now, since steps wait
        while the driver pins memory."""
        self._sites, self._device, self._dtype = sites, device, sites.dtype
        # A little more than the budget: places that others leave do not always fit.
        size = num_bytes + num_bytes // 16 + 2**20
        self._arena = Arena(size // ALIGNMENT * ALIGNMENT)
        self._memory = torch.empty(self._arena.size, dtype=torch.uint8, device=device.torch_device)
        self._copies = HostCopies(device.pinned((host_bytes // ALIGNMENT * ALIGNMENT,), torch.uint8))
        self._buffers = [device.pinned((_CHUNK_BYTES,), torch.uint8) for _ in range(2)]
        self._copied = [device.event() for _ in self._buffers]
        self._next = 0  # which of the two copies that may be under way
        self._stream = device.stream()
        self._layouts: dict[str, FileLayout | None] = {}  # None: it is not learnt, which would take too much memory

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

    def room(self, num_bytes: int) -> HostRoom | None:
        room = self._copies.take(num_bytes + TAIL_BYTES)
        if room is not None:
            room.memory[num_bytes:] = 0
        return room

    def free(self, room: HostRoom) -> None:
        self._copies.free(room)

    def again(self, name: str) -> GpuAdapter | None:
        copy = self._copies.get(name)
        return None if copy is None else self._to_device(copy.memory, copy.form)

    def hold(self, sites: Mapping[int, Sequence[AdapterPart]], name: str = "") -> GpuAdapter:
        form = self._form(sites)
        return self._filled(form, name, lambda image: self._pack(sites, form, image.view(self._dtype)))

    def learn(self, layout: str, sites: Mapping[int, Sequence[AdapterPart]], num_numbers: int) -> None:
        found: FileLayout | None = None
        if sum(other.nbytes for other in self._layouts.values() if other is not None) < _MOST_LAYOUT_BYTES:
            form = self._form(sites)
            origins = torch.zeros(form.num_bytes // self.itemsize, dtype=torch.int32)
            self._pack(sites, form, origins)
            found = layout_from(form, origins.numpy(), num_numbers)
        self._layouts[layout] = found
        if len(self._layouts) > _MAX_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]

    def knows(self, layout: str) -> bool:
        return layout in self._layouts

    def place(
        self, layout: str, read: Tensor, dtype: torch.dtype, scales: NDArray[np.float32], name: str
    ) -> GpuAdapter | None:
        found = self._layouts.get(layout)
        if found is None:
            return None
        form, itemsize = found.with_scales(scales), dtype.itemsize

        def fill(image: Tensor) -> None:
            if dtype == self._dtype:
                found.fill(image.numpy(), read.numpy(), itemsize)
                return
            room = self._copies.take(form.num_bytes // self.itemsize * itemsize)
            stored = (
                torch.empty(form.num_bytes // self.itemsize, dtype=dtype) if room is None else room.memory.view(dtype)
            )
            found.fill(stored.view(torch.uint8).numpy(), read.numpy(), itemsize)
            image.view(self._dtype).copy_(stored)
            if room is not None:
                self._copies.free(room)

        return self._filled(form, name, fill)

    def _filled(self, form: Form, name: str, fill: Callable[[Tensor], None]) -> GpuAdapter:
        room = self._copies.take(form.num_bytes) if name else None
        image = torch.empty(form.num_bytes, dtype=torch.uint8) if room is None else room.memory
        try:
            with torch.inference_mode():
                fill(image)
        except BaseException:
            if room is not None:
                self._copies.free(room)
            raise
        if room is not None:
            self._copies.keep(name, room, form)
        return self._to_device(image, form)

    def _form(self, sites: Mapping[int, Sequence[AdapterPart]]) -> Form:
        """Where each matrix lies in one piece of memory."""
        table = np.zeros((len(self._sites.weights), self._sites.max_parts, FIELDS), dtype=np.int64)
        pieces: list[tuple[int, int]] = []
        kinds = end = 0
        for site, parts in sites.items():
            kinds |= self._sites.weights[site].kind
            assert len(parts) <= self._sites.max_parts
            for number, part in enumerate(parts):
                rank, columns = padded_rank(part.down.shape[0]), len(part.up)
                starts = []
                for count in (part.down.shape[1], columns):
                    starts.append(end)
                    pieces.append((end, rank * count * self.itemsize))
                    end += rounded(rank * count * self.itemsize)
                (bits,) = struct.unpack("i", struct.pack("f", part.scale))
                table[site, number] = (*starts, rank, part.first_column, columns, bits)
        return Form(table, np.array(pieces, dtype=np.int64).reshape(-1, 2), kinds, end)

    def _pack(self, sites: Mapping[int, Sequence[AdapterPart]], form: Form, image: Tensor) -> None:
        """Copy the matrices to their places in `image` [numbers]. One call for all of them: each call gives up the lock of the interpreter, and waits for it again
        behind the thread that makes steps."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for site, parts in sites.items():
            for number, part in enumerate(parts):
                starts, rank = form.table[site, number, :2], int(form.table[site, number, 2])
                for start, matrix, shape in (
                    (int(starts[0]), part.down, (rank, part.down.shape[1])),
                    (int(starts[1]), part.up, (len(part.up), rank)),
                ):
                    first = start // self.itemsize
                    target = image[first : first + shape[0] * shape[1]].view(shape)
                    if target.shape != matrix.shape:  # the file's rank is smaller: the rest is zeros
                        target.zero_()
                        target = target[: matrix.shape[0], : matrix.shape[1]]
                    targets.append(target)
                    sources.append(matrix)
        torch._foreach_copy_(targets, sources)

    def _to_device(self, image: Tensor, form: Form) -> GpuAdapter:
        """Copy an adapter to the device, and wait until it is there. Raises NoRoom."""
        self._device.use()
        places: list[int] = []
        try:
            with torch.inference_mode():
                return self._sent(image, form, places)
        except BaseException:
            for copied in self._copied:
                copied.wait_asleep()
            self._give_back(places)
            raise

    def _sent(self, image: Tensor, form: Form, places: list[int]) -> GpuAdapter:
        num_bytes, starts = form.num_bytes, form.pieces[:, 0]
        table = form.table.copy()
        whole = self._arena.take(num_bytes + table.nbytes)
        if whole is not None:
            places.append(whole)
            table_start, new_starts = whole + num_bytes, starts + whole
            self._send(whole, image)
        else:  # what is free lies in smaller pieces
            table_start = self._place(table.nbytes, places)
            new_starts = np.array([self._place(int(size), places) for size in form.pieces[:, 1]], dtype=np.int64)
            for new_start, (start, size) in zip(new_starts, form.pieces, strict=True):
                self._send(int(new_start), image[start : start + size])
        used = form.is_used
        table[used, :2] = self._memory.data_ptr() + new_starts[np.searchsorted(starts, table[used, :2])]
        self._send(table_start, torch.from_numpy(table.reshape(-1)).view(torch.uint8))
        for copied in self._copied:
            copied.wait_asleep()
        nbytes = int(form.pieces[:, 1].sum()) + table.nbytes
        return GpuAdapter(self._memory.data_ptr() + table_start, form.kinds, places, nbytes)

    def _place(self, num_bytes: int, places: list[int]) -> int:
        start = self._arena.take(num_bytes)
        if start is None:
            raise NoRoom(f"no place of {num_bytes} bytes is free")
        places.append(start)
        return start

    def _send(self, start: int, source: Tensor) -> None:
        """Two copies may be under way, of a few MB each: a step's own numbers wait behind them. Memory that is not pinned goes through the
        two buffers."""
        target = self._memory[start : start + len(source)]
        is_pinned = self._copies.has(source)
        for first in range(0, len(source), _CHUNK_BYTES):
            chunk = source[first : first + _CHUNK_BYTES]
            copied, buffer = self._copied[self._next], self._buffers[self._next]
            self._next = 1 - self._next
            copied.wait_asleep()
            if not is_pinned:
                chunk = buffer[: len(chunk)].copy_(chunk)
            with self._stream.queue():
                target[first : first + len(chunk)].copy_(chunk, non_blocking=True)
                copied.record()

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
