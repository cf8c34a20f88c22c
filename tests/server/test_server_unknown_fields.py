"""Fields within others follow the rule of all fields: honoured, refused by their path, or named back by it."""

import logging
from typing import Any

import httpx
import pytest

from tests.doubles import ScriptedEngine, byte_text, says
from tests.server import test_server_messages as messages
from tests.server.conftest import Serve, error_of
from tests.server.test_server_tools import CALL, HERMES, WEATHER, engine

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HI: dict[str, Any] = {"role": "user", "content": "hi"}
BARE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI]},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [HI], "max_tokens": 9},
    MESSAGES + "/count_tokens": {"messages": [HI]},
    "/tokenize": {"messages": [HI]},
}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
SHAPED = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
LONG = {"type": "object", "properties": {}}

CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    (CHAT, {"messages": [HI, {**HI, "colour": "red"}]}, ["messages[1].colour"]),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "odd": 1}]}]}, ["messages[0].content[0].odd"]),
    (CHAT, {"tools": [{**TOOL, "odd": 1}]}, ["tools[0].odd"]),
    (CHAT, {"tools": [TOOL | {"function": FUNCTION | {"odd": 1, "name": "g"}}]}, ["tools[0].function.odd"]),
    (CHAT, {"tools": [TOOL], "tool_choice": {**TOOL, "function": {"name": "f", "odd": 1}, "odd": 2}}, ["tool_choice.odd", "tool_choice.function.odd"]),
    (CHAT, {"response_format": {**SHAPED, "odd": 1}}, ["response_format.odd"]),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": LONG, "odd": 1}}}, ["response_format.json_schema.odd"]),
    (CHAT, {"stream_options": {"odd": 1}, "stream": True}, ["stream_options.odd"]),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, ["tools[0].function.strict"]),
    (COMPLETIONS, {"structured_outputs": {"regex": "a+", "odd": 1, "backend": "auto"}}, ["structured_outputs.odd", "structured_outputs.backend"]),
    (COMPLETIONS, {"response_format": {"type": "json_object", "odd": 1}}, ["response_format.odd"]),
    ("/tokenize", {"tools": [{**TOOL, "odd": 1}]}, ["tools[0].odd"]),
    (RESPONSES, {"input": [{**HI, "odd": 1}]}, ["input[0].odd"]),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "odd": 1}]}]}, ["input[0].content[0].odd"]),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": [], "name": "x"}, HI]}, ["input[0].name"]),
    (RESPONSES, {"text": {"format": {"type": "text", "odd": 1}, "odd": 2}}, ["text.odd", "text.format.odd"]),
    (RESPONSES, {"reasoning": {"odd": 1}}, ["reasoning.odd"]),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, ["tools[0].defer_loading"]),
    (RESPONSES, {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f", "odd": 1}]}}, ["tool_choice.tools[0].odd"]),
    (MESSAGES, {"messages": [{**HI, "odd": 1}]}, ["messages[0].odd"]),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "odd": 1}]}]}, ["messages[0].content[0].odd"]),
    (MESSAGES, {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "odd": 1}}]}, ["system[0].cache_control.odd"]),
    (MESSAGES, {"cache_control": {"type": "ephemeral", "odd": 1}, "metadata": {"user_id": "u", "odd": 1}}, ["cache_control.odd", "metadata.odd"]),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {}, "odd": 1}], "tool_choice": {"type": "auto", "odd": 1}}, ["tools[0].odd", "tool_choice.odd"]),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": LONG, "odd": 1}}}, ["output_config.format.odd"]),
    (MESSAGES + "/count_tokens", {"messages": [{**HI, "odd": 1}]}, ["messages[0].odd"]),
]  # fmt: skip


def named_back(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        head = response.text.partition("\n\n")[0]
        return list(httpx.Response(200, text=head.removeprefix("data: ")).json()["ignored_fields"])
    return list(response.json().get("ignored_fields", []))


@pytest.mark.parametrize(("path", "fields", "names"), CASES)
async def test_what_is_unknown_within_is_named_by_its_path(
    serve: Serve, path: str, fields: dict[str, Any], names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    body = {**BARE[path], **fields}
    answer = says(CALL) if "tool_choice" in fields else says("aa")
    with caplog.at_level(logging.INFO, "octavo.server"):
        named = named_back(await serve(engine(answer)).post(path, json=body))
    assert sorted(named) == sorted(names)
    assert all(name in caplog.text for name in names)
    response = await serve(strict_fields=True).post(path, json=body)
    if path.startswith(MESSAGES):
        words = messages.error_of(response, 400)
    else:
        error = error_of(response, 400)
        words = error["message"]
        assert error["param"] in names and error["code"] == "unsupported_parameter", error
    assert all(name in words for name in names)


async def test_a_hint_at_the_right_name_within(serve: Serve) -> None:
    tool = {"type": "function", "function": {"name": "f", "paramters": {}}}
    error = error_of(await serve(strict_fields=True).post(CHAT, json={**BARE[CHAT], "tools": [tool]}), 400)
    assert "did you mean 'tools[0].function.parameters'?" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": [HI, {"role": "assistant", "content": "a", "prefix": True}]}, "messages[1].prefix", "continue_final"),
        ({"messages": [{"role": "assistant", "content": None, "audio": {"id": "a"}}]}, "messages[0].audio", "leave"),
        ({"messages": [*[{**HI, "annotations": [1]}] * 70, {**HI, "audio": {"id": "a"}}]}, "messages[70].audio", "leave"),
    ],
)  # fmt: skip
async def test_what_changes_the_meaning_is_refused_in_every_mode(
    serve: Serve, fields: dict[str, Any], param: str, words: str
) -> None:
    error = error_of(await serve().post(CHAT, json={**BARE[CHAT], **fields}), 400)
    assert error["param"] == param and error["code"] == "unsupported_parameter" and words in error["message"], error


async def test_answers_can_be_sent_back_without_a_word(serve: Serve) -> None:
    """As clients keep them: with what their libraries add, and null for what they know and had not."""
    client = serve(engine(says(CALL)), byte_text(HERMES), strict_fields=True)
    body = {"messages": [HI], "tools": [WEATHER]}
    message = (await client.post(CHAT, json=body)).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    kept = {
        **message,
        **dict.fromkeys(("audio", "function_call", "images", "parsed")),
        "annotations": [],
        "provider_specific_fields": {"refusal": None},
        "tool_calls": [{**call, "index": 0, "function": {**call["function"], "parsed_arguments": {"city": "Paris"}}}],
    }
    result = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "18"}]}
    for sent in (message, kept):
        assert named_back(await client.post(CHAT, json={**body, "messages": [HI, sent, result]})) == []
    tools = [{"type": "function", **WEATHER["function"]}]
    items = (await client.post(RESPONSES, json={"input": "hi", "tools": tools})).json()["output"]
    part = {"type": "output_text", "text": "x", "annotations": [], "logprobs": [], "parsed": {"a": 1}}
    items = [*({**item, "parsed_arguments": {"city": "Paris"}, "namespace": None} for item in items),
             {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "18", "status": "completed"},
             {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}, HI]  # fmt: skip
    assert named_back(await client.post(RESPONSES, json={"input": items, "tools": tools})) == []


async def test_what_an_assistant_said_in_refusing_is_what_it_said(serve: Serve) -> None:
    scripted = ScriptedEngine()
    client = serve(scripted)
    for said in ({"content": None, "refusal": "no"}, {"content": [{"type": "refusal", "refusal": "no"}]}):
        await client.post(CHAT, json={"messages": [HI, {"role": "assistant", **said}, HI]})
        assert b"assistant: no" in bytes(token for token in scripted.requests[-1].prompt_ids if token < 256)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", **{f"x{at}": 1 for at in range(100_000)}}}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "", "x": 1}] * 100_000}]},
    ],
    ids=["in one object", "in as many"],
)
async def test_an_answer_does_not_grow_with_rubbish_within(serve: Serve, fields: dict[str, Any]) -> None:
    client = serve(max_json_items=10**8)
    names = named_back(await client.post("/tokenize", json={**BARE[CHAT], **fields}))
    assert len(names) == 65 and names[-1] == "and 99936 more"
    client = serve(max_json_items=10**8, strict_fields=True)
    error = error_of(await client.post(CHAT, json={**BARE[CHAT], **fields}), 400)
    assert error["message"].endswith("and 99992 more fields") and len(error["message"]) < 1000
