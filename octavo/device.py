"""Device: where tensors live; streams, events and pinned memory, with null versions on the CPU.
Knows nothing of models, batches or steps."""

import math
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from octavo.errors import ConfigError

PATIENCE_SECONDS = 1.0
"""For so long a wait may keep a core busy. What takes longer can as well be noticed a hundredth of that later; and one that never ends
must not look, to whoever counts processor time, as if something was computed."""
_SHARE_SLEPT = 0.01  # of what it has taken so far
_let_others: Callable[[int], object] = select.poll().poll if hasattr(select, "poll") else time.sleep


class Event:
    """Marks a point in a device's queue. On the CPU work is done when its call returns, so there is nothing to wait for."""

    def __init__(self, cuda: bool = False) -> None:
        self._event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Return once everything before the mark is done."""
        if self._event is None:
            return
        query, started = self._event.query, time.monotonic()
        while not query():  # type: ignore[no-untyped-call]
            elapsed = time.monotonic() - started
            if elapsed < PATIENCE_SECONDS:
                _let_others(0)  # other threads, to the interpreter: asking does not
            else:
                time.sleep(elapsed * _SHARE_SLEPT)

    def hold(self) -> None:
        """What is queued on the current stream from now on runs once everything before the mark is done. The host goes on."""
        if self._event is not None:
            self._event.wait()

    def is_done(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A GPU's memory at one moment, in bytes."""

    total: int
    free: int  # nobody holds it
    reserved: int  # this process's tensors, and what its allocator keeps for the next ones


class Device:
    """One place to compute. `kind` is "cpu" or "cuda"; `index` is the GPU's number."""

    def __init__(self, kind: str, index: int = 0) -> None:
        self.kind = kind
        self.is_cuda = kind == "cuda"
        self.torch_device = torch.device("cuda", index) if self.is_cuda else torch.device("cpu")
        if self.is_cuda:
            torch.cuda.set_device(self.torch_device)
        self._side_stream = torch.cuda.Stream(self.torch_device) if self.is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def chip(self) -> str:
        """A GPU's name; "" for a CPU."""
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else ""

    def describe(self, num_threads: int) -> str:
        """In words, for people: "cpu (2 threads)"."""
        if self.is_cuda:
            return f"{self.torch_device} ({self.chip})"
        return f"cpu ({num_threads} thread{'s' if num_threads != 1 else ''})"

    def memory_available(self) -> int:
        """Bytes that can still be allocated."""
        if self.is_cuda:
            free, _ = torch.cuda.mem_get_info(self.torch_device)
            return free + torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return min(_host_available(), _group_available())

    def memory_total(self) -> int:
        """Bytes there are in all."""
        if self.is_cuda:
            return torch.cuda.mem_get_info(self.torch_device)[1]
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def memory_use(self) -> MemoryUse:
        """What is held now, once all queued work is done and the allocator has given back what no tensor needs."""
        assert self.is_cuda, "a host's memory is nobody's in particular"
        self.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return MemoryUse(total, free, torch.cuda.memory_reserved(self.torch_device))

    def start_peak(self) -> None:
        """Forget the peak of what was reserved: peak_reserved() counts from here."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_reserved(self) -> int:
        """The most bytes that were reserved at any moment since start_peak()."""
        self.synchronize()
        return torch.cuda.max_memory_reserved(self.torch_device)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def event(self) -> Event:
        return Event(cuda=self.is_cuda)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Queue what follows beside the main stream, for copies to and from the host. On the CPU: in line."""
        if self._side_stream is None:
            yield
            return
        with torch.cuda.stream(self._side_stream):
            yield

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Large and zero. On the CPU the kernel hands out zeroed memory page by page, when it is first written to:
        nothing is filled at start, and what is never used is never taken."""
        if self.is_cuda:
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device can copy from and to without waiting. Up to twice as much is taken: torch's
        allocator rounds the size up to a power of two."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.is_cuda)

    def release_pinned(self) -> None:
        """Give back pinned memory that no tensor uses any more: its allocator would keep it for the next of that size."""
        if not self.is_cuda:
            return
        if hasattr(torch.accelerator, "empty_host_cache"):  # newer than the oldest torch we take
            torch.accelerator.empty_host_cache()
        else:
            torch._C._host_emptyCache()


def pick(name: str = "auto", index: int = 0) -> Device:
    """The device of that name; auto: a GPU where there is one."""
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


def device_of(place: torch.device | str) -> Device:
    """The device behind torch's name for it."""
    place = torch.device(place)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    return Device(place.type, place.index or 0)


def _host_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not Linux: physical memory is the nearest number that every system gives.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_available() -> int:
    """What the control group (a container's limit) leaves; without a limit, more than any machine has."""
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit = Path(limit_file).read_text().strip()
            used = int(Path(used_file).read_text())
            cache = _group_file_cache(Path(limit_file).parent / "memory.stat")
        except (OSError, ValueError):
            continue
        if limit != "max" and int(limit) < 2**60:
            return max(0, int(limit) - used + cache)
    return 2**62


def _group_file_cache(stat: Path) -> int:
    """Bytes of a control group's use that are cached files, which the kernel gives back on demand."""
    for line in stat.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
