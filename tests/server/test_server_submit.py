"""What a handler submits is answered or aborted: whatever becomes of the response, nothing stays in the engine."""

import json
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import Overloaded
from octavo.messages import GenerateRequest
from octavo.server.endpoints import routers
from octavo.server.http.middleware import RequestMiddleware
from tests.doubles import AsgiCall, ScriptedEngine, never_ends, says
from tests.server.conftest import Serve, error_of

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "n": 2},
    "/v1/completions": {"prompt": ["a", "b", "c"]},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
}
RESUMABLE = {"stream": True, "stream_options": {"resumable": True}}


def abandons(app: Any, path: str, *, fails: bool) -> ASGIApp:
    """The app's own door and handler; the handler's response is dropped, or what comes between fails."""
    routes: list[Any] = [route for router in routers(app.state.service) for route in router.routes]
    (handler,) = [route.endpoint for route in routes if route.path == path and "POST" in route.methods]

    async def drop(scope: Scope, receive: Receive, send: Send) -> None:
        await handler(Request(scope, receive))
        if fails:
            raise RuntimeError("between the handler and its response")
        await Response("another")(scope, receive, send)

    return RequestMiddleware(drop, app.state.service)


def stream_id(engine: ScriptedEngine) -> str:
    return engine.requests[0].id.removesuffix("-0")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_response_that_is_never_sent_aborts_what_was_submitted(serve: Serve, path: str, fails: bool) -> None:
    engine = ScriptedEngine(never_ends)
    app = serve(engine).app  # type: ignore[attr-defined]
    body = json.dumps({**BODIES[path], "stream": True}).encode()
    call = AsgiCall(abandons(app, path, fails=fails), "POST", path, body)
    await call.done()
    assert call.status == (500 if fails else 200)
    assert [abort.request_id for abort in engine.aborts] == [request.id for request in engine.requests] != []
    assert engine.num_open == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_one_that_can_be_resumed_goes_on(serve: Serve, path: str) -> None:
    engine = ScriptedEngine(never_ends)
    app = serve(engine).app  # type: ignore[attr-defined]
    call = AsgiCall(abandons(app, path, fails=False), "POST", path, json.dumps({**BODIES[path], **RESUMABLE}).encode())
    await call.done()
    assert engine.num_open == len(engine.requests) > 0 and not engine.aborts
    service = app.state.service
    assert service.logs.end(stream_id(engine), b"")
    await service.idle.wait()
    assert engine.num_open == 0 and len(engine.aborts) == len(engine.requests)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [*BODIES, "/v1/embeddings"])
async def test_a_client_that_has_left_already(serve: Serve, path: str, stream: bool) -> None:
    engine = ScriptedEngine(never_ends)
    app = serve(engine).app  # type: ignore[attr-defined]
    body = {"input": ["a", "b"]} if path == "/v1/embeddings" else {**BODIES[path], "stream": stream}
    call = AsgiCall(app, "POST", path, json.dumps(body).encode())
    call.leave()
    await call.done()
    assert call.status == 0 or stream
    assert engine.num_open == 0 and len(engine.aborts) == len(engine.requests)


class Full(ScriptedEngine):
    """Takes two requests and refuses the third."""

    def submit(self, request: GenerateRequest) -> None:
        if len(self.requests) == 2:
            raise Overloaded("too many", retry_after=7)
        super().submit(request)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, RESUMABLE])
async def test_several_prompts_are_taken_in_order_or_not_at_all(serve: Serve, fields: dict[str, Any]) -> None:
    engine = Full(never_ends)
    client = serve(engine)
    response = await client.post("/v1/completions", json={"prompt": ["a", "b", "c", "d"], **fields})
    assert error_of(response, 429)["message"] == "too many" and response.headers["retry-after"] == "7"
    assert [request.prompt_ids for request in engine.requests] == [[97], [98]]
    assert [abort.request_id for abort in engine.aborts] == [request.id for request in engine.requests]
    assert engine.num_open == 0 and client.app.state.service.logs.find(stream_id(engine), b"") is None  # type: ignore[attr-defined]


async def test_what_is_refused_was_never_submitted(serve: Serve) -> None:
    """Where a stream cannot be kept, or a response not stored, the engine hears nothing."""
    engine = ScriptedEngine(says("a"))
    client = serve(engine, resume_seconds=0, max_stored_responses=0)
    for path in ("/v1/chat/completions", "/v1/responses"):
        error = error_of(await client.post(path, json={**BODIES[path], **RESUMABLE}), 400)
        assert error["param"] == "stream_options.resumable"
    error_of(await client.post("/v1/responses", json={"input": "hi", "store": True}), 400)
    assert not engine.requests
