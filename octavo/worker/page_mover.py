"""PageMover: moves KV pages between their memory and a tier's files, on threads of its own, beside the steps.

A load reads straight into pages that its caller has taken for it. A store copies pages first, and asks its caller whether they still
held what they were to hold when the copy was done; only then it writes. So no page is locked, and no step ever waits."""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from octavo.kv_tier.folder import LOOK_SECONDS, TierChanges, TierFolder
from octavo.messages.tiers import Copied, Loaded, TierEvent, TierFailed, TierKnown
from octavo.worker.pages import Pages

log = logging.getLogger("octavo.engine")

RETRY_SECONDS = 30.0  # after an error of the disk, before the next write; doubled each time
MOST_RETRY_SECONDS = 1800.0


class PageViews:
    """The bytes of pages, as memory that files are read into."""

    def __init__(self, pages: Pages) -> None:
        """Raises ValueError where pages are no memory of this process that can be read as bytes."""
        self._layers: list[npt.NDArray[np.uint8]] = [_bytes_of(layer) for layer in pages.side_by_side()]
        self.page_bytes = sum(layer.shape[1] for layer in self._layers)

    def of(self, page: int) -> list[memoryview]:
        return [memoryview(layer[page]) for layer in self._layers]

    def copy(self, page: int) -> list[memoryview]:
        return [memoryview(layer[page].copy()) for layer in self._layers]


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


class PageMover:
    def __init__(self, views: PageViews, folder: TierFolder, clock: Callable[[], float] = time.monotonic) -> None:
        self._views, self._folder, self._clock = views, folder, clock
        self.events: queue.SimpleQueue[TierEvent] = queue.SimpleQueue()
        self.on_event: Callable[[], None] = lambda: None  # called by any thread
        self._loads: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[_Store | None] = queue.SimpleQueue()
        self._approvals: queue.SimpleQueue[list[bool] | None] = queue.SimpleQueue()
        self._resets: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_closing = False
        self._pause = RETRY_SECONDS
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._run_loads, "octavo-tier-read"), (self._run_stores, "octavo-tier-write"))
        ]
        with contextlib.suppress(OSError):
            self._tell(TierKnown(*folder.look(), self._folder.num_bytes))
        for thread in self._threads:
            thread.start()

    # ── the stepping thread ──

    def load(self, ticket: int, keys: list[bytes], pages: list[int]) -> None:
        """Read the pages of these keys into `pages`. A Loaded event follows, whatever happens."""
        self._loads.put(_Load(ticket, keys, pages))

    def store(self, keys: list[bytes], pages: list[int]) -> None:
        """Copy these pages. A Copied event follows, and approve() must answer it; then TierKnown or TierFailed. One at a time."""
        self._stores.put(_Store(keys, pages))

    def approve(self, are_right: list[bool]) -> None:
        """Which of the copied pages held what they were to hold until now: those are written."""
        self._approvals.put(are_right)

    def delete_all(self) -> None:
        self._resets.put(None)

    def counts(self) -> tuple[int, int, int]:
        """(bytes in the folder, files that were bad, files that made room for others)."""
        return self._folder.num_bytes, self._folder.num_bad, self._folder.num_evicted

    def close(self) -> None:
        self._is_closing = True
        self._loads.put(None)
        self._stores.put(None)
        self._approvals.put(None)
        for thread in self._threads:
            thread.join(2)  # a disk that hangs must not keep the process

    # ── the moving threads ──

    def _run_loads(self) -> None:
        while (job := self._loads.get()) is not None and not self._is_closing:
            started, count, changes = self._clock(), 0, TierChanges([], [])
            try:
                count, changes = self._folder.read(job.keys, [self._views.of(page) for page in job.pages])
            except Exception:  # the request that waits for it must go on
                log.exception("KV pages could not be loaded")
            self._tell(Loaded(job.ticket, count, changes.dropped, self._clock() - started))

    def _run_stores(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # beside steps, never before them
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        paused_until, looked_at = 0.0, self._clock()
        while not self._is_closing:
            if self._clock() - looked_at >= LOOK_SECONDS:
                looked_at = self._clock()
                self._look()
            try:
                job = self._stores.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            if job is None:
                return
            started = (
                time.thread_time()
            )  # what it takes of a core: waiting for the disk, or for approval, keeps no step
            copies = [self._views.copy(page) for page in job.pages]
            self._tell(Copied())
            are_right = self._approvals.get()
            if are_right is None:
                return
            keys = [key for key, is_right in zip(job.keys, are_right, strict=True) if is_right]
            copies = [copy for copy, is_right in zip(copies, are_right, strict=True) if is_right]
            if self._clock() < paused_until:
                keys = []
            try:
                changes = self._folder.write(keys, copies) if keys else TierChanges([], [])
                self._pause = RETRY_SECONDS if keys else self._pause
                self._tell(TierKnown(*changes, self._folder.num_bytes, time.thread_time() - started, True))
            except OSError as error:
                paused_until = self._clock() + self._pause
                log.warning(
                    "KV pages cannot be stored (%s): serving goes on without it, and it is tried again in %d s",
                    error.strerror or error, self._pause,
                )  # fmt: skip
                self._tell(TierFailed(keys, self._pause))
                self._pause = min(2 * self._pause, MOST_RETRY_SECONDS)

    def _look(self) -> None:
        with contextlib.suppress(queue.Empty, OSError):
            self._resets.get_nowait()
            self._tell(TierKnown(*self._folder.delete_all(), self._folder.num_bytes))
            return
        with contextlib.suppress(OSError):
            changes = self._folder.look()
            if changes.stored or changes.dropped:
                self._tell(TierKnown(*changes, self._folder.num_bytes))

    def _tell(self, event: TierEvent) -> None:
        self.events.put(event)
        self.on_event()


def open_mover(pages: Pages, folder: str, max_bytes: int, layout: str) -> PageMover:
    """Raises ValueError or OSError where the tier cannot be used."""
    views = PageViews(pages)
    return PageMover(views, TierFolder(Path(folder), max_bytes, layout, views.page_bytes))
