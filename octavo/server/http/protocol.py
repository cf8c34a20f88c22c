"""Connection: uvicorn's HTTP protocol with limits for what a client sends, and times for sending and reading it.

A client has Patience.request to send a request's head (middleware.py limits the body) and Patience.reader to read any of a
response. Checked once a second, which costs less than timers for every request.

The parser gets its input in pieces that end where a request ends, so that a client's next request stays bytes until the one
before it is answered: a parsed request takes a hundred times the memory of its bytes."""

import fcntl
import http
import re
import struct
import termios
from asyncio import Transport
from collections.abc import Callable
from typing import Any, Literal

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.config import BudgetConfig
from octavo.errors import EngineUnavailable, HeadTooLarge, InvalidRequest, OctavoError, RequestTimeout
from octavo.ipc.launch import Patience
from octavo.server.http.errors import error_response
from octavo.server.http.middleware import new_request_id

KEEP_ALIVE_SECONDS = 75  # longer than proxies' own, so that we never close under a request
NO_ROOM_RETRY_AFTER = 5
LINGER_SECONDS = 2.0  # for a refused client to read why, although it is still sending
CHUNKED_PIECE = 1024  # bytes of a chunked body that are parsed at once, at least: its end may be anywhere
FRAMING_PER_BYTE = 16  # bytes of framing for each byte of a chunked body: even chunks of one byte need fewer
_BLANK_LINE = re.compile(rb"\n\r?\n")
_TAIL = 2  # bytes of a blank line before its last one
_TARGET = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#@]+)([/?][^#]*)?")  # an absolute one: authority, path

Malformed = Literal["syntax", "head"]
"""What was wrong with a request that never reached the application."""


class _Flow(FlowControl):
    """Flow control that does not resume reading while enough unparsed input waits."""

    is_full = False

    def resume_reading(self) -> None:
        if not self.is_full:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits."""

    def __init__(
        self,
        *,
        is_refused: bool,
        budget: BudgetConfig,
        on_malformed: Callable[[Malformed], None],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._max_head_bytes, self._max_headers = int(budget.max_head_bytes), budget.max_headers
        self._on_malformed = on_malformed
        self._held = b""  # received, not parsed yet
        self._tail = b""  # the last bytes that were parsed
        self._is_in_head = True  # also between requests
        self._num_framing = 0  # bytes of the head, or around the chunks of the body
        self._num_fields = 0  # headers of the head, or trailers
        self._num_body_bytes = 0
        self._parts: list[bytes] = []  # of the body, parsed and not yet given to the application
        self._body_left: int | None = 0  # bytes of the body to come; None: it is chunked
        self._is_body_unparsed = False  # the parser takes the request for an upgrade, and would not parse its body
        self._refusal: OctavoError | None = None  # raised in a callback of the parser, which has errors of its own
        self._is_over = False  # a refusal is sent; what still comes is dropped
        self._running: RequestResponseCycle | None = None  # `cycle` is the last one that was parsed
        now = self.loop.time()
        self._opened = now
        self._responded = now  # when the last request was answered
        self._head_begun: float | None = None  # None: no partial request head
        self._is_invalid = False  # the input is no longer valid HTTP
        self._unsent = 0
        self._moved = now  # when that last changed
        if is_refused:
            self.app: Any = _no_room

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: FlowControl = _Flow(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disconnect_running()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        super().shutdown()
        if self._is_over:
            self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _disconnect_running(self) -> None:
        """Let the application see a disconnect. uvicorn does so for the last request that was parsed, which may be a later one."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    # ── input ──

    def data_received(self, data: bytes) -> None:
        if not self._is_invalid and not self._is_over:
            self._parse(self._held + data)

    def _parse(self, data: bytes) -> None:
        """Parse up to the end of the first request that is not answered yet, and hold the rest."""
        at, view = 0, memoryview(data)
        while at < len(data) and not self._must_wait:
            end = self._piece_end(data, at)
            self._unset_keepalive_if_required()
            num_taken = self._feed(view[at:end])
            self._tail = (self._tail + data[max(at, at + num_taken - _TAIL) : at + num_taken])[-_TAIL:]
            at += num_taken
        self._held = b"" if self._is_invalid or self._is_over else data[at:]
        self._regulate_reading()

    @property
    def _must_wait(self) -> bool:
        if self._is_invalid or self._is_over or self.transport.is_closing():
            return True
        return bool(self.pipeline) or (self.is_responding and not self.cycle.more_body)

    def _regulate_reading(self) -> None:
        """Pause reading while much input is held. Reading goes on while little is held, so that a disconnect is noticed."""
        assert isinstance(self.flow, _Flow)
        was_full, self.flow.is_full = self.flow.is_full, len(self._held) > self._max_head_bytes
        if self.flow.is_full:
            self.flow.pause_reading()
        elif was_full and (self.cycle is None or len(self.cycle.body) <= HIGH_WATER_LIMIT):
            self.flow.resume_reading()

    def _piece_end(self, data: bytes, at: int) -> int:
        """The end of the next piece, which begins at `at`. A head, or a body of known length, never reaches beyond its own end;
        a chunked body may, by less than CHUNKED_PIECE."""
        if not self._is_in_head and self._body_left is not None:
            return min(len(data), at + self._body_left)
        if self._is_in_head:  # the blank line may have begun in the piece before
            for blank in _BLANK_LINE.finditer(self._tail + data[at : at + _TAIL]):
                if blank.end() > len(self._tail):
                    return at + blank.end() - len(self._tail)
        found = _BLANK_LINE.search(data, at if self._is_in_head else at + CHUNKED_PIECE)
        return len(data) if found is None else found.end()

    def _feed(self, piece: memoryview) -> int:
        """Parse a piece. → bytes taken: all of it, or up to an upgrade."""
        if self._is_body_unparsed:
            self._take_unparsed(bytes(piece))
            return len(piece)
        was_in_head, was_chunked = self._is_in_head, self._body_left is None
        if was_in_head:
            self._num_framing += len(piece)
            if self._num_framing > self._max_head_bytes:
                self._malformed("head", self._too_large("the request's head is"))
                return len(piece)
        num_body_bytes = self._num_body_bytes
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            # None is offered: the request is answered as if it had not asked.
            return int(upgrade.args[0]) or len(piece)
        except httptools.HttpParserError:
            refusal = self._refusal or InvalidRequest("this is not a valid HTTP request")
            self._malformed("head" if isinstance(refusal, HeadTooLarge) else "syntax", refusal)
            return len(piece)
        finally:
            self._give_body()
        if not was_in_head and not self._is_in_head and was_chunked:
            self._num_framing += len(piece) - (self._num_body_bytes - num_body_bytes)
            if self._num_framing > self._max_head_bytes + FRAMING_PER_BYTE * self._num_body_bytes:
                self._malformed(
                    "head", self._too_large("what surrounds the chunks of the body (sizes, extensions, trailers) is")
                )
        return len(piece)

    def _too_large(self, what: str) -> HeadTooLarge:
        return HeadTooLarge(f"{what} over the limit of {self._max_head_bytes} bytes (--max-head-bytes)")

    def _take_unparsed(self, piece: bytes) -> None:
        """Take a body that the parser left alone, because its request asked for an upgrade."""
        self.on_body(piece)
        if self._body_left:
            self._give_body()
        else:
            self._is_body_unparsed = False
            self._end_message()

    # ── parser callbacks ──

    def on_message_begin(self) -> None:
        self._head_begun = self.loop.time()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        if self._num_fields > self._max_headers:
            what = "headers" if self._is_in_head else "trailers"
            self._refusal = HeadTooLarge(f"the request has more than {self._max_headers} {what} (--max-headers)")
            raise self._refusal
        # Trailers are dropped: merged into the headers, they would evade checks that a proxy made of those.
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_begun = None
        fields = dict(self.headers)
        self._body_left = None if b"transfer-encoding" in fields else int(fields.get(b"content-length", b"0"))
        if not self.url.startswith(b"/"):
            self._split_target()
        if self.parser.should_upgrade():
            if self._body_left is None:
                raise InvalidRequest("an upgrade with a chunked body")
            self._is_body_unparsed = self._body_left > 0
        super().on_headers_complete()
        self._is_in_head, self._num_framing, self._num_fields, self._num_body_bytes = False, 0, 0, 0

    def _split_target(self) -> None:
        """Take the host of an absolute request target for the Host header, as RFC 9112 has it."""
        target = _TARGET.fullmatch(self.url)
        if target is None:
            raise InvalidRequest("the request target is neither a path nor an absolute URL")
        authority, path = target.groups()
        self.url = path if path and path.startswith(b"/") else b"/" + (path or b"")
        hosts = [at for at, (name, _) in enumerate(self.headers) if name == b"host"]
        if len(hosts) == 1:
            self.headers[hosts[0]] = (b"host", authority)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if self._body_left is not None:
            self._body_left -= len(body)
        self._parts.append(body)

    def _give_body(self) -> None:
        """Give the application what was parsed of the body. Once for each piece of input: for each chunk, uvicorn would copy the
        body and wake the application, a million times for a body in chunks of one byte."""
        if self._parts:
            body = b"".join(self._parts)
            self._parts.clear()
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_body_unparsed:
            self._end_message()

    def _end_message(self) -> None:
        self._give_body()
        self._is_in_head, self._num_framing, self._num_fields = True, 0, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._responded = self.loop.time()
        super().on_response_complete()
        if self._is_invalid and not self.is_responding and not self.transport.is_closing():
            assert self._refusal is not None
            if self._is_in_head:
                self.refuse(self._refusal)
            else:
                self._end()
        elif self._held and not self._must_wait:
            self._parse(self._held)

    # ── limits ──

    @property
    def is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def has_unread(self) -> bool:
        """Whether sent bytes wait here for the client to read them."""
        return self.transport.get_write_buffer_size() > 0

    def check_times(self, now: float, patience: Patience) -> None:
        """Close the connection if the client is too slow, or idle for too long. To be called regularly."""
        if self.is_stuck(now, patience.reader):
            self.transport.abort()
        elif self.is_responding or self._is_over or self.transport.is_closing():
            pass
        elif self._head_begun is not None:
            if now - max(self._head_begun, self._responded) > patience.request:
                self.refuse(RequestTimeout(f"the request head did not arrive completely within {patience.request:g} s"))
        elif now - max(self._opened, self._responded) > KEEP_ALIVE_SECONDS:
            self.transport.close()

    def is_stuck(self, now: float, seconds: float) -> bool:
        """Whether the client has read nothing for so long although bytes wait. To be called regularly."""
        if not self.has_unread:
            self._unsent, self._moved = 0, now
            return False
        unsent = self.transport.get_write_buffer_size() + self._num_in_kernel()
        if unsent != self._unsent:
            self._unsent, self._moved = unsent, now
        return now - self._moved > seconds

    def _num_in_kernel(self) -> int:
        """Unsent bytes in the kernel's buffer: a slow client drains these for minutes before more of ours fit."""
        try:
            descriptor = self.transport.get_extra_info("socket").fileno()
            (size,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
        except OSError:  # not available on every system
            return 0
        return int(size)

    # ── refusals ──

    def _malformed(self, kind: Malformed, error: OctavoError) -> None:
        """Refuse input that is not HTTP or exceeds a limit, after the requests before it are answered."""
        self._on_malformed(kind)
        self._refusal = error
        if self.is_responding and (not self.cycle.more_body or self.cycle.response_started or self.pipeline):
            self._is_invalid = True
        elif self._is_in_head or self.is_responding:
            self.refuse(error)
        else:  # the rest of a request that is answered already
            self._end()

    def refuse(self, error: OctavoError) -> None:
        """Send an error response and close. Only before a response has started."""
        request_id = new_request_id()
        response = error_response(error, request_id)
        response.headers.update({"x-request-id": request_id, "connection": "close"})
        lines = [b"HTTP/1.1 %d %b" % (response.status_code, http.HTTPStatus(response.status_code).phrase.encode())]
        lines += [b"%b: %b" % header for header in [*self.server_state.default_headers, *response.raw_headers]]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self._end()

    def _end(self) -> None:
        """Close, but not at once: the client may still be sending. Closing would reset the connection, and what was written last
        would not be read."""
        self._is_over, self._held = True, b""
        self._disconnect_running()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


async def _no_room(scope: Scope, receive: Receive, send: Send) -> None:
    message = "this server has too many open connections (limit of open files, ulimit -n): try again later"
    error = EngineUnavailable(message, NO_ROOM_RETRY_AFTER)
    request_id = new_request_id()
    response = error_response(error, request_id, scope["method"], scope["path"])
    response.headers.update({"x-request-id": request_id, "connection": "close"})
    await response(scope, receive, send)
