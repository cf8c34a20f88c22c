"""Attacks on uploads, batches and what is read back by id."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.torture.attacks.base import HI, MB, Answer, Attack, Door, Send, Strike, dumped, one, several
from benchmarks.torture.attacks.grammars import chain_of_any_of

_BOUNDARY = "octavo-torture"
_PURPOSE = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'.encode()
_FILE = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'.encode()
_END = f"\r\n--{_BOUNDARY}--\r\n".encode()


def _form(door: Door, body: bytes, boundary: str = _BOUNDARY) -> bytes:
    return door.request("POST", "/v1/files", body, {"Content-Type": f"multipart/form-data; boundary={boundary}"})


def _upload(door: Door, content: bytes) -> bytes:
    return _form(door, _PURPOSE + _FILE + content + _END)


def _sized(door: Door, num_bytes: int) -> Iterator[bytes]:
    """An upload of so many bytes, which are made as they are sent."""
    start, piece = _PURPOSE + _FILE, b"a" * 255 + b"\n"
    head = door.request("POST", "/v1/files", b"", {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"})
    yield head.replace(b"Content-Length: 0", b"Content-Length: %d" % (len(start) + num_bytes + len(_END))) + start
    for _ in range(num_bytes // MB):
        yield piece * (MB // len(piece))
    yield _END


def _part_headers(door: Door) -> Iterator[bytes]:
    yield _form(door, b"").replace(b"Content-Length: 0", b"Content-Length: %d" % (60 * MB)) + _FILE[:-2]
    for _ in range(59):
        yield b"X-Filler: " + b"a" * (MB - 12) + b"\r\n"


def _batch(name: str, content: Callable[[], bytes], **options: Any) -> Attack:
    """Upload, start a batch, look at it for a while, cancel it and delete its file."""

    def strike(door: Door, dice: random.Random) -> Strike:
        (uploaded,) = yield [Send([_upload(door, content())])]
        if uploaded.status != 200:
            return
        body = {"input_file_id": uploaded.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        (made,) = yield [Send([door.request("POST", "/v1/batches", dumped(body))])]
        for _ in range(6):
            (seen,) = yield [Send([door.request("GET", f"/v1/batches/{made.id}")], delay=0.5)]
            if not isinstance(found := seen.json(), dict) or found.get("status") in ("completed", "failed", "expired"):
                break
        yield [Send([door.request("POST", f"/v1/batches/{made.id}/cancel", b"")])]
        yield [Send([door.request("DELETE", f"/v1/files/{uploaded.id}")])]

    return Attack(name, strike, **{"seconds": 15.0, **options})


def _line(number: int, **fields: Any) -> bytes:
    body = {"messages": HI, "max_tokens": 1, **fields}
    line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return dumped(line) + b"\n"


def _chain_line(number: int) -> bytes:
    schema = chain_of_any_of(1050 + number)
    return _line(number, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def _conversation(door: Door, dice: random.Random) -> Strike:
    """A long chain of responses, each the continuation of the last."""
    previous: dict[str, str] = {}
    for _ in range(40):
        body = {"input": "once upon a time " * 10, "max_output_tokens": 1, **previous}
        (answer,) = yield [Send([door.request("POST", "/v1/responses", dumped(body))])]
        if answer.status != 200:
            return
        previous = {"previous_response_id": answer.id}


def _stored(door: Door, dice: random.Random) -> Strike:
    """Large responses that are stored: the store must stay within its limit."""
    body = dumped({"input": "a " * 4000, "max_output_tokens": 1, "instructions": "b " * 3000})
    yield [Send([door.request("POST", "/v1/responses", body)]) for _ in range(24)]


def _resumed(door: Door, dice: random.Random) -> Strike:
    """One resumable stream, read by 50 clients from odd places."""
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True, "stream_options": {"resumable": True}}
    (first,) = yield [Send([door.request("POST", "/v1/completions", dumped(body))])]
    name = first.headers.get("x-stream-id", "none")
    places = ["0", "1", "199", "999999999999999", "9" * 5000, "-1", "%00", "٣", "1e3", "0x10"]
    yield [Send([door.request("GET", f"/v1/stream/{name}?from={at}".encode().decode("latin-1"))]) for at in places * 5]


def _odd_ids(paths: Sequence[str]) -> Callable[[Door], list[Send]]:
    odd = [
        "x",
        "%00",
        "..%2f..%2fetc%2fpasswd",
        "%ff%fe",
        "-1",
        "9" * 50,
        "a" * 8000,
        "file-" + "0" * 32,
        "%0d%0aX: y",
        "*",
        "a" * 60_000,
    ]
    return lambda door: [Send([door.request("GET", path.replace("{}", name))]) for path in paths for name in odd]


def _loop(door: Door, dice: random.Random, paths: Sequence[str], count: int) -> Strike:
    for _ in range(count):
        yield [Send([door.request("GET", path)]) for path in paths]


def _many_parts(count: int) -> bytes:
    return b"".join(
        b'--%s\r\nContent-Disposition: form-data; name="n%d"\r\n\r\nv\r\n' % (_BOUNDARY.encode(), at) for at in range(count)
    )  # fmt: skip


def _few(answers: Sequence[Answer], door: Door) -> str:
    wrong = [answer.status for answer in answers if answer.status >= 400]
    return f"{wrong[0]} instead of 200" if wrong else ""


ATTACKS = [
    one("form-100000-parts", lambda door: _form(door, _many_parts(100_000) + _END)),
    several("form-60mb-of-part-headers", lambda door: [Send(_part_headers(door))]),
    one("form-30mb-part-header-name", lambda door: _form(door, _FILE[:-2] + b"X" * 30 * MB)),
    one("form-30mb-disposition", lambda door: _form(
        door, _PURPOSE + _FILE[:-4] + b'; x="' + b"a;" * 15 * MB + b'"\r\n\r\n{}' + _END)),
    one("form-without-last-boundary", lambda door: _form(door, _PURPOSE + _FILE + b"a" * 20 * MB)),
    one("form-only-boundaries", lambda door: _form(door, f"--{_BOUNDARY}\r\n".encode() * 500_000)),
    one("form-almost-boundaries", lambda door: _form(door, _PURPOSE + _FILE + b"\r\n--octavo-tortur" * MB + _END)),
    one("form-60kb-boundary", lambda door: _form(door, b"--" + b"b" * 60_000, "b" * 60_000), is_cheap=True),
    several("form-over-the-limit", lambda door: [Send(_sized(door, 210 * MB))], seconds=12.0),
    one("form-huge-filename", lambda door: _form(
        door, _PURPOSE + _FILE.replace(b"a.jsonl", b"\xf0\x9f\x98\x80" * 250_000) + b"{}" + _END)),
    _batch("batch-200000-empty-lines", lambda: b"\n" * 200_000),
    _batch("batch-60mb-of-newlines", lambda: b"\n" * 60 * MB),
    _batch("batch-one-32mb-line", lambda: _line(0, metadata="a" * 32 * 10**6)),
    _batch("batch-one-60mb-line", lambda: b"a" * 60 * MB),
    _batch("batch-chains", lambda: b"".join(map(_chain_line, range(4)))),
    _batch("batch-wrong-lists", lambda: b"".join(_line(at, stop=[1] * 1_000_000) for at in range(3))),
    _batch("batch-50000-lines", lambda: b"".join(map(_line, range(50_000)))),
    _batch("batch-unknown-members", lambda: b"{" + b",".join(b'"x%d":1' % at for at in range(1_000_000)) + b"}\n"),
    _batch("batch-same-ids", lambda: _line(1) * 20_000),
    Attack("responses-chain-40", _conversation, seconds=20.0),
    Attack("responses-stored-24", _stored, seconds=20.0, is_long=True, is_flood=True),
    Attack("stream-resumed-from-odd-places", _resumed, seconds=15.0, is_cheap=True),
    several("ids-odd", _odd_ids(["/v1/files/{}", "/v1/batches/{}", "/v1/responses/{}", "/v1/requests/{}", "/v1/stream/{}",
                                 "/v1/models/{}", "/v1/live/pages/{}"]), is_cheap=True),
    several("queries-odd", _odd_ids(["/v1/files?limit={}", "/v1/files?after={}&order={}", "/v1/batches?after={}", "/v1/requests?limit={}",
                                     "/v1/responses/x?starting_after={}&stream=true"]), is_cheap=True),
    several("last-event-ids-odd", lambda door: [
        Send([door.request("GET", "/v1/stream/x", headers={"Last-Event-ID": value})])
        for value in ("9" * 8000, "-1", "\xff", "1" * 15, "1 1")], is_cheap=True),
    Attack("loop-of-reads", lambda door, dice: _loop(
        door, dice, ["/metrics", "/v1/compat", "/openapi.json", "/v1/requests?limit=1000", "/v1/files", "/health/ready"], 20),
           is_flood=True, seconds=10.0),
    several("reads-of-metrics-100-at-once", lambda door: [Send([door.request("GET", "/metrics")]) for _ in range(100)],
            is_flood=True, check=_few),
    several("reads-of-the-document-50-at-once", lambda door: [Send([door.request("GET", "/openapi.json")]) for _ in range(50)],
            is_flood=True, check=_few),
]  # fmt: skip
