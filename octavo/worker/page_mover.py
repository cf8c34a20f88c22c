"""PageMover: moves KV pages between their memory and a tier, on threads of its own, beside the steps.

A load fills pages that its caller has taken for it. A store copies pages first, and asks its caller whether they still
held what they were to hold when the copy was done; only then they count. So no page is locked, and no step ever waits.

On a CPU, files are read straight into pages. On a GPU pages go through pinned memory of the host (page_transfer.py),
and some stay there: the level "ram"."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from octavo.config import KVTiers
from octavo.device import Device
from octavo.errors import ConfigError
from octavo.ipc.memory_pressure import read_memory
from octavo.kv_tier.folder import LOOK_SECONDS, TierChanges, TierFolder
from octavo.kv_tier.ram_slots import RamSlots
from octavo.kv_tier.run_file import Buffers
from octavo.messages.tiers import (
    IN_RAM,
    Copied,
    Level,
    Loaded,
    TierCounts,
    TierEvent,
    TierFailed,
    TierKnown,
)
from octavo.worker.page_transfer import PageTransfer
from octavo.worker.pages import Pages
from octavo.worker.priority import STORING, yield_to_steps

log = logging.getLogger("octavo.engine")

RETRY_SECONDS = 30.0  # after an error of the disk, before the next write; doubled each time
MOST_RETRY_SECONDS = 1800.0
MOST_RAM_SHARE = 0.8  # of the memory that is available: most that pages of a tier may pin


class PageMemory(Protocol):
    """Where pages are, for the copies of a disk: one thread copies, another fills."""

    page_bytes: int

    def use_device(self) -> None: ...

    def copies(self, pages: Sequence[int]) -> Sequence[Buffers]: ...

    def fill(self, pages: Sequence[int], read: Callable[[int, list[Buffers]], int]) -> int: ...


class PageViews:
    """The bytes of pages, as memory that files are read into."""

    def __init__(self, pages: Pages) -> None:
        """Raises ValueError where pages are no memory of this process that can be read as bytes."""
        self._layers: list[npt.NDArray[np.uint8]] = [_bytes_of(layer) for layer in pages.side_by_side()]
        self.page_bytes = sum(layer.shape[1] for layer in self._layers)

    def use_device(self) -> None:
        """Nothing to do: it is memory of this process."""

    def copies(self, pages: Sequence[int]) -> list[Buffers]:
        return [[memoryview(layer[page].copy()) for layer in self._layers] for page in pages]

    def fill(self, pages: Sequence[int], read: Callable[[int, list[Buffers]], int]) -> int:
        """Read straight into the pages (PageTransfer.fill)."""
        return read(0, [[memoryview(layer[page]) for layer in self._layers] for page in pages])


def _bytes_of(layer: torch.Tensor) -> npt.NDArray[np.uint8]:
    """[pages, bytes of a page], sharing the layer's memory."""
    if layer.device.type != "cpu" or not layer[0].is_contiguous():
        raise ValueError("pages are not contiguous memory of this process")
    size = layer.itemsize
    storage = torch.empty(0, dtype=torch.uint8).set_(layer.untyped_storage())
    whole: npt.NDArray[np.uint8] = storage.numpy()
    return np.lib.stride_tricks.as_strided(
        whole[layer.storage_offset() * size :], (len(layer), layer[0].numel() * size), (layer.stride(0) * size, 1)
    )


class _Load(NamedTuple):
    ticket: int
    keys: list[bytes]
    pages: list[int]


class _Store(NamedTuple):
    keys: list[bytes]
    pages: list[int]
    level: Level


class PageMover:
    def __init__(
        self,
        memory: PageMemory,
        folder: TierFolder | None,
        ram: RamSlots | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder`: None: there is no disk. `ram`: pages in the memory of the host, of a PageTransfer."""
        self._memory, self._folder, self._clock = memory, folder, clock
        self._ram = RamSlots(0) if ram is None else ram
        assert not self._ram.num_slots or isinstance(memory, PageTransfer), "pages of a CPU are in memory already"
        self.num_ram_pages, self.has_disk = self._ram.num_slots, folder is not None
        self.events: queue.SimpleQueue[TierEvent] = queue.SimpleQueue()
        self.on_event: Callable[[], None] = lambda: None  # called by any thread
        self.on_load: Callable[[list[int]], None] = lambda pages: (
            None
        )  # called when pages were filled, by a thread of its own
        self._loads: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[_Store | None] = queue.SimpleQueue()
        self._approvals: queue.SimpleQueue[list[bool] | None] = queue.SimpleQueue()
        self._resets: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_closing = False
        self._pause = RETRY_SECONDS
        self._paused_until = 0.0
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._run_loads, "octavo-tier-read"), (self._run_stores, "octavo-tier-write"))
        ]
        if folder is not None:
            with contextlib.suppress(OSError):
                self._tell(TierKnown(*folder.look()))
        for thread in self._threads:
            thread.start()

    # ── the stepping thread ──

    def load(self, ticket: int, keys: list[bytes], pages: list[int]) -> None:
        """Fill `pages` with the pages of these keys. A Loaded event follows, whatever happens."""
        self._loads.put(_Load(ticket, keys, pages))

    def store(self, keys: list[bytes], pages: list[int], level: Level = "disk") -> None:
        """Copy these pages. A Copied event follows, and approve() must answer it; then TierKnown or TierFailed. One at a time."""
        self._stores.put(_Store(keys, pages, level))

    def approve(self, are_right: list[bool]) -> None:
        """Which of the copied pages held what they were to hold until now: those count."""
        self._approvals.put(are_right)

    def delete_all(self) -> None:
        self._ram.clear()
        self._resets.put(None)

    def counts(self) -> TierCounts:
        folder, ram_bytes = self._folder, len(self._ram) * self._memory.page_bytes
        if folder is None:
            return TierCounts(ram_bytes=ram_bytes)
        return TierCounts(folder.num_bytes, folder.num_bad, folder.num_evicted, ram_bytes)

    def close(self) -> None:
        self._is_closing = True
        self._loads.put(None)
        self._stores.put(None)
        self._approvals.put(None)
        for thread in self._threads:
            thread.join(2)  # a disk that hangs must not keep the process

    # ── the loading thread ──

    def _run_loads(self) -> None:
        self._memory.use_device()
        while (job := self._loads.get()) is not None and not self._is_closing:
            started, done, num_from_ram, ram_seconds = self._clock(), 0, 0, 0.0
            dropped: list[bytes] = []
            try:
                while done < len(job.keys):
                    begun = self._clock()
                    if count := self._load_from_ram(job.keys[done:], job.pages[done:]):
                        num_from_ram, ram_seconds = num_from_ram + count, ram_seconds + self._clock() - begun
                        done += count
                        continue
                    wanted = self._ram.num_missing(job.keys[done:])
                    count = self._load_from_disk(
                        job.keys[done : done + wanted], job.pages[done : done + wanted], dropped
                    )
                    done += count
                    if count < wanted:
                        break
            except Exception:  # the request that waits for it must go on
                log.exception("KV pages could not be loaded")
            self.on_load(job.pages)
            self._tell(Loaded(job.ticket, done, dropped, self._clock() - started, num_from_ram, ram_seconds))

    def _load_from_ram(self, keys: list[bytes], pages: list[int]) -> int:
        slots = self._ram.begin_read(keys)
        if not slots:
            return 0
        assert isinstance(self._memory, PageTransfer)
        try:
            self._memory.copy_in(slots, pages[: len(slots)])
        finally:
            self._ram.end_read(slots)
        return len(slots)

    def _load_from_disk(self, keys: list[bytes], pages: list[int], dropped: list[bytes]) -> int:
        folder = self._folder
        if folder is None:
            return 0

        def read(first: int, buffers: list[Buffers]) -> int:
            count, changes = folder.read(keys[first : first + len(buffers)], buffers)
            dropped.extend(changes.dropped)
            return count

        return self._memory.fill(pages, read)

    # ── the storing thread ──

    def _run_stores(self) -> None:
        yield_to_steps(STORING)
        self._memory.use_device()
        looked_at = self._clock()
        while not self._is_closing:
            if self._clock() - looked_at >= LOOK_SECONDS:
                looked_at = self._clock()
                self._look()
            try:
                job = self._stores.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            if job is None or not (self._store_in_ram(job) if job.level == "ram" else self._store_on_disk(job)):
                return

    def _ask(self) -> list[bool] | None:
        """Ask which of the copied pages are right. None: the mover is closed."""
        self._tell(Copied())
        return self._approvals.get()

    def _store_in_ram(self, job: _Store) -> bool:
        """False: the mover is closed."""
        assert isinstance(self._memory, PageTransfer)
        started = time.thread_time()
        slots, dropped = self._ram.reserve(len(job.keys))
        self._memory.copy_out(job.pages[: len(slots)], slots)
        if (are_right := self._ask()) is None:
            return False
        stored = self._ram.fill(job.keys[: len(slots)], slots, are_right[: len(slots)])
        self._tell(TierKnown(stored, dropped, time.thread_time() - started, True, "ram"))
        return True

    def _store_on_disk(self, job: _Store) -> bool:
        """False: the mover is closed."""
        assert self._folder is not None
        started = time.thread_time()  # what it takes of a core: waiting for the disk, or for approval, keeps no step
        copies, in_ram = self._copies(job)
        try:
            if (are_right := self._ask()) is None:
                return False
            right = [at for at, is_right in enumerate(are_right) if is_right and copies[at]]
            keys = [job.keys[at] for at in right]
            if self._clock() < self._paused_until:
                keys = []
            try:
                changes = self._folder.write(keys, [copies[at] for at in right]) if keys else TierChanges([], [])
                self._pause = RETRY_SECONDS if keys else self._pause
                self._tell(TierKnown(*changes, time.thread_time() - started, True))
            except OSError as error:
                self._paused_until = self._clock() + self._pause
                log.warning(
                    "KV pages cannot be stored (%s): serving goes on without it, and it is tried again in %d s",
                    error.strerror or error, self._pause,
                )  # fmt: skip
                self._tell(TierFailed(keys, self._pause))
                self._pause = min(2 * self._pause, MOST_RETRY_SECONDS)
        finally:
            self._ram.end_read(in_ram)
        return True

    def _copies(self, job: _Store) -> tuple[list[Buffers], list[int]]:
        """Copies of a store's pages (an empty one: it is gone from memory), and slots that are read meanwhile."""
        copies: list[Buffers] = [[] for _ in job.keys]
        on_device = [at for at, page in enumerate(job.pages) if page != IN_RAM]
        if on_device:
            for at, copy in zip(on_device, self._memory.copies([job.pages[at] for at in on_device]), strict=True):
                copies[at] = copy
        in_ram: list[int] = []
        for at, page in enumerate(job.pages):
            if page == IN_RAM and (slots := self._ram.begin_read([job.keys[at]])):
                assert isinstance(self._memory, PageTransfer)
                copies[at] = self._memory.host.views(slots)
                in_ram += slots
        return copies, in_ram

    def _look(self) -> None:
        folder = self._folder
        if folder is None:
            return
        with contextlib.suppress(queue.Empty, OSError):
            self._resets.get_nowait()
            self._tell(TierKnown(*folder.delete_all()))
            return
        with contextlib.suppress(OSError):
            changes = folder.look()
            if changes.stored or changes.dropped:
                self._tell(TierKnown(*changes))

    def _tell(self, event: TierEvent) -> None:
        self.events.put(event)
        self.on_event()


def open_mover(
    pages: Pages, device: Device, tiers: KVTiers, layout: str, through_host: bool | None = None
) -> PageMover:
    """`through_host`: whether pages are copied to other memory of the host; None: only those of a GPU. Raises ConfigError where the tiers cannot
    be used."""
    ram: RamSlots | None = None
    through_host = device.is_cuda if through_host is None else through_host
    if tiers.ram_bytes and not through_host:
        raise ConfigError(
            "--kv-tier ram: on a CPU pages are in memory already (--kv-cache-memory-bytes): use disk:SIZE:FOLDER"
        )
    try:
        if through_host:
            num_slots = tiers.ram_bytes // pages.page_bytes
            _check_ram(tiers.ram_bytes, num_slots)
            memory: PageMemory = PageTransfer(pages, device, num_slots)
            ram = RamSlots(num_slots)
        else:
            memory = PageViews(pages)
        folder = None
        if tiers.disk is not None:
            folder = TierFolder(Path(tiers.disk.folder), tiers.disk.max_bytes, layout, memory.page_bytes)
    except (ValueError, OSError, RuntimeError) as error:  # torch raises RuntimeError where memory cannot be pinned
        raise ConfigError(f"--kv-tier cannot be used here: {error}") from None
    return PageMover(memory, folder, ram)


def _check_ram(num_bytes: int, num_slots: int) -> None:
    if num_bytes and not num_slots:
        raise ConfigError(f"--kv-tier ram: {num_bytes:,} bytes do not hold one KV page: give more")
    reading = read_memory()
    if reading is not None and num_bytes > MOST_RAM_SHARE * reading.available:
        most = int(MOST_RAM_SHARE * reading.available / 2**30 * 10) / 10
        raise ConfigError(
            f"--kv-tier ram: {num_bytes / 2**30:.1f} GiB are asked for and {reading.available / 2**30:.1f} GiB of host memory are "
            f"available: give {most} GiB or less"
        )
