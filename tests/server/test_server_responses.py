"""POST /v1/responses: every field and event as OpenAI's schema has it; input, limits, what is refused and under which name."""

from typing import Any

import pytest

from octavo.messages import Finish, GenerateRequest, TokenDelta
from tests.doubles import TURN, AsgiCall, ScriptedEngine, byte_text, never_ends, says
from tests.server.conftest import Serve, error_of
from tests.server.openai_schema import check_response, typed_events

URL = "/v1/responses"


def prompt(*turns: str) -> list[int]:
    """As the byte tokenizer's template writes them: "user: hi", …"""
    ids: list[int] = []
    for turn in turns:
        ids += [TURN, *turn.encode(), 10]
    return [*ids, TURN, *b"assistant: "]


class TestWhole:
    async def test_every_field(self, serve: Serve) -> None:
        engine = ScriptedEngine(says("hello", cached=3))
        labels = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}
        body = {"input": "hi", "instructions": "be kind", "temperature": 0.5, "max_output_tokens": 50, **labels}
        response = check_response((await serve(engine).post(URL, json=body)).json())
        assert response["id"].startswith("resp_") and response["status"] == "completed"
        assert response["completed_at"] >= response["created_at"] > 0
        (message,) = response["output"]
        assert message["id"].startswith("msg_") and message["status"] == "completed"
        assert message["content"] == [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}]
        ids = prompt("system: be kind", "user: hi")
        assert engine.requests[0].prompt_ids == ids and engine.requests[0].params.max_tokens == 50
        assert response["usage"] == {
            "input_tokens": len(ids),
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": 6,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(ids) + 6,
        }
        assert response["instructions"] == "be kind" and response["temperature"] == 0.5 and response["top_p"] == 1.0
        assert {key: response[key] for key in labels} == labels and "ignored_fields" not in response
        assert (
            response["tool_choice"] == "auto"
            and response["tools"] == []
            and response["text"]["format"]["type"] == "text"
        )

    async def test_cut_by_a_limit(self, serve: Serve) -> None:
        response = (await serve(ScriptedEngine(says("hel", reason="length"))).post(URL, json={"input": "hi"})).json()
        check_response(response)
        assert response["status"] == "incomplete" and response["completed_at"] is None
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "incomplete"

    async def test_cut_because_it_went_round_in_circles(self, serve: Serve) -> None:
        """OpenAI has no word for it: ours is beside the place for theirs."""
        client = serve(ScriptedEngine(says("abab", reason="repetition")))
        response = check_response((await client.post(URL, json={"input": "hi"})).json())
        assert response["status"] == "incomplete" and response["output"][0]["status"] == "incomplete"
        assert response["incomplete_details"] == {"stop_reason": "repetition_detected"}

    async def test_an_answer_without_a_word(self, serve: Serve) -> None:
        response = check_response((await serve(ScriptedEngine(says(""))).post(URL, json={"input": "hi"})).json())
        assert response["output"][0]["content"][0]["text"] == "" and response["status"] == "completed"

    async def test_a_limit_shrinks_to_the_room_that_there_is(self, serve: Serve) -> None:
        engine = ScriptedEngine()
        client = serve(engine)
        for limit in ({}, {"max_output_tokens": 10_000}):
            check_response((await client.post(URL, json={"input": "hi", **limit})).json())
            assert engine.requests[-1].params.max_tokens == 256 - len(prompt("user: hi"))

    async def test_what_vllm_takes_beyond_openai(self, serve: Serve) -> None:
        engine = ScriptedEngine(says("abcdef"))
        body = {"input": "hi", "seed": 7, "top_k": 3, "stop": "d", "presence_penalty": 0.5, "logit_bias": {"97": 1.0}}
        response = check_response((await serve(engine).post(URL, json=body)).json())
        params = engine.requests[0].params
        assert (params.seed, params.top_k, params.stop, params.logit_bias) == (7, 3, ("d",), {97: 1.0})
        assert response["output"][0]["content"][0]["text"] == "abc" and response["presence_penalty"] == 0.5


class TestInput:
    async def test_messages_of_every_kind(self, serve: Serve) -> None:
        engine = ScriptedEngine()
        items = [
            {"role": "developer", "content": "short"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
             "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]},
        ]  # fmt: skip
        await serve(engine).post(URL, json={"input": items, "instructions": "be kind"})
        turns = ("system: be kind\n\nshort", "user: a", "assistant: b", "assistant: no", "user: c\nd")
        assert engine.requests[0].prompt_ids == prompt(*turns)

    async def test_truncation_leaves_out_the_oldest_turns(self, serve: Serve) -> None:
        engine = ScriptedEngine()
        client = serve(engine)
        items = [{"role": "user", "content": f"{at}" * 40} for at in range(9)]
        error = error_of(await client.post(URL, json={"input": items}), 400)
        assert error["code"] == "context_length_exceeded" and error["param"] == "input"
        body = {"input": items, "instructions": "be kind", "truncation": "auto"}
        response = check_response((await client.post(URL, json=body)).json())
        assert response["truncation"] == "auto"
        kept = [f"user: {str(at) * 40}" for at in range(5, 9)]
        assert engine.requests[0].prompt_ids == prompt("system: be kind", *kept)
        assert len(prompt("system: be kind", "user: " + "4" * 40, *kept)) > 256
        one = [{"role": "user", "content": "x" * 300}]
        assert error_of(await client.post(URL, json={**body, "input": one}), 400)["param"] == "input"

    @pytest.mark.parametrize(
        ("given", "param", "words"),
        [
            (None, "input", "string or a list"),
            ([], "input", "empty"),
            (7, "input", "string or a list"),
            (["a"], "input[0]", "object"),
            ([{}], "input[0]", "type or a role"),
            ([{"role": "king", "content": "a"}], "input[0].role", "one of user"),
            ([{"role": "user", "content": 1}], "input[0].content", "string or a list"),
            ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text", "string"),
            ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0].type", "supports only text"),
            ([{"type": "web_search_call", "id": "w"}], "input[0].type", "not supported"),
            ([{"type": "function_call", "name": "f", "arguments": "{}"}], "input[0].call_id", "string"),
            ([{"type": "function_call", "name": "f", "call_id": "c", "arguments": "[1]"}], "input[0].arguments", "JSON object"),
            ([{"type": "function_call_output", "call_id": "c", "output": "1"}], "input", "no earlier function_call"),
            ([{"type": "reasoning", "encrypted_content": "x"}], "input[0].encrypted_content", "is not supported"),
            ([{"type": "item_reference", "id": "msg_none"}], "input[0].id", "no stored response"),
        ],
    )  # fmt: skip
    async def test_bad_input_is_named(self, serve: Serve, given: Any, param: str, words: str) -> None:
        error = error_of(await serve().post(URL, json={"input": given}), 400)
        assert error["param"] == param and words in error["message"], error

    async def test_too_many_items(self, serve: Serve) -> None:
        items = [{"role": "user", "content": "a"}] * 3
        error = error_of(await serve(max_messages=2).post(URL, json={"input": items}), 400)
        assert error["param"] == "input" and "at most 2 (--max-messages)" in error["message"]


class TestFields:
    @pytest.mark.parametrize(
        ("fields", "param", "words"),
        [
            ({"background": True}, "background", "not supported"),
            ({"conversation": "conv_1"}, "conversation", "not supported"),
            ({"prompt": {"id": "p"}}, "prompt", "not supported"),
            ({"max_output_tokens": 0}, "max_output_tokens", "between 1 and"),
            ({"max_output_tokens": 2**64}, "max_output_tokens", "between 1 and"),
            ({"max_output_tokens": "many"}, "max_output_tokens", "integer"),
            ({"temperature": 9}, "temperature", "between 0 and 2"),
            ({"top_p": 2}, "top_p", "top_p must be"),
            ({"safety_identifier": "s" * 65}, "safety_identifier", "64 characters"),
            ({"top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
            ({"include": ["odd"]}, "include", "not one of"),
            ({"truncation": "odd"}, "truncation", "'auto' or 'disabled'"),
            ({"metadata": {"a": 1}}, "metadata.a", "string"),
            ({"metadata": {str(at): "" for at in range(17)}}, "metadata", "at most 16"),
            ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
            ({"priority": 1}, "priority", "must be 0 here"),
            ({"reasoning": {"effort": "odd"}}, "reasoning.effort", "'none', 'minimal'"),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type", "only 'function'"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0]", "beside 'type'"),
            ({"tool_choice": "required"}, "tool_choice", "no tools"),
            ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "not in tools"),
            ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "not supported"),
            ({"previous_response_id": "resp_none"}, "previous_response_id", "resp_none"),
        ],
    )  # fmt: skip
    async def test_bad_fields_are_named(self, serve: Serve, fields: dict[str, Any], param: str, words: str) -> None:
        status = 404 if "previous_response_id" in fields else 400
        error = error_of(await serve().post(URL, json={"input": "hi", **fields}), status)
        assert error["param"] == param and words in error["message"], error

    async def test_fields_without_effect_are_named_back(self, serve: Serve) -> None:
        more = {
            "service_tier": "flex",
            "include": ["reasoning.encrypted_content"],
            "odd": 1,
            "text": {"verbosity": "low"},
        }
        names = ["odd", "service_tier", "text.verbosity", "include.reasoning.encrypted_content"]
        client = serve()
        response = check_response((await client.post(URL, json={"input": "hi", **more})).json())
        assert sorted(response["ignored_fields"]) == sorted(names)
        events = typed_events((await client.post(URL, json={"input": "hi", **more, "stream": True})).content)
        assert sorted(events[0]["ignored_fields"]) == sorted(names) and "ignored_fields" not in events[1]
        for name, value in more.items():
            error = error_of(await serve(strict_fields=True).post(URL, json={"input": "hi", name: value}), 400)
            assert error["param"].startswith(name), error

    async def test_another_model_and_a_body_that_is_none(self, serve: Serve) -> None:
        client = serve()
        assert error_of(await client.post(URL, json={"input": "a", "model": "other"}), 404)["code"] == "model_not_found"
        error_of(await client.post(URL, content=b"{"), 400)
        error_of(await client.post(URL, content=b"[]"), 400)

    async def test_how_many_tokens_an_input_has(self, serve: Serve) -> None:
        body = {"input": "hi", "instructions": "be kind"}
        answer = (await serve().post(URL + "/input_tokens", json=body)).json()
        assert answer == {"object": "response.input_tokens", "input_tokens": len(prompt("system: be kind", "user: hi"))}

    async def test_limits_of_its_own(self, serve: Serve) -> None:
        engine = ScriptedEngine(never_ends)
        client = serve(engine)
        body = {"input": "hi", "deadline_ms": 200, "max_queue_ms": 100}
        assert error_of(await client.post(URL, json=body), 504)["code"] == "deadline_exceeded"
        events = typed_events((await client.post(URL, json={**body, "stream": True})).content)
        assert events[-1]["type"] == "response.failed" and "deadline_ms has passed" in str(
            events[-1]["response"]["error"]
        )
        assert len(engine.aborts) == len(engine.requests) == 2
        for request in engine.requests:
            assert request.queue_until > request.arrived
            assert request.deadline - request.queue_until == pytest.approx(0.1)
        assert error_of(await client.post(URL, json={**body, "deadline_ms": 0}), 400)["param"] == "deadline_ms"
        counted = (await client.post(URL + "/input_tokens", json=body)).json()
        assert counted["ignored_fields"] == ["deadline_ms", "max_queue_ms"], "nothing is computed"


class TestStream:
    async def test_the_events_of_a_message(self, serve: Serve) -> None:
        response = await serve(ScriptedEngine(says("héj", cached=1))).post(URL, json={"input": "hi", "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        events = typed_events(response.content)
        assert [event["type"].removeprefix("response.") for event in events] == [
            "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * 3,
            "output_text.done", "content_part.done", "output_item.done", "completed",
        ]  # fmt: skip
        assert "".join(event["delta"] for event in events if "delta" in event) == "héj"
        assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
        assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"]["output_tokens"] == 0
        assert events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 1

    async def test_it_says_what_a_whole_answer_says(self, serve: Serve) -> None:
        client = serve(ScriptedEngine(says("hello")))
        body = {"input": "hi", "seed": 1, "store": False}
        whole = (await client.post(URL, json=body)).json()
        last = typed_events((await client.post(URL, json={**body, "stream": True})).content)[-1]["response"]
        for response in (whole, last):
            for key in ("id", "created_at", "completed_at"):
                del response[key]
            del response["output"][0]["id"]
        assert whole == last

    async def test_cut_by_a_limit(self, serve: Serve) -> None:
        engine = ScriptedEngine(says("hel", reason="length"))
        events = typed_events((await serve(engine).post(URL, json={"input": "hi", "stream": True})).content)
        assert events[-1]["type"] == "response.incomplete" and events[-2]["item"]["status"] == "incomplete"

    async def test_a_failure_is_the_last_event(self, serve: Serve) -> None:
        def fails(request: GenerateRequest) -> list[list[TokenDelta]]:
            failure = TokenDelta(request.id, 0, [], Finish("error", message="the page table is torn"))
            return [[TokenDelta(request.id, 0, [ord("a")])], [failure]]

        client = serve(ScriptedEngine(fails))
        events = typed_events((await client.post(URL, json={"input": "hi", "stream": True})).content)
        response = events[-1]["response"]
        assert events[-1]["type"] == "response.failed" and response["status"] == "failed"
        assert response["error"] == {"code": "server_error", "message": "the page table is torn"}
        assert response["output"][0]["content"][0]["text"] == "a"
        error_of(await client.get(f"{URL}/{response['id']}"), 404)

    async def test_an_error_before_the_first_event_is_a_status(self, serve: Serve) -> None:
        error = error_of(await serve().post(URL, json={"input": "x" * 300, "stream": True}), 400)
        assert error["param"] == "input"

    async def test_a_client_that_leaves_ends_the_work(self, serve: Serve) -> None:
        engine = ScriptedEngine(never_ends)
        app = serve(engine).app  # type: ignore[attr-defined]
        call = AsgiCall(app, "POST", URL, b'{"input": "hi", "stream": true}')
        await call.until(lambda call: b"output_text.delta" in b"".join(call.sent))
        call.leave()
        await call.done()
        assert len(engine.aborts) == 1

    async def test_a_server_that_stops_says_so(self, serve: Serve) -> None:
        app = serve(ScriptedEngine(never_ends)).app  # type: ignore[attr-defined]
        call = AsgiCall(app, "POST", URL, b'{"input": "hi", "stream": true}')
        await call.until(lambda call: b"output_text.delta" in b"".join(call.sent))
        app.state.service.stop()
        await call.done()
        events = typed_events(b"".join(call.sent))
        assert events[-1]["type"] == "response.failed" and "shut down" in events[-1]["response"]["error"]["message"]


def logprobs_of(text: str) -> Any:
    from octavo.messages import Logprobs

    def script(request: GenerateRequest) -> list[list[TokenDelta]]:
        steps = [
            [TokenDelta(request.id, 0, [byte], logprobs=(Logprobs(1, [byte, byte, 65], [-0.5, -0.5, -2.0]),))]
            for byte in text.encode()
        ]
        return [*steps, [TokenDelta(request.id, 0, [], Finish("length"))]]

    return script


@pytest.mark.parametrize(
    "fields", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}]
)
async def test_logprobs(serve: Serve, fields: dict[str, Any]) -> None:
    client = serve(ScriptedEngine(logprobs_of("aé")), byte_text())
    whole = check_response((await client.post(URL, json={"input": "hi", **fields})).json())
    entries = whole["output"][0]["content"][0]["logprobs"]
    assert [entry["bytes"] for entry in entries] == [[97], [0xC3], [0xA9]]
    assert [top["token"] for top in entries[0]["top_logprobs"]] == ["a", "A"]
    events = typed_events((await client.post(URL, json={"input": "hi", "stream": True, **fields})).content)
    streamed = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert streamed == entries and whole["top_logprobs"] == 2
