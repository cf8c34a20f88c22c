"""A server in memory: the real app over a scripted engine, spoken to through httpx."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from octavo.engine.build import Engine
from octavo.server.app import build_app
from octavo.text import Text
from tests.doubles import ScriptedEngine, byte_text, config
from tests.server import running

Serve = Callable[..., httpx.AsyncClient]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """serve(engine, text, **config options) → client. The app is at client.app, its Service at client.app.state.service."""
    opened: list[tuple[httpx.AsyncClient, ScriptedEngine]] = []

    def start(engine: ScriptedEngine | None = None, text: Text | None = None, **options: Any) -> httpx.AsyncClient:
        engine = engine or ScriptedEngine()
        app = build_app(engine, text or byte_text(), config(**options), "byte-model")
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")
        client.app = app  # type: ignore[attr-defined]
        opened.append((client, engine))
        return client

    yield start
    for client, engine in opened:
        engine.close()
        client.app.state.service.compiler.close()  # type: ignore[attr-defined]
        client.app.state.service.tenants.close()  # type: ignore[attr-defined]
        await client.aclose()


@pytest.fixture
async def served() -> AsyncIterator[Callable[..., running.Served]]:
    """served(engine, **config options) → a server over the real engine loop."""
    opened: list[running.Served] = []

    def start(engine: Engine | None = None, **options: Any) -> running.Served:
        opened.append(running.Served(engine or running.engine(), **options))
        return opened[-1]

    yield start
    for one in opened:
        await one.http.aclose()
        one.app.state.service.compiler.close()
        one.app.state.service.tenants.close()
        one.client.close()


def events(body: bytes | str) -> list[Any]:
    """The JSON of every event of an SSE body, which must end with [DONE]."""
    text = body.decode() if isinstance(body, bytes) else body
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a response, whose shape is OpenAI's."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])
