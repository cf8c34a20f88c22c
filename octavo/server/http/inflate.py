"""Inflater: a compressed request body as it arrives, inflated in short pieces, so that a small body that inflates to gigabytes is
refused as soon as it passes the limit. Brotli needs a package of its own (the extra `brotli`)."""

import functools
import zlib
from abc import ABC, abstractmethod

from octavo.errors import InvalidRequest, UnsupportedEncoding

PIECE = 128 * 1024  # bytes of output at a time: about a millisecond
_AUTO_WBITS = 32 + zlib.MAX_WBITS  # gzip or zlib, as the header says
_RAW_WBITS = -zlib.MAX_WBITS
_ZLIB_METHOD = 8  # in the low half of a zlib stream's first byte
_GZIP_MAGIC = b"\x1f\x8b"


class Inflater(ABC):
    def __init__(self, encoding: str) -> None:
        self.num_bytes = 0  # of output so far
        self.is_over = False  # all output was taken
        self._encoding = encoding
        self._input = b""  # not yet inflated
        self._is_last = False  # no more input will come

    def feed(self, data: bytes, is_last: bool) -> None:
        self._input += data
        self._is_last = is_last

    def take(self) -> bytes:
        """The next piece of output. Empty: more input is needed, or everything was taken. Raises InvalidRequest for damaged data."""
        piece = self._take()
        self.num_bytes += len(piece)
        return piece

    @abstractmethod
    def _take(self) -> bytes:
        """At most PIECE bytes."""

    def _damaged(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"the request body is not valid {self._encoding} (Content-Encoding): {why}")


class ZlibInflater(Inflater):
    """gzip and deflate."""

    def __init__(self, encoding: str) -> None:
        super().__init__(encoding)
        self._stream: zlib._Decompress | None = None  # None: between two streams
        self._num_streams = 0

    def _take(self) -> bytes:
        piece = b""
        while not piece and not self.is_over:
            if self._stream is None and not self._open():
                break
            assert self._stream is not None
            try:
                piece = self._stream.decompress(self._input, PIECE)
            except zlib.error as error:
                raise self._damaged(str(error).rpartition(": ")[2]) from None
            self._input = self._stream.unconsumed_tail
            if self._stream.eof:
                self._input, self._stream = self._stream.unused_data, None
            elif not piece and not self._input:
                if self._is_last:
                    raise self._damaged("it ends early")
                break
        return piece

    def _open(self) -> bool:
        """Begin a stream once there is input for it. False: more is needed, or all streams have ended."""
        if not self._input:
            if self._is_last and not self._num_streams:
                raise self._damaged("it is empty")
            self.is_over = self._is_last
            return False
        if self._num_streams and (self._encoding != "gzip" or not _GZIP_MAGIC.startswith(self._input[:2])):
            raise self._damaged("something follows its end")  # only gzip has several streams, one after the other
        is_raw = (
            self._encoding == "deflate" and self._input[0] & 15 != _ZLIB_METHOD
        )  # some clients leave out zlib's header
        self._stream = zlib.decompressobj(_RAW_WBITS if is_raw else _AUTO_WBITS)
        self._num_streams += 1
        return True


class BrotliInflater(Inflater):
    _LIMIT = (
        PIECE // 2
    )  # the package's buffer grows in blocks until it has this size: it ends at three quarters of a PIECE

    def __init__(self, encoding: str = "br") -> None:
        import brotli

        super().__init__(encoding)
        self._error: type[Exception] = brotli.error
        self._stream = brotli.Decompressor()
        self._has_input = False  # some arrived

    def _take(self) -> bytes:
        data = b""
        if self._stream.can_accept_more_data():
            data, self._input = self._input, b""
        self._has_input = self._has_input or bool(data)
        try:
            piece: bytes = self._stream.process(data, output_buffer_limit=self._LIMIT)
        except self._error:
            raise self._damaged("it is damaged, or something follows its end") from None
        if self._stream.is_finished():
            if self._input:
                raise self._damaged("something follows its end")
            self.is_over = self._is_last and not piece
        elif not piece and self._is_last and not self._input:
            raise self._damaged("it ends early" if self._has_input else "it is empty")
        return piece


@functools.cache
def encodings() -> tuple[str, ...]:
    """What a body may have as its Content-Encoding: brotli only where a package is installed that can limit its output."""
    try:
        import brotli
    except ImportError:
        return ("gzip", "deflate")
    return ("gzip", "deflate", "br") if hasattr(brotli.Decompressor, "can_accept_more_data") else ("gzip", "deflate")


def inflater_for(content_encoding: str) -> Inflater | None:
    """None: the body is not compressed. Raises UnsupportedEncoding for an encoding that is not taken, or several."""
    name = content_encoding.strip().lower()
    if name in ("", "identity"):
        return None
    name = {"x-gzip": "gzip"}.get(name, name)
    taken = encodings()
    if name in taken:
        return BrotliInflater() if name == "br" else ZlibInflater(name)
    what = "is not supported"
    if name == "br":
        what = "needs a package that this server does not have, or has too old (pip install 'octavo[brotli]')"
    raise UnsupportedEncoding(
        f"Content-Encoding {content_encoding[:60]!r} {what}: send the body as {', '.join(taken[:-1])} or {taken[-1]}, or as it is"
    )
