"""Pages: the memory behind the page numbers, on the device and in the swap space, and the moves between them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from octavo.device import Device, Event
from octavo.ipc.memory_trim import give_back_range
from octavo.messages import PageMove
from octavo.worker.staging import Column, Staging

STAGING_BYTES = 64 * 2**20
"""The largest size of each of the two staging buffers on the device, if there is a swap space (at least one page)."""

_SLAB_BYTES = 2**30  # pinned memory is allocated in powers of two: pieces of this size waste little of it


class Pages:
    """Page memory whose swapping overlaps with the steps. Pages that leave the device are first gathered into a staging
    buffer on the step's own stream, before a step can overwrite them; the slow copy to the host then runs on the side
    stream. Pages that return take the same way back. The side stream is one queue, so a host page is never read before it
    was written, nor overwritten before it was read. The host itself never reads a host page, so it never waits."""

    def __init__(
        self,
        layers: list[torch.Tensor],
        page_dim: int,
        device: Device,
        num_host_pages: int = 0,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """`layers`: one zero-filled store per layer, or none at all. `page_dim`: the dimension that counts pages."""
        self.layers = layers
        self._device = device
        self._page_dim = page_dim
        assert all(page_dim < store.dim() - 1 for store in layers), "a page is more than a scatter of single numbers"
        # Moves need no arithmetic: wide integers move pages of any type, in fewer accesses.
        self._stores = [store.view(_widest(store)) for store in layers]
        self._indices = Staging(device)
        self._host: HostPages | None = None
        self._staging: list[PageStaging] = []
        self._next = 0
        if num_host_pages:
            self._host = self.new_host_pages(num_host_pages)
            num_staged = max(1, min(num_host_pages, staging_bytes // self._host.page_bytes))
            self._staging = [self.new_staging(num_staged) for _ in range(2)]

    @property
    def page_bytes(self) -> int:
        """Of a page with all layers."""
        return sum(store.nbytes for store in self._stores) // self._stores[0].shape[self._page_dim]

    def new_host_pages(self, num_pages: int) -> "HostPages":
        """Host memory for so many pages, with all layers."""
        return HostPages(self._device, num_pages, _page_shape(self._stores, self._page_dim), self._stores[0].dtype)

    def new_staging(self, num_pages: int) -> "PageStaging":
        shape = _page_shape(self._stores, self._page_dim)
        return PageStaging.of(self._device, num_pages, shape, self._stores[0].dtype)

    def move(self, moves: list[PageMove]) -> None:
        """Queue the moves ahead of the next work on the current stream. The effect is that of one move after the other."""
        if not moves:
            return
        num_together = len(self._staging[0].pages) if self._staging else len(moves)
        chunks = [chunk for run in runs(moves) for chunk in _chunks(*run, num_together)]
        sent = iter(self._indices.send([column for chunk in chunks for column in _on_device(*chunk)]))
        for kind, sources, targets in chunks:
            match kind:
                case "copy":
                    self._copy(next(sent), next(sent))
                case "out":
                    self._out(next(sent), targets)
                case "in":
                    self._in(sources, next(sent))

    def give_back(self, pages: list[int]) -> None:
        """Give the memory of these pages back to the system; they are zero when they are used again. Only where a page's layers lie side
        by side: apart, they are smaller than what the system takes back."""
        if not self.layers or self._device.is_cuda or self._page_dim or not self._are_together:
            return
        store = self.layers[0]
        page_bytes = store.stride(0) * store.itemsize
        for first, count in _neighbours(pages):
            give_back_range(store.data_ptr() + first * page_bytes, count * page_bytes)

    @property
    def _are_together(self) -> bool:
        """Whether the layers' parts of a page lie side by side."""
        return self.layers[0].stride(0) == len(self.layers) * self.layers[0][0].numel()

    def side_by_side(self) -> list[torch.Tensor]:
        """The memory of pages as tensors whose first dimension counts pages: one where the layers' parts of a page lie side by side, else
        one for each layer. Raises ValueError where pages are counted by another dimension."""
        if not self.layers or self._page_dim:
            raise ValueError("there are no pages that lie one after the other")
        store = self.layers[0]
        if not self._are_together:
            return self.layers
        return [torch.as_strided(store, (len(store), store.stride(0)), (store.stride(0), 1))]

    def _copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        for store in self._stores:
            store.index_copy_(self._page_dim, targets, store.index_select(self._page_dim, sources))

    def _out(self, sources: torch.Tensor, host_pages: list[int]) -> None:
        assert self._host is not None, "a plan swaps and there is no swap space"
        staging = self._next_staging()
        staging.is_free.hold()
        self.gather(sources, staging)
        staging.is_full.record()
        with self._device.side_stream():
            staging.is_full.hold()
            for first, host in self._host.stretches(host_pages):
                host.copy_(staging.pages[first : first + len(host)], non_blocking=True)
            staging.is_free.record()

    def _in(self, host_pages: list[int], targets: torch.Tensor) -> None:
        assert self._host is not None, "a plan swaps and there is no swap space"
        staging = self._next_staging()
        with self._device.side_stream():
            staging.is_free.hold()
            for first, host in self._host.stretches(host_pages):
                staging.pages[first : first + len(host)].copy_(host, non_blocking=True)
            staging.is_full.record()
        staging.is_full.hold()
        self.scatter(staging, targets)
        staging.is_free.record()

    def gather(self, sources: torch.Tensor, staging: "PageStaging") -> None:
        """Copy these pages to the beginning of a staging buffer, by work on the current stream."""
        for layer, store in enumerate(self._stores):
            torch.index_select(store, self._page_dim, sources, out=self._staged(staging, layer, len(sources)))

    def scatter(self, staging: "PageStaging", targets: torch.Tensor) -> None:
        """The way back."""
        for layer, store in enumerate(self._stores):
            store.index_copy_(self._page_dim, targets, self._staged(staging, layer, len(targets)))

    def _next_staging(self) -> "PageStaging":
        self._next = (self._next + 1) % len(self._staging)
        return self._staging[self._next]

    def _staged(self, staging: "PageStaging", layer: int, count: int) -> torch.Tensor:
        """The first `count` staged pages of a layer, shaped as in its store."""
        return staging.pages[:count, layer].movedim(0, self._page_dim)


@dataclass(frozen=True, slots=True)
class PageStaging:
    """A staging buffer on the device."""

    pages: torch.Tensor  # [N, layers, *page]
    is_full: Event  # the last write to `pages` is complete
    is_free: Event  # the last contents have been read

    @classmethod
    def of(cls, device: Device, num_pages: int, shape: tuple[int, ...], dtype: torch.dtype) -> "PageStaging":
        pages = torch.empty(num_pages, *shape, dtype=dtype, device=device.torch_device)
        return cls(pages, device.event(), device.event())


class HostPages:
    """Pages in host memory: the swap space, or a tier. A page's layers are contiguous, so that a page, or a run of neighbours, is one copy."""

    def __init__(self, device: Device, num_pages: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.num_pages = num_pages
        self.page_bytes = torch.Size(shape).numel() * dtype.itemsize
        self._per_slab = max(1, _SLAB_BYTES // self.page_bytes)
        self._slabs = [
            device.pinned((min(self._per_slab, num_pages - first), *shape), dtype)  # [pages, layers, *page]
            for first in range(0, num_pages, self._per_slab)
        ]

    def stretches(self, pages: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of the first page in `pages`, memory) for each run of pages that are contiguous in that order."""
        ends = [i for i in range(1, len(pages)) if not self._are_neighbours(pages[i - 1], pages[i])]
        for start, end in pairwise([0, *ends, len(pages)]):
            slab, first = divmod(pages[start], self._per_slab)
            yield start, self._slabs[slab][first : first + end - start]

    def views(self, pages: Sequence[int]) -> list[memoryview]:
        """The bytes of these pages."""
        found = []
        for page in pages:
            slab, at = divmod(page, self._per_slab)
            found.append(self._slabs[slab][at].reshape(-1).view(torch.uint8).numpy().data)
        return found

    def _are_neighbours(self, page: int, following: int) -> bool:
        return following == page + 1 and following % self._per_slab != 0


def _neighbours(pages: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (first page, count) of runs of adjacent pages."""
    pages = sorted(pages)
    starts = [0, *(i for i in range(1, len(pages)) if pages[i] != pages[i - 1] + 1), len(pages)]
    for start, end in pairwise(starts):
        if end > start:
            yield pages[start], end - start


def runs(moves: list[PageMove]) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yield (kind, sources, targets) of runs that can be carried out at once: all reads first, then all writes.

    That equals one move after the other unless a move reads or overwrites what an earlier move of the run wrote."""
    kind = ""
    sources: list[int] = []
    targets: list[int] = []
    written: set[int] = set()
    for move in moves:
        again = move.target in written or (move.kind == "copy" and move.source in written)
        if sources and (move.kind != kind or again):
            yield kind, sources, targets
            sources, targets, written = [], [], set()
        kind = move.kind
        sources.append(move.source)
        targets.append(move.target)
        written.add(move.target)
    if sources:
        yield kind, sources, targets


def _chunks(
    kind: str, sources: list[int], targets: list[int], num_together: int
) -> Iterator[tuple[str, list[int], list[int]]]:
    """Split a run into pieces that fit a staging buffer. Sorted by host page, so that neighbours are one copy; the order of
    moves within a run does not matter."""
    if kind == "copy":
        yield kind, sources, targets
        return
    at_host = targets if kind == "out" else sources
    order = sorted(range(len(at_host)), key=at_host.__getitem__)
    for start in range(0, len(order), num_together):
        together = order[start : start + num_together]
        yield kind, [sources[i] for i in together], [targets[i] for i in together]


def _on_device(kind: str, sources: list[int], targets: list[int]) -> list[Column]:
    """The page numbers that the device reads."""
    lists = {"copy": (sources, targets), "out": (sources,), "in": (targets,)}[kind]
    return [np.array(pages, dtype=np.int64) for pages in lists]


def _page_shape(stores: list[torch.Tensor], page_dim: int) -> tuple[int, ...]:
    """The shape of one page with all layers."""
    extents = list(stores[0].shape)
    del extents[page_dim]
    return (len(stores), *extents)


def _widest(store: torch.Tensor) -> torch.dtype:
    """The widest integer type whose size divides a store's innermost rows."""
    row_bytes = store.shape[-1] * store.itemsize
    return next(
        dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) if row_bytes % dtype.itemsize == 0
    )
