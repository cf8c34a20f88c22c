"""Malformed and hostile HTTP requests, generated from a seed: as bytes, with the kind of answer that may follow."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks.torture.hostile_bodies import ROUTES, forms, numbers, upload, wrong_types

_POSTS = tuple(ROUTES)
_OBJECTS = (
    "/v1/files/{}", "/v1/files/{}/content", "/v1/batches/{}", "/v1/batches/{}/cancel", "/v1/responses/{}", "/v1/responses/{}/cancel",
    "/v1/responses/{}/input_items?limit={}", "/v1/stream/{}", "/v1/stream/{}?from={}", "/v1/requests/{}", "/v1/models/{}",
    "/v1/files?after={}&limit={}", "/v1/batches?after={}&limit={}", "/v1/requests?limit={}", "/v1/live/pages/{}", "/pages/{}",
)  # fmt: skip
_IDS = (
    "x",
    "%00",
    "..%2f..%2fetc%2fpasswd",
    "%ff%fe",
    "-1",
    "9" * 50,
    "a" * 3000,
    "%F0%9F%8C%B3",
    "file-",
    "''",
    "NaN",
    "",
)
Waits = Literal["answer", "status", "nothing"]


@dataclass(frozen=True, slots=True)
class Hostile:
    kind: str
    request: bytes
    waits: Waits = "answer"
    """What must follow. "answer": a whole answer, and the connection stays usable. "status": at least a status line; the connection is
    unusable afterwards. "nothing": the request is incomplete, or its client disconnects."""


def hostile(dice: random.Random, ids: list[str]) -> Hostile:
    """`ids`: ids of objects that answers have named."""
    (kind,) = dice.choices(list(KINDS), [weight for weight, _ in KINDS.values()])
    return KINDS[kind][1](dice, ids)


def _post(body: bytes, kind: str, path: str = "/v1/completions", headers: bytes = b"") -> Hostile:
    head = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\n%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return Hostile(kind, head % (path.encode(), headers, len(body)) + body)


def _bad_json(dice: random.Random, ids: list[str]) -> Hostile:
    body = bytearray(
        b'{"prompt": "a", "max_tokens": 1, "stop": ["x", "y"], "temperature": 0.5, "input": "a", "messages": []}'
    )
    for _ in range(dice.randrange(1, 6)):
        at = dice.randrange(len(body))
        body[at : at + dice.randrange(3)] = bytes(dice.choices(b'{}[]",:0eE+-.\\nul\x00\xff', k=dice.randrange(4)))
    # The body may still be a valid request by chance: then it must be a small one.
    return _post(bytes(body).replace(b"1", b"0"), "bad JSON", dice.choice(_POSTS))


def _deep(dice: random.Random, ids: list[str]) -> Hostile:
    depth = dice.choice([10, 1000, 50_000])
    opening, closing = dice.choice([(b"[", b"]"), (b'{"a":', b"}")])
    name = dice.choice([b"prompt", b"input", b"messages", b"metadata", b"tools"])
    body = b'{"' + name + b'": ' + opening * depth + b"1" + closing * depth + b"}"
    return _post(body, "deep nesting", dice.choice(_POSTS))


def _numbers(dice: random.Random, ids: list[str]) -> Hostile:
    path, body = numbers(dice)
    return _post(body, "huge numbers", path)


def _utf8(dice: random.Random, ids: list[str]) -> Hostile:
    wrong = dice.choice([b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\\ud800", b"\xe2\x28\xa1"])
    text = b'"a' + wrong + b'"'
    body = b'{"prompt": %b, "input": %b, "max_tokens": 0, "messages": [{"role": "user", "content": %b}]}' % (
        text,
        text,
        text,
    )
    return _post(body, "wrong UTF-8", dice.choice(_POSTS))


def _headers(dice: random.Random, ids: list[str]) -> Hostile:
    head = dice.choice([
        b"X: " + b"a" * dice.choice([100, 70_000]) + b"\r\n",
        b"".join(b"X-%d: y\r\n" % i for i in range(dice.choice([10, 2000]))),
        b"Authorization: Bearer \xff\xfe\r\n",
        b"X-Request-Id: " + b"\xc3\xa9" * 50 + b"\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Length: 7\r\n",
        b"Content-Length: -1\r\n",
        b"Expect: 100-continue\r\n",
        b"Range: bytes=0-\r\n",
        b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
        b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n",
        b"Traceparent: 00-\xff-zz\r\n",
        b"Last-Event-ID: \xff\r\n",
        b"Bad Header: x\r\n",
        b": nameless\r\n",
    ])  # fmt: skip
    made = _post(b'{"prompt": ""}', "header abuse", headers=head)
    return Hostile(made.kind, made.request, "status")


def _lines(dice: random.Random, ids: list[str]) -> Hostile:
    line = dice.choice([
        b"GET / HTTP/9.9", b"G\x00T / HTTP/1.1", b"GET  HTTP/1.1", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1", b"GET /%00%2e%2e%2f HTTP/1.1", b"GET http://other/ HTTP/1.1", b"POST /v1/completions",
        b"GET /\xff\xfe HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"GET * HTTP/1.1", b"OPTIONS * HTTP/1.1", b"GET //// HTTP/1.0",
    ])  # fmt: skip
    return Hostile("wrong lines", line + b"\r\nHost: 127.0.0.1\r\n\r\n", "status")


def _methods(dice: random.Random, ids: list[str]) -> Hostile:
    method, path = (
        dice.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"]),
        dice.choice((*_POSTS, "/v1/files", "/v1/models", "/nowhere", "/v1/../v1")),
    )
    return Hostile("wrong methods", f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())


def _objects(dice: random.Random, ids: list[str]) -> Hostile:
    """A request for an object by its id: an unknown one, a hostile one, or one that exists."""
    path = dice.choice(_OBJECTS)
    names = [dice.choice((*_IDS, *ids[-6:])) for _ in range(path.count("{}"))]
    method = "POST" if path.endswith("cancel") else dice.choice(["GET", "GET", "DELETE"])
    return Hostile(
        "objects", f"{method} {path.format(*names)} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n".encode()
    )


def _types(dice: random.Random, ids: list[str]) -> Hostile:
    path, body = wrong_types(dice, ids)
    return _post(body, "wrong types", path)


def _forms(dice: random.Random, ids: list[str]) -> Hostile:
    path, body = forms(dice)
    return _post(body, "schemas, grammars, tools", path)


def _files(dice: random.Random, ids: list[str]) -> Hostile:
    kind, body = upload(dice)
    head = b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
    return Hostile("files", head % (kind, len(body)) + body)


def _cut(dice: random.Random, ids: list[str]) -> Hostile:
    """A body that is cut short: its client disconnects. (Slow bodies: fuzz.py.)"""
    made = _post(b'{"prompt": "' + b"a" * 5000 + b'"}', "cut bodies", dice.choice(_POSTS))
    return Hostile(made.kind, made.request[: dice.randrange(20, len(made.request))], "nothing")


def _left(dice: random.Random, ids: list[str]) -> Hostile:
    """A stream whose client disconnects at once."""
    path, body = dice.choice([
        ("/v1/completions", b'{"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": true, "stream": true}'),
        ("/v1/responses", b'{"input": "Once upon a time", "max_output_tokens": 200, "stream": true, "store": false}'),
        ("/v1/messages", b'{"messages": [{"role": "user", "content": "Tell"}], "max_tokens": 200, "stream": true}'),
    ])  # fmt: skip
    return Hostile("SSE disconnects", _post(body, "", path).request, "nothing")


KINDS: dict[str, tuple[float, Callable[[random.Random, list[str]], Hostile]]] = {
    "bad JSON": (1, _bad_json),
    "deep nesting": (1, _deep),
    "huge numbers": (1, _numbers),
    "wrong UTF-8": (1, _utf8),
    "header abuse": (1, _headers),
    "wrong lines": (1, _lines),
    "wrong methods": (1, _methods),
    "objects": (1, _objects),
    "wrong types": (2, _types),
    "schemas, grammars, tools": (0.4, _forms),  # some take a second to compile
    "files": (0.5, _files),
    "cut bodies": (1, _cut),
    "SSE disconnects": (1, _left),
}
"""Weight, and the function that makes it."""
