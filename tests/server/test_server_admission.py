"""Limits of a request's own, refusals for the backlog, and the place in the queue: as clients see them."""

import asyncio
import json
from typing import Any

import pytest

from octavo.messages import Finish, GenerateRequest, TokenDelta
from octavo.server.http import sse
from tests.doubles import AsgiCall, ScriptedEngine, never_ends, says
from tests.server.conftest import Serve, error_of


def ends_with(finish: Finish):
    def script(request: GenerateRequest) -> list[list[TokenDelta]]:
        return [[TokenDelta(request.id, index, [], finish) for index in range(request.params.n)]]

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_429_with_the_time_to_come_again(serve: Serve, stream: bool) -> None:
    finish = Finish("error", message="7 requests are already waiting", cause="overload", retry_after=12)
    response = await serve(ScriptedEngine(ends_with(finish))).post(
        "/v1/completions", json={"prompt": "a", "stream": stream}
    )
    error = error_of(response, 429)
    assert error["code"] == "rate_limit_exceeded" and error["message"] == "7 requests are already waiting"
    assert response.headers["retry-after"] == "12" and "x-should-retry" not in response.headers


async def test_what_failed_for_good_is_not_to_be_tried_again(serve: Serve) -> None:
    response = await serve(ScriptedEngine(ends_with(Finish("error", message="no")))).post(
        "/v1/completions", json={"prompt": "a"}
    )
    assert error_of(response, 500)["message"] == "no" and response.headers["x-should-retry"] == "false"


async def test_the_requests_own_limits_reach_the_engine(serve: Serve) -> None:
    engine = ScriptedEngine()
    body = {"messages": [{"role": "user", "content": "a"}], "deadline_ms": 5000, "max_queue_ms": 1500}
    assert (await serve(engine).post("/v1/chat/completions", json=body)).status_code == 200
    (request,) = engine.requests
    assert request.deadline - request.arrived == pytest.approx(5, abs=1)
    assert request.queue_until - request.arrived == pytest.approx(1.5, abs=0.5)


async def test_a_deadline_is_504_before_the_first_byte_and_an_event_after_it(serve: Serve) -> None:
    engine = ScriptedEngine(never_ends)
    client = serve(engine)
    response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 200, "deadline_ms": 30})
    error = error_of(response, 504)
    assert error["code"] == "deadline_exceeded" and "deadline_ms has passed" in error["message"]
    assert response.headers["x-should-retry"] == "false"
    body = {"prompt": "a", "max_tokens": 200, "deadline_ms": 30, "stream": True}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200 and '"code":"deadline_exceeded"' in response.text
    assert response.text.endswith("data: [DONE]\n\n")
    assert len(engine.aborts) == 2


async def test_who_waits_too_long_says_so(serve: Serve) -> None:
    engine = ScriptedEngine()
    engine.gate.clear()
    asking = asyncio.create_task(serve(engine).post("/v1/completions", json={"prompt": "a", "max_queue_ms": 10}))
    while not engine.leaves:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert engine.leaves == [engine.requests[0].id]  # whether it had a row, only the engine can tell
    engine.gate.set()
    assert (await asking).status_code == 200


@pytest.mark.parametrize("name", ["deadline_ms", "max_queue_ms"])
@pytest.mark.parametrize("value", [0, -5, 10**13, 1.5, "soon"])
async def test_bad_limits_are_refused_by_name(serve: Serve, name: str, value: object) -> None:
    response = await serve().post("/v1/completions", json={"prompt": "a", name: value})
    assert name in error_of(response, 400)["message"]


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/completions", {"prompt": "a"}, b"data: [DONE]"),
        ("/v1/responses", {"input": "a"}, b"data: [DONE]"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}, b'{"type":"message_stop"}'),
    ],
)
async def test_the_place_in_the_queue_comes_as_comments(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], end: bytes
) -> None:
    monkeypatch.setattr(sse, "QUEUE_SECONDS", 0.01)
    engine = ScriptedEngine(says("hi"))
    engine.gate.clear()
    engine.place = "3 1.5"
    app = serve(engine).app  # type: ignore[attr-defined]
    body = {**body, "stream": True, "stream_options": {"include_queue": True}, "frobnicate": 1}
    call = AsgiCall(app, "POST", path, json.dumps(body).encode())
    await call.until(lambda call: len(call.sent) >= 2)
    assert call.status == 200 and set(call.sent) == {b": queue position=3 estimate_s=1.5\n\n"}
    engine.place = ""  # it has a row
    engine.gate.set()
    await call.done()
    rest = b"".join(call.sent)
    assert rest.endswith(end + b"\n\n")
    assert b'"h"' in rest and b'"ignored_fields":["frobnicate"]' in rest
