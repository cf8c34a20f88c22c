"""Malformed and hostile HTTP requests, made by dice from a seed: as bytes, with what may come back.
Knows nothing of connections."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/nowhere",
    "/v1/../v1",
)


@dataclass(frozen=True, slots=True)
class Hostile:
    kind: str
    request: bytes
    is_whole: bool = True  # False: it is not a complete request: no answer can be waited for


def hostile(dice: random.Random) -> Hostile:
    kind = dice.choice(list(KINDS))
    return KINDS[kind](dice)


def _post(body: bytes, kind: str, path: str = "/v1/completions", headers: bytes = b"") -> Hostile:
    head = b"POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return Hostile(kind, head % (path.encode(), headers, len(body)) + body)


def _bad_json(dice: random.Random) -> Hostile:
    body = bytearray(b'{"prompt": "a", "max_tokens": 1, "stop": ["x", "y"], "temperature": 0.5}')
    for _ in range(dice.randrange(1, 6)):
        at = dice.randrange(len(body))
        body[at : at + dice.randrange(3)] = bytes(dice.choices(b'{}[]",:0eE+-.\\nul\x00\xff', k=dice.randrange(4)))
    # It may still be a request by chance: then it must be a small one.
    return _post(bytes(body).replace(b"1", b"0"), "bad JSON")


def _deep(dice: random.Random) -> Hostile:
    depth = dice.choice([10, 1000, 50_000])
    opening, closing = dice.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return _post(
        b'{"prompt": ' + opening * depth + b"1" + closing * depth + b"}", "deep nesting", dice.choice(_PATHS[:4])
    )


def _numbers(dice: random.Random) -> Hostile:
    name = dice.choice(
        ["max_tokens", "n", "seed", "top_k", "temperature", "logprobs", "deadline_ms", "min_tokens", "stop_token_ids"]
    )
    number = dice.choice(
        ["1e999", "-1e999", "9" * 400, "-" + "9" * 40, "NaN", "Infinity", "0." + "1" * 5000, "1e-400", "-1", "2.5"]
    )
    return _post(f'{{"prompt": "a", "stop": "b", "{name}": {number}, "max_tokens": 0}}'.encode(), "huge numbers")


def _utf8(dice: random.Random) -> Hostile:
    wrong = dice.choice([b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\\ud800", b"\xe2\x28\xa1"])
    return _post(b'{"prompt": "a' + wrong + b'", "max_tokens": 0}', "wrong UTF-8")


def _headers(dice: random.Random) -> Hostile:
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
        b"Bad Header: x\r\n",
        b": nameless\r\n",
    ])  # fmt: skip
    made = _post(b'{"prompt": ""}', "header abuse", headers=head)
    return Hostile(made.kind, made.request, is_whole=False)


def _lines(dice: random.Random) -> Hostile:
    line = dice.choice([
        b"GET / HTTP/9.9", b"G\x00T / HTTP/1.1", b"GET  HTTP/1.1", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1", b"GET /%00%2e%2e%2f HTTP/1.1", b"GET http://other/ HTTP/1.1", b"POST /v1/completions",
    ])  # fmt: skip
    return Hostile("wrong lines", line + b"\r\nHost: x\r\n\r\n", is_whole=False)


def _methods(dice: random.Random) -> Hostile:
    method, path = dice.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"]), dice.choice(_PATHS)
    return Hostile("wrong methods", f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


def _types(dice: random.Random) -> Hostile:
    value = dice.choice([None, True, [], {}, [[]], [None], [[-1]], [10**9], "", 5, {"a": 1}, [[1, "a"]], ["a", 1]])
    name = dice.choice(
        [
            "prompt",
            "messages",
            "input",
            "stop",
            "logit_bias",
            "stream_options",
            "model",
            "bad_words",
            "n",
            "response_format",
        ]
    )
    path = dice.choice(_PATHS[:4])
    return _post(json.dumps({"prompt": "", "messages": [], "max_tokens": 0, name: value}).encode(), "wrong types", path)


def _slow(dice: random.Random) -> Hostile:
    """A body that never comes whole."""
    made = _post(b'{"prompt": "' + b"a" * 5000 + b'"}', "slow bodies")
    return Hostile(made.kind, made.request[: dice.randrange(20, len(made.request))], is_whole=False)


def _left(dice: random.Random) -> Hostile:
    """A stream whose client leaves at once."""
    body = b'{"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": true, "stream": true}'
    return Hostile("SSE disconnects", _post(body, "").request, is_whole=False)


KINDS: dict[str, Callable[[random.Random], Hostile]] = {
    "bad JSON": _bad_json,
    "deep nesting": _deep,
    "huge numbers": _numbers,
    "wrong UTF-8": _utf8,
    "header abuse": _headers,
    "wrong lines": _lines,
    "wrong methods": _methods,
    "wrong types": _types,
    "slow bodies": _slow,
    "SSE disconnects": _left,
}
