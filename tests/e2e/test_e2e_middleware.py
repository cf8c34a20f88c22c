"""TLS and keys with `octavo serve` as people start it."""

import http.client
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.certificates import Certificates, make_certificates
from tests.e2e.servers import Server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def ask(server: Server, trust: ssl.SSLContext, path: str, key: str = "", body: object = None) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(server.base + path, data, headers), timeout=120, context=trust
        ) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def answer(base: str, trust: ssl.SSLContext | None, body: object) -> dict[str, Any]:
    """What does not change from one request to the next, of a connection of its own."""
    headers = {"Authorization": "Bearer two", "Connection": "close"}
    request = urllib.request.Request(base + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120, context=trust) as response:
        found = json.loads(response.read())
    return {name: found[name] for name in ("choices", "system_fingerprint")}


def test_tls_and_keys_and_the_same_bytes_from_one_api_process_as_from_two(
    certificates: Certificates, tmp_path: Path, server: Server
) -> None:
    """`server` has two processes, and other rows, pages and context besides: none of it reaches a byte."""
    body = {"prompt": "Once upon a time", "max_tokens": 24, "seed": 11, "temperature": 1.1, "logprobs": 3}
    expected = [answer(server.base, None, body) for _ in range(4)]  # dealt out to the processes in turn
    assert expected.count(expected[0]) == 4
    check_tls_and_keys(certificates, tmp_path, body, expected[0])


def check_tls_and_keys(certificates: Certificates, tmp_path: Path, body: object, expected: dict[str, Any]) -> None:
    keys = tmp_path / "keys"
    keys.write_text("from-file\n")
    with Server(
        "--ssl-certfile", str(certificates.server), "--ssl-keyfile", str(certificates.server_key),
        "--api-key", "one", "--api-key", "two", "--api-key-file", str(keys),
        "--kv-cache-memory-bytes", "64M", "--api-processes", "1", "--max-model-len", "256", "--max-num-seqs", "4",
    ) as server:  # fmt: skip
        assert server.base.startswith("https://")
        assert not any("from-file" in line for line in server.lines)
        trust = ssl.create_default_context(cafile=certificates.authority)
        assert ask(server, trust, "/health") == 200
        for key, status in (("", 401), ("three", 401), ("one", 200), ("two", 200), ("from-file", 200)):
            assert ask(server, trust, "/v1/models", key) == status, key
        assert answer(server.base, trust, body) == expected
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            ask(server, ssl.create_default_context(), "/health")
        with pytest.raises((urllib.error.URLError, ConnectionError)):  # plain HTTP gets no answer
            urllib.request.urlopen(server.base.replace("https", "http") + "/health", timeout=60)
        assert ask(server, trust, "/health") == 200, "and nobody else suffers from it"
        assert server.terminate() == 0


def test_certificates_that_do_not_work_are_one_line_before_anything_is_loaded(
    certificates: Certificates, tmp_path: Path
) -> None:
    def complaint(*flags: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "octavo.cli.main", "serve", "--port", "0", *flags],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        return line

    server, key = str(certificates.server), str(certificates.server_key)
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("no certificate")
    assert "--ssl-certfile /nowhere.pem cannot be read" in complaint("--ssl-certfile", "/nowhere.pem")
    assert "do not work (KEY_VALUES_MISMATCH)" in complaint(
        "--ssl-certfile", server, "--ssl-keyfile", str(certificates.client_key)
    )
    assert "holds no certificates" in complaint(
        "--ssl-certfile", server, "--ssl-keyfile", key, "--ssl-ca-certs", str(rubbish)
    )


def status_of(server: Server, method: str, path: str, body: bytes | None = None, **headers: str) -> int:
    address = server.base.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=120)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        return connection.getresponse().status
    finally:
        connection.close()


def test_web_pages_of_others_get_nothing_from_a_server_without_a_key(server: Server) -> None:
    body, port = b'{"prompt": "a", "max_tokens": 1}', server.base.rpartition(":")[2]
    json_type, own = "application/json", f"http://127.0.0.1:{port}"
    before = server.metric("octavo:forbidden_requests_total")
    for status, headers in (
        (200, {}),
        (200, {"Content_Type": "application/x-www-form-urlencoded"}),  # curl -d
        (200, {"Host": f"localhost:{port}"}),  # through a tunnel
        (200, {"Origin": own, "Content_Type": json_type}),
        (200, {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}", "Content_Type": json_type}),
        (200, {"Sec_Fetch_Site": "same-origin", "Origin": own, "Content_Type": json_type}),
        (403, {"Host": "rebind.evil.example"}),
        (403, {"Host": "rebind.evil.example", "Origin": "http://rebind.evil.example", "Content_Type": json_type}),
        (403, {"Origin": "http://evil.example", "Content_Type": "text/plain"}),
        (403, {"Origin": "http://evil.example", "Content_Type": json_type}),
        (403, {"Origin": own, "Content_Type": "text/plain"}),
        (403, {"Sec_Fetch_Site": "cross-site", "Content_Type": "multipart/form-data; boundary=a"}),
    ):
        assert status_of(server, "POST", "/v1/completions", body, **headers) == status, headers
    assert status_of(server, "GET", "/play", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate") == 200
    assert status_of(server, "GET", "http://rebind.evil.example/v1/models") == 403
    assert server.metric("octavo:forbidden_requests_total") - before == 7
    malformed = server.metric("octavo:malformed_requests_total")
    for sent in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000):
        with socket.create_connection(("127.0.0.1", int(port)), 120) as connection:
            connection.sendall(sent)
            assert connection.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 431")
    with socket.create_connection(("127.0.0.1", int(port)), 120) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 400"
    assert server.metric("octavo:malformed_requests_total") - malformed == 2


def test_every_line_of_a_json_log_is_json() -> None:
    with Server(
        "--log-format", "json", "--enable-log-requests", "--kv-cache-memory-bytes", "64M", "--max-model-len", "256",
        "--host", "0.0.0.0",
    ) as server:  # fmt: skip
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        assert server.get("/%0a{}%1b")[0] == 404
        with socket.create_connection(("127.0.0.1", int(server.base.rpartition(":")[2])), 120) as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            connection.recv(12)
        assert server.terminate() == 0
    lines = [json.loads(line) for line in server.lines]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    messages = [line["message"] for line in lines]
    for words in (
        "ready after",
        "a request was refused: not valid HTTP",
        "no API key",
        "stopped",
        "POST /v1/completions 200",
    ):
        assert any(words in message for message in messages), (words, messages)
    assert {line.get("path") for line in lines} >= {"/\n{}\x1b", "/v1/completions"}


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        (["--log-format", "json", "--port", "0", "/nowhere"], {}, ["/nowhere"]),
        (["--log_format=json", "--prot", "1"], {}, ["unknown flag --prot; did you mean --port?"]),
        (["--log-format", "json", "--port", "many"], {}, ["--port: 'many' is not a whole number"]),
        (["--enable-chunked-prefill", "/nowhere"], {"OCTAVO_LOG_FORMAT": "json", "OCTAVO_PROT": "1"},
         ["--enable-chunked-prefill has no effect", "OCTAVO_PROT is not known", "/nowhere"]),
        (["--config", "FILE", "--enable-sleep-mode"], {}, ["--enable-sleep-mode is not offered"]),
    ],
)  # fmt: skip
def test_a_mistake_at_the_start_is_json_too(
    flags: list[str], environ: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text("log-format: json\n")
    named = [str(file) if flag == "FILE" else flag for flag in flags]
    command = [sys.executable, "-m", "octavo.cli.main", "serve", *named]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environ})
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 2 and lines[-1]["level"] == "error"
    assert all(part in line["message"] for part, line in zip(words, lines, strict=True)), lines


def test_a_server_on_a_unix_socket(short_path: Path) -> None:
    path = short_path / "octavo.sock"
    with Server("--uds", str(path), "--served-model-name", "one,two", "--api-processes", "2") as server:
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=120
        ) as client:
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["one", "two"]
            body = {"model": "two", "prompt": "a", "max_tokens": 3, "temperature": 0}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == 3 and answer["model"] == "one"
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
                assert list(stream.iter_lines())[-2] == "data: [DONE]"
            found = client.get("/metrics").text
        roles = set(re.findall(r'process_resident_memory_bytes\{process="(\w+)"', found))
        assert roles == {"supervisor", "api", "engine"} and found.count("process_open_fds{") == 4
        server.process.terminate()
        assert server.process.wait(60) == 0
    assert not path.exists()
