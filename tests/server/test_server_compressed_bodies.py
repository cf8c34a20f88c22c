"""Request bodies with a Content-Encoding: inflated within the limit of a body, or refused."""

import gzip
import json
import sys
import types
import zlib
from collections.abc import Callable

import httpx
import pytest

from octavo.errors import InvalidRequest
from octavo.server.http import inflate
from octavo.server.http.inflate import PIECE, BrotliInflater, Inflater, ZlibInflater, encodings
from tests.server.conftest import Serve, error_of

BODY = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


async def post(client: httpx.AsyncClient, encoding: str, content: bytes) -> httpx.Response:
    return await client.post("/v1/completions", content=content, headers={"content-encoding": encoding})


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("X-GZIP", gzip.compress(BODY, mtime=0)),
        ("gzip", gzip.compress(BODY[:9], mtime=0) + gzip.compress(BODY[9:], mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", raw_deflate(BODY)),
        ("identity", BODY),
    ],
)
async def test_a_compressed_body_is_read(serve: Serve, encoding: str, content: bytes) -> None:
    answer = await post(serve(), encoding, content)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("encoding", ["zstd", "gzip, gzip", "compress", "x" * 500])
async def test_other_encodings_are_refused(serve: Serve, encoding: str) -> None:
    answer = await post(serve(), encoding, BODY)
    error = error_of(answer, 415)
    assert error["code"] == "unsupported_encoding" and "send the body as gzip" in error["message"]
    assert answer.headers["accept-encoding"] == ", ".join((*encodings(), "identity")) and len(error["message"]) < 300


@pytest.mark.parametrize(
    ("encoding", "content", "problem"),
    [
        ("gzip", BODY, "incorrect header check"),
        ("gzip", b"", "it is empty"),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9], "it ends early"),
        ("gzip", gzip.compress(BODY, mtime=0)[:-4] + b"abcd", "incorrect length check"),
        ("gzip", gzip.compress(BODY, mtime=0) + b"more", "something follows its end"),
        ("deflate", zlib.compress(BODY) + zlib.compress(BODY), "something follows its end"),
        ("deflate", b"\xff\xff\xff", "invalid block type"),
    ],
)
async def test_a_damaged_body_is_named(serve: Serve, encoding: str, content: bytes, problem: str) -> None:
    message = error_of(await post(serve(), encoding, content), 400)["message"]
    assert message == f"the request body is not valid {encoding} (Content-Encoding): {problem}"


async def test_the_limit_is_of_the_inflated_body(serve: Serve) -> None:
    client = serve(max_body_bytes=2**20)
    bomb = gzip.compress(b" " * 2**26, 9, mtime=0)
    assert len(bomb) < 2**20
    error = error_of(await post(client, "gzip", bomb), 413)
    assert error["message"] == "the request body, inflated, is over the limit of 1048576 bytes (--max-body-bytes)"
    padded = BODY + b" " * (2**20 - len(BODY))
    assert (await post(client, "gzip", gzip.compress(padded, mtime=0))).status_code == 200


async def test_no_piece_is_larger_than_its_limit() -> None:
    inflater: Inflater = ZlibInflater("gzip")
    inflater.feed(gzip.compress(b"x" * 5_000_000, mtime=0), is_last=True)
    sizes = []
    while not inflater.is_over:
        sizes.append(len(inflater.take()))
    assert max(sizes) <= PIECE and sum(sizes) == inflater.num_bytes == 5_000_000


@pytest.mark.parametrize(
    "content", [gzip.compress(BODY, mtime=0), gzip.compress(BODY[:5], mtime=0) + gzip.compress(BODY[5:], mtime=0)]
)
def test_any_cut_of_the_input_gives_the_same(content: bytes) -> None:
    for cut in range(len(content) + 1):
        inflater, found = ZlibInflater("gzip"), b""
        for part, is_last in ((content[:cut], False), (content[cut:], True)):
            inflater.feed(part, is_last)
            while piece := inflater.take():
                found += piece
        assert found == BODY and inflater.is_over


def test_an_ended_stream_takes_nothing_more() -> None:
    inflater: Inflater = ZlibInflater("deflate")
    inflater.feed(zlib.compress(b"a"), is_last=False)
    assert inflater.take() == b"a" and inflater.take() == b"" and not inflater.is_over
    inflater.feed(b"b", is_last=True)
    with pytest.raises(InvalidRequest, match="something follows"):
        inflater.take()


# ── brotli: an optional package ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_old", [False, True])
async def test_without_its_package_brotli_is_refused_by_name(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    old = types.SimpleNamespace(Decompressor=type("Decompressor", (), {}))  # as before brotli 1.2
    monkeypatch.setitem(sys.modules, "brotli", old if is_old else None)
    inflate.encodings.cache_clear()
    try:
        answer = await post(serve(), "br", BODY)
    finally:
        inflate.encodings.cache_clear()
    error = error_of(answer, 415)
    assert "pip install 'octavo[brotli]'" in error["message"] and "send the body as gzip or deflate" in error["message"]
    assert answer.headers["accept-encoding"] == "gzip, deflate, identity"


@pytest.fixture
def brotli() -> types.ModuleType:
    module: types.ModuleType = pytest.importorskip("brotli", minversion="1.2")
    return module


async def test_a_brotli_body_is_read(serve: Serve, brotli: types.ModuleType) -> None:
    answer = await post(serve(), "br", brotli.compress(BODY))
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0


async def test_the_limit_is_of_the_inflated_brotli(serve: Serve, brotli: types.ModuleType) -> None:
    client = serve(max_body_bytes=2**20)
    bomb = brotli.compress(b" " * 2**26)
    assert len(bomb) < 1000
    error = error_of(await post(client, "br", bomb), 413)
    assert error["message"] == "the request body, inflated, is over the limit of 1048576 bytes (--max-body-bytes)"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: b"", "it is empty"),
        (lambda data: data[:-9], "it ends early"),
        (lambda data: data + b"more", "it is damaged, or something follows its end"),
        (lambda data: b"\xff" * 40, "it is damaged, or something follows its end"),
    ],
)
async def test_a_damaged_brotli_body_is_named(
    serve: Serve, brotli: types.ModuleType, change: Callable[[bytes], bytes], problem: str
) -> None:
    message = error_of(await post(serve(), "br", change(brotli.compress(BODY))), 400)["message"]
    assert message == f"the request body is not valid br (Content-Encoding): {problem}"


def test_no_brotli_piece_is_larger_than_its_limit(brotli: types.ModuleType) -> None:
    inflater = BrotliInflater()
    inflater.feed(brotli.compress(b"x" * 5_000_000), is_last=True)
    sizes = []
    while not inflater.is_over:
        sizes.append(len(inflater.take()))
    assert max(sizes) <= PIECE and sum(sizes) == inflater.num_bytes == 5_000_000


def test_any_cut_of_brotli_input_gives_the_same(brotli: types.ModuleType) -> None:
    content = brotli.compress(BODY)
    for cut in range(len(content) + 1):
        inflater, found = BrotliInflater(), b""
        for part, is_last in ((content[:cut], False), (content[cut:], True)):
            inflater.feed(part, is_last)
            while piece := inflater.take():
                found += piece
        assert found == BODY and inflater.is_over
