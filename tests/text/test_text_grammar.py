"""Output formats as grammars: random answers within their masks are valid, and everything else is refused by name."""

import contextlib
import json
import re
import time
from typing import Any

import jsonschema
import pytest

from octavo.errors import Field, InvalidRequest, RequestError, Unsupported
from octavo.text.chat.tools import calls_schema, parse_tool_choice, parse_tools
from octavo.text.grammar.build import MAX_CHOICES, grammar_of, schema_grammar, wish_of_response_format
from octavo.text.grammar.keywords import FORMATS
from octavo.text.grammar.limits import longest_chain
from tests.doubles import byte_text
from tests.schemas import peoples, suite
from tests.walks import VOCABULARY, walk

CHECKER = jsonschema.FormatChecker([name for name in FORMATS if name in jsonschema.FormatChecker.checkers])


def compiled(schema: Any) -> str:
    return schema_grammar(schema, VOCABULARY, field=Field("schema"))


def check(name: str, schema: Any, num_walks: int) -> int:
    """Validate every walk that ends. Return how many did."""
    grammar, num_ended = compiled(schema), 0
    validator = jsonschema.Draft202012Validator(_modern(schema), format_checker=CHECKER)
    for number in range(num_walks):
        text, ended = walk(grammar, f"{name} {number}")
        if ended:
            num_ended += 1
            validator.validate(json.loads(text))
    return num_ended


def _modern(schema: Any) -> Any:
    """Return our one schema of an older draft in the form of the newest."""
    if isinstance(schema, dict) and isinstance(schema.get("items"), list):
        return {**schema, "prefixItems": schema["items"], "items": schema["additionalItems"]}
    return schema


def test_whatever_a_mask_leaves_validates():
    ended = {name: check(name, schema, 4) for name, schema in peoples().items()}
    assert sum(map(bool, ended.values())) >= 0.98 * len(ended)


# Patterns that only ECMAScript supports, or that Python reads differently: Python cannot check these.
_NOT_PYTHONS = ("ecmascript-regex", "non-bmp-regex", "\\p{")


def test_the_suite_is_enforced_or_refused():
    enforced, refused = [], []
    for name, schema in suite().items():
        try:
            compiled(schema)
        except RequestError as error:
            assert error.message.startswith("schema") and error.param == "schema" and "\n" not in error.message
            refused.append(name)
            continue
        enforced.append(name)
        if not any(mark in f"{name} {schema}" for mark in _NOT_PYTHONS):
            assert check(name, schema, 3) or "recursive" in name or "ref" in name, name
    assert len(enforced) >= 195 and len(enforced) + len(peoples()) >= 380
    assert len(refused) == len(suite()) - len(enforced)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "multipleOf": 1999993}, "multipleOf"),
        ({"type": "number", "multipleOf": 1.00001}, "multipleOf"),
        ({"properties": {"a": {"not": {"pattern": "b"}}}}, "'not' (at #/properties/a)"),
        ({"items": {"if": {"pattern": "b"}, "then": {"minLength": 3}}}, "'if' (at #/items)"),
        ({"contains": {"const": 1}, "minContains": 40}, "'contains' (at #)"),
        ({"type": "object", "propertyNames": {"maxLength": 2, "pattern": "a"}}, "'propertyNames'"),
        ({"type": "object", "extends": {"$ref": "#"}}, "'extends'"),
        ({"type": "object", "minProperties": 3}, "'minProperties' (at #) cannot be enforced (enforced up to 1"),
        ({"x-guidance": {"lenient": True}, "not": {"pattern": "a"}}, "'not'"),
        ({"type": "strin"}, "#/type must be one or several of null"),
        ({"minimum": "3"}, "#/minimum must be a number"),
        ({"minLength": -1}, "#/minLength must be a whole number from 0 to 100000"),
        ({"minItems": 10**9}, "#/minItems must be a whole number from 0 to 100000"),
        ({"minimum": 10**300}, "#/minimum must be a number between"),
        ({"minimum": 10**400}, "#/minimum must be a number between"),  # more than a float holds
        ({"multipleOf": 10**400}, "#/multipleOf must be"),
        ({"minLength": 10**400}, "#/minLength must be"),
        ({"enum": []}, "#/enum must be a non-empty list"),
        ({"required": "a"}, "#/required must be a list of strings"),
        ({"properties": []}, "#/properties must be an object of schemas"),
        ({"items": 3}, "#/items must be a schema"),
        ({"anyOf": []}, "#/anyOf must be a non-empty list of schemas"),
        ({"pattern": "a(?=b)"}, "look-ahead"),
        ({"pattern": "["}, "unclosed character class"),
        ({"$ref": "https://example.com/schema"}, "points outside this schema"),
        ({"$ref": "#/$defs/none"}, "does not exist in this schema"),
        ({"$ref": "#"}, "# refers to itself"),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#"}]}}}, "refers to itself"),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            "no finite output satisfies this schema",
        ),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no finite output satisfies this schema"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "'oneOf' (at #)"),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "schema cannot be compiled"),
        (False, "no output satisfies"),
        (3, "# must be a schema"),
        ("text", "# must be a schema"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_name(schema: Any, words: str):
    with pytest.raises(RequestError) as error:
        compiled(schema)
    assert words in error.value.message and error.value.message.startswith("schema") and error.value.param == "schema"


def object_with(**values: int) -> Any:
    properties = {name: {"const": value} for name, value in values.items()}
    return {"type": "object", "properties": properties, "required": [*properties]}


def bomb(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [bomb(100), bomb(2000), {"anyOf": [{"const": number} for number in range(30_000)]}],
    ids=["deep", "deeper", "wide"],
)
def test_bombs_are_refused(schema: Any):
    with pytest.raises(RequestError):
        schema_grammar(schema, VOCABULARY, field=Field("schema"), max_bytes=2**22)


@pytest.mark.parametrize(
    ("edges", "longest"),
    [
        ({}, 0),
        ({"a": []}, 1),
        ({"a": ["a"]}, 1),
        ({"a": ["b"], "b": ["c"], "c": []}, 3),
        ({"a": ["b", "c"], "b": ["d"], "c": ["b"], "d": []}, 4),  # a c b d
        ({"a": ["b"], "b": ["c", "a"], "c": ["d"], "d": []}, 4),  # all of a cycle, and what it leads to
        ({str(at): [str(at + 1)] for at in range(9999)} | {"9999": []}, 10_000),
    ],
)
def test_the_longest_chain_of_references(edges: dict[str, list[str]], longest: int):
    assert longest_chain(edges) == longest
    assert longest_chain(dict(reversed(edges.items()))) == longest


SECONDS = 5.0
"""Of computing, for what takes some tenths of one, and took much longer when its time grew by the square of its size."""


@pytest.mark.parametrize(
    "wish",
    [
        {"json": {"oneOf": [{"const": at} for at in range(9000)]}},
        {"grammar": 'start: "' + '\\"' * 120_000},
        {"grammar": "start: /" + "\\/" * 120_000},
        {"grammar": "start: " + "%json {} " * 60_000},
    ],
    ids=["oneOf", "open text", "open regex", "%json"],
)  # fmt: skip
def test_checks_take_no_longer_than_their_size(wish: dict[str, Any]):
    """Without the compiler, which has limits of its own."""
    started = time.process_time()
    with contextlib.suppress(RequestError), pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.text.grammar.build._problem", lambda *_: "not compiled")
        grammar_of(wish, VOCABULARY, max_bytes=2**22)
    assert time.process_time() - started < SECONDS


def test_one_of_many_is_told_apart_by_two_properties_together():
    schema = {"oneOf": [object_with(k=at // 20, v=at % 20) for at in range(400)]}
    assert "anyOf" in compiled(schema)
    schema["oneOf"].append(object_with(k=3, v=4))
    with pytest.raises(Unsupported, match="oneOf"):
        compiled(schema)


def doubling(num_lines: int) -> Any:
    """Each line doubles the size if references are expanded."""
    lines = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(num_lines)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**lines, f"d{num_lines}": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        (doubling(60), r"-?\d+"),
        ({"type": "string", "pattern": "^((a{1,500}){1,500}){1,500}b$"}, r'"a+b"'),
        ({"type": "string", "pattern": "^(.*a.{0,500}){60}$"}, r'"(.*a){60}.*"'),
        ({"type": "string", "pattern": "^[ab]*a[ab]{24}$"}, r'"[ab]*a[ab]{24}"'),
    ],
    ids=["doubling", "powers", "states", "exponential"],
)
def test_bombs_do_not_go_off(schema: Any, pattern: str):
    """Schemas that take exponential time elsewhere are compiled at once, and enforced."""
    grammar = compiled(schema)
    for number in range(3):
        text, ended = walk(grammar, f"bomb {number}")
        assert not ended or re.fullmatch(pattern, text.decode(), re.S)


@pytest.mark.parametrize(
    ("wish", "error", "param", "words"),
    [
        ({}, InvalidRequest, "structured_outputs", "got none"),
        ({"json": {}, "regex": "a"}, InvalidRequest, "structured_outputs", "got json and regex"),
        ({"choice": []}, InvalidRequest, "structured_outputs.choice", "non-empty"),
        ({"choice": ["a", 3]}, InvalidRequest, "structured_outputs.choice", "list of strings"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, InvalidRequest, "structured_outputs.choice", "at most 4096"),
        ({"json": "{"}, InvalidRequest, "structured_outputs.json", "not valid JSON"),
        ({"json": {"const": "x" * 300_000}}, InvalidRequest, "structured_outputs.json", "at most 262144"),
        ({"regex": "("}, InvalidRequest, "structured_outputs.regex", "unclosed group"),
        ({"regex": ""}, InvalidRequest, "structured_outputs.regex", "non-empty"),
        ({"regex": r"[^\s\S]"}, InvalidRequest, "structured_outputs.regex", "no first token is possible"),
        ({"regex": "(" * 200 + "a" + ")" * 200}, InvalidRequest, "structured_outputs.regex", "nested too deeply"),
        ({"grammar": "nothing of the kind"}, InvalidRequest, "structured_outputs.grammar", "neither Lark"),
        (
            {"grammar": '%llguidance {"no_forcing": false}\nstart: "a"'},
            Unsupported,
            "structured_outputs.grammar",
            "%llguidance",
        ),
        (
            {"grammar": 'start: "a" | %json {"type": "array", "uniqueItems": true}'},
            Unsupported,
            "structured_outputs.grammar",
            "'uniqueItems' (at #)",
        ),
        (
            {"grammar": "start: %json {"},
            InvalidRequest,
            "structured_outputs.grammar",
            "%json must be followed by a JSON schema",
        ),
        (
            {"grammar": 'start: %regex {"substring_words": "a b"}'},
            Unsupported,
            "structured_outputs.grammar",
            "%regex is not supported",
        ),
        (
            {"grammar": 'start: %lark { start: %json {"uniqueItems": true} }'},
            Unsupported,
            "structured_outputs.grammar",
            "%lark is not supported",
        ),
        (
            {"grammar": 'start: x // "\nx [max_tokens=3]: /a/ // "'},
            Unsupported,
            "structured_outputs.grammar",
            "'max_tokens'",
        ),
        (
            {"grammar": 'start: %json {"type": "integer", "multipleOf": 6001} %json {"multipleOf": 6002}'},
            InvalidRequest,
            "structured_outputs.grammar",
            "#/multipleOf is too large: the sum of all multipleOf values must be at most",
        ),
        (
            {"json": {"prefixItems": [{"multipleOf": 1000 + number} for number in range(20)]}},
            InvalidRequest,
            "structured_outputs.json",
            "#/prefixItems/9/multipleOf is too large",
        ),
        (
            {"json": {"allOf": [{"multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 83}], "type": "integer"}},
            InvalidRequest,
            "structured_outputs.json",
            "their common multiple must be at most 10000",
        ),
        ({"grammar": "start: missing"}, InvalidRequest, "structured_outputs.grammar", "missing"),
        ({"grammar": "root ::= missing"}, InvalidRequest, "structured_outputs.grammar", "missing"),
        ({"grammar": "start: x\nx[temperature=0.5]: /a/"}, Unsupported, "structured_outputs.grammar", "'temperature'"),
        (
            {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
            InvalidRequest,
            "structured_outputs.grammar",
            "deeply",
        ),
        ({"structural_tag": {}}, InvalidRequest, "structured_outputs.structural_tag", "structures and triggers"),
        (
            {"structural_tag": {"format": {"type": "magic"}}},
            Unsupported,
            "structured_outputs.structural_tag.format",
            "'magic'",
        ),
        (
            {"structural_tag": {"format": {"type": "any_text", "excludes": ["a"]}}},
            Unsupported,
            "structured_outputs.structural_tag.format.excludes",
            "not supported",
        ),
        (
            {"structural_tag": {"structures": [{"begin": "<a", "schema": {}, "end": "", "odd": 1}], "triggers": ["<"]}},
            Unsupported,
            "structured_outputs.structural_tag.structures[0].odd",
            "allowed fields: begin, end, schema",
        ),
        (
            {"structural_tag": {"format": {"type": "tag", "begin": 1}}},
            InvalidRequest,
            "structured_outputs.structural_tag.format.begin",
            "must be a non-empty string",
        ),
        ({"json": {}, "backend": "fast"}, Unsupported, "structured_outputs.backend", "backend is not supported"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_by_name(wish: Any, error: type[RequestError], param: str, words: str):
    with pytest.raises(error) as raised:
        grammar_of(wish, VOCABULARY)
    assert words in raised.value.message and raised.value.param == param and "\n" not in raised.value.message


def said(wish: dict[str, Any], count: int = 40) -> list[str]:
    grammar = grammar_of(wish, VOCABULARY)
    walks = [walk(grammar, f"{wish} {number}") for number in range(count)]
    assert any(ended for _, ended in walks)
    return [text.decode() for text, ended in walks if ended]


@pytest.mark.parametrize(
    "pattern", [r"^a/b+\d$", r"(x|y){2,3}\.", r"[x\d]{1,3}\n?", r"€ ?\d{2}", r"\w\$[0-9]\$", r"[^\w]\\$"]
)
def test_answers_match_a_regex_from_end_to_end(pattern: str):
    for text in said({"regex": pattern}):
        assert re.fullmatch(pattern.removeprefix("^").removesuffix("$") if pattern[0] == "^" else pattern, text)


def test_classes_are_those_of_ecmascript():
    for text in said({"regex": r"\d\w\s"}):
        assert text.isascii() and re.fullmatch(r"\d\w\s", text)
    grammar = compiled({"type": "string", "pattern": r"^[\d\]]\W$"})
    assert all(re.fullmatch(r"[0-9\]]\W", json.loads(walk(grammar, str(number)).text), re.A) for number in range(20))


def test_answers_are_one_of_a_choice():
    choice = ["yes", "yes, but", 'no "', "é\n", "<|end|>"]
    assert {*said({"choice": choice}, 200)} == {*choice}


LARK = """
start: sum
sum: product ("+" product)*
product: NUMBER ("*" NUMBER)*
NUMBER: /[1-9]/
"""
GBNF = """
root   ::= sum
sum    ::= product ("+" product)*
product ::= number ("*" number)*
number ::= [1-9]
"""


@pytest.mark.parametrize("grammar", [LARK, GBNF], ids=["lark", "gbnf"])
def test_answers_follow_a_grammar(grammar: str):
    for text in said({"grammar": grammar}):
        assert re.fullmatch(r"[1-9](\*[1-9])*(\+[1-9](\*[1-9])*)*", text)


def test_schemas_within_a_grammar_are_kept_to_as_others_are():
    """Integers have the same bounds as elsewhere. Directives within a text, a regex or a comment are ignored."""
    lark = """
        // %json {"uniqueItems": true}
        start: "%lark " /max_tokens=%json / %json {"type": "object", "properties": {"a": {"type": "integer"}},
               "required": ["a"], "additionalProperties": false, "description": "a } in a note"} tail
        tail: "#"  # max_tokens=1
    """
    for text in said({"grammar": lark}):
        found = re.fullmatch(r"%lark max_tokens=%json (\{.*\})#", text, re.DOTALL)
        assert found and abs(json.loads(found[1])["a"]) <= 2**53


def test_white_space_between_the_parts_of_json_has_an_end():
    wish = {"json": {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}}
    assert any(re.search(r"\s", text) for text in said(wish))
    assert {*said({**wish, "disable_any_whitespace": True})} == {"[1,1]"}
    assert {*said({**wish, "whitespace_pattern": "_"}, 100)} <= {
        f"[{a}1{b},{c}1{d}]" for a in ("", "_") for b in ("", "_") for c in ("", "_") for d in ("", "_")
    }


def test_properties_that_are_not_listed_can_be_ruled_out():
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    texts = said({"json": schema, "disable_additional_properties": True, "disable_any_whitespace": True})
    assert {*texts} == {'{"a":1}', "{}"}


TAGS = {
    "triggers": ["<fn"],
    "structures": [
        {
            "begin": "<fn=a>",
            "schema": {"type": "object", "properties": {}, "additionalProperties": False},
            "end": "</fn>",
        },
        {"begin": "<fn=b>", "schema": {"enum": [1, 2]}, "end": "</fn>"},
    ],
}


def test_tags_within_a_text_keep_their_form():
    grammar = grammar_of({"structural_tag": {"type": "structural_tag", **TAGS}}, VOCABULARY)
    assert grammar == grammar_of({"structural_tag": json.dumps(TAGS)}, VOCABULARY)
    for number in range(60):
        text = walk(grammar, f"tags {number}").text.decode("utf-8", "replace")
        assert not re.search(r"<fn(?!=(a>\s*\{\s*\}\s*</fn>|b>[12]</fn>|(a|b)?$|a>|b>))", text)
    # After a trigger a tag must follow.
    from llguidance import LLMatcher

    matcher = LLMatcher(VOCABULARY.tokenizer(VOCABULARY.size), grammar, log_level=0)
    assert matcher.validate_tokens([*b"so <fn=b>1</fn> and <fn=a>{}</fn>."]) == len(
        b"so <fn=b>1</fn> and <fn=a>{}</fn>."
    )
    assert matcher.validate_tokens([*b"so <fn=c"]) == len(b"so <fn=")
    assert matcher.validate_tokens([*b"<fn=b>3"]) == len(b"<fn=b>")


def test_a_format_of_tags_is_made_of_parts():
    form = {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "<|call|>"},
            {
                "type": "or",
                "elements": [
                    {"type": "regex", "pattern": "[0-9]"},
                    {"type": "json_schema", "json_schema": {"const": "é"}},
                ],
            },
            {"type": "tag", "begin": "(", "content": {"type": "any_text"}, "end": ")"},
            {
                "type": "tags_with_separator",
                "tags": [
                    {
                        "type": "tag",
                        "begin": "<",
                        "content": {"type": "json_schema", "json_schema": {"const": 1}},
                        "end": ">",
                    }
                ],
                "separator": ",",
                "at_least_one": True,
            },
        ],
    }
    for text in said({"structural_tag": {"format": form}}, 200):
        assert re.fullmatch(r'<\|call\|>([0-9]|"é")\([^)]*\)<1>(,<1>)*', text)


def test_response_formats_are_wishes():
    schema = {"type": "object"}
    assert wish_of_response_format(None) is None and wish_of_response_format({"type": "text"}) is None
    assert wish_of_response_format({"type": "json_object"}) == {"json_object": True}
    named = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert wish_of_response_format(named) == {"json": schema}
    for text in said({"json_object": True}, 10):
        assert isinstance(json.loads(text), dict)
    with pytest.raises(InvalidRequest, match=r"json_schema\.schema is missing"):
        wish_of_response_format({"type": "json_schema", "json_schema": {"name": "x"}})
    with pytest.raises(Unsupported, match="'xml'"):
        wish_of_response_format({"type": "xml"})


def test_required_calls_have_a_grammar():
    parameters = {
        "type": "object",
        "properties": {"to": {"enum": ["a", "b"]}},
        "required": ["to"],
        "additionalProperties": False,
    }
    tools = parse_tools([
        {"type": "function", "function": {"name": "go", "parameters": parameters}},
        {"type": "function", "function": {"name": "stay"}},
    ])  # fmt: skip
    choice = {"type": "function", "function": {"name": "go"}}
    grammar = schema_grammar(calls_schema(tools, parse_tool_choice(choice, tools)), VOCABULARY, field=Field("tools"))
    calls = [json.loads(text) for text, ended in (walk(grammar, str(number)) for number in range(20)) if ended]
    assert calls and all(call == [{"name": "go", "arguments": {"to": call[0]["arguments"]["to"]}}] for call in calls)
    assert schema_grammar(calls_schema(tools, parse_tool_choice("required", tools)), VOCABULARY, field=Field("tools"))


def test_every_vocabulary_of_bytes_can_be_kept_to():
    vocabulary = byte_text().vocabulary
    assert vocabulary.size == 258 and vocabulary.eos_ids == (256,) and vocabulary.special_names["<|turn|>"] == 257
    assert vocabulary.spell(65) == b"A" and vocabulary.tokenizer(300).vocab_size == 300
