"""Tools and reasoning on /v1/chat/completions: what the prompt holds, what the answer becomes, streamed and whole."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.messages import Finish, GenerateRequest, TokenDelta
from octavo.text import Text, load_text
from tests.doubles import EOS, REPORT, Script, ScriptedEngine, byte_text, says, write_byte_tokenizer
from tests.server.conftest import Serve, error_of, events

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
BROKEN = {
    "type": "function",
    "function": {
        "name": "x",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "array", "not": {"not": {"contains": {"const": 1}}}}},
        },
    },
}
TURNS = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{% if m.role == 'tool' %}@{{ m.name }}{% endif %}{{ '\\n' }}{% endfor %}"
)
HERMES = "{% if tools %}{{ tools | tojson }} <tool_call>\n{% endif %}" + TURNS + "assistant:"
THINKING = HERMES + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
OPEN = TURNS + "assistant:<think>\n{# </think> #}"
MISTRAL = "{% if tools %}{{ tools }}[TOOL_CALLS]{% endif %}" + OPEN
OBJECT = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
CALL = f"<tool_call>\n{OBJECT}\n</tool_call>"
TIME = '<tool_call>{"name": "get_time"}</tool_call>'


def engine(script: Script) -> ScriptedEngine:
    return ScriptedEngine(script, msgspec.structs.replace(REPORT, max_model_len=4096))


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"messages": HI, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def put_together(chunks: list[Any]) -> list[dict[str, Any]]:
    """The messages that a stream's deltas amount to, as the openai client puts them together; ids aside."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": [], "finish": None})
            delta = choice["delta"]
            whole["content"] += delta.get("content") or ""
            whole["reasoning"] += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(whole["calls"]):
                    assert call["id"] and call["type"] == "function"
                    whole["calls"].append([call["function"]["name"], ""])
                else:
                    assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
                whole["calls"][call["index"]][1] += call["function"]["arguments"]
            if choice["finish_reason"] is not None:
                assert whole["finish"] is None
                whole["finish"] = choice["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def as_streamed(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "content": choice["message"]["content"] or "",
            "reasoning": choice["message"].get("reasoning", ""),
            "calls": [
                [call["function"]["name"], call["function"]["arguments"]]
                for call in choice["message"].get("tool_calls", ())
            ],
            "finish": choice["finish_reason"],
        }
        for choice in body["choices"]
    ]


async def test_a_call(serve: Serve) -> None:
    scripted = engine(says("Let me see." + CALL + TIME))
    body = await ask(serve(scripted, byte_text(HERMES)), tools=[WEATHER, CLOCK])
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
    first, second = choice["message"]["tool_calls"]
    assert first["type"] == "function" and first["id"] != second["id"]
    assert first["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert second["function"] == {"name": "get_time", "arguments": "{}"}
    prompt = bytes(scripted.requests[0].prompt_ids).decode()
    assert '"name": "get_weather"' in prompt and '"name": "get_time"' in prompt


async def test_nothing_but_a_call_has_null_content(serve: Serve) -> None:
    body = await ask(serve(engine(says(CALL)), byte_text(HERMES)), tools=[WEATHER])
    assert body["choices"][0]["message"]["content"] is None


async def test_deltas_of_a_call(serve: Serve) -> None:
    client = serve(engine(says("So: " + CALL)), byte_text(HERMES))
    response = await client.post(URL, json={"messages": HI, "tools": [WEATHER], "stream": True})
    chunks = events(response.content)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    begin, arguments, end = deltas[-3:]
    call_id = begin["tool_calls"][0].pop("id")
    assert call_id.startswith("call_")
    assert begin == {
        "tool_calls": [{"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}]
    }
    assert arguments == {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Paris"}'}}]}
    assert end == {} and chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.sampled_from(["a", " ", "\n", "é", "<think>", "</think>", "<tool_call>", "</tool_call>", CALL, TIME, "{}"]),
        max_size=8,
    ),
    chunks=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    fields=st.sampled_from([{}, {"parallel_tool_calls": False}, {"include_reasoning": False}, {"stop": ["a"]}]),
    reason=st.sampled_from(["stop", "length"]),
)
async def test_a_whole_answer_is_the_streamed_one_put_together(
    serve: Serve, parts: list[str], chunks: tuple[int, int], fields: dict[str, Any], reason: Any
) -> None:
    answer = "".join(parts) or "."
    body = {"messages": HI, "tools": [WEATHER, CLOCK], **fields}
    whole = serve(engine(says(answer, reason=reason, chunk=chunks[0])), byte_text(THINKING))
    streamed = serve(engine(says(answer, reason=reason, chunk=chunks[1])), byte_text(THINKING))
    completion = await ask(whole, **body)
    response = await streamed.post(URL, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    seen = events(response.content)
    assert put_together(seen) == as_streamed(completion)
    for usage in (seen[-1]["usage"], completion["usage"]):
        del usage[
            "prompt_tokens_details"
        ]  # where a stop string ends it, the engine may or may not have reported them yet
    assert seen[-1]["usage"] == completion["usage"]


async def test_only_the_first_call_where_calls_may_not_be_parallel(serve: Serve) -> None:
    client = serve(engine(says(CALL + TIME)), byte_text(HERMES))
    body = await ask(client, tools=[WEATHER, CLOCK], parallel_tool_calls=False)
    assert [call["function"]["name"] for call in body["choices"][0]["message"]["tool_calls"]] == ["get_weather"]


@pytest.mark.parametrize("fields", [{"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}, {}])
async def test_without_tools_nothing_is_a_call(serve: Serve, fields: dict[str, Any]) -> None:
    scripted = engine(says(CALL))
    body = await ask(serve(scripted, byte_text(HERMES)), **fields)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert "get_weather" not in bytes(scripted.requests[0].prompt_ids).decode()


async def test_a_template_without_tools(serve: Serve) -> None:
    scripted = engine(says(CALL))
    body = await ask(serve(scripted, byte_text(TURNS)), tools=[WEATHER])
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    prompt = bytes(scripted.requests[0].prompt_ids).decode()
    assert prompt.startswith("system:You can call functions.") and '"name": "get_weather"' in prompt


async def test_calls_and_results_of_earlier_turns(serve: Serve) -> None:
    scripted = engine(says("20 degrees"))
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "20"},
    ]
    await ask(serve(scripted, byte_text(HERMES)), messages=messages, tools=[WEATHER])
    prompt = bytes(scripted.requests[0].prompt_ids).decode()
    assert prompt.endswith('assistant:(hm)get_weather{"city": "Paris"}\ntool:20@get_weather\nassistant:')


@cache
def marked_text() -> Text:
    """Its call mark is a special token, 258, as Mistral's is."""
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder), "{% if tools %}[TOOL_CALLS]{% endif %}" + TURNS, special=("[TOOL_CALLS]",))
        return load_text(Path(folder))


async def test_marks_that_are_special_tokens_are_seen(serve: Serve) -> None:
    def script(request: GenerateRequest) -> list[list[TokenDelta]]:
        ids = [258, *b'[{"name": "get_time", "arguments": {}}]', EOS]
        return [[TokenDelta(request.id, 0, ids, Finish("stop", EOS, num_cached_tokens=0))]]

    report = msgspec.structs.replace(REPORT, max_model_len=4096, vocab_size=259)
    client = serve(ScriptedEngine(script, report), marked_text())
    body = await ask(client, tools=[CLOCK])
    (call,) = body["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "get_time", "arguments": "{}"} and len(call["id"]) == 9
    assert (await ask(client))["choices"][0]["message"]["content"].startswith("[{"), "without tools it is skipped"


async def test_reasoning(serve: Serve) -> None:
    client = serve(engine(says("<think>\nHm.\n</think>\n\nYes.")), byte_text(THINKING))
    body = await ask(client)
    message = body["choices"][0]["message"]
    assert message["content"] == "Yes." and message["reasoning_content"] == message["reasoning"] == "Hm."
    # <think>, the thought and </think>, a token each byte
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nHm.\n</think>")}
    body = await ask(client, include_reasoning=False)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nHm.\n</think>")}


async def test_reasoning_that_the_prompt_has_opened(serve: Serve) -> None:
    body = await ask(serve(engine(says("Hm", reason="length")), byte_text(OPEN)))
    assert body["choices"][0]["message"]["reasoning"] == "Hm" and body["choices"][0]["message"]["content"] is None
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


async def test_an_answer_without_reasoning(serve: Serve) -> None:
    body = await ask(serve(engine(says("Yes.")), byte_text(THINKING)))
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("fields", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
async def test_thinking_can_be_switched_off(serve: Serve, fields: dict[str, Any]) -> None:
    scripted = engine(says("Yes."))
    body = await ask(serve(scripted, byte_text(THINKING)), **fields)
    assert bytes(scripted.requests[0].prompt_ids).endswith(b"<think></think>") and "ignored_fields" not in body


async def test_an_effort_that_no_template_reads_is_named_back(serve: Serve) -> None:
    assert (await ask(serve(), reasoning_effort="high"))["ignored_fields"] == ["reasoning_effort"]
    error_of(await serve(strict_fields=True).post(URL, json={"messages": HI, "reasoning_effort": "high"}), 400)


async def test_logprobs_cover_every_token_of_a_call(serve: Serve) -> None:
    client = serve(engine(says(CALL)), byte_text(HERMES))
    body = {"messages": HI, "tools": [WEATHER], "stream": True, "return_token_ids": True}
    chunks = events((await client.post(URL, json=body)).content)
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
    assert bytes(ids[:-1]).decode() == CALL


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("written", [(OPEN, CALL), (MISTRAL, f"[{OBJECT}]")], ids=["framed", "listed"])
async def test_calls_that_are_required_are_kept_to_by_a_grammar(
    serve: Serve, choice: Any, written: tuple[str, str]
) -> None:
    """Written as the model writes calls, or as a list where no grammar is made of its format."""
    source, answer = written
    scripted = engine(says(answer))
    client = serve(scripted, byte_text(source))
    body = {"tools": [WEATHER, CLOCK], "tool_choice": choice, "response_format": {"type": "json_object"}}
    completion = await ask(client, **body)
    assert (
        completion["choices"][0]["finish_reason"] == "tool_calls"
        and "reasoning" not in completion["choices"][0]["message"]
    )
    (call,) = completion["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    streamed = events((await client.post(URL, json={"messages": HI, **body, "stream": True})).content)
    assert put_together(streamed) == as_streamed(completion)
    grammar = scripted.requests[0].params.grammar
    assert '"get_weather"' in grammar and ('"get_time"' in grammar) == (choice == "required")


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_only_the_allowed_tools_are_offered(serve: Serve) -> None:
    scripted = engine(says(CALL))
    client = serve(scripted, byte_text(HERMES))
    tools = [WEATHER, CLOCK]
    (choice,) = (await ask(client, tools=tools, tool_choice=allowed("auto", "get_weather", "get_weather")))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    prompt = bytes(scripted.requests[-1].prompt_ids).decode()
    assert "get_weather" in prompt and "get_time" not in prompt and not scripted.requests[-1].params.grammar
    await ask(client, tools=tools, tool_choice=allowed("required", "get_weather"))
    grammar = scripted.requests[-1].params.grammar
    assert '"get_weather"' in grammar and '"get_time"' not in grammar


@pytest.mark.parametrize(
    ("choice", "param", "words"),
    [
        (allowed("auto", "get_place"), "tool_choice.allowed_tools.tools[0]", "names 'get_place', which is not in tools"),
        (allowed("auto"), "tool_choice", "tools\": [at least one]"),
        (allowed("named", "get_time"), "tool_choice", '"auto" or "required"'),
        ({"type": "allowed_tools"}, "tool_choice", "must be"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"name": "get_time"}]}},
         "tool_choice.allowed_tools.tools[0]", 'must be {"type": "function"'),
    ],
)  # fmt: skip
async def test_mistaken_allowed_tools(serve: Serve, choice: Any, param: str, words: str) -> None:
    error = error_of(await serve().post(URL, json={"messages": HI, "tools": [CLOCK], "tool_choice": choice}), 400)
    assert error["param"] == param and words in error["message"]


async def test_a_call_without_marks(serve: Serve) -> None:
    client = serve(engine(says(OBJECT)), byte_text(HERMES))
    completion = await ask(client, tools=[WEATHER])
    (choice,) = completion["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    streamed = events((await client.post(URL, json={"messages": HI, "tools": [WEATHER], "stream": True})).content)
    assert put_together(streamed) == as_streamed(completion)
    (choice,) = (await ask(client, tools=[CLOCK]))["choices"]
    assert choice["message"]["content"] == OBJECT and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("path", [URL, "/v1/responses", "/tokenize"])
async def test_template_variables_that_the_template_does_not_read_are_named_back(serve: Serve, path: str) -> None:
    body: dict[str, Any] = {"input": "hi"} if path == "/v1/responses" else {"messages": HI}
    body["chat_template_kwargs"] = {"enable_thinking": False, "mood": "calm", "x" * 500: 1}
    answer = await serve(engine(says("a")), byte_text(THINKING)).post(path, json=body)
    assert answer.status_code == 200
    assert answer.json()["ignored_fields"] == ["chat_template_kwargs.mood", f"chat_template_kwargs.{'x' * 60}"]
    strict = serve(engine(says("a")), byte_text(THINKING), strict_fields=True)
    error = error_of(await strict.post(path, json=body), 400)
    assert error["param"] == "chat_template_kwargs.mood" and "the chat template does not read it" in error["message"]
    body["chat_template_kwargs"] = {"enable_thinking": False}
    assert "ignored_fields" not in (await strict.post(path, json=body)).json()


async def test_template_variables_reach_the_prompt_of_a_response(serve: Serve) -> None:
    scripted = engine(says("a"))
    client = serve(scripted, byte_text(THINKING))
    for off in (True, False):
        await client.post("/v1/responses", json={"input": "hi", "chat_template_kwargs": {"enable_thinking": not off}})
        assert bytes(scripted.requests[-1].prompt_ids).endswith(b"<think></think>") == off


@pytest.mark.parametrize("answer", ["<", "<tool_call>", '<tool_call>\n{"na'])
async def test_what_is_left_of_a_call_that_had_no_room_is_no_content(serve: Serve, answer: str) -> None:
    client = serve(engine(says(answer, reason="length")), byte_text(HERMES))
    (choice,) = (await ask(client, tools=[CLOCK], tool_choice="required"))["choices"]
    assert not choice["message"]["content"] and not choice["message"].get("tool_calls")
    assert choice["finish_reason"] == "length"


async def test_what_is_left_of_a_list_of_calls_that_was_cut_is_no_content(serve: Serve) -> None:
    answer = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "get_ti'
    client = serve(engine(says(answer, reason="length")), byte_text(HERMES))
    (choice,) = (await ask(client, tools=[CLOCK], tool_choice="required"))["choices"]
    assert choice["message"]["content"] is None and len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "length"


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].function", "tools[0].function must be an object"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "only 'function'"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "twice"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "'required'"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": [BROKEN], "tool_choice": "required"}, "tools", "contains"),
    ({"tools": [CLOCK], "tool_choice": "required", "guided_regex": "a+"}, "tool_choice", "both"),
    ({"functions": [{"name": "x"}]}, "functions", "tools"),
    ({"function_call": {"name": "x"}}, "function_call", "tool_choice"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not set 'messages'"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "must not set 'self'"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "none, minimal"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "'tool'"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls", "role 'user'"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls", "must be a list"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]", '"name"'),
    ({"messages": [{"role": "assistant", "function_call": {"name": "x"}}]}, "messages[0].function_call", "tool_calls"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 7}]}, "messages[0].tool_call_id", "string"),
]


@pytest.mark.parametrize(("fields", "param", "words"), CASES)
async def test_what_is_refused(serve: Serve, fields: dict[str, Any], param: str, words: str) -> None:
    error = error_of(await serve().post(URL, json={"messages": HI, **fields}), 400)
    assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize("arguments", ["[]", "{", '"x"', "7", 7, [1]])
async def test_arguments_of_earlier_calls_are_objects(serve: Serve, arguments: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "x", "arguments": arguments}}
    body = {"messages": [*HI, {"role": "assistant", "tool_calls": [call]}]}
    error = error_of(await serve().post(URL, json=body), 400)
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"


async def test_auto_can_be_switched_off(serve: Serve) -> None:
    client = serve(engine(says(CALL)), byte_text(HERMES), enable_auto_tool_choice=False)
    error = error_of(await client.post(URL, json={"messages": HI, "tools": [WEATHER]}), 400)
    assert error["param"] == "tool_choice" and "--no-enable-auto-tool-choice" in error["message"]


async def test_the_chosen_parsers_are_used(serve: Serve) -> None:
    """As the API process loads its text."""
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder), HERMES)
        text = load_text(Path(folder), tool_call_parser="pythonic", reasoning_parser="qwen3")
    body = await ask(serve(engine(says('<think>a</think>[get_weather(city="Rome")]')), text), tools=[WEATHER])
    message = body["choices"][0]["message"]
    assert message["reasoning"] == "a"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
