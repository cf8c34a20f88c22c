"""What a client may send before a request is accepted is bounded: heads, trailers, chunk framing and pipelined requests."""

import asyncio
import json
import os
import random
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from octavo.config import BudgetConfig
from octavo.server.http.protocol import Connection
from tests.certificates import make_certificates
from tests.server.api_process import SECONDS, Server

MAX_HEAD_BYTES = 4096
MAX_HEADERS = 20
MIB = 2**20


class Transport(asyncio.Transport):
    """Keeps what is written, and whether reading is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = self.is_paused = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Conversation:
    """A connection in this event loop, to an application that answers with what it was asked."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, list[tuple[bytes, bytes]], bytes]] = []  # method, path, headers, body
        self.may_respond = asyncio.Event()
        self.may_respond.set()
        self.refusals: list[str] = []
        config = uvicorn.Config(
            self._app, http="httptools", ws="none", lifespan="off", interface="asgi3", log_config=None
        )
        self.connection = Connection(
            config=config,
            server_state=ServerState(),
            app_state={},
            is_refused=False,
            budget=BudgetConfig(max_head_bytes=MAX_HEAD_BYTES, max_headers=MAX_HEADERS),
            on_malformed=self.refusals.append,
        )
        self.transport = Transport()
        self.connection.connection_made(self.transport)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        if scope["path"] == "/early":  # answered before its body is read
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        else:
            return
        self.seen.append((scope["method"], scope["path"], [*scope["headers"]], body))
        await self.may_respond.wait()
        said = b"%s %d" % (scope["path"].encode(), len(body))
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", str(len(said)).encode())],
            }
        )
        await send({"type": "http.response.body", "body": said})

    async def send(self, *pieces: bytes) -> None:
        """Send pieces as a transport would: none while reading is paused."""
        for piece in pieces:
            for _ in range(1000):
                if not self.transport.is_paused or self.transport.is_closed:
                    break
                await asyncio.sleep(0)
            if self.transport.is_closed:
                return
            self.connection.data_received(piece)
            await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def answered(self, num_requests: int) -> None:
        for _ in range(10 * num_requests):
            await asyncio.sleep(0)
            if len(self.seen) == num_requests:
                break
        await self.settle()

    @property
    def answers(self) -> list[tuple[int, bytes]]:
        found = []
        for answer in self.transport.written.split(b"HTTP/1.1 ")[1:]:
            head, _, body = answer.partition(b"\r\n\r\n")
            found.append((int(head.split()[0]), body))
        return found

    def refusal(self, status: int) -> dict[str, Any]:
        """The error with which the connection ended."""
        assert self.answers[-1][0] == status, self.transport.written
        error: dict[str, Any] = json.loads(self.answers[-1][1])["error"]
        return error


GET = b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
REQUESTS = [
    GET % b"/1",
    b"POST /2 HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\nab\r\n\r\ncd\r\n\r\n",
    CHUNKED + b"3\r\nabc\r\n4;x=y\r\n\r\n\r\n\r\n0\r\nTrailer: t\r\n\r\n",
    b"\r\n\r\nGET /4 HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"POST /5 HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 5\r\n\r\nGET /",
    CHUNKED + b"0\r\n\r\n",
    GET % b"/7",
]
ANSWERS = [(200, said) for said in (b"/1 0", b"/2 12", b"/c 7", b"/4 0", b"/5 5", b"/c 0", b"/7 0")]


async def test_requests_are_the_same_however_their_bytes_are_split() -> None:
    """Pipelined in one piece, byte by byte, cut at every place, and in random pieces."""
    stream = b"".join(REQUESTS)
    shuffled = random.Random(1)
    ways = [[stream], [bytes([byte]) for byte in stream], REQUESTS]
    ways += [[stream[:at], stream[at:]] for at in range(1, len(stream))]
    for _ in range(200):
        cuts = sorted(shuffled.sample(range(1, len(stream)), shuffled.randint(1, 8)))
        ways.append([stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)])
    for pieces in ways:
        conversation = Conversation()
        await conversation.send(*pieces)
        for _ in range(20):
            await conversation.settle()
        assert conversation.answers == ANSWERS, pieces
        assert not conversation.refusals


async def test_a_head_up_to_the_limit_and_one_byte_more() -> None:
    for num_bytes, status in ((MAX_HEAD_BYTES, 200), (MAX_HEAD_BYTES + 1, 431)):
        head = b"GET /a HTTP/1.1\r\nHost: a\r\nX: "
        head += b"x" * (num_bytes - len(head) - 4) + b"\r\n\r\n"
        for pieces in ([head], [head[:1000], head[1000:]], [head[at : at + 7] for at in range(0, len(head), 7)]):
            conversation = Conversation()
            await conversation.send(*pieces)
            assert [status for status, _ in conversation.answers] == [status], num_bytes
            assert conversation.refusals == ([] if status == 200 else ["head"])


@pytest.mark.parametrize(
    ("what", "sent"),
    [
        ("a header", [b"GET / HTTP/1.1\r\nHost: a\r\nX: ", *[b"x" * 1000] * 6]),
        ("a header's name", [b"GET / HTTP/1.1\r\nHost: a\r\n", *[b"x" * 1000] * 6]),
        ("a path", [b"GET /", *[b"x" * 1000] * 6]),
        ("a query", [b"GET /?", *[b"x&" * 500] * 6]),
        ("empty lines before a request", [b"\r\n" * 500] * 6),
        ("in one piece", [b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 200_000]),
        ("of a second request", [GET % b"/", *[b"\r\n" * 500] * 6]),
    ],
)
async def test_a_head_without_end(what: str, sent: list[bytes]) -> None:
    conversation = Conversation()
    await conversation.send(*sent)
    error = conversation.refusal(431)
    assert "4096 bytes (--max-head-bytes)" in error["message"] and error["code"] == "head_too_large", error
    assert conversation.refusals == ["head"]


async def test_headers_up_to_the_limit_and_one_more() -> None:
    for num_headers, status in ((MAX_HEADERS, 200), (MAX_HEADERS + 1, 431)):
        conversation = Conversation()
        lines = [b"X-%d: y\r\n" % number for number in range(num_headers - 1)]
        await conversation.send(b"GET /a HTTP/1.1\r\nHost: a\r\n" + b"".join(lines) + b"\r\n")
        assert [status for status, _ in conversation.answers] == [status]
    assert "more than 20 headers (--max-headers)" in conversation.refusal(431)["message"]


@pytest.mark.parametrize(
    ("what", "sent", "words"),
    [
        ("trailers", [b"0\r\n", *[b"X: y\r\n"] * (MAX_HEADERS + 2)], "more than 20 trailers (--max-headers)"),
        ("a trailer", [b"0\r\nX: ", *[b"x" * 1000] * 6], "4096 bytes (--max-head-bytes)"),
        ("an extension", [b"1;", *[b"x" * 1000] * 6], "4096 bytes (--max-head-bytes)"),
        ("zeros of a size", [b"0" * 1000] * 6, "4096 bytes (--max-head-bytes)"),
        ("many extensions", [b"1;" + b"x" * 500 + b"\r\na\r\n"] * 20, "4096 bytes (--max-head-bytes)"),
        ("in one piece", [b"0\r\nX: " + b"x" * 200_000], "4096 bytes (--max-head-bytes)"),
    ],
)
async def test_what_is_neither_head_nor_body(what: str, sent: list[bytes], words: str) -> None:
    for pieces in ([CHUNKED, *sent], [CHUNKED + b"".join(sent)]):
        conversation = Conversation()
        await conversation.send(*pieces)
        error = conversation.refusal(431)
        assert words in error["message"], error
        assert conversation.refusals == ["head"] and not conversation.seen


async def test_a_body_in_chunks_of_a_byte_is_no_framing_without_end() -> None:
    conversation = Conversation()
    await conversation.send(CHUNKED, *[b"1\r\na\r\n"] * 10_000, b"0\r\n\r\n")
    assert conversation.answers == [(200, b"/c 10000")]


async def test_chunks_that_arrive_together_are_given_together(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    give = HttpToolsProtocol.on_body
    monkeypatch.setattr(
        HttpToolsProtocol, "on_body", lambda connection, body: (given.append(len(body)), give(connection, body))[1]
    )
    conversation = Conversation()
    await conversation.send(CHUNKED + b"1\r\na\r\n" * 30_000, b"2\r\nbb\r\n" * 10 + b"0\r\n\r\n")
    assert conversation.answers == [(200, b"/c 30020")]
    assert sum(given) == 30_020 and len(given) <= 3


async def test_a_body_is_no_head() -> None:
    body = b"x" * (10 * MAX_HEAD_BYTES)
    head = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    for at in (len(head) - 3, len(head) - 1, len(head), len(head) + 1):
        conversation = Conversation()
        await conversation.send((head + body)[:at], (head + body)[at:])
        assert conversation.answers == [(200, b"/a %d" % len(body))]


@pytest.mark.parametrize("rest", [b"0\r\nX: " + b"x" * 6000, b"no size"])
async def test_what_is_answered_is_not_answered_again(rest: bytes) -> None:
    conversation = Conversation()
    await conversation.send(CHUNKED.replace(b"/c", b"/early"), rest, GET % b"/next")
    assert conversation.answers == [(401, b"")]
    assert len(conversation.refusals) == 1 and not conversation.seen


async def test_trailers_are_no_headers() -> None:
    """A proxy checks headers; what comes after the body it may pass on as it is."""
    conversation = Conversation()
    await conversation.send(CHUNKED + b"1\r\na\r\n0\r\nHost: evil\r\nAuthorization: Bearer stolen\r\n\r\n")
    ((_, _, headers, body),) = conversation.seen
    assert headers == [(b"host", b"a"), (b"transfer-encoding", b"chunked")] and body == b"a"


async def test_pipelined_requests_wait_as_bytes_and_reading_pauses() -> None:
    conversation = Conversation()
    conversation.may_respond.clear()
    many = GET % b"/x" * 1000
    conversation.connection.data_received(many)
    await conversation.settle()
    assert len(conversation.seen) == 1 and not conversation.connection.pipeline
    assert conversation.transport.is_paused
    conversation.may_respond.set()
    await conversation.answered(1000)
    assert conversation.answers == [(200, b"/x 0")] * 1000
    assert not conversation.transport.is_paused


async def test_a_chunked_body_is_followed_by_few_requests_in_memory() -> None:
    conversation = Conversation()
    conversation.may_respond.clear()
    conversation.connection.data_received(CHUNKED + b"0\r\n\r\n" + GET % b"/x" * 5000)
    await conversation.settle()
    assert len(conversation.connection.pipeline) < 50
    conversation.may_respond.set()
    await conversation.answered(5001)
    assert conversation.answers == [(200, b"/c 0")] + [(200, b"/x 0")] * 5000


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        (b"http://other.example:81/a?b", "/a", b"other.example:81"),
        (b"http://other.example", "/", b"other.example"),
        (b"https://other.example?b", "/", b"other.example"),
        (b"HTTP://[::1]:80/x//y", "/x//y", b"[::1]:80"),
    ],
)
async def test_the_host_of_an_absolute_target_counts(target: bytes, path: str, host: bytes) -> None:
    conversation = Conversation()
    await conversation.send(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nX: y\r\n\r\n")
    assert conversation.seen == [("GET", path, [(b"host", host), (b"x", b"y")], b"")]


@pytest.mark.parametrize("target", [b"a:443", b"http://", b"http:///a", b"http://user@host/", b"*x"])
async def test_a_target_that_is_none(target: bytes) -> None:
    conversation = Conversation()
    await conversation.send(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert conversation.refusal(400)["message"] == "this is not a valid HTTP request"
    assert conversation.refusals == ["syntax"]


# ── the memory of a real process ──


@pytest.fixture(params=["plain", "tls"])
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, ssl.SSLContext | None]]:
    options: dict[str, object] = {"api_key": "secret"}
    trust = None
    if request.param == "tls":
        certificates = make_certificates(tmp_path_factory.mktemp("c"))
        options |= {"ssl_certfile": str(certificates.server), "ssl_keyfile": str(certificates.server_key)}
        trust = ssl.create_default_context(cafile=certificates.authority)
        trust.check_hostname = False
    server = Server(tmp_path_factory.mktemp("s"), **options)
    yield server.ready(), trust
    server.close()


def memory_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("head", "rest"),
    [
        (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"x: y\r\n" * 100),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
            b"x: y\r\n" * 100,
        ),
        (b"", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20),
    ],
    ids=["headers", "trailers", "pipelined"],
)
def test_memory_stays_where_it_was(guarded: tuple[Server, ssl.SSLContext | None], head: bytes, rest: bytes) -> None:
    """64 MB on one connection, or as much as the server takes in a few seconds; it took gigabytes of memory for that."""
    server, trust = guarded
    before = memory_of(server.process.pid)
    most = before
    with server.connect() as plain:
        connection = plain if trust is None else trust.wrap_socket(plain)
        connection.settimeout(0.5)
        until, num_sent = time.monotonic() + 5, 0
        try:
            connection.sendall(head)
            while num_sent < 64 * MIB and time.monotonic() < until:
                num_sent += connection.send(rest * 20)
                most = max(most, memory_of(server.process.pid))
        except (TimeoutError, ConnectionError, ssl.SSLError):
            pass  # the server reads no more, or has closed
        most = max(most, memory_of(server.process.pid))
        connection.close()
    assert most - before < 16 * MIB, (before, most, num_sent)
    with server.connect() as plain:
        connection = plain if trust is None else trust.wrap_socket(plain)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        connection.settimeout(SECONDS)
        assert connection.recv(15).startswith(b"HTTP/1.1 200")
        connection.close()


def test_a_refused_head_is_answered_while_the_client_still_sends(tmp_path_factory: pytest.TempPathFactory) -> None:
    server = Server(tmp_path_factory.mktemp("s"), api_key="secret")
    try:
        connection = server.ready().connect()
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
        for _ in range(32):  # several times what the kernel's buffers hold
            try:
                connection.sendall(b"x" * 65536)
            except ConnectionError:
                break
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        assert answer.startswith(b"HTTP/1.1 431 ") and b"--max-head-bytes" in answer, answer
    finally:
        server.close()


def test_limits_are_flags_with_a_floor() -> None:
    from octavo.config import Config, replace
    from octavo.errors import ConfigError

    assert (Config().budget.max_head_bytes, Config().budget.max_headers) == (65536, 100)
    for options in ({"max_head_bytes": 100}, {"max_headers": 1}):
        with pytest.raises(ConfigError, match="must be"):
            replace(Config(), **options)
