"""Pages: the memory behind the page numbers, on the device and in the swap space, and the moves between them.
Knows nothing of which page belongs to whom, nor of a page's inner layout."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from octavo.device import Device, Event
from octavo.messages import PageMove
from octavo.worker.staging import Column, Staging

STAGING_BYTES = 64 * 2**20
"""What one of the two staging buffers on the device may take, where there is a swap space (one page, if that is larger)."""

_SLAB_BYTES = 2**30  # pinned memory comes in powers of two: in pieces of this size little of it is wasted


class Pages:
    """Swapping runs beside the steps. What a step may still write to is first gathered into a staging buffer, in the
    step's own stream; the slow copy to the host then runs in the side stream, and the other way round. The side stream
    is one queue, so that a host page is never read before it was written, nor written before it was read; no host page
    is looked at by the host itself, so that the host never waits."""

    def __init__(
        self,
        layers: list[torch.Tensor],
        page_dim: int,
        device: Device,
        num_host_pages: int = 0,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """One zero-filled store per layer, or none at all; `page_dim` is the dimension that counts pages."""
        self.layers = layers
        self._device = device
        self._page_dim = page_dim
        assert all(page_dim < store.dim() - 1 for store in layers), "a page is more than a scatter of single numbers"
        # Moving needs no arithmetic: as wide integers pages of any type are moved, and in fewer accesses.
        self._stores = [store.view(_widest(store)) for store in layers]
        self._indices = Staging(device)
        self._host: _HostPages | None = None
        self._staging: list[_Staging] = []
        self._next = 0
        if num_host_pages:
            shape, dtype = _page_shape(self._stores, page_dim), self._stores[0].dtype
            self._host = _HostPages(device, num_host_pages, shape, dtype)
            num_staged = max(1, min(num_host_pages, staging_bytes // self._host.page_bytes))
            self._staging = [_Staging.of(device, num_staged, shape, dtype) for _ in range(2)]

    def move(self, moves: list[PageMove]) -> None:
        """Queue the moves, before what is queued on the current stream next, with the effect of one after the other."""
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

    def _copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        for store in self._stores:
            store.index_copy_(self._page_dim, targets, store.index_select(self._page_dim, sources))

    def _out(self, sources: torch.Tensor, host_pages: list[int]) -> None:
        assert self._host is not None, "a plan swaps and there is no swap space"
        staging = self._next_staging()
        staging.is_free.hold()
        for layer, store in enumerate(self._stores):
            torch.index_select(store, self._page_dim, sources, out=self._staged(staging, layer, len(sources)))
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
        for layer, store in enumerate(self._stores):
            store.index_copy_(self._page_dim, targets, self._staged(staging, layer, len(targets)))
        staging.is_free.record()

    def _next_staging(self) -> "_Staging":
        self._next = (self._next + 1) % len(self._staging)
        return self._staging[self._next]

    def _staged(self, staging: "_Staging", layer: int, count: int) -> torch.Tensor:
        """The first `count` staged pages of a layer, shaped as in its store."""
        return staging.pages[:count, layer].movedim(0, self._page_dim)


@dataclass(frozen=True, slots=True)
class _Staging:
    """A stop on the way, on the device."""

    pages: torch.Tensor  # [N, layers, *page]
    is_full: Event  # what was put here last is all there
    is_free: Event  # what was put here last has been taken

    @classmethod
    def of(cls, device: Device, num_pages: int, shape: tuple[int, ...], dtype: torch.dtype) -> "_Staging":
        pages = torch.empty(num_pages, *shape, dtype=dtype, device=device.torch_device)
        return cls(pages, device.event(), device.event())


class _HostPages:
    """The swap space: a page's layers lie side by side, so that a page is one copy, and neighbours are one too."""

    def __init__(self, device: Device, num_pages: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.page_bytes = torch.Size(shape).numel() * dtype.itemsize
        self._per_slab = max(1, _SLAB_BYTES // self.page_bytes)
        self._slabs = [
            device.pinned((min(self._per_slab, num_pages - first), *shape), dtype)  # [pages, layers, *page]
            for first in range(0, num_pages, self._per_slab)
        ]

    def stretches(self, pages: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """(index of its first page in `pages`, their memory) of stretches that lie side by side in that order."""
        ends = [i for i in range(1, len(pages)) if not self._are_neighbours(pages[i - 1], pages[i])]
        for start, end in pairwise([0, *ends, len(pages)]):
            slab, first = divmod(pages[start], self._per_slab)
            yield start, self._slabs[slab][first : first + end - start]

    def _are_neighbours(self, page: int, following: int) -> bool:
        return following == page + 1 and following % self._per_slab != 0


def runs(moves: list[PageMove]) -> Iterator[tuple[str, list[int], list[int]]]:
    """(kind, sources, targets) of stretches that may be carried out at once: all reads first, then all writes.

    That is the same as one after the other unless a move reads or writes again what an earlier one wrote."""
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
    """A run in pieces that a staging buffer holds. Sorted by host page, which a run is free for: neighbours are one copy."""
    if kind == "copy":
        yield kind, sources, targets
        return
    at_host = targets if kind == "out" else sources
    order = sorted(range(len(at_host)), key=at_host.__getitem__)
    for start in range(0, len(order), num_together):
        together = order[start : start + num_together]
        yield kind, [sources[i] for i in together], [targets[i] for i in together]


def _on_device(kind: str, sources: list[int], targets: list[int]) -> list[Column]:
    """The page numbers that the device itself reads."""
    lists = {"copy": (sources, targets), "out": (sources,), "in": (targets,)}[kind]
    return [np.array(pages, dtype=np.int64) for pages in lists]


def _page_shape(stores: list[torch.Tensor], page_dim: int) -> tuple[int, ...]:
    """Of one page of all layers together."""
    extents = list(stores[0].shape)
    del extents[page_dim]
    return (len(stores), *extents)


def _widest(store: torch.Tensor) -> torch.dtype:
    """The widest integer that a store's innermost rows are whole numbers of."""
    row_bytes = store.shape[-1] * store.itemsize
    return next(
        dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) if row_bytes % dtype.itemsize == 0
    )
