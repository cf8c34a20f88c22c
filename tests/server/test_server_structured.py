"""What an answer must look like, over HTTP: which fields say so, that the engine gets one grammar, and what is refused."""

import json
from typing import Any

import pytest

from octavo.text.grammar.build import grammar_of
from tests.doubles import ScriptedEngine, byte_text
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
                    "json_schema": {"schema": {"type": "array", "uniqueItems": True}},
                }
            },
            "response_format.json_schema.schema",
            "'uniqueItems' (at #)",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"uniqueItems": True}}},
            "response_format.schema",
            "'uniqueItems' (at #)",
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
