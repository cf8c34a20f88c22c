"""Copy tensors from files to a device: threads read ahead into a ring of pinned buffers, which are copied across.

Copying a mapped file to a GPU goes through the page faults of one thread and a bounce buffer of the driver. Here several
threads read, there are no page faults, and a copy overlaps the next reads. The host holds the ring and nothing else."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from octavo.device import Device, Event
from octavo.errors import ConfigError

CHUNK_BYTES = 32 * 2**20  # long enough to reach the full speed of disk and bus
NUM_READERS = 4
_PER_READER = 2  # buffers: one being read into, one being copied from


@dataclass(frozen=True, slots=True)
class Region:
    """The place of one tensor in its file."""

    name: str
    path: Path
    offset: int  # of its first byte in the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def read_ahead(
    regions: Sequence[Region], device: Device, chunk_bytes: int = CHUNK_BYTES, num_readers: int = NUM_READERS
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in the given order, each newly allocated on the device. Copies are queued on the current stream, as
    is the caller's work on the tensors, so the host does not wait for either. Only a reader waits: for the copy out of its
    buffer."""
    try:
        yield from _tensors(list(_chunks(regions, chunk_bytes)), device, chunk_bytes, num_readers)
    finally:
        device.release_pinned()


def _tensors(
    chunks: "list[_Chunk]", device: Device, chunk_bytes: int, num_readers: int
) -> Iterator[tuple[str, torch.Tensor]]:
    buffers = [_Buffer.of(device, chunk_bytes) for _ in range(min(len(chunks), _PER_READER * num_readers))]
    ahead = iter(chunks)
    readers = ThreadPoolExecutor(num_readers, "weights")
    try:
        reading = deque([readers.submit(_read, next(ahead), buffer) for buffer in buffers])
        target = torch.empty(0)
        for chunk in chunks:
            buffer = reading.popleft().result()
            for part in chunk.parts:
                region = part.region
                if part.start == 0:
                    target = torch.empty(region.num_bytes, dtype=torch.uint8, device=device.torch_device)
                read = buffer.memory[part.at : part.at + part.num_bytes]
                target[part.start : part.start + part.num_bytes].copy_(read, non_blocking=True)
                if part.is_last:
                    yield region.name, target.view(region.dtype).view(region.shape)
            buffer.is_copied.record()
            reading.extend(readers.submit(_read, following, buffer) for following in islice(ahead, 1))
    finally:
        readers.shutdown(cancel_futures=True)
        device.synchronize()  # the last copies may still read from the ring


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of one tensor that lies in a chunk."""

    region: Region
    at: int  # offset in the chunk
    start: int  # offset in the tensor
    num_bytes: int
    is_last: bool


@dataclass(slots=True)
class _Chunk:
    """Neighbouring bytes of one file, read in one go."""

    path: Path
    offset: int
    num_bytes: int
    parts: list[_Part]


@dataclass(frozen=True, slots=True)
class _Buffer:
    memory: torch.Tensor  # [chunk bytes] uint8, pinned
    room: memoryview  # the same memory
    is_copied: Event  # recorded behind the copy to the device: the buffer may be reused after it

    @classmethod
    def of(cls, device: Device, num_bytes: int) -> "_Buffer":
        memory = device.pinned((num_bytes,), torch.uint8)
        return cls(memory, memory.numpy().data, device.event())


def _chunks(regions: Sequence[Region], chunk_bytes: int) -> Iterator[_Chunk]:
    """Cut the regions into chunks: adjacent small tensors share a chunk, a large tensor takes several."""
    chunk: _Chunk | None = None
    for region in regions:
        start, is_last = 0, False
        while not is_last:
            offset = region.offset + start
            is_next = chunk is not None and chunk.path == region.path and chunk.offset + chunk.num_bytes == offset
            if chunk is None or not is_next or chunk.num_bytes == chunk_bytes:
                if chunk is not None:
                    yield chunk
                chunk = _Chunk(region.path, offset, 0, [])
            num_bytes = min(region.num_bytes - start, chunk_bytes - chunk.num_bytes)
            is_last = start + num_bytes == region.num_bytes
            chunk.parts.append(_Part(region, chunk.num_bytes, start, num_bytes, is_last))
            chunk.num_bytes += num_bytes
            start += num_bytes
    if chunk is not None:
        yield chunk


def _read(chunk: _Chunk, buffer: _Buffer) -> _Buffer:
    buffer.is_copied.wait()
    room = buffer.room[: chunk.num_bytes]
    try:
        with open(chunk.path, "rb", buffering=0) as file:
            file.seek(chunk.offset)
            while len(room):
                count = file.readinto(room)
                if not count:
                    raise ConfigError(f"{chunk.path} has become shorter while it was read: fetch it again")
                room = room[count:]
    except OSError as error:
        raise ConfigError(f"cannot read {chunk.path}: {error.strerror or error}") from error
    return buffer
