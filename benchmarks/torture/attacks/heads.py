"""Attacks on the HTTP parser, most of them before any key is read."""

import base64
import random
from collections.abc import Iterator

from benchmarks.torture.attacks.base import MB, Attack, Door, Send, Strike, must_be, one, several

_LINE = b"X-Filler: " + b"a" * 1000 + b"\r\n"


def _start(door: Door, line: bytes = b"GET /health HTTP/1.1") -> bytes:
    return line + b"\r\nHost: 127.0.0.1:%d\r\n" % door.port


def _repeated(head: bytes, part: bytes, num_bytes: int, end: bytes = b"") -> Iterator[bytes]:
    """`head`, then `part` until it is num_bytes in all, then `end`."""
    piece = part * max(1, 256 * 1024 // len(part))
    if head:
        yield head
    for _ in range(max(1, num_bytes // len(piece))):
        yield piece
    if end:
        yield end


def _chunked(door: Door, rest: bytes) -> bytes:
    return _start(door, b"POST /v1/completions HTTP/1.1") + b"Transfer-Encoding: chunked\r\n\r\n" + rest


def _numbered(count: int) -> bytes:
    return b"".join(b"x-%d: y\r\n" % number for number in range(count))


def _slow_heads(door: Door) -> list[Send]:
    head = _start(door) + b"X: " + b"a" * 50
    return [Send([head[at : at + 1] for at in range(len(head))], "hold", pause=0.1) for _ in range(200)]


def _pipelined(path: bytes, num_bytes: int, then: str) -> Attack:
    def strike(door: Door, dice: random.Random) -> Strike:
        request = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % (path, door.port)
        if door.key:
            request += b"Authorization: Bearer %s\r\n" % door.key.encode()
        assert then in ("drain", "hold")
        yield [Send(_repeated(b"", request + b"\r\n", num_bytes), then)]  # type: ignore[arg-type]

    name = path.decode().strip("/").replace("/", "-").replace(".", "-")
    return Attack(
        f"head-pipelined-{name}-{num_bytes // MB}mb{'-unread' if then == 'hold' else ''}",
        strike,
        seconds=4.0,
        is_flood=True,
    )


ATTACKS = [
    several("head-64mb-in-headers", lambda door: [Send(_repeated(_start(door), _LINE, 64 * MB, b"\r\n"))]),
    several("head-64mb-in-one-value", lambda door: [Send(_repeated(_start(door) + b"X: ", b"a", 64 * MB, b"\r\n\r\n"))]),
    several("head-64mb-in-one-name", lambda door: [Send(_repeated(_start(door), b"a", 64 * MB, b": b\r\n\r\n"))]),
    one("head-100000-headers", lambda door: _start(door) + _numbered(100_000) + b"\r\n"),
    one("head-4000-headers", lambda door: _start(door) + _numbered(4000) + b"\r\n", is_cheap=True),
    several(
        "head-64mb-in-trailers",
        lambda door: [Send(_repeated(_chunked(door, b"2\r\n{}\r\n0\r\n"), _LINE, 64 * MB, b"\r\n"))],
    ),
    one("head-100000-trailers", lambda door: _chunked(door, b"2\r\n{}\r\n0\r\n" + _numbered(100_000) + b"\r\n")),
    _pipelined(b"/health", 64 * MB, "drain"),
    _pipelined(b"/health", 64 * MB, "hold"),
    _pipelined(b"/openapi.json", 2 * MB, "hold"),
    _pipelined(b"/metrics", 1 * MB, "drain"),
    several("head-32mb-request-line", lambda door: [Send(_repeated(b"GET /", b"a", 32 * MB, b" HTTP/1.1\r\nHost: localhost\r\n\r\n"))]),
    several("head-16mb-query", lambda door: [Send(_repeated(b"GET /health?", b"a=b&", 16 * MB, b" HTTP/1.1\r\nHost: localhost\r\n\r\n"))]),
    one("head-60k-query", lambda door: _start(door, b"GET /v1/files?" + b"a=b&" * 15_000 + b" HTTP/1.1") + b"\r\n", is_cheap=True),
    several("head-64mb-method", lambda door: [Send(_repeated(b"", b"G", 64 * MB))]),
    several("head-64mb-of-newlines", lambda door: [Send(_repeated(b"", b"\r\n", 64 * MB, _start(door) + b"\r\n"))]),
    several(
        "head-16mb-chunk-extension",
        lambda door: [Send(_repeated(_chunked(door, b"2;x="), b"a", 16 * MB, b"\r\n{}\r\n0\r\n\r\n"))],
    ),
    several(
        "head-chunk-extensions-on-2000-chunks",
        lambda door: [Send(_repeated(_chunked(door, b""), b"1;x=" + b"a" * 8000 + b"\r\n \r\n", 16 * MB, b"0\r\n\r\n"))],
    ),
    several(
        "head-a-million-chunks-of-a-byte",
        lambda door: [Send(_repeated(_chunked(door, b""), b"1\r\n \r\n", 6 * MB, b"0\r\n\r\n"))],
    ),
    one("head-endless-chunk-size", lambda door: _chunked(door, b"0" * 4 * MB + b"2\r\n{}\r\n0\r\n\r\n")),
    several("head-slow-200", _slow_heads, seconds=4.0, is_flood=True),
    several("head-without-end", lambda door: [Send(_repeated(_start(door), _LINE, 48 * MB), "hold", pause=0.005)], seconds=4.0),
    one("head-10000-hosts", lambda door: b"GET /health HTTP/1.1\r\n" + b"Host: a\r\n" * 10_000 + b"\r\n"),
    one("head-10000-content-lengths", lambda door: _start(door, b"POST /tokenize HTTP/1.1") + b"Content-Length: 2\r\n" * 10_000 + b"\r\n{}"),
    one(
        "head-length-and-chunked",
        lambda door: _chunked(door, b"").replace(b"\r\n\r\n", b"\r\nContent-Length: 4\r\n\r\n") + b"0\r\n\r\n",
        is_cheap=True, check=must_be(400, 401, 403),
    ),
    one("head-10000-keys", lambda door: _start(door) + b"x-api-key: wrong\r\n" * 10_000 + b"\r\n"),
    one(
        "head-8mb-basic-password",
        lambda door: _start(door, b"GET /v1/models HTTP/1.1") + b"Authorization: Basic " + base64.b64encode(b"a" * 6 * MB) + b"\r\n\r\n",
    ),
    one("head-1mb-traceparent", lambda door: _start(door) + b"traceparent: " + b"0" * MB + b"\r\n\r\n"),
    one(
        "head-upgrades", lambda door: _start(door) + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n" + b"\xff" * MB,
        is_cheap=True,
    ),
    several(
        "head-expect-continue-100",
        lambda door: [
            Send([_start(door, b"POST /tokenize HTTP/1.1") + b"Expect: 100-continue\r\nContent-Length: 33000000\r\n\r\n"], "hold")
            for _ in range(100)
        ],
        seconds=3.0, is_flood=True,
    ),
]  # fmt: skip
