"""Attacks by connections: silent, slow, half-closed, and readers that do not read."""

import random

from benchmarks.torture.attacks.base import HI, MB, Attack, Door, Send, Strike, dumped, several

_LONG = dumped({"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True})
_LOGPROBS = dumped(
    {"messages": HI, "max_tokens": 2000, "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20}
)


def _stream(door: Door, body: bytes = _LONG, path: str = "/v1/completions") -> bytes:
    return door.request("POST", path, body)


def _held_bodies(door: Door) -> list[Send]:
    request = door.request("POST", "/tokenize", b"a" * 31 * MB)
    return [Send([request[: 24 * MB]], "hold") for _ in range(8)]


def _slow_bodies(door: Door) -> list[Send]:
    request = door.request("POST", "/tokenize", b"a" * MB)
    head = request.index(b"\r\n\r\n") + 4
    pieces = [request[:head], *(request[at : at + 1] for at in range(head, head + 30))]
    return [Send(pieces, "hold", pause=0.1) for _ in range(200)]


def _leaving(door: Door, dice: random.Random) -> Strike:
    """Clients that ask for a stream and reset the connection, wave after wave."""
    for _ in range(10):
        yield [Send([_stream(door)], "reset", delay=dice.random() / 20) for _ in range(30)]


ATTACKS = [
    several("connections-1000-silent", lambda door: [Send([], "hold") for _ in range(1000)], seconds=4.0, is_flood=True),
    several("connections-half-closed-100", lambda door: [Send([_stream(door)], "hold", shuts=True) for _ in range(100)],
            seconds=3.0, is_flood=True),
    several("connections-unread-streams-16",
            lambda door: [Send([_stream(door)], "hold", receive_buffer=4096) for _ in range(16)], seconds=4.0, is_flood=True),
    several("connections-unread-logprobs-8",
            lambda door: [Send([_stream(door, _LOGPROBS, "/v1/chat/completions")], "hold", receive_buffer=4096) for _ in range(8)],
            seconds=4.0, is_flood=True),
    several("connections-slow-bodies-200", _slow_bodies, seconds=4.0, is_flood=True),
    several("connections-held-bodies-8x24mb", _held_bodies, seconds=4.0, is_flood=True),
    Attack("connections-300-resets", _leaving, is_flood=True),
    several("connections-live-100", lambda door: [Send([door.request("GET", "/v1/live")], "drain") for _ in range(100)],
            seconds=3.0, is_flood=True),
    several("connections-unread-live-30", lambda door: [Send([door.request("GET", "/v1/live")], "hold", receive_buffer=4096) for _ in range(30)],
            seconds=3.0, is_flood=True),
]  # fmt: skip
