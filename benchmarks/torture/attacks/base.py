"""What an attack is: rounds of connections, each with its bytes, and what may come back."""

import json
import random
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

MB = 2**20
HI = [{"role": "user", "content": "hi"}]
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1, "store": False},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/batches": {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"},
}
"""A valid body for each route, with an answer of one token at most."""


@dataclass(frozen=True, slots=True)
class Door:
    """Where to send, and with which keys. An empty key: the server has none."""

    port: int
    key: str = ""
    other_key: str = ""
    admin_key: str = ""
    log: str = ""  # the file of the server's log

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        key: str | None = None,
        host: str = "",
    ) -> bytes:
        """`key`: None: the right one."""
        key = self.key if key is None else key
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host or f'127.0.0.1:{self.port}'}"]
        given = {"Content-Type": "application/json"} if method == "POST" else {}
        if key:
            given["Authorization"] = f"Bearer {key}"
        if body or method == "POST":
            given["Content-Length"] = str(len(body))
        lines += [f"{name}: {value}" for name, value in {**given, **(headers or {})}.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


Then = Literal["answer", "drain", "hold", "leave", "reset"]


@dataclass(frozen=True, slots=True)
class Send:
    """One connection. `then`, after the last piece: "answer": read one whole response; "drain": read until the server closes or
    time is over; "hold": read nothing until time is over; "leave": close; "reset": close with a reset."""

    pieces: Iterable[bytes]
    then: Then = "answer"
    pause: float = 0.0  # seconds between two pieces
    shuts: bool = False  # closes its sending side after the last piece
    receive_buffer: int = 0  # bytes; 0: the system's choice
    delay: float = 0.0  # seconds before the first piece


@dataclass(slots=True)
class Answer:
    status: int = 0  # 0: none
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""  # its first megabyte
    num_sent: int = 0
    was_all_sent: bool = False
    is_closed: bool = False  # by the server, before a whole response
    seconds: float = 0.0
    waited: bool = True  # False: the client did not read

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return {}

    @property
    def id(self) -> str:
        found = self.json()
        return str(found.get("id", "none")) if isinstance(found, dict) else "none"


Strike = Generator[Sequence[Send], Sequence[Answer], None]
"""Yields the connections of a round, which run at the same time, and is sent their answers."""
Check = Callable[[Sequence[Answer], Door], str]
"""The answers of the last round → what is wrong with them; empty: nothing."""


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    strike: Callable[[Door, random.Random], Strike]
    seconds: float = 8.0  # after which its clients leave
    # Its prompts take longer than a first event may: older prompts are computed first, so a new stream waits for as long as they are there.
    is_long: bool = False
    is_flood: bool = False  # many requests: 429, and 503 with Retry-After, are proper answers
    is_cheap: bool = False  # may be repeated beside a soak
    needs: Literal["any", "key", "no key"] = "any"
    needs_gateway: bool = False  # several models on one port
    check: Check | None = None


def one(name: str, make: Callable[[Door], bytes], **options: Any) -> Attack:
    """An attack of one request."""

    def strike(door: Door, dice: random.Random) -> Strike:
        yield [Send([make(door)])]

    return Attack(name, strike, **options)


def several(name: str, make: Callable[[Door], Sequence[Send]], **options: Any) -> Attack:
    """An attack of one round of connections."""

    def strike(door: Door, dice: random.Random) -> Strike:
        yield make(door)

    return Attack(name, strike, **options)


def post(name: str, path: str, make: Callable[[], Mapping[str, Any] | bytes], **options: Any) -> Attack:
    """An attack of one POST: the fields are added to a valid body; bytes are the whole body."""

    def request(door: Door) -> bytes:
        made = make()
        body = made if isinstance(made, bytes) else dumped({**BASES[path], **made})
        return door.request("POST", path, body)

    return one(name, request, **options)


def raw_field(path: str, name: str, value: bytes) -> bytes:
    """A valid body with one field written by hand: json.dumps would take long, or could not write it."""
    rest = json.dumps({key: member for key, member in BASES[path].items() if key != name}).encode()
    return b'{"%s": %s%s' % (name.encode(), value, b", " + rest[1:] if len(rest) > 2 else b"}")


def dumped(value: Any) -> bytes:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # for schemas that are nested thousands deep
    try:
        return json.dumps(value).encode()
    finally:
        sys.setrecursionlimit(before)


def must_be(*statuses: int) -> Check:
    def check(answers: Sequence[Answer], door: Door) -> str:
        wrong = [answer.status for answer in answers if answer.status not in statuses]
        return f"{wrong[0]} instead of {' or '.join(map(str, statuses))}" if wrong else ""

    return check
