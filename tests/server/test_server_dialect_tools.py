"""Tools, reasoning and shaped answers in the Responses API and in Anthropic's: what the prompt holds, what becomes of the answer."""

import json
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.messages import GenerateRequest
from octavo.text.grammar.build import grammar_of
from tests.doubles import ScriptedEngine, byte_text, says
from tests.server import test_server_messages as messages
from tests.server.conftest import Serve, error_of
from tests.server.openai_schema import check_response, typed_events
from tests.server.test_server_tools import CALL, HERMES, OPEN, THINKING, TIME, engine

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
THOUGHT = "<think>\nAha.\n</think>\n\n"
MIXED = THOUGHT + "Let me see." + CALL + TIME + "Done."


def shown(request: GenerateRequest) -> str:
    """The prompt, as the byte tokenizer has it."""
    return bytes(request.prompt_ids).decode()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.sampled_from(["a", " ", "\n", "é", "<think>", "</think>", "<tool_call>", "</tool_call>", CALL, TIME, "{}"]),
        max_size=8,
    ),
    chunks=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    is_parallel=st.booleans(),
    reason=st.sampled_from(["stop", "length"]),
)
async def test_a_whole_answer_is_the_streamed_one_put_together(
    serve: Serve, parts: list[str], chunks: tuple[int, int], is_parallel: bool, reason: Any
) -> None:
    """For any cut into tokens, and what is streamed keeps to the dialect's order: see typed_events and blocks_of."""
    answer = "".join(parts) or "."
    whole, streamed = (serve(engine(says(answer, reason=reason, chunk=chunk)), byte_text(THINKING)) for chunk in chunks)
    body = {**TestResponses.BODY, "parallel_tool_calls": is_parallel}
    one = check_response((await whole.post(RESPONSES, json=body)).json())
    other = typed_events((await streamed.post(RESPONSES, json={**body, "stream": True})).content)[-1]["response"]
    assert without_ids(one["output"]) == without_ids(other["output"])
    assert (one["status"], one["usage"]) == (other["status"], other["usage"])
    choice = {"type": "auto", "disable_parallel_tool_use": not is_parallel}
    body = {**TestMessages.BODY, "tool_choice": choice}
    message = messages.message_of(await whole.post(MESSAGES, json=body))
    events = messages.events_of((await streamed.post(MESSAGES, json={**body, "stream": True})).content)
    assert without_ids(message["content"]) == without_ids(messages.blocks_of(events))
    assert message["stop_reason"] == events[-2]["delta"]["stop_reason"]


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


class TestShapes:
    """The engine gets the grammar that a chat's response_format becomes."""

    STRICT: ClassVar[dict[str, Any]] = {**SCHEMA, "additionalProperties": False}

    async def test_of_a_response(self, serve: Serve) -> None:
        scripted = ScriptedEngine(says('{"city": "a"}'))
        client = serve(scripted)
        format = {"type": "json_schema", "name": "place", "schema": self.STRICT, "strict": True}
        for shape, wish in ((format, {"json": self.STRICT}), ({"type": "json_object"}, {"json_object": True})):
            response = check_response(
                (await client.post(RESPONSES, json={"input": "a", "text": {"format": shape}})).json()
            )
            assert response["text"]["format"] == shape
            assert scripted.requests[-1].params.grammar == grammar_of(wish, byte_text().vocabulary)
        bad = {"type": "json_schema", "name": "place", "schema": {"type": "odd"}}
        error = error_of(await client.post(RESPONSES, json={"input": "a", "text": {"format": bad}}), 400)
        assert error["param"].startswith("text.format") and "response_format" not in error["message"], error
        error = error_of(
            await client.post(RESPONSES, json={"input": "a", "text": {"format": {"type": "json_schema"}}}), 400
        )
        assert error["param"].startswith("text.format"), error

    async def test_of_a_message(self, serve: Serve) -> None:
        scripted = ScriptedEngine(says('{"city": "a"}'))
        client = serve(scripted)
        config = {"format": {"type": "json_schema", "schema": self.STRICT}}
        messages.message_of(await client.post(MESSAGES, json={**messages.HI, "output_config": config}))
        assert scripted.requests[-1].params.grammar == grammar_of({"json": self.STRICT}, byte_text().vocabulary)
        config = {"format": {"type": "json_schema", "schema": {"type": "odd"}}}
        words = messages.error_of(await client.post(MESSAGES, json={**messages.HI, "output_config": config}), 400)
        assert "output_config.format" in words


class TestResponses:
    TOOLS = ({"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True},
             {"type": "function", "name": "get_time", "parameters": None, "strict": None})  # fmt: skip
    BODY: ClassVar[dict[str, Any]] = {"input": "hi", "tools": list(TOOLS)}

    async def test_reasoning_words_and_calls_are_items(self, serve: Serve) -> None:
        scripted = engine(says(MIXED))
        client = serve(scripted, byte_text(THINKING))
        response = check_response((await client.post(RESPONSES, json=self.BODY)).json())
        kinds = [item["type"] for item in response["output"]]
        assert kinds == ["reasoning", "message", "function_call", "function_call", "message"]
        reasoning, words, weather, clock, done = response["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Aha."}] and reasoning["summary"] == []
        assert [item["content"][0]["text"] for item in (words, done)] == ["Let me see.", "Done."]
        assert (weather["name"], json.loads(weather["arguments"])) == ("get_weather", {"city": "Paris"})
        assert (clock["name"], clock["arguments"]) == ("get_time", "{}")
        assert weather["id"] != weather["call_id"] != clock["call_id"]
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len(THOUGHT.rstrip())
        assert (
            response["tools"][0] == {**self.TOOLS[0], "description": None} and response["tools"][1]["strict"] is False
        )
        assert '"name": "get_weather"' in shown(scripted.requests[0])

    async def test_streamed_it_is_the_same(self, serve: Serve) -> None:
        client = serve(engine(says(MIXED)), byte_text(THINKING))
        whole = (await client.post(RESPONSES, json=self.BODY)).json()
        events = typed_events((await client.post(RESPONSES, json={**self.BODY, "stream": True})).content)
        final = events[-1]["response"]
        for item in (*whole["output"], *final["output"]):
            del item["id"]
            item.pop("call_id", None)
        assert final["output"] == whole["output"] and final["usage"] == whole["usage"]
        kinds = {event["type"] for event in events}
        assert kinds > {"response.reasoning_text.delta", "response.reasoning_text.done"}
        assert kinds > {"response.function_call_arguments.delta", "response.function_call_arguments.done"}

    async def test_all_of_it_can_be_sent_back(self, serve: Serve) -> None:
        scripted = engine(says(THOUGHT + "Let me see." + CALL))
        client = serve(scripted, byte_text(THINKING))
        first = (await client.post(RESPONSES, json=self.BODY)).json()
        call_id = first["output"][-1]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": [{"type": "input_text", "text": "18"}]}
        by_hand = [{"role": "user", "content": "hi"}, *first["output"], result]
        await client.post(RESPONSES, json={**self.BODY, "input": by_hand})
        await client.post(RESPONSES, json={**self.BODY, "input": [result], "previous_response_id": first["id"]})
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        await client.post(RESPONSES, json={**self.BODY, "input": [by_hand[0], *references, result]})
        prompts = {shown(request) for request in scripted.requests[1:]}
        assert len(scripted.requests) == 4 and len(prompts) == 1
        (prompt,) = prompts
        assert 'assistant:(Aha.)Let me see.get_weather{"city": "Paris"}\ntool:18@get_weather\n' in prompt

    async def test_which_tools_may_be_called(self, serve: Serve) -> None:
        scripted = engine(says(CALL))
        client = serve(scripted, byte_text(HERMES))
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
        response = check_response((await client.post(RESPONSES, json={**self.BODY, "tool_choice": allowed})).json())
        prompt = shown(scripted.requests[-1])
        assert '"name": "get_time"' in prompt and "get_weather" not in prompt
        assert response["tool_choice"] == allowed and len(response["tools"]) == 2
        unnamed = {**self.BODY, "tools": [*self.BODY["tools"], {"type": "function"}], "tool_choice": allowed}
        assert (await client.post(RESPONSES, json=unnamed)).status_code == 400
        response = check_response((await client.post(RESPONSES, json={**self.BODY, "tool_choice": "none"})).json())
        assert response["output"][0]["content"][0]["text"] == CALL, "no tool may be called, so it is text"
        one = {**self.BODY, "parallel_tool_calls": False}
        several = serve(engine(says(CALL + TIME)), byte_text(HERMES))
        response = check_response((await several.post(RESPONSES, json=one)).json())
        assert [item["type"] for item in response["output"]] == ["function_call"]
        assert response["parallel_tool_calls"] is False

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
    async def test_a_call_that_is_required(self, serve: Serve, choice: object) -> None:
        scripted = engine(says(CALL))
        client = serve(scripted, byte_text(HERMES))
        response = check_response((await client.post(RESPONSES, json={**self.BODY, "tool_choice": choice})).json())
        assert [item["type"] for item in response["output"]] == ["function_call"] and response["tool_choice"] == choice
        assert "get_weather" in scripted.requests[0].params.grammar

    async def test_effort_is_a_switch_where_the_template_has_one(self, serve: Serve) -> None:
        scripted = engine(says("ok"))
        body = {"input": "hi", "reasoning": {"effort": "none"}}
        response = check_response((await serve(scripted, byte_text(THINKING)).post(RESPONSES, json=body)).json())
        assert shown(scripted.requests[0]).endswith("<think></think>")
        assert "ignored_fields" not in response and response["reasoning"]["effort"] == "none"
        body = {"input": "hi", "reasoning": {"effort": "high", "summary": "auto"}}
        response = check_response((await serve().post(RESPONSES, json=body)).json())
        assert sorted(response["ignored_fields"]) == ["reasoning.effort", "reasoning.summary"]
        error = error_of(
            await serve(strict_fields=True).post(RESPONSES, json={"input": "a", "reasoning": {"effort": "low"}}), 400
        )
        assert error["param"] == "reasoning.effort" and "reasoning.effort" in error["message"]

    @pytest.mark.parametrize(
        ("tool", "param", "words"),
        [
            ({"type": "function", "name": "a b"}, "tools[0].name", "tools[0].name must be"),
            ({"type": "function", "name": "f", "parameters": 1}, "tools[0].parameters", "tools[0].parameters must be"),
        ],
    )
    async def test_bad_tools_are_named(self, serve: Serve, tool: dict[str, Any], param: str, words: str) -> None:
        error = error_of(await serve().post(RESPONSES, json={"input": "hi", "tools": [tool]}), 400)
        assert error["param"] == param and words in error["message"], error

    async def test_reasoning_that_is_cut(self, serve: Serve) -> None:
        client = serve(engine(says("Hm, well", reason="length")), byte_text(OPEN))
        response = check_response((await client.post(RESPONSES, json={"input": "hi"})).json())
        assert [(item["type"], item["status"]) for item in response["output"]] == [("reasoning", "incomplete")]
        assert (
            response["status"] == "incomplete" and response["usage"]["output_tokens_details"]["reasoning_tokens"] == 8
        )


class TestMessages:
    TOOLS = (
        {"name": "get_weather", "description": "Look", "input_schema": SCHEMA},
        {"name": "get_time", "input_schema": {}},
    )
    BODY: ClassVar[dict[str, Any]] = {**messages.HI, "tools": list(TOOLS), "max_tokens": 300}

    async def test_thinking_words_and_calls_are_blocks(self, serve: Serve) -> None:
        scripted = engine(says(MIXED))
        client = serve(scripted, byte_text(THINKING))
        message = messages.message_of(await client.post(MESSAGES, json=self.BODY))
        assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use", "text"]
        thinking, words, weather, clock, _ = message["content"]
        assert thinking == {"type": "thinking", "thinking": "Aha.", "signature": ""} and words["text"] == "Let me see."
        assert (weather["name"], weather["input"]) == ("get_weather", {"city": "Paris"})
        assert clock["input"] == {} and weather["id"] != clock["id"]
        assert message["stop_reason"] == "tool_use"
        assert message["usage"]["output_tokens_details"] == {"thinking_tokens": len(THOUGHT.rstrip())}
        events = messages.events_of((await client.post(MESSAGES, json={**self.BODY, "stream": True})).content)
        streamed = messages.blocks_of(events)
        for block in (*streamed, *message["content"]):
            block.pop("id", None)
        assert streamed == message["content"] and events[-2]["delta"]["stop_reason"] == "tool_use"

    async def test_all_of_it_can_be_sent_back(self, serve: Serve) -> None:
        scripted = engine(says(THOUGHT + "Let me see." + CALL))
        client = serve(scripted, byte_text(THINKING))
        first = messages.message_of(await client.post(MESSAGES, json=self.BODY))
        result = {
            "type": "tool_result",
            "tool_use_id": first["content"][-1]["id"],
            "content": [{"type": "text", "text": "18"}],
        }
        turns = [
            *self.BODY["messages"],
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
        ]
        messages.message_of(await client.post(MESSAGES, json={**self.BODY, "messages": turns}))
        expected = 'assistant:(Aha.)Let me see.get_weather{"city": "Paris"}\ntool:18@get_weather\nuser:so?\n'
        assert expected in shown(scripted.requests[-1])
        turns[-1]["content"] = [{**result, "content": "no such city", "is_error": True}]
        messages.message_of(await client.post(MESSAGES, json={**self.BODY, "messages": turns}))
        assert "tool:Error: no such city@get_weather\n" in shown(scripted.requests[-1])

    async def test_which_tools_may_be_called(self, serve: Serve) -> None:
        scripted = engine(says(CALL + TIME))
        client = serve(scripted, byte_text(HERMES))
        none = messages.message_of(await client.post(MESSAGES, json={**self.BODY, "tool_choice": {"type": "none"}}))
        assert none["content"][0]["text"] == CALL + TIME and none["stop_reason"] == "end_turn"
        single = {"type": "auto", "disable_parallel_tool_use": True}
        one = messages.message_of(await client.post(MESSAGES, json={**self.BODY, "tool_choice": single}))
        assert [block["type"] for block in one["content"]] == ["tool_use"]
        scripted.script = says(CALL)
        for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
            made = messages.message_of(await client.post(MESSAGES, json={**self.BODY, "tool_choice": choice}))
            assert made["content"][0]["input"] == {"city": "Paris"} and made["stop_reason"] == "tool_use"
            assert "get_weather" in scripted.requests[-1].params.grammar

    async def test_thinking_is_switched(self, serve: Serve) -> None:
        scripted = engine(says(THOUGHT + "ok"))
        client = serve(scripted, byte_text(THINKING))
        off = messages.message_of(await client.post(MESSAGES, json={**messages.HI, "thinking": {"type": "disabled"}}))
        assert shown(scripted.requests[-1]).endswith("<think></think>")
        assert [block["type"] for block in off["content"]] == ["text"] and "ignored_fields" not in off
        on = messages.message_of(await client.post(MESSAGES, json={**messages.HI, "thinking": {"type": "adaptive"}}))
        assert not shown(scripted.requests[-1]).endswith("</think>")
        assert [block["type"] for block in on["content"]] == ["thinking", "text"]
        body = {**messages.HI, "output_config": {"effort": "high"}}
        message = messages.message_of(await serve(ScriptedEngine()).post(MESSAGES, json=body))
        assert message["ignored_fields"] == ["output_config.effort"]

    async def test_bad_tools_are_named(self, serve: Serve) -> None:
        for tool, words in (
            ({"name": "a b", "input_schema": {}}, "tools[0].name must be"),
            ({"name": "f", "input_schema": 1}, "tools[0].input_schema must be"),
        ):
            assert words in messages.error_of(await serve().post(MESSAGES, json={**messages.HI, "tools": [tool]}), 400)


async def test_strict_tools_that_may_be_called_or_not_are_named_back(serve: Serve) -> None:
    """Only calls that must come are kept to their schemas."""
    tool = {"name": "f", "strict": True}
    asked = [
        (RESPONSES, {"input": "hi", "tools": [{**tool, "type": "function", "parameters": SCHEMA}]}, "required"),
        (
            MESSAGES,
            {
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 5,
                "tools": [{**tool, "input_schema": SCHEMA}],
            },
            {"type": "any"},
        ),
    ]
    for path, body, required in asked:
        answer = (await serve(text=byte_text(HERMES)).post(path, json=body)).json()
        assert answer["ignored_fields"] == ["tools[0].strict"], (path, answer)
        answer = (await serve(text=byte_text(HERMES)).post(path, json={**body, "tool_choice": required})).json()
        assert "ignored_fields" not in answer, (path, answer)


class TestNamesInErrors:
    """A refusal calls fields by the dialect's names; what the client's own schema says comes back as the client wrote it."""

    ODD: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            name: {"type": "array", "items": {"type": "string"}, "contains": {"const": "a"}, "minContains": 40}
            for name in ("reasoning_effort", "messages", "max_tokens", "response_format", "x.function")
        },
    }

    @pytest.mark.parametrize("name", [*ODD["properties"]])
    async def test_properties_of_a_tools_schema_are_the_clients_own(self, serve: Serve, name: str) -> None:
        client = serve()
        schema = {"type": "object", "properties": {name: self.ODD["properties"][name]}}
        place = f"tools: 'contains' (at #/$defs/tool_0/properties/{name})"
        tool = {"name": "f", "input_schema": schema}
        body = {**messages.HI, "tools": [tool], "tool_choice": {"type": "any"}}
        assert messages.error_of(await client.post(MESSAGES, json=body), 400).startswith(place)
        tool = {"type": "function", "name": "f", "parameters": schema}
        body = {"input": "a", "tools": [tool], "tool_choice": "required"}
        error = error_of(await client.post(RESPONSES, json=body), 400)
        assert error["message"].startswith(place) and error["param"] == "tools"

    @pytest.mark.parametrize("name", [*ODD["properties"]])
    async def test_so_are_those_of_an_answers_schema(self, serve: Serve, name: str) -> None:
        client = serve()
        schema = {"type": "object", "properties": {name: self.ODD["properties"][name]}}
        place = f": 'contains' (at #/properties/{name})"
        body = {**messages.HI, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
        words = messages.error_of(await client.post(MESSAGES, json=body), 400)
        assert words.startswith(f"output_config.format.schema{place}")
        body = {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
        error = error_of(await client.post(RESPONSES, json=body), 400)
        assert error["message"].startswith(f"text.format.schema{place}") and error["param"] == "text.format.schema"

    async def test_fields_go_by_the_dialects_names(self, serve: Serve) -> None:
        client = serve(strict_fields=True)
        long = {"role": "user", "content": "x" * 300}
        for fields, words in (
            ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must be 1 to 64"),
            ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema must be a JSON schema"),
            ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type must be 'object'"),
            ({"tools": [{"name": "f", "input_schema": {}, "strict": True}]}, "tools[0].strict is not supported here"),
            ({"output_config": {"effort": "odd"}}, "output_config.effort must be one of"),
            ({"output_config": {"effort": "low"}}, "output_config.effort is not supported here"),
            ({"stop_sequences": [""]}, "stop_sequences must be non-empty strings"),
            ({"messages": [long]}, "messages has"),
        ):  # fmt: skip
            words_streamed = messages.error_of(await client.post(MESSAGES, json={**messages.HI, **fields}), 400)
            assert words_streamed.startswith(words), words_streamed
        for fields, param, words in (
            ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "tools[0].name must be 1 to 64"),
            ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "tools[0].parameters.type",
             "tools[0].parameters.type must be 'object'"),
            ({"tools": [{"type": "function", "name": "f", "strict": True}]}, "tools[0].strict", "tools[0].strict is not"),
            ({"reasoning": {"effort": "low"}}, "reasoning.effort", "reasoning.effort is not supported here"),
            ({"input": "x" * 300}, "input", "input has"),
            ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "text.format.schema is missing"),
            ({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}, "structured_outputs",
             "text.format and structured_outputs both constrain"),
        ):  # fmt: skip
            error = error_of(await client.post(RESPONSES, json={"input": "a", **fields}), 400)
            assert error["message"].startswith(words) and error["param"] == param, error
