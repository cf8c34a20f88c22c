"""The benchmark's HTTP client: the URLs it accepts, and servers that answer in broken HTTP or in none.
In a whole run, each such answer is one failed request."""

import asyncio

import pytest

from octavo.cli import main
from octavo.cli.bench import serve
from octavo.cli.bench.http_stream import Client, HTTPFailure, Target
from octavo.cli.bench.serve import Sender
from octavo.errors import ConfigError, EngineUnavailable, RequestFailed


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://host:port"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL"):
        Target.parse(url)


def test_urls() -> None:
    assert Target.parse("https://host/api/v1/") == Target("host", 443, True, "/api")
    assert Target.parse("localhost:81") == Target("localhost", 81, False, "")


async def test_a_server_that_does_not_speak_http() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0\r\n")
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    client = Client(Target("127.0.0.1", server.sockets[0].getsockname()[1], False, ""))
    with pytest.raises(HTTPFailure, match="does not speak HTTP"):
        await client.get("/v1/models")
    with pytest.raises(RequestFailed):
        await serve._first_model(client, "url")
    server.close()
    with pytest.raises(EngineUnavailable):
        await serve._first_model(Client(Target("127.0.0.1", 9, False, "")), "url")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 \r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2**21 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["status", "no status", "length", "negative length", "long header", "chunk size"],
)
async def test_a_malformed_answer_is_a_failed_request(answer: bytes) -> None:
    async def garble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(garble, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    record = await Sender(Client(Target.parse(url)), main.build_parser().parse_args(["bench", "serve"]), "m").send("x")
    assert "malformed" in record.error or "does not speak HTTP" in record.error or "broke off" in record.error
    with pytest.raises(RequestFailed, match="/v1/models: the "):
        await serve._first_model(Client(Target.parse(url)), url)
    server.close()
