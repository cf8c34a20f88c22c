"""The file of a run of KV pages. It describes itself: the layout of its pages, their keys, and a checksum of each. A file that is torn, of
another layout or changed in any byte is found out: by its header's checksum, or by that of the page.

magic, length and checksum of the header · header (msgpack) · zeros up to a multiple of 4096 · pages, one after the other."""

import os
import struct
import zlib
from collections.abc import Sequence

import msgspec

Buffers = Sequence[memoryview]
"""The memory of one page, in pieces."""

_MAGIC = b"octavoKV"
_PREFIX = struct.Struct("<8sII")  # magic, bytes of the header, checksum of the header
_ALIGN = 4096
MAX_PAGES = 256  # in one run
_MAX_HEADER = 64 * 1024
_IOV = 512  # pieces in one call; the system's limit is 1024


class RunHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    layout: str  # what the bytes of a page mean: a hash of the fingerprint and the shape
    page_bytes: int
    keys: list[bytes]
    sums: list[int]  # crc32 of each page's key and bytes

    @property
    def start(self) -> int:
        """Where the first page begins."""
        return _data_start(len(_encode(self)))

    @property
    def num_bytes(self) -> int:
        return self.start + len(self.keys) * self.page_bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RunHeader).decode


class BadRun(Exception):
    """The file is no complete run of pages."""


def _data_start(header_bytes: int) -> int:
    return -(-(_PREFIX.size + header_bytes) // _ALIGN) * _ALIGN


def checksum(key: bytes, page: Buffers) -> int:
    value = zlib.crc32(key)
    for piece in page:
        value = zlib.crc32(piece, value)
    return value


def write_run(file: int, header: RunHeader, pages: Sequence[Buffers]) -> None:
    """Write the run to an empty file. Raises OSError, and may leave a part behind."""
    content = _encode(header)
    prefix = _PREFIX.pack(_MAGIC, len(content), zlib.crc32(content)) + content
    prefix += bytes(_data_start(len(content)) - len(prefix))
    pieces = [memoryview(prefix), *(piece for page in pages for piece in page)]
    at = 0
    while pieces:
        written = os.pwritev(file, pieces[:_IOV], at)
        at += written
        pieces = _rest(pieces, written)


def read_header(file: int) -> RunHeader:
    """Raises BadRun where the header is none, or the file is shorter than it says; OSError where it cannot be read."""
    start = os.pread(file, _ALIGN, 0)
    if len(start) < _PREFIX.size:
        raise BadRun("it ends before its header does")
    magic, length, expected = _PREFIX.unpack_from(start)
    if magic != _MAGIC or length > _MAX_HEADER:
        raise BadRun("it does not begin as a run of pages does")
    content = start[_PREFIX.size : _PREFIX.size + length]
    if len(content) < length:
        content += os.pread(file, length - len(content), len(start))
    if zlib.crc32(content) != expected:
        raise BadRun("its header is damaged")
    try:
        header = _decode(content)
    except (ValueError, RecursionError) as error:  # of msgspec, and where a text is not UTF-8
        raise BadRun(f"its header cannot be read: {error}") from None
    num_keys = len(header.keys)
    if not 0 < num_keys <= MAX_PAGES or len(header.sums) != num_keys or header.page_bytes <= 0:
        raise BadRun("its header contradicts itself")
    if len(set(header.keys)) != num_keys:
        raise BadRun("two of its pages have one key")
    if os.fstat(file).st_size != header.num_bytes:
        raise BadRun("it does not have the size that its header says")
    return header


def read_pages(file: int, header: RunHeader, first: int, pages: Sequence[Buffers]) -> int:
    """Read pages first, first + 1, … into these buffers. Returns how many of them, from the first on, are what was written; the buffers
    of the others hold anything. Raises OSError."""
    at = header.start + first * header.page_bytes
    pieces = [piece for page in pages for piece in page]
    while pieces:
        read = os.preadv(file, pieces[:_IOV], at)
        if not read:
            break
        at += read
        pieces = _rest(pieces, read)
    for number, page in enumerate(pages, first):
        if checksum(header.keys[number], page) != header.sums[number]:
            return number - first
    return len(pages)


def _rest(pieces: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the pieces after the first `done` bytes."""
    for at, piece in enumerate(pieces):
        if done < piece.nbytes:
            return [piece[done:], *pieces[at + 1 :]]
        done -= piece.nbytes
    return []
