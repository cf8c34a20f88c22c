"""Copies of shared memory on another machine: what has changed since the last look is sent, and written there."""

import mmap
import struct
from collections.abc import Sequence

_CHUNK = 512  # bytes that are compared, and sent if they differ
_HEADER = struct.Struct("<II")  # offset, length


class Copier:
    """Finds what has changed in parts of a memory."""

    def __init__(self, memory: mmap.mmap, parts: Sequence[tuple[int, int]], assume_zero: bool = False) -> None:
        """`parts`: (first byte, end). `assume_zero`: the other side has zeros there; otherwise the first look finds all of it."""
        self._memory, self._parts = memory, parts
        self._last = [bytes(end - start) if assume_zero else b"" for start, end in parts]

    def changes(self) -> bytes:
        """What `apply` takes. Empty: nothing has changed."""
        found = []
        for number, (start, end) in enumerate(self._parts):
            now, before = self._memory[start:end], self._last[number]
            if now != before:
                self._last[number] = now
                found += [
                    _HEADER.pack(start + at, len(chunk)) + chunk
                    for at in range(0, len(now), _CHUNK)
                    if (chunk := now[at : at + _CHUNK]) != before[at : at + _CHUNK]
                ]
        return b"".join(found)


def apply(memory: mmap.mmap, changes: bytes, parts: Sequence[tuple[int, int]]) -> None:
    """Write changes. Raises ValueError for what lies outside the parts, or is cut off."""
    at = 0
    while at < len(changes):
        if at + _HEADER.size > len(changes):
            raise ValueError("changes of a memory are cut off")
        offset, length = _HEADER.unpack_from(changes, at)
        at += _HEADER.size
        if not any(start <= offset and offset + length <= end for start, end in parts) or at + length > len(changes):
            raise ValueError(f"{length} bytes at {offset} are not in a part that is copied")
        memory[offset : offset + length] = changes[at : at + length]
        at += length
