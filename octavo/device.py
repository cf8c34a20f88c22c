"""Device: where tensors live. Streams, events and pinned memory on a GPU, and their no-op versions on the CPU."""

import math
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.errors import ConfigError
from octavo.ipc.memory_pressure import read_memory

PATIENCE_SECONDS = 1.0
"""How long a wait may busy-poll. After that it sleeps between polls, which delays the result by at most about 1 %; and a wait that never
ends uses no processor time, so that it cannot be mistaken for computation."""
_SHARE_SLEPT = 0.01  # each sleep, as a share of the time waited so far
_SLEEP_SECONDS = 2e-4
_release_gil: Callable[[int], object] = select.poll().poll if hasattr(select, "poll") else time.sleep


class Event:
    """A mark in a device's queue. On the CPU all work is done when its call returns, so there is nothing to wait for."""

    def __init__(self, cuda: bool = False) -> None:
        self._event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Block the host until everything before the mark is done."""
        if self._event is None:
            return
        query, started = self._event.query, time.monotonic()
        while not query():  # type: ignore[no-untyped-call]
            elapsed = time.monotonic() - started
            if elapsed < PATIENCE_SECONDS:
                _release_gil(0)  # release the GIL to other threads, which query() does not
            else:
                time.sleep(elapsed * _SHARE_SLEPT)

    def wait_asleep(self) -> None:
        """The same for threads beside the steps: sleeps between polls, so that it takes neither the GIL nor a core from them."""
        while not self.is_done():
            time.sleep(_SLEEP_SECONDS)

    def hold(self) -> None:
        """Make later work on the current stream wait for the mark, without blocking the host."""
        if self._event is not None:
            self._event.wait()

    def is_done(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]


class Stream:
    """A queue of work beside a device's other queues. On the CPU all work runs in line."""

    def __init__(self, place: torch.device) -> None:
        self._stream = torch.cuda.Stream(place) if place.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Queue the block's work here. Events that it records are marks in this queue."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A GPU's memory at one moment, in bytes."""

    total: int
    free: int
    reserved: int  # by this process: its tensors, and what its allocator keeps for later ones


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that torch sees. Memory in bytes."""

    name: str
    capability: tuple[int, int]
    free: int
    total: int


class Device:
    """A CPU or one GPU. `kind` is "cpu" or "cuda"; `index` is the GPU's number."""

    def __init__(self, kind: str, index: int = 0) -> None:
        self.kind = kind
        self.is_cuda = kind == "cuda"
        self.torch_device = torch.device("cuda", index) if self.is_cuda else torch.device("cpu")
        if self.is_cuda:
            torch.cuda.set_device(self.torch_device)
        self._side_stream = torch.cuda.Stream(self.torch_device) if self.is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def has_8_bit_floats(self) -> bool:
        """Whether a GPU has instructions for 8-bit floats."""
        return self.is_cuda and torch.cuda.get_device_capability(self.torch_device) >= (8, 9)

    @property
    def chip(self) -> str:
        """A GPU's name; "" for a CPU."""
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else ""

    def describe(self, num_threads: int) -> str:
        """Describe the device for people, for example "cpu (2 threads)"."""
        if self.is_cuda:
            return f"{self.torch_device} ({self.chip})"
        return f"cpu ({num_threads} thread{'s' if num_threads != 1 else ''})"

    def memory_available(self) -> int:
        """Bytes that can still be allocated."""
        if self.is_cuda:
            free, _ = torch.cuda.mem_get_info(self.torch_device)
            return free + torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        reading = read_memory()
        # Not Linux: physical memory is the closest number that every system reports.
        return reading.available if reading else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def memory_use(self) -> MemoryUse:
        """Measure the GPU's memory after all queued work is done and the allocator has freed its unused blocks."""
        assert self.is_cuda, "only a GPU's memory is measured"
        self.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return MemoryUse(total, free, torch.cuda.memory_reserved(self.torch_device))

    def start_peak(self) -> None:
        """Reset the peak that peak_reserved() returns."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_reserved(self) -> int:
        """Most bytes that were reserved at any moment since start_peak()."""
        self.synchronize()
        return torch.cuda.max_memory_reserved(self.torch_device)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def event(self) -> Event:
        return Event(cuda=self.is_cuda)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Queue the block's work on a second stream, for copies to and from the host. On the CPU it runs in line."""
        if self._side_stream is None:
            yield
            return
        with torch.cuda.stream(self._side_stream):
            yield

    def stream(self) -> Stream:
        return Stream(self.torch_device)

    def use(self) -> None:
        """Make it the current device of this thread: a new thread's is the first GPU."""
        if self.is_cuda:
            torch.cuda.set_device(self.torch_device)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a large zero-filled tensor. On the CPU the system hands out zeroed memory page by page on first write:
        nothing is filled at start, and memory that is never used is never taken."""
        if self.is_cuda:
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory for asynchronous copies from and to the device. It may take twice the size: torch's allocator
        rounds up to a power of two."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.is_cuda)

    def pin(self, memory: torch.Tensor) -> None:
        """Make existing host memory such that the device copies from and to it by itself, until unpin(). It must not be freed before."""
        if self.is_cuda:
            self._check(_cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0), "pin host memory")

    def unpin(self, memory: torch.Tensor) -> None:
        if self.is_cuda:
            self._check(_cudart().cudaHostUnregister(memory.data_ptr()), "unpin host memory")

    @staticmethod
    def _check(code: Any, what: str) -> None:
        if int(code):
            raise RuntimeError(f"CUDA cannot {what}: error {int(code)}")

    def release_pinned(self) -> None:
        """Free pinned memory that no tensor uses any more; torch's allocator would keep it for later tensors."""
        if not self.is_cuda:
            return
        if hasattr(torch.accelerator, "empty_host_cache"):  # newer than the oldest torch that we support
            torch.accelerator.empty_host_cache()
        else:
            torch._C._host_emptyCache()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def pick(name: str = "auto", index: int = 0) -> Device:
    """Return the device of that name; auto: a GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_gpu else "cpu"
    if name == "cuda":
        if not has_gpu:
            raise ConfigError(
                "--device cuda: this torch sees no GPU; use --device cpu, or install a CUDA build of torch"
            )
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {index} has no GPU: this machine shows {torch.cuda.device_count()}; lower --tensor-parallel-size"
            )
    elif name != "cpu":
        raise ConfigError(f"--device must be auto, cpu or cuda, got {name}")
    return Device(name, index)


def gpus() -> list[Gpu]:
    """The GPUs that torch sees, in their order."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        found.append(Gpu(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), free, total))
    return found


def torch_build() -> tuple[str, str]:
    """torch's version, and the version of CUDA that it was built for, "" for a CPU build."""
    return str(torch.__version__), str(torch.version.cuda or "")


def device_of(place: torch.device | str) -> Device:
    """Return the Device for a torch device."""
    place = torch.device(place)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    return Device(place.type, place.index or 0)
