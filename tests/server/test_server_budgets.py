"""What one request may take is limited, checked before the work is done, and named in the error, in every dialect."""

import asyncio
import contextvars
import json
import threading
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from octavo.config import BudgetConfig
from octavo.errors import Overloaded
from octavo.server.endpoints.compat import all_route_schemas
from octavo.server.generate import offload
from octavo.server.schema import fields as schema_fields
from octavo.server.threads import Pool
from tests.doubles import REPORT, ScriptedEngine
from tests.server.conftest import Serve, error_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": HI},
    RESPONSES: {"input": "a"},
    MESSAGES: {"messages": HI, "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
    "/v1/embeddings": {"input": "a"},
}


def message_of(body: dict[str, Any]) -> str:
    return str(body["error"]["message"])


# ── lists ───────────────────────────────────────────────────────────────────────────────────────────

MANY = 20_000
LISTS = [
    (COMPLETIONS, "bad_words", [1] * MANY, 256),
    (COMPLETIONS, "stop", [1] * MANY, 64),
    (COMPLETIONS, "stop_token_ids", ["x"] * MANY, 1024),
    (COMPLETIONS, "logit_bias", {str(number): "x" for number in range(MANY)}, 1024),
    (COMPLETIONS, "guided_choice", [1] * MANY, 4096),
    (COMPLETIONS, "allowed_token_ids", ["x"] * (2**18 + 1), 2**18),
    (RESPONSES, "include", [1] * MANY, 64),
    (RESPONSES, "metadata", {str(number): 1 for number in range(MANY)}, 16),
    (MESSAGES, "stop_sequences", [1] * MANY, 64),
]


@pytest.mark.parametrize(("path", "name", "value", "most"), LISTS, ids=[f"{path} {name}" for path, name, *_ in LISTS])
async def test_a_long_list_is_counted_before_its_entries_are_read(
    serve: Serve, path: str, name: str, value: Any, most: int
) -> None:
    response = await serve().post(path, json={**BODIES[path], name: value})
    assert response.status_code == 400
    assert message_of(response.json()) == f"{name} has {len(value)} entries; at most {most} are allowed"


WRONG = [
    (CHAT, "messages", [1] * MANY),
    (MESSAGES, "messages", [1] * MANY),
    (MESSAGES, "tools", [1] * MANY),
    (RESPONSES, "tools", [1] * MANY),
    ("/detokenize", "tokens", ["x"] * MANY),
    (COMPLETIONS, "allowed_token_ids", ["x"] * MANY),
]


@pytest.mark.parametrize(("path", "name", "value"), WRONG, ids=[f"{path} {name}" for path, name, _ in WRONG])
async def test_a_list_of_wrong_entries_makes_one_error(serve: Serve, path: str, name: str, value: Any) -> None:
    """An error object takes a kilobyte: two million of them froze a process for seven seconds."""
    route = next(route for route in all_route_schemas() if route.path == path)
    body = json.dumps({**BODIES[path], name: value}).encode()
    with pytest.raises(ValidationError) as refusal:
        route.schema.model_validate_json(body)
    assert refusal.value.error_count() == 1
    response = await serve().post(path, content=body)
    assert response.status_code == 400 and message_of(response.json()).startswith(f"{name}[0]: input should be")


MANY_OF = {"list": [object()] * 5000, "dict": {str(number): object() for number in range(5000)}}


@pytest.mark.parametrize("route", list(all_route_schemas()), ids=lambda route: str(route.path))
def test_every_list_of_a_request_is_limited(route: Any) -> None:
    """A list or an object whose entries are validated has AtMost or FirstError: a new field must have one of them."""
    for name, field in route.schema.model_fields.items():
        for value in (value for kind, value in MANY_OF.items() if kind in str(field.annotation)):
            try:
                route.schema.model_validate({name: value})
            except ValidationError as error:
                assert error.error_count() < 20, name


@pytest.mark.parametrize("path", BODIES)
async def test_values_and_depth_of_any_body(serve: Serve, path: str) -> None:
    client = serve(max_json_items=100, max_json_depth=8)
    response = await client.post(path, json={**BODIES[path], "x": [1] * 101})
    assert response.status_code == 413
    assert "more than 100 JSON values, which is the limit (--max-json-items)" in message_of(response.json())
    response = await client.post(path, content=json.dumps(BODIES[path])[:-1] + ', "x": ' + "[" * 8 + "]" * 8 + "}")
    assert response.status_code == 400
    assert "nested deeper than 8 levels, the limit (--max-json-depth)" in message_of(response.json())


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}] * 3}, "tools"),
        (RESPONSES, {"tools": [{"type": "function", "name": "f"}] * 3}, "tools"),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}] * 3}, None),
        ("/tokenize", {"prompt": None, "messages": HI, "tools": [{}] * 3}, "tools"),
    ],
)
async def test_tools(serve: Serve, path: str, fields: dict[str, Any], param: str | None) -> None:
    response = await serve(max_tools=2).post(path, json={**BODIES[path], **fields})
    assert response.status_code == 400
    assert message_of(response.json()) == "tools has 3 entries; this server allows at most 2 (--max-tools)"
    if param is not None:
        assert response.json()["error"]["param"] == param


async def test_items_of_a_response(serve: Serve) -> None:
    error = error_of(await serve(max_messages=2).post(RESPONSES, json={"input": HI * 3}), 400)
    assert error["param"] == "input" and "at most 2 (--max-messages)" in error["message"]
    assert (await serve(max_messages=2).post("/v1/embeddings", json={"input": ["a"] * 3})).status_code != 400


# ── text ────────────────────────────────────────────────────────────────────────────────────────────

LONG = "word " * 50  # 250 characters


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (COMPLETIONS, {"prompt": LONG, "truncate_prompt_tokens": 3}, "prompt"),
        (COMPLETIONS, {"prompt": [LONG[:150]] * 2}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}], "truncate_prompt_tokens": 3}, "messages"),
        (CHAT, {"messages": HI, "chat_template_kwargs": {"a": LONG}}, "messages"),
        (RESPONSES, {"input": LONG, "truncation": "auto"}, "input"),
        (RESPONSES, {"input": "a", "instructions": LONG}, "input"),
        (RESPONSES + "/input_tokens", {"input": LONG}, "input"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}], "max_tokens": 1}, "messages"),
        (MESSAGES + "/count_tokens", {"messages": HI, "system": LONG}, "messages"),
        ("/v1/embeddings", {"input": [LONG[:150]] * 2, "truncate_prompt_tokens": 2}, "input"),
    ],
)  # fmt: skip
async def test_text_is_measured_before_it_is_tokenized(
    serve: Serve, path: str, body: dict[str, Any], field: str
) -> None:
    engine = ScriptedEngine()
    response = await serve(engine, max_text_len=200).post(path, json=body)
    assert response.status_code == 400, response.text
    message = message_of(response.json())
    assert (
        message.startswith(f"{field} has ") and "at most 200 are tokenized for one request (--max-text-len)" in message
    )
    assert not engine.requests


def test_the_automatic_limit_grows_with_the_context() -> None:
    assert BudgetConfig().text_len(8192) == 2**21 and BudgetConfig().text_len(2**20) == 2**24
    assert BudgetConfig(max_text_len=100).text_len(2**20) == 100


async def test_arguments_of_calls_have_the_limits_of_a_body(serve: Serve) -> None:
    deep = '{"a":' * 9 + "1" + "}" * 9
    client = serve(max_json_depth=8)
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": deep}}
    chat = {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    error = error_of(await client.post(CHAT, json=chat), 400)
    assert error["param"] == "messages[1].tool_calls[0].function.arguments" and "--max-json-depth" in error["message"]
    item = {"type": "function_call", "call_id": "x", "name": "f", "arguments": deep}
    error = error_of(await client.post(RESPONSES, json={"input": [item]}), 400)
    assert error["param"] == "input[0].arguments" and "--max-json-depth" in error["message"]


async def test_variables_of_a_template(serve: Serve) -> None:
    variables = {f"a{number}": 1 for number in range(65)}
    error = error_of(await serve().post(CHAT, json={"messages": HI, "chat_template_kwargs": variables}), 400)
    assert error["message"] == "chat_template_kwargs has 65 entries; at most 64 are allowed"


async def test_tokens_to_be_detokenized(serve: Serve) -> None:
    error = error_of(await serve().post("/detokenize", json={"tokens": [97] * (2**18 + 1)}), 400)
    assert error["message"] == "tokens has 262145 entries; at most 262144 are allowed"


# ── what a request multiplies ───────────────────────────────────────────────────────────────────────


async def test_parameters_that_every_prompt_repeats(serve: Serve) -> None:
    stops = ["x" * 1000 + str(number) for number in range(60)]
    body = {"prompt": ["a"] * 200, "stop": stops}
    error = error_of(await serve().post(COMPLETIONS, json=body), 400)
    assert "the sampling parameters of 200 prompts take" in error["message"] and "at most 8388608" in error["message"]
    assert (await serve().post(COMPLETIONS, json={"prompt": ["a"] * 2, "stop": stops})).status_code == 200


async def test_allowed_tools_are_found_by_name(serve: Serve) -> None:
    tools = [{"type": "function", "name": f"f{number}", "parameters": {"type": "object"}} for number in range(3)]
    for names, status in ((["f2", "f0", "f2"], 200), (["f2", "g"], 400)):
        chosen = [{"type": "function", "name": name} for name in names]
        choice = {"type": "allowed_tools", "mode": "auto", "tools": chosen}
        engine = ScriptedEngine(report=msgspec.structs.replace(REPORT, max_model_len=4096))
        response = await serve(engine).post(RESPONSES, json={"input": "a", "tools": tools, "tool_choice": choice})
        assert response.status_code == status, response.text
        if status == 400:
            assert "tool_choice names 'g', which is not in tools" in response.text


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"model": "m" * 100_000}),
        (COMPLETIONS, {"stop": [["x" * 100_000]]}),
        (COMPLETIONS, {"bad_words": [["x"] * 5_000]}),
        (COMPLETIONS, {"logit_bias": {"x" * 100_000: 1}}),
        (COMPLETIONS, {"prompt": [10**350]}),
        (COMPLETIONS, {"seed": 10**350}),
        (COMPLETIONS, {"n": 10**350}),
        (COMPLETIONS, {"temperature": "x" * 100_000}),
        (COMPLETIONS, {"truncate_prompt_tokens": 10**350}),
        (COMPLETIONS, {"priority": 10**350}),
        (COMPLETIONS, {"stop_token_ids": [10**350]}),
        (COMPLETIONS, {"suffix": "x" * 100_000}),
        (CHAT, {"messages": [{"role": "x" * 100_000}]}),
        (CHAT, {"messages": [{"x" * 100_000: [{}], "role": 5}]}),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "x" * 100_000}}}),
        (CHAT, {"chat_template_kwargs": {"x" * 100_000: 1, "messages": 1}}),
        (RESPONSES, {"previous_response_id": "x" * 100_000}),
        (RESPONSES, {"include": ["x" * 100_000]}),
        (RESPONSES, {"user": "x" * 100_000}),
        (RESPONSES, {"prompt_cache_key": "x" * 100_000}),
        (RESPONSES, {"input": [{"type": "x" * 100_000}]}),
        ("/v1/embeddings", {"pooling": "x" * 100_000}),
        ("/v1/embeddings", {"dimensions": 10**350}),
        ("/detokenize", {"tokens": [10**350]}),
    ],
)
async def test_errors_quote_little_of_what_was_sent(serve: Serve, path: str, fields: dict[str, Any]) -> None:
    response = await serve().post(path, json={**BODIES[path], **fields})
    assert 400 <= response.status_code < 500, response.text[:300]
    assert len(message_of(response.json())) < 400 and len(response.content) < 1000, response.text[:500]


# ── threads ─────────────────────────────────────────────────────────────────────────────────────────


async def test_large_bodies_are_parsed_in_their_own_pool(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    parse = schema_fields.check_json

    def noted(*arguments: Any) -> None:
        names.append(threading.current_thread().name)
        parse(*arguments)

    monkeypatch.setattr(schema_fields, "check_json", noted)
    client = serve()
    assert (await client.post(COMPLETIONS, json={"prompt": "a", "user": "x" * 100})).status_code == 200
    assert (await client.post(COMPLETIONS, json={"prompt": "a", "user": "x" * 100_000})).status_code == 200
    assert names[0] == threading.main_thread().name and names[1].startswith("octavo-request bodies")


async def test_a_pool_refuses_what_would_wait_too_long() -> None:
    pool, gate = Pool("tests", num_threads=1, max_waiting=2), threading.Event()
    tasks = [asyncio.create_task(pool.run(gate.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 requests waiting for tests") as refusal:
        await pool.run(gate.wait)
    assert refusal.value.retry_after
    tasks[2].cancel()  # it waits: it is dropped, and its place is free
    await asyncio.wait({tasks[2]})
    tasks.append(asyncio.create_task(pool.run(lambda: "last")))
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(tasks[0], tasks[1], tasks[3]) == [True, True, "last"]
    assert pool.num_open == 0


async def test_work_that_was_given_up_counts_until_it_ends() -> None:
    pool, started, gate = Pool("tests", num_threads=1, max_waiting=0), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        gate.wait()

    task = asyncio.create_task(pool.run(work))
    await asyncio.to_thread(started.wait)
    task.cancel()
    await asyncio.wait({task})
    with pytest.raises(Overloaded):
        await pool.run(work)
    gate.set()
    while pool.num_open:  # noqa: ASYNC110 (a thread changes it)
        await asyncio.sleep(0.001)
    assert await pool.run(lambda: 5) == 5


async def test_work_sees_its_callers_context_and_errors() -> None:
    pool = Pool("tests", num_threads=1, max_waiting=1)
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    variable.set(7)
    assert await pool.run(variable.get) == 7
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 // 0)


async def test_an_overloaded_pool_is_an_error_that_can_be_retried(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "PROMPTS", Pool("prompts", num_threads=1, max_waiting=-1))
    response = await serve().post(COMPLETIONS, json={"prompt": "a " * 20_000})
    error = error_of(response, 429)
    assert error["code"] == "rate_limit_exceeded" and response.headers["retry-after"] == "1"
