"""What a rank does with a GPU's memory while its engine sleeps: weights go to pinned memory and come back; KV pages are freed, and are zero
when they come back. On a CPU the weights stay where they are, and pages are given back by number (Pages.give_back)."""

import atexit
import contextlib
import dataclasses
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from octavo.device import Device
from octavo.layers.model import DecoderModel
from octavo.weights.methods.base import Held


def tensors_of(model: DecoderModel) -> Iterator[torch.Tensor]:
    """Every tensor that a model's layers and the weights they hold refer to; one may come up several times. A tensor that is held in another
    way stays on the device, which costs memory, and nothing else."""
    for module in model.modules():
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        for value in vars(module).values():
            yield from _tensors_in(value)


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    match value:
        case torch.Tensor():
            yield value
        case list() | tuple():
            for each in value:
                yield from _tensors_in(each)
        case Held():
            for each in vars(value).values():
                yield from _tensors_in(each)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                yield from _tensors_in(getattr(value, field.name))


_PART_BYTES = 2**28
"""Copied between two calls of `moved`: a tenth of a second over PCIe, and longer where host memory is to be found first."""

_CHUNK_BYTES = 2**26  # of host memory that is pinned, and freed, at once
_FREE_PAUSE_SECONDS = 0.05  # between two chunks: freeing one holds up a step by some 10 ms


_is_exiting = threading.Event()
_freeing: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


@atexit.register
def _stop_freeing() -> None:
    """An interpreter that exits ends threads where they are, and one in the driver's code takes the process down with it."""
    _is_exiting.set()
    for thread in list(_freeing):
        thread.join()


class HostChunks:
    """Pinned host memory in chunks of one size. Freeing it takes as long as copying all of it to the device twice or more, and a step must
    not wait for that: what is given back is freed chunk by chunk, by a thread of its own, unless it is wanted again before."""

    def __init__(self, device: Device, chunk_bytes: int = _CHUNK_BYTES, pause: float = _FREE_PAUSE_SECONDS) -> None:
        self._device, self.chunk_bytes, self._pause = device, chunk_bytes, pause
        self._lock = threading.Lock()
        self._unused: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None

    @property
    def num_unused(self) -> int:
        with self._lock:
            return len(self._unused)

    def take(self) -> torch.Tensor:
        """A chunk of bytes, whatever they are."""
        with self._lock:
            if self._unused:
                return self._unused.pop()
        memory = mmap.mmap(-1, self.chunk_bytes)  # pages of its own: none is pinned twice
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        chunk = torch.frombuffer(memory, dtype=torch.uint8)
        self._device.pin(chunk)
        return chunk

    def give_back(self, chunks: Sequence[torch.Tensor], ready: Callable[[], object]) -> None:
        """`ready`: waits until the device has read them."""
        if not chunks:
            return
        waiting = self._thread
        self._thread = threading.Thread(
            target=self._free, args=(chunks, ready, waiting), name="octavo-free-pinned", daemon=True
        )
        _freeing.add(self._thread)
        self._thread.start()

    def _free(
        self, chunks: Sequence[torch.Tensor], ready: Callable[[], object], waiting: threading.Thread | None
    ) -> None:
        self._device.use()  # a new thread's is the first GPU
        ready()
        with self._lock:
            self._unused += chunks
        del chunks
        if waiting is not None:
            waiting.join()
        while not _is_exiting.wait(self._pause):
            with self._lock:
                if not self._unused:
                    return
                chunk = self._unused.pop()
            self._device.unpin(chunk)
            del chunk

    def settle(self) -> None:
        """Wait until everything that was given back is freed. Tests and benchmarks do."""
        if self._thread is not None:
            self._thread.join()


class OffloadedMemory:
    """Memory of a device that is freed for a while. Tensors stay valid: each storage, which views share, is emptied and filled again, at
    another address. So nothing that has kept an address may be used afterwards: captured graphs are dropped."""

    def __init__(self, device: Device, chunks: HostChunks) -> None:
        self._device, self._chunks = device, chunks
        self._kept: list[
            tuple[torch.UntypedStorage, int]
        ] = []  # and its size: their bytes follow each other on the host
        self._host: list[torch.Tensor] = []
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []  # and its size

    @property
    def num_bytes(self) -> int:
        """That are not on the device."""
        return sum(size for _, size in (*self._kept, *self._emptied))

    def keep(self, tensors: Iterable[torch.Tensor], moved: Callable[[], None]) -> None:
        """Copy what these tensors hold to the host, and free it on the device. `moved`: called now and then meanwhile."""
        self._kept = [(storage, storage.nbytes()) for storage in _storages(tensors)]
        size, num_bytes = self._chunks.chunk_bytes, 0
        self._host = []
        for _ in range(-(-sum(size for _, size in self._kept) // size)):
            self._host.append(self._chunks.take())
            num_bytes = self._tell(num_bytes + size, moved)
        for here, host in self._pieces(_bytes_of(storage) for storage, _ in self._kept):
            host.copy_(here, non_blocking=True)
            num_bytes = self._tell(num_bytes + len(here), moved)
        self._device.synchronize()
        for storage, _ in self._kept:
            storage.resize_(0)

    def drop(self, tensors: Iterable[torch.Tensor]) -> None:
        """Free what these tensors hold. It will be zero."""
        for storage in _storages(tensors):
            self._emptied.append((storage, storage.nbytes()))
            storage.resize_(0)

    def bring_back(self, moved: Callable[[], None]) -> None:
        """The copies are queued, as steps are that follow: nothing waits for the last of them."""
        num_bytes = 0
        for storage, size in self._kept:
            storage.resize_(size)
        for here, host in self._pieces(_bytes_of(storage) for storage, _ in self._kept):
            here.copy_(host, non_blocking=True)
            num_bytes = self._tell(num_bytes + len(here), moved)
        copied = self._device.event()
        copied.record()
        for storage, size in self._emptied:
            storage.resize_(size)
            _bytes_of(storage).zero_()
        self._chunks.give_back(self._host, copied.wait_asleep)
        self._kept, self._emptied, self._host = [], [], []

    def _pieces(self, storages: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of these bytes, one storage after the other, each with its part of a chunk."""
        size, at = self._chunks.chunk_bytes, 0
        for here in storages:
            first = 0
            while first < len(here):
                count = min(len(here) - first, size - at % size)
                yield here[first : first + count], self._host[at // size][at % size : at % size + count]
                first, at = first + count, at + count

    def _tell(self, num_bytes: int, moved: Callable[[], None]) -> int:
        """Call `moved` once so much is copied, not only queued. → bytes since the last call."""
        if num_bytes < _PART_BYTES:
            return num_bytes
        self._device.synchronize()
        moved()
        return 0


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The memory behind these tensors, each once; none that is empty."""
    found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in found.values() if storage.nbytes()]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
