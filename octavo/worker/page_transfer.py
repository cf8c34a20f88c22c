"""PageTransfer: KV pages between a device and host memory, on streams of its own, beside the steps.

Pages lie apart on the device, one part for each layer. On their way out they are gathered into a staging buffer and then copied to the host in long
runs; on their way in they take the same way back. Each direction has two staging buffers and two streams, so that one buffer is
copied while the other is gathered or scattered. Each direction is for one thread."""

from collections.abc import Callable, Iterator, Sequence

import torch

from octavo.device import Device
from octavo.kv_tier.run_file import Buffers
from octavo.worker.pages import HostPages, Pages, PageStaging

IN_BYTES = 128 * 2**20  # of each of the two staging buffers on the way in: fewer and longer pieces than on the way out
OUT_BYTES = 64 * 2**20
RUN_PAGES = 32  # that a disk's file has at most


def staging_bytes(page_bytes: int) -> int:
    """What the staging buffers take on the device."""
    return 2 * (max(IN_BYTES, page_bytes) + max(OUT_BYTES, page_bytes))


class PageTransfer:
    def __init__(self, pages: Pages, device: Device, num_slots: int) -> None:
        """`num_slots`: pages of a tier in host memory. Behind them are slots on the way to a disk (`outgoing`) and from it (`incoming`)."""
        self._pages, self._device = pages, device
        self.host: HostPages = pages.new_host_pages(num_slots + 2 * RUN_PAGES)
        self.page_bytes = self.host.page_bytes
        self.outgoing = range(num_slots, num_slots + RUN_PAGES)
        self.incoming = range(num_slots + RUN_PAGES, num_slots + 2 * RUN_PAGES)
        self._ins, self._outs = self._staging(IN_BYTES), self._staging(OUT_BYTES)
        self._copies_in, self._copies_out = device.stream(), device.stream()
        self._scatters, self._gathers = device.stream(), device.stream()

    def _staging(self, num_bytes: int) -> list[PageStaging]:
        num_pages = max(1, min(num_bytes // self.page_bytes, self.host.num_pages))
        return [self._pages.new_staging(num_pages) for _ in range(2)]

    def copy_in(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy host pages to device pages, and wait until they are there."""
        with torch.inference_mode():
            with self._scatters.queue():
                targets = self._on_device(pages)
            for start, part, staging in _chunks(slots, self._ins):
                with self._copies_in.queue():
                    staging.is_free.hold()
                    for first, host in self.host.stretches(part):
                        staging.pages[first : first + len(host)].copy_(host, non_blocking=True)
                    staging.is_full.record()
                with self._scatters.queue():
                    staging.is_full.hold()
                    self._pages.scatter(staging, targets[start : start + len(part)])
                    staging.is_free.record()
            for staging in self._ins:
                staging.is_free.wait_asleep()

    def copy_out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy device pages to host pages, and wait until they are there."""
        with torch.inference_mode():
            with self._gathers.queue():
                sources = self._on_device(pages)
            for start, part, staging in _chunks(slots, self._outs):
                with self._gathers.queue():
                    staging.is_free.hold()
                    self._pages.gather(sources[start : start + len(part)], staging)
                    staging.is_full.record()
                with self._copies_out.queue():
                    staging.is_full.hold()
                    for first, host in self.host.stretches(part):
                        host.copy_(staging.pages[first : first + len(host)], non_blocking=True)
                    staging.is_free.record()
            for staging in self._outs:
                staging.is_free.wait_asleep()

    def copies(self, pages: Sequence[int]) -> list[Buffers]:
        """Copies of at most RUN_PAGES device pages. They are valid until the next call."""
        slots = self.outgoing[: len(pages)]
        self.copy_out(pages, slots)
        return [[view] for view in self.host.views(slots)]

    def fill(self, pages: Sequence[int], read: Callable[[int, list[Buffers]], int]) -> int:
        """Fill device pages by read(first, buffers), which fills the buffers of the pages from number `first` on, and returns how many are
        right. → how many pages are filled, from the first on."""
        for start in range(0, len(pages), RUN_PAGES):
            part = pages[start : start + RUN_PAGES]
            slots = self.incoming[: len(part)]
            count = read(start, [[view] for view in self.host.views(slots)])
            self.copy_in(slots[:count], part[:count])
            if count < len(part):
                return start + count
        return len(pages)

    def _on_device(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self._device.torch_device)

    def use_device(self) -> None:
        """Called first by each thread that copies."""
        self._device.use()


def _chunks(slots: Sequence[int], stagings: list[PageStaging]) -> Iterator[tuple[int, Sequence[int], PageStaging]]:
    """Yield (number of the first slot, slots, the staging buffer that takes them), the buffers in turn."""
    size = len(stagings[0].pages)
    for number, start in enumerate(range(0, len(slots), size)):
        yield start, slots[start : start + size], stagings[number % len(stagings)]
