"""POST /v1/messages: Anthropic's blocks, events, usage and errors; what is refused and under which name."""

import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

from octavo.messages import Finish, GenerateRequest, TokenDelta
from octavo.text import load_text
from tests.doubles import AsgiCall, ScriptedEngine, never_ends, says, write_byte_tokenizer
from tests.server.conftest import Serve
from tests.server.test_server_responses import prompt

URL = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI: dict[str, Any] = {"max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
BEGUN = [*HI["messages"], {"role": "assistant", "content": "one, two, "}]
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
_EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def message_of(response: httpx.Response) -> dict[str, Any]:
    """A whole answer, by the client's own types."""
    assert response.status_code == 200, response.text
    body = response.json()
    Message.model_validate(body)
    assert body.keys() >= {"id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage"}
    assert response.headers["request-id"] == response.headers["x-request-id"]
    return dict(body)


def error_of(response: httpx.Response, status: int, kind: str = "invalid_request_error") -> str:
    """The words of an error in Anthropic's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    ErrorResponse.model_validate(body) if kind != "request_too_large" else None
    assert body.keys() == {"type", "error", "request_id"} and body["error"].keys() == {"type", "message"}
    assert body["type"] == "error" and body["error"]["type"] == kind, body
    assert body["request_id"] == response.headers["x-request-id"]
    return str(body["error"]["message"])


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Every event of a stream, each of them checked, the pings left out."""
    events = []
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            _EVENTS.validate_python(event)
        if event["type"] != "ping":
            events.append(event)
    return events


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that a stream's events come to."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
                is_open = True
            case "content_block_delta":
                assert is_open and event["index"] == len(blocks) - 1
                for key, value in event["delta"].items():
                    match key:
                        case "text" | "thinking" | "signature":
                            blocks[-1][key] += value
                        case "partial_json":
                            blocks[-1]["json"] += value
            case "content_block_stop":
                assert is_open and event["index"] == len(blocks) - 1
                is_open = False
    for block in blocks:
        spelled = block.pop("json")
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(spelled)
    return blocks


class TestWhole:
    async def test_a_message(self, serve: Serve) -> None:
        engine = ScriptedEngine(says("hello", cached=3))
        body = {**HI, "system": "be kind", "temperature": 0.5, "top_p": 0.9, "top_k": 5, "metadata": {"user_id": "u"}}
        message = message_of(await serve(engine).post(URL, json=body))
        assert message["id"].startswith("msg_") and message["type"] == "message" and message["role"] == "assistant"
        assert message["content"] == [{"type": "text", "text": "hello", "citations": None}]
        assert message["stop_reason"] == "end_turn" and message["stop_sequence"] is None
        ids = prompt("system: be kind", "user: hi")
        (request,) = engine.requests
        assert request.prompt_ids == ids and request.params.max_tokens == 50
        assert (request.params.temperature, request.params.top_p, request.params.top_k) == (0.5, 0.9, 5)
        usage = message["usage"]
        assert usage["input_tokens"] == len(ids) - 3 and usage["cache_read_input_tokens"] == 3
        assert usage["output_tokens"] == 6 and usage["cache_creation_input_tokens"] == 0
        assert "ignored_fields" not in message

    @pytest.mark.parametrize(("ttl", "times"), [({}, (16, 0)), ({"ttl": "5m"}, (16, 0)), ({"ttl": "1h"}, (0, 16))])
    async def test_what_a_request_adds_to_the_prefix_cache_is_told_where_it_asked_for_it(
        self, serve: Serve, ttl: dict[str, str], times: tuple[int, int]
    ) -> None:
        """Full pages of 16 tokens that were not found. The three numbers add up to the prompt."""
        system = [{"type": "text", "text": "be kind to all", "cache_control": {"type": "ephemeral", **ttl}}]
        message = message_of(
            await serve(ScriptedEngine(says("hello", cached=16))).post(URL, json={**HI, "system": system})
        )
        total = len(prompt("system: be kind to all", "user: hi"))
        assert 32 < total < 48
        usage = message["usage"]
        assert usage["cache_read_input_tokens"] == usage["cache_creation_input_tokens"] == 16
        assert usage["input_tokens"] == total - 32
        assert tuple(usage["cache_creation"].values()) == times
        body = (
            await serve(ScriptedEngine(says("hello", cached=16))).post(
                URL, json={**HI, "system": system, "stream": True}
            )
        ).content
        first, last = events_of(body)[0]["message"]["usage"], events_of(body)[-2]["usage"]
        assert first["input_tokens"] == total and first["cache_creation_input_tokens"] == 0, "not known yet"
        assert last["cache_creation_input_tokens"] == 16 and last["input_tokens"] == total - 32

    async def test_nothing_is_added_without_a_prefix_cache(self, serve: Serve) -> None:
        body = {**HI, "cache_control": {"type": "ephemeral"}}
        message = message_of(await serve(enable_prefix_caching=False).post(URL, json=body))
        assert message["usage"]["cache_creation_input_tokens"] == 0

    async def test_the_line_that_a_client_changes_in_every_request_is_left_out_and_named_back(
        self, serve: Serve
    ) -> None:
        nonce = "x-anthropic-billing-header: cc_version=2.1.37; cc_entrypoint=cli; cch=%05x;"
        name = "system.x-anthropic-billing-header"
        engine = ScriptedEngine(says("hello"))
        client, ids = serve(engine), prompt("system: be kind", "user: hi")
        kind = {"type": "text", "text": "be kind"}
        for number, system in enumerate(
            (
                [{"type": "text", "text": nonce % 1}, kind],
                [{"type": "text", "text": nonce % 2 + "\nbe kind", "cache_control": {"type": "ephemeral"}}],
                nonce % 3 + "\n\nbe kind",
            )
        ):
            message = message_of(await client.post(URL, json={**HI, "system": system}))
            assert engine.requests[number].prompt_ids == ids
            assert message["ignored_fields"] == [name]
        alone = message_of(await client.post(URL, json={**HI, "system": nonce % 4}))
        assert engine.requests[-1].prompt_ids == prompt("user: hi") and alone["ignored_fields"] == [name]
        for system in (
            "be kind\n" + nonce % 5,
            "I say x-anthropic-billing-header: x",
            [kind, {"type": "text", "text": nonce % 6}],
        ):
            message = message_of(await client.post(URL, json={**HI, "system": system}))
            assert "ignored_fields" not in message
            assert b"x-anthropic-billing-header" in bytes(i for i in engine.requests[-1].prompt_ids if i < 256)
        for options in ({"drop_client_nonces": False}, {"strict_fields": True}):
            engine = ScriptedEngine(says("hello"))
            assert "ignored_fields" not in message_of(
                await serve(engine, **options).post(URL, json={**HI, "system": nonce % 7})
            )
            assert len(engine.requests[0].prompt_ids) > len(prompt("user: hi")), "the line stays"

    async def test_why_it_stopped(self, serve: Serve) -> None:
        client = serve(ScriptedEngine(says("abcdef")))
        message = message_of(await client.post(URL, json={**HI, "stop_sequences": ["x", "cd"]}))
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "cd")
        assert message["content"][0]["text"] == "ab"
        cut = serve(ScriptedEngine(says("abc", reason="length")))
        assert message_of(await cut.post(URL, json={**HI, "max_tokens": 3}))["stop_reason"] == "max_tokens"
        room = 256 - len(prompt("user: hi"))
        engine = ScriptedEngine(says("a" * room, reason="length"))
        message = message_of(await serve(engine).post(URL, json={**HI, "max_tokens": 4096}))
        assert (
            message["stop_reason"] == "model_context_window_exceeded" and engine.requests[0].params.max_tokens == room
        )

    async def test_an_answer_that_went_round_in_circles(self, serve: Serve) -> None:
        message = message_of(await serve(ScriptedEngine(says("abab", reason="repetition"))).post(URL, json=HI))
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "repetition_detected")

    @pytest.mark.parametrize("content", ["one, two, ", [{"type": "text", "text": "one, two, "}]])
    async def test_the_assistants_own_words_are_gone_on_with(self, serve: Serve, content: object) -> None:
        """Whole, streamed and counted; by a model that would otherwise think first, too."""
        with tempfile.TemporaryDirectory() as folder:
            write_byte_tokenizer(Path(folder))
            text = load_text(Path(folder), reasoning_parser="deepseek_r1")
        engine = ScriptedEngine(says("three"))
        client = serve(engine, text)
        body = {**HI, "messages": [*HI["messages"], {"role": "assistant", "content": content}]}
        message = message_of(await client.post(URL, json=body))
        assert message["content"] == [{"type": "text", "text": "three", "citations": None}], (
            "and not what was said before"
        )
        ids = prompt("user: hi")
        assert engine.requests[0].prompt_ids == [*ids, *b"one, two, "]
        streamed = events_of((await client.post(URL, json={**body, "stream": True})).content)
        assert (
            blocks_of(streamed) == message["content"] and engine.requests[1].prompt_ids == engine.requests[0].prompt_ids
        )
        count = await client.post(COUNT, json={"messages": body["messages"]})
        assert count.json() == {"input_tokens": len(ids) + 10}

    async def test_an_answer_without_a_word(self, serve: Serve) -> None:
        message = message_of(await serve(ScriptedEngine(says(""))).post(URL, json=HI))
        assert message["content"] == [] and message["stop_reason"] == "end_turn"

    async def test_blocks_become_messages(self, serve: Serve) -> None:
        engine = ScriptedEngine()
        mark = {"type": "ephemeral"}
        messages = [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a", "cache_control": mark}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
            {"role": "user", "content": "d"},
        ]
        system = [{"type": "text", "text": "be kind", "cache_control": mark}, {"type": "text", "text": "be brief"}]
        body = {"max_tokens": 9, "messages": messages, "system": system, "cache_control": mark}
        message = message_of(await serve(engine).post(URL, json=body))
        assert "ignored_fields" not in message
        turns = ("system: be kind\n\nbe brief", "user: a\nb", "assistant: c", "user: d")
        assert engine.requests[0].prompt_ids == prompt(*turns)
        count = await serve().post(COUNT, json={key: body[key] for key in ("messages", "system")})
        assert count.json() == {"input_tokens": len(prompt(*turns))}


class TestStream:
    async def test_the_events_of_a_message(self, serve: Serve) -> None:
        client = serve(ScriptedEngine(says("héj", cached=1)))
        response = await client.post(URL, json={**HI, "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        assert b'event: ping\ndata: {"type":"ping"}\n\n' in response.content
        events = events_of(response.content)
        assert [event["type"] for event in events] == [
            "message_start", "content_block_start", *["content_block_delta"] * 3, "content_block_stop",
            "message_delta", "message_stop",
        ]  # fmt: skip
        assert blocks_of(events) == [{"type": "text", "text": "héj", "citations": None}]
        start, end = events[0]["message"], events[-2]
        total = len(prompt("user: hi"))
        assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["input_tokens"] == total
        assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert end["usage"]["output_tokens"] == 5 and end["usage"]["cache_read_input_tokens"] == 1

    async def test_fields_without_effect_are_named_back(self, serve: Serve) -> None:
        more = {"thinking": {"type": "enabled", "budget_tokens": 2000}, "inference_geo": "us", "odd": 1}
        names = ["inference_geo", "odd", "thinking", "thinking.budget_tokens"]
        client = serve()
        message = message_of(await client.post(URL, json={**HI, **more}))
        assert sorted(message["ignored_fields"]) == names
        events = events_of((await client.post(URL, json={**HI, **more, "stream": True})).content)
        assert sorted(events[0]["ignored_fields"]) == names
        words = error_of(await serve(strict_fields=True).post(URL, json={**HI, **more}), 400)
        assert all(name in words for name in names)
        off = message_of(await client.post(URL, json={**HI, "thinking": {"type": "disabled"}}))
        assert "ignored_fields" not in off, "nothing to switch off: the model does not think"

    async def test_an_error_in_a_stream_is_an_event(self, serve: Serve) -> None:
        def fails(request: GenerateRequest) -> list[list[TokenDelta]]:
            failure = TokenDelta(request.id, 0, [], Finish("error", message="the page table is torn"))
            return [[TokenDelta(request.id, 0, [ord("a")])], [failure]]

        events = events_of((await serve(ScriptedEngine(fails)).post(URL, json={**HI, "stream": True})).content)
        assert events[-1]["error"] == {"type": "api_error", "message": "the page table is torn"}

    async def test_pings_keep_a_stream_alive(self, serve: Serve) -> None:
        engine = ScriptedEngine(says("abc"))
        engine.gate.clear()
        app = serve(engine, sse_keep_alive_interval=0.01).app  # type: ignore[attr-defined]
        call = AsgiCall(app, "POST", URL, json.dumps({**HI, "stream": True}).encode())
        await call.until(lambda call: len(call.sent) >= 2)
        assert set(call.sent) == {b'event: ping\ndata: {"type":"ping"}\n\n'}
        engine.gate.set()
        await call.done()
        assert blocks_of(events_of(b"".join(call.sent)))[0]["text"] == "abc"

    async def test_a_client_that_leaves_ends_the_work(self, serve: Serve) -> None:
        engine = ScriptedEngine(never_ends)
        app = serve(engine).app  # type: ignore[attr-defined]
        call = AsgiCall(app, "POST", URL, json.dumps({**HI, "stream": True}).encode())
        await call.until(lambda call: b"text_delta" in b"".join(call.sent))
        call.leave()
        await call.done()
        assert len(engine.aborts) == 1


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


class TestErrors:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"max_tokens": None}, "max_tokens"),
            ({"max_tokens": 0}, "max_tokens must be at least 1"),
            ({"temperature": 200}, "temperature must be between"),
            ({"stop_sequences": ["a"] * 65}, "stop_sequences has 65 entries; at most 64 are allowed"),
            ({"stop_sequences": ["a", 1]}, "stop_sequences[1]"),
            ({"system": 1}, "system must be"),
            ({"system": [IMAGE]}, "system[0].type 'image' is not supported"),
            ({"messages": []}, "messages is empty"),
            ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type 'image' is not supported"),
            ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
            ({"messages": [*HI["messages"], {"role": "assistant", "content": ""}]}, "it must end with text"),
            ({"messages": [*HI["messages"], {"role": "assistant", "content": [CALL]}]}, "must not call a tool"),
            ({"messages": BEGUN, "thinking": {"type": "enabled"}}, "thinking is not supported with that"),
            ({"messages": BEGUN, "output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format is not supported"),
            ({"messages": BEGUN, "tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice is not supported"),
            ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]}, "matches no earlier tool_use"),
            ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages has"),
            ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type 'web_search_20250305'"),
            ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
            ({"tools": [{"name": "f", "input_schema": {"type": "object"}, "input_examples": 5}]}, "input_examples must be a list"),
            ({"tool_choice": {"type": "any"}}, "there are no tools"),
            ({"tool_choice": {"type": "odd"}}, "tool_choice.type must be"),
            ({"thinking": {"type": "odd"}}, "thinking.type"),
            ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
            ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ],
    )  # fmt: skip
    async def test_bad_fields_are_named(self, serve: Serve, fields: dict[str, Any], words: str) -> None:
        assert words in error_of(await serve().post(URL, json={**HI, **fields}), 400)

    async def test_every_refusal_has_the_dialects_shape(self, serve: Serve) -> None:
        client = serve(max_body_bytes=200)
        error_of(await client.post(URL, content=b"{"), 400)
        error_of(await client.post(URL, json={**HI, "model": "other"}), 404, "not_found_error")
        error_of(await client.post(COUNT, json={"messages": "x"}), 400)
        error_of(await client.post(URL, json={**HI, "system": "x" * 200}), 413, "request_too_large")
        error_of(await client.get(URL), 405)
        error_of(await client.post(URL + "/batches", json={}), 404, "not_found_error")
        error_of(await serve(ScriptedEngine(report=None)).post(URL, json=HI), 503, "overloaded_error")
        other = (await client.post("/v1/messages-of-old", json={})).json()
        assert other.keys() == {"error"}, "only these routes"

    async def test_limits_of_its_own(self, serve: Serve) -> None:
        engine = ScriptedEngine(never_ends)
        client = serve(engine)
        response = await client.post(URL, json={**HI, "deadline_ms": 30, "max_queue_ms": 15})
        assert "deadline_ms has passed" in error_of(response, 504, "timeout_error")
        assert response.headers["x-should-retry"] == "false"
        (request,) = engine.requests
        assert request.queue_until > request.arrived and request.deadline - request.queue_until == pytest.approx(0.015)
        assert "max_queue_ms" in error_of(await client.post(URL, json={**HI, "max_queue_ms": -1}), 400)
        assert "stream_options" in error_of(await client.post(URL, json={**HI, "stream_options": {}}), 400)

    async def test_both_ways_to_send_a_key(self, serve: Serve) -> None:
        client = serve(api_key="sesame")
        assert "API key" in error_of(await client.post(URL, json=HI), 401, "authentication_error")
        headers = [{"x-api-key": "wrong"}, {"x-api-key": ""}, {"authorization": "Basic sesame"}]
        for wrong in headers:
            error_of(await client.post(URL, json=HI, headers=wrong), 401, "authentication_error")
        for right in ({"x-api-key": "sesame", "anthropic-version": "2023-06-01"}, {"authorization": "Bearer sesame"}):
            message_of(await client.post(URL, json=HI, headers=right))
        both = {"x-api-key": "sesame", "authorization": "Bearer other"}
        assert (await client.get("/v1/models", headers=both)).status_code == 200
