"""/v1/compat says what requests meet: each claim is tried on the endpoint it is about."""

import json
import re
from typing import Any

import httpx
import msgspec
import pytest

from tests.doubles import REPORT, ScriptedEngine, byte_text
from tests.server.conftest import Serve, error_of
from tests.server.test_server_tools import HERMES

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/responses/compact": {"input": "a"},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "a"}], "stream": False},
    "/api/generate": {"prompt": "a", "stream": False},
    "/api/show": {"name": "byte-model"},
    "/v1/prefix": {"action": "pin", "name": "a", "prompt": "a"},
    "/completion": {"prompt": "a"},
    "/apply-template": {"messages": [{"role": "user", "content": "a"}]},
}
LLAMA_CPP = ("/completion", "/apply-template")
UNTRIED = {
    "/completions",
    "/v1/fleet",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/infill",
    "/v1/embeddings",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/reranking",
    "/v1/reranking",
    "/classify",
    "/pooling",
    "/v1/batches",
    "/api/embed",
    "/api/embeddings",
    "/api/pull",
    "/api/delete",
}
NUMBERS = re.compile(r"\[\d+\]")
STRANGE = [["value"]]  # no field that is honoured or only labels takes it

TEXT = {"type": "text", "text": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
CHAT: dict[str, Any] = {
    "messages": [{"role": "assistant", "content": [TEXT], "tool_calls": [CALL]}, {"role": "user", "content": [TEXT]}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
SHAPE = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
WISH = {"structured_outputs": {"regex": "a+"}}
INPUT: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
    ],
    "tools": [{"type": "function", "name": "f"}],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "reasoning": {},
    "stream_options": {},
    "stream": True,
}
BLOCKS = [
    {"role": "assistant", "content": [TEXT, {"type": "thinking", "thinking": "a"},
                                      {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [TEXT]}]},
]  # fmt: skip
TURNS = {
    "messages": BLOCKS,
    "system": [TEXT],
    "tools": [{"name": "f", "input_schema": {}}],
    "thinking": {"type": "disabled"},
}
OLLAMA = [
    {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    {"role": "user", "content": "a"},
]
COUNTED = {name: value for name, value in INPUT.items() if not name.startswith("stream")}
RICH: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [{"prompt": "a", **SHAPE}, {"prompt": "a", **WISH}],
    "/v1/chat/completions": [{**CHAT, **SHAPE}, {**CHAT, **WISH}],
    "/tokenize": [CHAT],
    "/v1/responses": [INPUT, {"input": "a", **WISH}],
    "/v1/responses/input_tokens": [COUNTED, {"input": "a", **WISH}],
    "/v1/responses/compact": [{"input": INPUT["input"]}, {"input": "a", **WISH}],
    "/v1/messages": [
        {"max_tokens": 9, **TURNS},
        {
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "a"}],
            **WISH,
        },
    ],
    "/v1/messages/count_tokens": [TURNS],
    "/api/chat": [{"messages": OLLAMA, "tools": CHAT["tools"], "options": {}, "stream": False, **WISH}],
    "/api/generate": [{"prompt": "a", "options": {}, "stream": False, **WISH}],
    "/v1/prefix": [{"action": "pin", "name": "a", **CHAT}],
    "/completion": [{"prompt": "a", **WISH}],
    "/apply-template": [CHAT],
}
"""Bodies that have every object in which fields within others are."""


def put(value: Any, row: str, strange: object) -> int:
    """A value for a field within others, in every object that may have it, as `row` says (tools[].function.name). → how many."""
    step, dot, rest = row.partition(".")
    if not dot:
        value[step] = strange
        return 1
    inner = value.get(step.removesuffix("[]"))
    within = inner if step.endswith("[]") and isinstance(inner, list) else [inner]
    return sum(put(entry, rest, strange) for entry in within if isinstance(entry, dict))


@pytest.mark.parametrize("strict", [False, True])
async def test_what_it_says_is_what_happens(serve: Serve, strict: bool) -> None:
    engine = ScriptedEngine(report=msgspec.structs.replace(REPORT, max_model_len=4096))
    client = serve(engine, byte_text(HERMES), strict_fields=strict)
    compat = (await client.get("/v1/compat")).json()
    assert compat["strict"] is strict
    dialects = {dialect["path"]: dialect["fields"] for dialect in compat["dialects"]}
    assert dialects.keys() - BODIES.keys() == UNTRIED
    for path, body in BODIES.items():
        names = [field["name"] for field in dialects[path]]
        assert len(set(names)) == len(names)
        assert {field["name"] for field in dialects[path] if field["status"] == "honoured"} >= body.keys()
        for field in dialects[path]:
            if "." in field["name"]:
                await check_within(client, path, field)
            else:
                await check_field(client, path, body, field)


async def check_field(client: httpx.AsyncClient, path: str, body: dict[str, Any], field: dict[str, Any]) -> None:
    name = field["name"]
    if (path, name) == ("/completion", "prompt"):
        return  # a list of lists of texts is a prompt there
    response = await client.post(path, json={**body, name: STRANGE})
    match field["status"]:
        case "refused":
            check_error(path, response, name, "unsupported_parameter")
            assert field["why"]
            for value in field.get("taken_values", []):
                assert (await client.post(path, json={**body, name: value})).status_code == 200, (name, value)
        case "accepted_without_effect" if response.status_code == 200:
            assert response.json().get("ignored_fields", [name]) == [name] and field["why"], name
        case "accepted_without_effect":  # a label, whose type is checked
            check_error(path, response, name, "invalid_value")
        case "honoured":
            check_error(path, response, name, "invalid_value")


async def check_within(client: httpx.AsyncClient, path: str, field: dict[str, Any]) -> None:
    name = field["name"]
    if field["status"] == "honoured":
        return
    bodies = json.loads(json.dumps(RICH[path]))  # nothing in them is shared
    body = next(body for body in bodies if put(body, name, STRANGE))
    response = await client.post(path, json=body)
    if field["status"] == "refused":
        assert response.status_code == 400 and name in NUMBERS.sub("[]", response.text), (name, response.text)
        for value in field.get("taken_values", []):
            put(body, name, value)
            assert (await client.post(path, json=body)).status_code == 200, (name, value)
        return
    assert field["why"]
    if response.status_code == 200:
        text = response.text.partition("\n\n")[0] if body.get("stream") else response.text
        back = json.loads(text.partition("data: ")[2] or text).get("ignored_fields", [])
        assert {NUMBERS.sub("[]", at) for at in back} <= {name}, (name, back)
    else:  # a label, whose type is checked
        assert response.status_code == 400 and name.rpartition(".")[2] in response.text, (name, response.text)


def check_error(path: str, response: httpx.Response, name: str, code: str) -> None:
    if path.startswith("/v1/messages"):  # Anthropic's shape has words alone
        error = response.json()["error"]
        assert response.status_code == 400 and error["type"] == "invalid_request_error" and name in error["message"], (
            error
        )
    elif path.startswith("/api/"):  # so has Ollama's
        assert response.status_code == 400 and name in response.json()["error"], (name, response.text)
    elif path in LLAMA_CPP:  # whose code is the status
        error = response.json()["error"]
        assert response.status_code == error["code"] == 400 and error["param"].startswith(name), (name, response.text)
    else:
        error = error_of(response, 400)
        assert error["code"] == code and error["param"].startswith(name), (name, error)


async def test_the_names_that_users_bring_are_all_there(serve: Serve) -> None:
    trusting = (await serve(trust_request_chat_template=True).get("/v1/compat")).json()
    compat = (await serve().get("/v1/compat")).json()
    for report, status in ((compat, "refused"), (trusting, "honoured")):
        (chat,) = (dialect for dialect in report["dialects"] if dialect["name"] == "chat")
        assert [field["status"] for field in chat["fields"] if field["name"] == "chat_template"] == [status]
    fields = {d["name"]: {f["name"]: f["status"] for f in d["fields"]} for d in compat["dialects"]}
    assert fields["chat"]["guided_json"] == "honoured", "vLLM takes it and does nothing"
    assert fields["chat"]["user"] == fields["completions"]["service_tier"] == "accepted_without_effect"
    assert fields["chat"]["stream_options.continuous_usage_stats"] == "honoured"
    for name in (
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "logprobs",
    ):
        assert fields["chat"][name] == fields["completions"][name] == "honoured"
    for name in ("use_beam_search", "length_penalty", "best_of", "priority", "repetition_detection.min_count"):
        assert fields["chat"][name] == fields["completions"][name] == "honoured"
    assert fields["chat"]["top_logprobs"] == fields["completions"]["echo"] == "honoured"
    assert fields["embeddings"]["dimensions"] == fields["tokenize"]["return_token_strs"] == "honoured"
    for name in ("tools[].function.parameters", "messages[].tool_calls[].id", "response_format.json_schema.schema"):
        assert fields["chat"][name] == "honoured"
    assert fields["chat"]["messages[].audio"] == fields["chat"]["messages[].function_call"] == "refused"
    assert fields["responses"]["input[].status"] == "accepted_without_effect"
    assert fields["messages"]["tools[].cache_control"] == "honoured"
    assert fields["responses"]["priority"] == fields["messages"]["messages[].content[].is_error"] == "honoured"
    for name in ("chat", "completions", "responses", "messages", "embeddings"):
        assert fields[name]["deadline_ms"] == fields[name]["max_queue_ms"] == "honoured"
        assert fields[name].get("stream_options.include_queue") == (None if name == "embeddings" else "honoured")
    assert "deadline_ms" not in fields["responses input tokens"], "nothing is computed"
    assert compat["unknown_fields"] == "named back in ignored_fields"
