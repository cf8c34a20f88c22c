"""What an answer must look like, over HTTP: which fields say so, that the engine gets one grammar, and what is refused."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from octavo.text.grammar.build import grammar_of
from tests.doubles import REPORT, ScriptedEngine, byte_text, says
from tests.server.conftest import Serve, error_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
NAMED = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
TAGS = {"structures": [{"begin": "<a>", "schema": {"type": "null"}, "end": "</a>"}], "triggers": ["<a>"]}


@pytest.mark.parametrize(
    ("fields", "wish"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": NAMED}, {"json": SCHEMA}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"response_format": {"type": "json_object", "schema": None}}, {"json_object": True}),
        ({"response_format": {"type": "structural_tag", **TAGS}}, {"structural_tag": TAGS}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, {"json": SCHEMA}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, {"structural_tag": TAGS}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_engine_gets_one_grammar(serve: Serve, path: str, fields: dict[str, Any], wish: dict[str, Any]):
    engine = ScriptedEngine()
    response = await serve(engine).post(path, json={**BODIES[path], **fields, "n": 2})
    assert response.status_code == 200 and "ignored_fields" not in response.json()
    (request,) = engine.requests
    assert request.params.grammar == grammar_of(wish, byte_text().vocabulary)
    assert request.params.structured_outputs is None


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "text"}}, {"response_format": None}, {"guided_json": None}]
)
async def test_what_asks_for_nothing_costs_nothing(serve: Serve, fields: dict[str, Any]):
    engine = ScriptedEngine()
    response = await serve(engine).post(CHAT, json={**BODIES[CHAT], **fields})
    assert response.status_code == 200 and engine.requests[0].params.grammar == ""


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"response_format": {}}, "response_format", "a type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema is missing"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "array", "not": {"not": {"contains": {"const": 1}}}}},
                }
            },
            "response_format.json_schema.schema",
            "'contains' (at #/not/not)",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"not": {"not": {"contains": {"const": 1}}}}}},
            "response_format.schema",
            "'contains' (at #/not/not)",
        ),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema", "'json_object'"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"json": {}, "choice": ["a"]}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "non-empty"),
        ({"structured_outputs": {"grammar": "?"}}, "structured_outputs.grammar", "neither Lark"),
        ({"structured_outputs": {"json": {"const": "x" * 300}}}, "structured_outputs.json", "at most 200"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "# refers to itself"),
        ({"guided_choice": "a"}, "guided_choice", "array"),
        (
            {"response_format": {"type": "json_object"}, "guided_choice": ["a"]},
            "guided_choice",
            "response_format and guided_choice both constrain",
        ),
    ],
    ids=lambda value: None,
)
async def test_what_cannot_be_met_is_refused_by_name(serve: Serve, fields: dict[str, Any], param: str, words: str):
    engine = ScriptedEngine()
    for path in (CHAT, COMPLETIONS):
        response = await serve(engine, max_schema_bytes=200).post(path, json={**BODIES[path], **fields})
        error = error_of(response, 400)
        assert error["param"] == param and words in error["message"] and "\n" not in error["message"]
    assert not engine.requests


async def test_no_grammar_is_compiled_in_the_servers_process(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """Few characters, too: they can take long, and end the process."""
    monkeypatch.setattr("llguidance.LLMatcher", None)
    large = {"enum": [f"choice number {number}" for number in range(2000)]}
    for schema in ({"type": "integer", "multipleOf": 3331}, large):
        engine = ScriptedEngine()
        response = await serve(engine).post(CHAT, json={**BODIES[CHAT], "guided_json": schema})
        assert response.status_code == 200 and engine.requests[0].params.grammar


async def test_a_server_without_llguidance_says_so(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    response = await serve().post(CHAT, json={**BODIES[CHAT], "guided_regex": "a"})
    assert "pip install llguidance" in error_of(response, 400)["message"]


@pytest.mark.parametrize(
    ("fields", "wish"),
    [
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"grammar": {"type": "json", "value": SCHEMA}}, {"json": SCHEMA}),
        ({"grammar": {"type": "regex", "value": "b"}}, {"regex": "b"}),
        ({"json_schema": SCHEMA}, {"json": SCHEMA}),
        ({"json_schema": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"json_schema": {}}, {"json": {}}),
        ({"guided_json_object": True}, {"json_object": True}),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, {"json": SCHEMA, "whitespace_pattern": " ?"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_other_servers_names_constrain_the_answer_too(
    serve: Serve, path: str, fields: dict[str, Any], wish: dict[str, Any]
):
    engine = ScriptedEngine()
    response = await serve(engine).post(path, json={**BODIES[path], **fields})
    assert response.status_code == 200 and "ignored_fields" not in response.json()
    assert engine.requests[0].params.grammar == grammar_of(wish, byte_text().vocabulary)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"grammar": {"type": "xml", "value": "a"}}, "grammar"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"regex": "a", "response_format": NAMED}, "regex"),
        ({"json_schema": {"type": "strin"}}, "json_schema"),
        ({"grammar": 'root ::= "a"', "grammar_lazy": True}, "grammar_lazy"),
        ({"structured_outputs": {"unenforced": "maybe"}, "response_format": NAMED}, "structured_outputs.unenforced"),
        ({"structured_outputs": {"unenforced": "check", "regex": "a"}}, "structured_outputs.unenforced"),
    ],
)
async def test_an_alias_that_cannot_be_honoured_is_refused(serve: Serve, fields: dict[str, Any], param: str):
    engine = ScriptedEngine()
    error = error_of(await serve(engine).post(CHAT, json={**BODIES[CHAT], **fields}), 400)
    assert error["param"] == param and not engine.requests


ELSEWHERE: dict[str, Any] = {
    "guided_json": SCHEMA, "guided_json_object": True, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": 'start: "a"',
    "regex": "a", "ebnf": 'root ::= "a"', "grammar": 'root ::= "a"', "json_schema": SCHEMA, "response_format": NAMED, "format": SCHEMA,
    "structured_outputs": {"json": SCHEMA}, "structural_tag": TAGS, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "output_format": {"type": "json_schema", "schema": SCHEMA}, "response_schema": SCHEMA, "guided_decoding": {"json": SCHEMA},
}  # fmt: skip
ROUTES: dict[str, dict[str, Any]] = {
    **BODIES,
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}]},
    "/api/generate": {"prompt": "hi"},
    "/completion": {"prompt": "hi"},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_a_field_of_another_server_is_honoured_or_refused_on_every_route(serve: Serve, path: str):
    engine = ScriptedEngine()
    client = serve(engine)
    for name, value in ELSEWHERE.items():
        num_before = len(engine.requests)
        response = await client.post(path, json={**ROUTES[path], name: value})
        if response.status_code == 200:
            assert engine.requests[-1].params.grammar, f"{name}: any text is an answer"
        else:
            assert response.status_code == 400 and name in response.text and len(engine.requests) == num_before
    for name in ELSEWHERE:  # null asks for nothing
        assert (await client.post(path, json={**ROUTES[path], name: None})).status_code == 200


@pytest.mark.parametrize("schema", [{}, True, "{}"])
async def test_a_schema_that_allows_everything_can_be_checked(serve: Serve, schema: Any):
    wish = {"structured_outputs": {"json": schema, "unenforced": "check"}, "max_tokens": 50}
    body = (await serve(saying("[1]")).post(COMPLETIONS, json={**BODIES[COMPLETIONS], **wish})).json()
    assert body["choices"][0]["schema_valid"] is True


UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "title": "numbers"}
HAS_TWO = {**UNIQUE, "not": {"not": {"contains": {"const": 2}}}}  # which cannot be enforced


def saying(text: str) -> ScriptedEngine:
    return ScriptedEngine(says(text), report=replace(REPORT, max_model_len=4096))


@pytest.mark.parametrize(("text", "is_valid"), [("[1, 2]", True), ("[1, 1]", False), ("[1, ", False)])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_checked_answer_says_whether_it_satisfies_the_schema(
    serve: Serve, path: str, text: str, is_valid: bool
):
    wish = {"structured_outputs": {"json": UNIQUE, "unenforced": "check"}}
    client = serve(saying(text))
    body = (await client.post(path, json={**BODIES[path], **wish, "max_tokens": 50, "n": 2})).json()
    assert [choice["schema_valid"] for choice in body["choices"]] == [is_valid, is_valid]
    assert body["ignored_fields"] == ["structured_outputs.json.title"]
    streamed = await client.post(path, json={**BODIES[path], **wish, "max_tokens": 50, "stream": True})
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["schema_valid"] for choice in choices if choice["finish_reason"]] == [is_valid]
    assert sum("schema_valid" in choice for choice in choices) == 1


async def test_a_check_goes_with_any_field_that_has_a_schema(serve: Serve):
    wish = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": HAS_TWO}},
        "structured_outputs": {"unenforced": "check"},
    }
    client = serve(saying("[1, 2]"))
    body = (await client.post(CHAT, json={**BODIES[CHAT], **wish})).json()
    assert body["choices"][0]["schema_valid"] is True
    assert body["ignored_fields"] == ["response_format.json_schema.schema.title"]
    error = error_of(await client.post(CHAT, json={**BODIES[CHAT], "response_format": wish["response_format"]}), 400)
    assert "'contains' (at #/not/not) cannot be enforced" in error["message"] and "'check'" in error["message"]
    plain = (await client.post(CHAT, json={**BODIES[CHAT], "response_format": NAMED})).json()
    assert "schema_valid" not in plain["choices"][0]


async def test_calls_are_checked_by_the_schemas_of_their_tools(serve: Serve):
    parameters = {"type": "object", "properties": {"a": UNIQUE}, "required": ["a"], "x-note": 1}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    wish = {"tools": tools, "tool_choice": "required", "structured_outputs": {"unenforced": "check"}, "max_tokens": 100}
    for arguments, is_valid in (('{"a": [1, 2]}', True), ('{"a": [2, 2]}', False)):
        client = serve(saying(f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'))
        body = (await client.post(CHAT, json={**BODIES[CHAT], **wish})).json()
        assert body["choices"][0]["schema_valid"] is is_valid, body
        assert "ignored_fields" not in body  # the prompt describes the tools, annotations and all


@pytest.mark.parametrize(("text", "is_valid"), [("[1, 2]", True), ("[2, 2]", False)])
async def test_a_response_and_a_message_say_it_in_their_dialects(serve: Serve, text: str, is_valid: bool):
    mode = {"structured_outputs": {"unenforced": "check"}, "stream": False}
    client = serve(saying(text))
    body = {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": HAS_TWO}}}
    assert "contains" in error_of(await client.post("/v1/responses", json=body), 400)["message"]
    response = (await client.post("/v1/responses", json={**body, **mode})).json()
    assert response["schema_valid"] is is_valid
    stored = (await client.get(f"/v1/responses/{response['id']}")).json()
    assert stored["schema_valid"] is is_valid
    streamed = await client.post("/v1/responses", json={**body, **mode, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    verdicts = [event["response"].get("schema_valid") for event in events if "response" in event]
    assert verdicts == [None, None, is_valid] and "schema_valid" not in events[0]["response"]

    body = {"max_tokens": 50, "messages": [{"role": "user", "content": "a"}]}
    body |= {"output_config": {"format": {"type": "json_schema", "schema": HAS_TWO}}}
    refused = await client.post("/v1/messages", json=body)
    assert refused.status_code == 400 and "contains" in refused.json()["error"]["message"]
    assert (await client.post("/v1/messages", json={**body, **mode})).json()["schema_valid"] is is_valid
    streamed = await client.post("/v1/messages", json={**body, **mode, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert [event["delta"]["schema_valid"] for event in events if event["type"] == "message_delta"] == [is_valid]

    for path, own in (
        ("/api/chat", {"messages": body["messages"]}),
        ("/api/generate", {"prompt": "a"}),
        ("/api/generate", {"prompt": "a", "raw": True}),
    ):
        given = {"model": "byte-model", "format": HAS_TWO, **own}
        answer = await client.post(path, json={**given, **mode})
        assert answer.status_code == 200 and answer.json()["schema_valid"] is is_valid, answer.text
        lines = (await client.post(path, json={**given, **mode, "stream": True})).text.splitlines()
        assert [json.loads(one).get("schema_valid") for one in lines] == [None] * (len(lines) - 1) + [is_valid]

    given = {"prompt": "a", "json_schema": HAS_TWO, "n_predict": 50}
    assert (await client.post("/completion", json={**given, **mode})).json()["schema_valid"] is is_valid
    streamed = await client.post("/completion", json={**given, **mode, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert [event.get("schema_valid") for event in events] == [None] * (len(events) - 1) + [is_valid]
