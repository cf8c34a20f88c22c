"""Parses a multipart/form-data body as it arrives: small fields into memory, one file to its target."""

from collections.abc import Callable
from typing import Protocol

import python_multipart.multipart as multipart
from fastapi import Request
from python_multipart.exceptions import FormParserError

from octavo.errors import InvalidRequest
from octavo.server.state.pools import FILES

MAX_PARTS = 32
MAX_FIELD_BYTES = 8192


class Target(Protocol):
    def write(self, data: bytes) -> None: ...


class Form:
    """The parts so far. `file_field`: the name of the part that is the file, which is written to `target` as it arrives."""

    def __init__(self, boundary: bytes, file_field: str, target: Target) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # None: no file so far
        self._file_field, self._target = file_field, target
        self._parser = multipart.MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._headers_finished,
                "on_part_data": lambda data, start, end: self._take(data[start:end]),
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )
        self._num_parts = 0
        self._is_complete = False
        self._begin_nothing()

    def feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(str(error)) from None

    def finish(self) -> None:
        if not self._is_complete:
            raise _malformed("it ends before its last boundary")
        if self.filename is None:
            raise InvalidRequest(f"{self._file_field} is missing", param=self._file_field)

    def _begin_nothing(self) -> None:
        self._header = (bytearray(), bytearray())
        self._disposition: bytes = b""
        self._name = ""
        self._value: bytearray | None = None  # None: this part is the file

    def _begin(self) -> None:
        self._begin_nothing()
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"the form has more than {MAX_PARTS} parts")

    def _end_header(self) -> None:
        if bytes(self._header[0]).lower() == b"content-disposition":
            self._disposition = bytes(self._header[1])
        self._header = (bytearray(), bytearray())

    def _headers_finished(self) -> None:
        _, options = multipart.parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")[:100]
        if not self._name:
            raise _malformed("a part has no name")
        if self._name in self.fields or (self._name == self._file_field and self.filename is not None):
            raise InvalidRequest(f"{self._name} is given twice", param=self._name)
        if self._name == self._file_field:
            if b"filename" not in options:
                raise InvalidRequest(f"{self._name} must be a file, with a filename", param=self._name)
            self.filename = options[b"filename"].decode("utf-8", "replace")
        else:
            self._value = bytearray()

    def _take(self, data: bytes) -> None:
        if self._value is None:
            self._target.write(data)
            return
        self._value += data
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{self._name} is longer than {MAX_FIELD_BYTES} bytes", param=self._name)

    def _end_part(self) -> None:
        if self._value is not None:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_complete = True


async def read_form(request: Request, file_field: str, open_target: Callable[[], Target]) -> Form:
    """`open_target` is called once the header announces a form. Holds one chunk of the body in memory; files are opened and
    written in a thread."""
    kind, options = multipart.parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise InvalidRequest("the body must be multipart/form-data, and its header must name the boundary")
    try:
        form = Form(options[b"boundary"], file_field, await FILES.run(open_target))
    except FormParserError as error:
        raise _malformed(str(error)) from None
    async for piece in request.stream():
        if piece:
            await FILES.run(form.feed, piece)
    form.finish()
    return form


def _malformed(words: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not well-formed multipart/form-data: {words[:200]}")
