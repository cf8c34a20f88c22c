"""Attacks on the gateway of several models: names, loads, waiting, and what it reads before it knows the model. `chat` is loaded and has
bystanders; `tiny-a` and `tiny-b` take turns in the one other place."""

import gzip
import json
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.torture.attacks.base import MB, Attack, Door, Send, Strike, must_be, one, several
from benchmarks.torture.house import TINY

SHARE = 1.0
"""Of the largest body: a test that only builds the attacks needs a small one."""
_ROUTE = "/v1/completions"


def _ask(door: Door, model: Any, **fields: Any) -> bytes:
    return door.request("POST", _ROUTE, json.dumps({"model": model, "prompt": "a", "max_tokens": 1, **fields}).encode())


def _unknown(door: Door) -> Sequence[Send]:
    return [Send([b"".join(_ask(door, f"model-{at}-{n}") for n in range(8))], then="drain") for at in range(250)]


def _thrash(door: Door, dice: random.Random) -> Strike:
    """One client has two models loaded in turn, as fast as they come."""
    for at in range(40):
        yield [Send([_ask(door, TINY[at % 2])])]


def _storm(then: Any, **fields: Any) -> Any:
    def make(door: Door) -> Sequence[Send]:
        return [Send([_ask(door, TINY[at % 2], **fields)], then=then) for at in range(400)]

    return make


def _come_and_go(door: Door, dice: random.Random) -> Strike:
    """Waits for a model that is not loaded, left again and again: the load must not begin anew for each."""
    for _ in range(10):
        yield [Send([_ask(door, TINY[1], stream=True)], then="reset") for _ in range(50)]


def _large(door: Door) -> Sequence[Send]:
    body = b'{"prompt": "' + b"a" * (7 * MB) + b'", "model": "none"}'
    return [Send([door.request("POST", _ROUTE, body)]) for _ in range(24)]


def _slow(door: Door) -> Sequence[Send]:
    head = door.request("POST", _ROUTE, b"", {"Content-Length": str(MB)})
    return [Send([head, *[b" "] * 60], then="hold", pause=0.2) for _ in range(300)]


def _slow_readers(door: Door) -> Sequence[Send]:
    asked = _ask(door, "tiny-a", max_tokens=1500, stream=True, ignore_eos=True)
    return [Send([asked], then="hold", receive_buffer=4096) for _ in range(64)]


def _bomb(door: Door) -> bytes:
    packed = gzip.compress(b'{"model": "chat", "prompt": "' + b"a" * int(1024 * MB * SHARE), 9)
    return door.request("POST", _ROUTE, packed, {"Content-Encoding": "gzip"})


def _form(size: int) -> bytes:
    return (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; '
        b'name="file"; filename="a"\r\n\r\n' + b"x" * size + b"\r\n--b--\r\n"
    )


def _files(door: Door) -> Sequence[Send]:
    request = door.request("POST", "/v1/files", _form(12 * MB), {"Content-Type": "multipart/form-data; boundary=b"})
    return [Send([request]) for _ in range(12)]


def _long_first_line(door: Door, dice: random.Random) -> Strike:
    """The gateway reads the first line of a batch for its model."""
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    (file,) = yield [Send([door.request("POST", "/v1/files", _form(100 * MB), form)])]
    start = {"input_file_id": file.id, "endpoint": _ROUTE, "completion_window": "24h"}
    made = yield [Send([door.request("POST", "/v1/batches", json.dumps(start).encode())]) for _ in range(8)]
    yield [Send([door.request("POST", f"/v1/batches/{each.id}/cancel")]) for each in made] + [
        Send([door.request("DELETE", f"/v1/files/{file.id}")])
    ]


def _asked_of_all(path: str, number: int) -> Any:
    def make(door: Door) -> Sequence[Send]:
        return [Send([door.request("GET", path.replace("N", f"{at:024d}"))]) for at in range(number)]

    return make


def _deep(door: Door) -> bytes:
    return door.request("POST", _ROUTE, b'{"model": ' + b"[" * 500_000 + b"]" * 500_000 + b"}")


def _many_models(door: Door) -> bytes:
    return door.request("POST", _ROUTE, b"{" + b'"model": "none", ' * 400_000 + b'"prompt": "a"}')


def _sleepers(door: Door) -> Sequence[Send]:
    return [Send([door.request("POST", f"/sleep?model={TINY[at % 2]}", b"{}")]) for at in range(100)]


GATEWAY: dict[str, Any] = {"needs_gateway": True}
ATTACKS = [
    several("gateway-2000-unknown-models", _unknown, is_flood=True, **GATEWAY),
    one("gateway-name-of-7-mb", lambda door: _ask(door, "x" * (7 * MB)), check=must_be(404), **GATEWAY),
    one("gateway-name-in-the-query", lambda door: door.request("GET", f"/v1/live?model={'x' * 30_000}"), check=must_be(404), **GATEWAY),
    one("gateway-name-is-deep", _deep, check=must_be(400), **GATEWAY),
    one("gateway-400000-names", _many_models, **GATEWAY),
    Attack("gateway-load-thrash", _thrash, seconds=25.0, is_flood=True, **GATEWAY),
    several("gateway-wake-up-storm", _storm("answer"), seconds=25.0, is_flood=True, **GATEWAY),
    several("gateway-wake-up-storm-of-streams", _storm("answer", stream=True), seconds=25.0, is_flood=True, **GATEWAY),
    several("gateway-wake-up-storm-that-leaves", _storm("reset"), is_flood=True, **GATEWAY),
    Attack("gateway-waits-that-come-and-go", _come_and_go, seconds=15.0, is_flood=True, **GATEWAY),
    several("gateway-24-bodies-of-7-mb", _large, seconds=15.0, is_flood=True, **GATEWAY),
    several("gateway-300-slow-bodies", _slow, seconds=12.0, **GATEWAY),
    several("gateway-64-slow-readers", _slow_readers, seconds=20.0, is_flood=True, **GATEWAY),
    one("gateway-gzip-of-a-gigabyte", _bomb, check=must_be(413), **GATEWAY),
    several("gateway-12-files-of-12-mb", _files, seconds=15.0, is_flood=True, **GATEWAY),
    Attack("gateway-first-line-of-100-mb", _long_first_line, seconds=25.0, **GATEWAY),
    several("gateway-ids-asked-of-all", _asked_of_all("/v1/responses/resp_N", 400), is_flood=True, check=must_be(404, 429), **GATEWAY),
    several("gateway-requests-asked-of-all", _asked_of_all("/v1/requests/req-N", 400), is_flood=True, check=must_be(404, 429), **GATEWAY),
    several("gateway-metrics-asked-of-all", _asked_of_all("/metrics", 60), seconds=20.0, is_flood=True, **GATEWAY),
    several("gateway-models-asked-of-all", _asked_of_all("/v1/models", 200), is_flood=True, **GATEWAY),
    several("gateway-journeys-asked-of-all", _asked_of_all("/v1/requests?limit=1000", 60), seconds=20.0, is_flood=True, **GATEWAY),
    several("gateway-sleep-without-the-right", _sleepers, needs="key", check=must_be(403), **GATEWAY),
]  # fmt: skip
