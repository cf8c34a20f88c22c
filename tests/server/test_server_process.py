"""A real API process on a real socket, before a ZMQ endpoint that plays a script: start, serve, drain, cut off, orphaned."""

import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.ipc.launch import Patience
from tests.certificates import make_certificates
from tests.doubles import config
from tests.server.api_process import NUM_LETTERS, SECONDS, Server

MAX_BODY_BYTES = 4 * 2**20
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z "  # begins the line of a record


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")  # short: a socket's path has about a hundred characters


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder, shutdown_timeout=20.0)
    yield server
    server.close()


@pytest.fixture
def impatient(folder: Path) -> Iterator[Server]:
    server = Server(folder, shutdown_timeout=0.1, max_body_bytes=MAX_BODY_BYTES)
    yield server
    server.close()


def test_serves_then_drains(server: Server) -> None:
    server.ready()
    answer = json.loads(server.ask("POST", "/v1/completions", {"prompt": "a"}).read())
    assert answer["choices"][0]["text"] == "ok"
    assert server.ask("GET", "/health").status == 200
    stream = server.stream()
    server.process.send_signal(signal.SIGTERM)
    while (refused := server.ask("POST", "/v1/completions", {"prompt": "a"})).status == 200:
        refused.read()  # the signal is on its way
    assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
    assert json.loads(refused.read())["error"]["code"] == "engine_unavailable"
    server.engine.release.set()
    rest = stream.read()
    assert b'"text":"ok","finish_reason":"stop"' in rest and rest.endswith(b"data: [DONE]\n\n")
    assert server.exit_code() == 0
    assert server.stderr() == ""


def test_what_does_not_finish_in_time_is_cut_off_with_a_word(impatient: Server) -> None:
    stream = impatient.ready().stream()
    impatient.process.send_signal(signal.SIGTERM)
    rest = stream.read()
    assert b'"engine_unavailable"' in rest and rest.endswith(b"data: [DONE]\n\n")
    assert impatient.exit_code() == 1
    assert impatient.engine.aborted.wait(SECONDS)


def test_a_body_over_the_limit_is_refused_and_the_connection_lives_on(impatient: Server) -> None:
    impatient.ready()
    connection = http.client.HTTPConnection("127.0.0.1", impatient.port, timeout=SECONDS)
    impatient.connections.append(connection)
    connection.request("POST", "/v1/completions", b" " * (MAX_BODY_BYTES + 1))
    refused = connection.getresponse()
    assert refused.status == 413 and json.loads(refused.read())["error"]["code"] == "request_too_large"
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200


def said_over(connection: socket.socket) -> tuple[int, dict[str, object]]:
    """Status and error of the answer after which the connection is closed."""
    answer = b""
    while chunk := connection.recv(65536):
        answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head and b"x-request-id: " in head and b"content-type: application/json" in head, (
        head
    )
    return int(head.split()[1]), json.loads(body)["error"]


def test_a_request_that_does_not_come_gets_408(folder: Path) -> None:
    server = Server(folder, Patience(request=0.5))
    try:
        server.ready()
        head, body = server.connect(), server.connect()
        head.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        body.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{")
        while not select.select([body], [], [], 0.1)[0]:
            body.sendall(b" ")  # a byte now and then is not enough
        for connection in (head, body):
            status, error = said_over(connection)
            assert status == 408 and error["code"] == "request_timeout" and "0.5 s" in str(error["message"]), error
        assert server.ask("GET", "/health").status == 200
    finally:
        server.close()


@pytest.mark.parametrize(
    "sent", [b"G\0T / HTTP/1.1\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nno size"]
)
def test_what_is_no_http_gets_an_error_as_everything_does(impatient: Server, sent: bytes) -> None:
    connection = impatient.ready().connect()
    connection.sendall(sent)
    status, error = said_over(connection)
    assert status == 400 and error["message"] == "this is not a valid HTTP request" and error["code"] == "invalid_value"


def test_what_is_no_http_does_not_end_the_request_before_it(server: Server) -> None:
    body = b'{"prompt": "a"}'
    connection = server.ready().connect()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % len(body) + body + b"and more\0than was said")
    answer = b""
    while chunk := connection.recv(65536):
        answer += chunk
    first, second = answer.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200") and b'"text":"ok"' in first
    assert second.startswith(b"400") and b"not a valid HTTP request" in second


def test_where_descriptors_run_out_new_connections_are_told_so_or_wait(folder: Path) -> None:
    server = Server(folder, num_descriptors=128)
    try:
        server.ready()
        while (refused := server.ask("GET", "/health/live")).status == 200:
            refused.read()
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
        assert "ulimit -n" in json.loads(refused.read())["error"]["message"]
        num_taken = len(server.connections)
        assert 16 < num_taken < 128
        waiting = [server.connect() for _ in range(100)]  # more than there are descriptors for
        for connection in waiting:
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        for taken in server.connections:
            taken.close()
        # None of them is closed without a word, those that came when there was no descriptor left included.
        answers = [connection.recv(65536).split()[1] for connection in waiting]
        assert set(answers) == {b"200", b"503"}, answers
        deadline = time.monotonic() + SECONDS
        while (again := server.ask("GET", "/health/live")).status == 503:  # the last of them are still being closed
            assert time.monotonic() < deadline
            again.read()
        assert again.status == 200
    finally:
        server.close()
    assert server.complaints.count("close to this process's limit of open files (128)") == 1


def ask_for_much(server: Server, is_stream: bool) -> socket.socket:
    body = json.dumps({"prompt": "#", "max_tokens": 200, "stream": is_stream}).encode()
    connection = server.connect(receive_bytes=4096)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % len(body) + body)
    assert connection.recv(8) == b"HTTP/1.1"
    return connection


def test_who_does_not_read_what_was_said_does_not_hold_up_the_end(folder: Path) -> None:
    server = Server(folder, Patience(farewell=0.5), shutdown_timeout=300.0)
    try:
        ask_for_much(server.ready(), is_stream=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 1  # it was not read
    finally:
        server.close()


def test_who_reads_slowly_gets_all_of_it(folder: Path) -> None:
    server = Server(folder, Patience(farewell=5.0), shutdown_timeout=300.0)
    try:
        connection = ask_for_much(server.ready(), is_stream=False)
        server.process.send_signal(signal.SIGTERM)
        answer = b""
        while chunk := connection.recv(16384):
            answer += chunk
            time.sleep(0.03)  # a slow reader; without being waited for, it would have a second
        assert b'"text":"' + b"a" * NUM_LETTERS + b'"' in answer
        assert server.exit_code() == 0
    finally:
        server.close()


def test_a_client_that_leaves_is_an_abort(server: Server) -> None:
    server.ready().stream().close()
    server.connections[0].close()
    assert server.engine.aborted.wait(SECONDS)


def test_a_supervisor_that_dies_takes_it_along(server: Server) -> None:
    stream = server.ready().stream()
    server.stdin.close()
    assert stream.read().endswith(b"data: [DONE]\n\n")
    assert server.exit_code() == 1


def test_a_supervisor_that_dies_takes_one_along_that_cannot_end(folder: Path) -> None:
    """One of its threads waits for a file that nobody will ever write."""
    os.mkfifo(folder / "template.jinja")
    server = Server(folder, chat_template=str(folder / "template.jinja"))
    try:
        writer = None
        while writer is None:
            with contextlib.suppress(OSError):  # it has not come to reading it yet
                writer = os.open(folder / "template.jinja", os.O_WRONLY | os.O_NONBLOCK)
            assert server.process.poll() is None, server.stderr()
        server.stdin.close()
        assert server.exit_code() == 1
        os.close(writer)
        assert not folder.exists()
    finally:
        server.close()


def test_told_to_stop_while_the_engine_loads(server: Server) -> None:
    # Its standard error stays silent, so there is nothing to wait for but its own signal handlers: ask the kernel.
    status = Path(f"/proc/{server.process.pid}/status")
    caught = lambda: int(status.read_text().split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1  # noqa: E731
    while not caught():
        pass
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert server.stdout.read() == b"" and server.stderr() == ""


def test_a_start_up_mistake_is_one_line_and_exit_2(folder: Path) -> None:
    server = Server(folder, chat_template=str(folder / "missing.jinja"))
    try:
        assert server.exit_code() == 2
        lines = server.stderr().splitlines()
        assert len(lines) == 1 and re.match(TIME + "octavo: error: ", lines[0]) and "missing.jinja" in lines[0]
    finally:
        server.close()


@pytest.mark.parametrize(("wanted", "num_cores", "num"), [("auto", 1, 1), ("auto", 2, 1), ("auto", 7, 1), ("auto", 8, 2),
                                                          ("auto", 16, 4), ("auto", 200, 8), (3, 1, 3), (12, 200, 12)])  # fmt: skip
def test_how_many_api_processes(wanted: int | str, num_cores: int, num: int) -> None:
    assert config(api_processes=wanted).server.num_api_processes(num_cores) == num


def test_no_api_process_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="--api-processes must be at least 1, got 0"):
        config(api_processes=0)


def test_tls_with_clients_that_must_show_a_certificate(folder: Path) -> None:
    files = make_certificates(folder)
    server = Server(
        folder,
        ssl_certfile=str(files.server),
        ssl_keyfile=str(files.server_key),
        ssl_ca_certs=str(files.authority),
    )
    try:
        server.ready()

        def ask(trust: ssl.SSLContext) -> int:
            connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=SECONDS, context=trust)
            server.connections.append(connection)
            connection.request("GET", "/health")
            return connection.getresponse().status

        known = ssl.create_default_context(cafile=files.authority)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            ask(known)
        known.load_cert_chain(files.client, files.client_key)
        assert ask(known) == 200
    finally:
        server.close()


def ask_raw(server: Server, sent: bytes) -> bytes:
    connection = server.connect()
    connection.sendall(sent)
    answer = b""
    while chunk := connection.recv(65536):
        answer += chunk
    return answer


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_path_forges_a_line_of_the_log(folder: Path, log_format: str) -> None:
    server = Server(folder, api_key="the-secret-key", enable_log_requests=True, log_format=log_format)
    try:
        server.ready()
        for path in (
            b"/%0aoctavo:%20error:%20forged%1b%5b2J",
            b"/%0d%0a%c2%85%e2%80%a8%e2%80%ae%7f",
            b"/" + b"x" * 20_000,
        ):
            head = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer the-wrong-key\r\nConnection: close\r\n\r\n"
            assert ask_raw(server, head % path).startswith(b"HTTP/1.1 401")
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        text = server.stderr()
    finally:
        server.close()
    lines = text.splitlines()
    assert len(lines) == 3, lines
    assert not set("\x1b\r\x7f\x85\u2028\u202e") & set(text)
    if log_format == "json":
        assert json.loads(lines[0])["path"] == "/\noctavo: error: forged\x1b[2J"
    else:
        assert all(re.match(TIME + "octavo: req-", line) for line in lines)
        assert "GET /\\noctavo: error: forged\\x1b[2J 401" in lines[0]
    assert max(map(len, lines)) < 4000 and "key" not in text


def test_requests_that_are_no_http_are_seldom_logged(folder: Path) -> None:
    server = Server(folder, api_key="secret")
    try:
        server.ready()
        for number in range(100):
            sent = b"no\x1bsense\r\n\r\n" if number % 2 else b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000
            assert ask_raw(server, sent).startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        lines = server.stderr().splitlines()
    finally:
        server.close()
    assert 1 <= len(lines) <= 1 + 100 // 10, lines
    assert all(re.match(TIME + "octavo: warning: a request was refused: ", line) for line in lines), lines


def test_a_body_that_dribbles_does_not_hold_up_the_end(folder: Path) -> None:
    """It would have the whole --shutdown-timeout, and then no answer."""
    server = Server(folder, Patience(request=300.0, farewell=1.0), shutdown_timeout=300.0)
    try:
        server.ready()
        connections = [server.connect() for _ in ("silent", "dribbling", "whole")]
        for connection, length in zip(connections, (1000, 1000, 15), strict=True):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n{"
            connection.sendall(head % length)
        assert server.ask("GET", "/health").status == 200  # all of them have been taken in
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        connections[2].sendall(b'"prompt": "a"}')
        while not select.select([connections[1]], [], [], 0.2)[0]:
            connections[1].sendall(b" ")
        for connection in connections[:2]:
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
            assert answer.startswith(b"HTTP/1.1 503 ") and b"shutting down" in answer, answer
        assert connections[2].recv(65536).startswith(b"HTTP/1.1 200 ")
        assert server.exit_code() == 0 and time.monotonic() - began < SECONDS
    finally:
        server.close()
