"""Loopback requests: the application answers a request from this process as if it had come over HTTP, without a socket.

They carry no key, and their body size is checked by the sender."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

INSIDE = "octavo.inside"
"""The key of a scope that was made here: no request over a socket can have it."""
FRESH = "octavo.fresh"
"""The scope key of the Source of a request that is made again (octavo.fresh)."""
RECORD = "octavo.stream_record"
"""The scope key of the StreamRecord of a stream that this request goes on with."""
OWNER = "octavo.owner"
"""The scope key of the owner of what the request makes (owners.py). Empty: the server has no keys."""


class LoopbackResponse(msgspec.Struct, frozen=True):
    status: int
    request_id: str
    retry_after: int | None
    body: bytes


def is_inside(scope: Scope) -> bool:
    """Whether this is a loopback request."""
    return INSIDE in scope


async def ask(
    app: ASGIApp, path: str, body: bytes, owner: bytes = b"", more: Mapping[str, Any] | None = None
) -> LoopbackResponse:
    """POST `body` to `path` on behalf of `owner`. `more`: of its scope. Cancelling ends the work, as a disconnecting client would."""
    chunks: list[bytes] = []
    head: dict[str, Any] = {}
    incoming = [body]

    async def receive() -> Message:
        if incoming:
            return {"type": "http.request", "body": incoming.pop(), "more_body": False}
        await asyncio.Event().wait()  # this client never disconnects: it cancels
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            head["status"] = message["status"]
            head.update((name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"])
        elif message["type"] == "http.response.body":
            chunks.append(message.get("body", b""))

    await app({**_scope(path, len(body), owner), **(more or {})}, receive, send)
    assert "status" in head, f"{path} gave no answer"
    wait = head.get("retry-after", "")
    return LoopbackResponse(
        head["status"], head["x-request-id"], int(wait) if wait.isdigit() else None, b"".join(chunks)
    )


def _scope(path: str, num_bytes: int, owner: bytes) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(num_bytes).encode())],
        "client": None,
        "server": None,
        INSIDE: True,
        OWNER: owner,
    }
