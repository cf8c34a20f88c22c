"""Inflater: a compressed request body as it arrives, inflated in short pieces, so that a small body that inflates to gigabytes is
refused as soon as it passes the limit."""

import zlib

from octavo.errors import InvalidRequest, UnsupportedEncoding

ENCODINGS = ("gzip", "deflate")
PIECE = 128 * 1024  # bytes of output at a time: about a millisecond
_AUTO_WBITS = 32 + zlib.MAX_WBITS  # gzip or zlib, as the header says
_RAW_WBITS = -zlib.MAX_WBITS
_ZLIB_METHOD = 8  # in the low half of a zlib stream's first byte
_GZIP_MAGIC = b"\x1f\x8b"


class Inflater:
    def __init__(self, encoding: str) -> None:
        self.num_bytes = 0  # of output so far
        self.is_over = False  # all output was taken
        self._encoding = encoding
        self._input = b""  # not yet inflated
        self._is_last = False  # no more input will come
        self._stream: zlib._Decompress | None = None  # None: between two streams
        self._num_streams = 0

    def feed(self, data: bytes, is_last: bool) -> None:
        self._input += data
        self._is_last = is_last

    def take(self) -> bytes:
        """The next piece of output. Empty: more input is needed, or everything was taken. Raises InvalidRequest for damaged data."""
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
        self.num_bytes += len(piece)
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

    def _damaged(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"the request body is not valid {self._encoding} (Content-Encoding): {why}")


def inflater_for(content_encoding: str) -> Inflater | None:
    """None: the body is not compressed. Raises UnsupportedEncoding for an encoding that is not taken, or several."""
    name = content_encoding.strip().lower()
    if name in ("", "identity"):
        return None
    name = {"x-gzip": "gzip"}.get(name, name)
    if name not in ENCODINGS:
        raise UnsupportedEncoding(
            f"Content-Encoding {content_encoding[:60]!r} is not supported: send the body as {' or '.join(ENCODINGS)}, or as it is"
        )
    return Inflater(name)
