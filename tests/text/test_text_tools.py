"""The tools of a request, the choice among them, and the schema of an answer that must call one. The parser of that format reads
the answers that the schema allows."""

from typing import Any

import pytest

from octavo.errors import InvalidRequest, RequestError
from octavo.text.chat.tools import ToolChoice, calls_schema, parse_tool_choice, parse_tools, schemas_by_name
from octavo.text.parsers import AnswerParser, CollectedEvents, tool_format

TREE = {
    "type": "object",
    "properties": {
        "root": {"$ref": "#/$defs/node"},
        "all": {"$ref": "#"},
        "$ref": {"const": {"$ref": "#/$defs/node"}},
        "enum": {"$ref": "#/$defs/node"},
    },
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
    },
}


def function(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = parse_tools([function("now"), function("grow", TREE, description="Plants.", strict=True)])


def test_a_required_call_is_a_list_of_name_and_arguments() -> None:
    schema = calls_schema(TOOLS, parse_tool_choice("required", TOOLS))
    assert schema is not None and schema["type"] == "array" and schema["minItems"] == 1 and "maxItems" not in schema
    first, second = schema["items"]["anyOf"]
    assert first["properties"] == {"name": {"const": "now"}, "arguments": {"$ref": "#/$defs/tool_0"}}
    assert first["required"] == ["name", "arguments"] and first["additionalProperties"] is False
    assert second["properties"]["name"] == {"const": "grow"}
    assert schema["$defs"]["tool_0"] == {"type": "object", "properties": {}, "additionalProperties": False}


def test_references_of_a_tool_still_lead_to_its_own_parts() -> None:
    choice = parse_tool_choice({"type": "function", "function": {"name": "grow"}}, TOOLS)
    assert choice == ToolChoice("named", "grow", parallel=False)
    schema = calls_schema(TOOLS, choice)
    assert schema is not None and schema["maxItems"] == 1
    grow = schema["$defs"]["tool_0"]
    assert grow["properties"]["root"] == grow["properties"]["enum"] == {"$ref": "#/$defs/tool_0/$defs/node"}
    assert grow["properties"]["all"] == {"$ref": "#/$defs/tool_0"}
    assert grow["properties"]["$ref"] == {"const": {"$ref": "#/$defs/node"}}  # data, not a reference
    assert grow["$defs"]["node"]["properties"]["next"]["anyOf"][0] == {"$ref": "#/$defs/tool_0/$defs/node"}
    assert TREE["properties"]["root"] == {"$ref": "#/$defs/node"}  # type: ignore[index]  # the request's own schema is unchanged


def test_nothing_is_enforced_where_nothing_is_required() -> None:
    for value in (None, "auto", "none"):
        assert calls_schema(TOOLS, parse_tool_choice(value, TOOLS)) is None
    assert parse_tool_choice(None, []).mode == parse_tool_choice("auto", []).mode == "none"


def test_what_the_schema_asks_for_is_read_as_calls() -> None:
    parser = AnswerParser(tool_format("plain_json"), schemas_by_name(TOOLS), new_id=lambda: "id")
    text = '[{"name": "now", "arguments": {}}, {"name": "grow", "arguments": {"root": {"next": null}}}]'
    answer = CollectedEvents()
    answer.collect(parser.feed(text) + parser.finish())
    assert [call.name for call in answer.calls] == ["now", "grow"] and answer.content == "" and parser.num_calls == 2


def test_a_required_call_makes_no_parameters_up() -> None:
    inner = {"type": "object", "properties": {"b": {}}, "patternProperties": {"^x": {}}}
    parameters = {"properties": {"a": {"type": "object", "properties": {}}, "i": inner, "free": {"type": "object"}}}
    tools = parse_tools([function("now", parameters)])
    schema = calls_schema(tools, parse_tool_choice("required", tools))
    assert schema is not None
    closed = schema["$defs"]["tool_0"]
    assert closed["additionalProperties"] is closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["i"] == inner and closed["properties"]["free"] == {"type": "object"}


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({}, "tools must be a list"),
        (["now"], r"tools\[0\] must be an object"),
        ([{"type": "web_search"}], r"tools\[0\].type is 'web_search'; only 'function' is supported"),
        ([{"type": "function"}], r"tools\[0\].function must be an object"),
        ([function("")], r"tools\[0\].function.name must be 1 to 64 letters"),
        ([function("now"), function("a b")], r"tools\[1\].function.name must be"),
        ([function("now"), function("now")], r"tools\[1\].function.name 'now' is used twice"),
        ([function("now", [])], r"tools\[0\].function.parameters must be a JSON schema"),
        ([function("now", {"type": "string"})], r"tools\[0\].function.parameters.type must be 'object'"),
        ([function("now", description=1)], r"tools\[0\].function.description must be a string"),
        ([function("now", strict="yes")], r"tools\[0\].function.strict must be true or false"),
    ],
)
def test_bad_tools_are_refused_by_the_name_of_the_field(tools: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        parse_tools(tools)
    assert raised.value.param and raised.value.message.startswith(raised.value.param)


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        ("required", [], "there are no tools"),
        ("any", TOOLS, "tool_choice must be 'none', 'auto', 'required', "),
        ({"type": "function", "function": {"name": "later"}}, TOOLS, "names 'later', which is not in tools"),
        ({"type": "function"}, TOOLS, "tool_choice must be"),
    ],
)
def test_a_bad_choice_is_refused(choice: Any, tools: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        parse_tool_choice(choice, tools)
    assert raised.value.param == "tool_choice"


def parameters_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call's arguments, as it is enforced."""
    tools = parse_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    calls = calls_schema(tools, parse_tool_choice("required", tools))
    assert calls is not None
    found: dict[str, Any] = calls["$defs"]["tool_0"]
    return found


def test_schemas_that_are_combined_with_others_are_not_closed():
    """A closed condition would hold for other objects, and closed parts of allOf would exclude each other's properties."""
    a, b = ({"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab")
    assert parameters_of({"allOf": [a, b]})["allOf"] == [a, b]
    assert parameters_of({"oneOf": [a, b]})["oneOf"] == [a, b]
    chosen = parameters_of({**a, "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}})
    assert chosen["if"] == {"properties": {"a": {"const": 1}}} and "additionalProperties" not in chosen
    defs = {"A": a, "B": b, "C": {"type": "object", "properties": {"c": {}}}}
    found = parameters_of(
        {
            "properties": {"x": {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}, "y": {"$ref": "#/$defs/C"}},
            "$defs": defs,
        }
    )
    assert found["$defs"]["A"] == a and found["$defs"]["B"] == b
    assert found["$defs"]["C"]["additionalProperties"] is found["additionalProperties"] is False
    assert all(part["additionalProperties"] is False for part in parameters_of({"anyOf": [a, b]})["anyOf"])
