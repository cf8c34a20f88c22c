"""Bodies that are JSON, or nearly, and yet hostile: for every route that takes one, with values, schemas, grammars, tools and files."""

import json
import random
from typing import Any

_HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "", "max_tokens": 0},
    "/v1/chat/completions": {"messages": _HI, "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1, "store": False},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": _HI, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": _HI},
    "/v1/embeddings": {"input": "hi"},
    "/v1/batches": {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}
"""A valid body for each route; its answer costs a token at most."""
FIELDS = (
    "prompt", "messages", "input", "stop", "logit_bias", "stream_options", "model", "bad_words", "n", "response_format", "tools",
    "tool_choice", "system", "instructions", "previous_response_id", "text", "reasoning", "metadata", "input_file_id", "endpoint",
    "completion_window", "output_expires_after", "tokens", "stop_sequences", "thinking", "include", "user", "conversation",
    "structured_outputs", "chat_template_kwargs", "documents", "dimensions", "encoding_format", "seed", "logprobs", "deadline_ms",
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, [], {}, [[]], [None], [[-1]], [10**9], "", 5, -1, 2.5, {"a": 1}, [[1, "a"]], ["a", 1], "\x00", "\ud800", "a" * 3000,
    [{}], [{"type": "x"}], {"type": "x"}, {"id": "x"}, [{"role": "user"}], [{"role": "tool", "content": []}], {"": {"": {}}},
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"type": "function_call_output", "call_id": "x", "output": "y"}], [{"type": "item_reference", "id": "x"}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": 3}]}],
)  # fmt: skip


def wrong_types(dice: random.Random, ids: list[str]) -> tuple[str, bytes]:
    """Return a route and its body with one or two fields of a wrong type."""
    route = dice.choice(list(ROUTES))
    body = dict(ROUTES[route])
    for _ in range(dice.randrange(1, 3)):
        body[dice.choice((*FIELDS, *body))] = dice.choice((*_VALUES, *ids[-3:]))
    return route, json.dumps(body).encode()


def numbers(dice: random.Random) -> tuple[str, bytes]:
    route = dice.choice(list(ROUTES))
    names = ("max_tokens", "n", "seed", "top_k", "temperature", "logprobs", "deadline_ms", "min_tokens", "stop_token_ids", "top_p",
             "max_output_tokens", "dimensions", "max_queue_ms", "truncate_prompt_tokens")  # fmt: skip
    number = dice.choice(
        ["1e999", "-1e999", "9" * 400, "-" + "9" * 40, "NaN", "Infinity", "0." + "1" * 5000, "1e-400", "-1", "2.5"]
    )
    # The hostile field first, so that it is parsed before the one that keeps the answer short.
    rest = json.dumps(ROUTES[route])[1:]
    return route, f'{{"stop": "b", "{dice.choice(names)}": {number}, {rest}'.encode()


# ── output formats ──


def _nested(depth: int, key: str) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}} if key == "properties" else {key: [schema, schema]}
        if key != "properties":
            schema[key] = schema[key][:1] if depth > 12 else schema[key]
    return schema


def _schema(dice: random.Random) -> Any:
    return dice.choice([
        lambda: _nested(dice.choice([5, 60, 400]), dice.choice(["properties", "anyOf", "allOf", "oneOf"])),
        lambda: {"$ref": "#"},
        lambda: {"$ref": dice.choice(["#/nowhere", "http://127.0.0.1:9/x", "file:///etc/passwd", "#/$defs/a"])},
        lambda: {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        lambda: {"enum": [f"{number}" for number in range(dice.choice([10, 3000]))]},
        lambda: {"type": "string", "pattern": _pattern(dice)},
        lambda: {"type": "string", "minLength": dice.choice([10**4, 10**9, -1, 1e300])},
        lambda: {"type": "array", "items": {"type": "integer"}, "minItems": dice.choice([3, 10**12]), "maxItems": 2},
        lambda: {"type": "number", "multipleOf": dice.choice([0, -1, 1e-300, 1e300, 0.1])},
        lambda: {"allOf": [{"type": "string"}, {"type": "integer"}]},
        lambda: {"type": dice.choice([5, "colour", ["string", "string"], None, {}])},
        lambda: {"properties": {f"k{number}\u00e9\"\\": {} for number in range(dice.choice([3, 500]))}, "required": ["z"]},
        lambda: dice.choice([{"not": {}}, False, True, [], "x", {"const": "\ud800"}, {"type": "object", "properties": 7}]),
        lambda: {"type": "integer", "minimum": 10**40, "maximum": -(10**40)},
    ])()  # fmt: skip


def _pattern(dice: random.Random) -> str:
    return dice.choice([
        "(a+)+$", "((a{99}){99}){99}", "[", "\\", "(?=a)b", "(?<n>a)\\k<n>", "a{5,2}", "(" * 300 + ")" * 300, "\\p{Greek}{1,400}",
        "[^\\x00-\\U0010ffff]", "(a|b|ab)*c{0,900}", "a" * 5000, "^$^$", "\ud800", "",
    ])  # fmt: skip


def _grammar(dice: random.Random) -> str:
    return dice.choice([
        "start: start start", "start: ", "start: a\na: b\nb: a", 'start: "a"*\nstart: "b"', "start: /(a+)+/", "%import common.INT",
        "root ::= root", 'root ::= ("a" | root)*', "start: (", "\x00", 'start: "' + "a" * 5000 + '"', "start: x" * 1000,
        "".join(f'r{number}: "a" r{number + 1}?\n' for number in range(300)) + 'r300: "z"\nstart: r0', 'start: %json {"type": 5}',
    ])  # fmt: skip


def _tools(dice: random.Random) -> dict[str, Any]:
    name = dice.choice(["f", "", "f" * 300, "é", "a b", "f\x00", None, 5])
    tool = {"type": "function", "function": {"name": name, "parameters": _schema(dice)}}
    chosen = dice.choice(["required", "auto", "none", "x", {"type": "function", "function": {"name": "g"}}, 5, None])
    return {"tools": [tool] * dice.choice([1, 2, 100]), "tool_choice": chosen}


def forms(dice: random.Random) -> tuple[str, bytes]:
    """Return a route and a body with schemas, patterns, grammars or tools, in each dialect's form."""
    wish: dict[str, Any]
    kind = dice.choice(["schema", "json", "regex", "grammar", "choice", "tag", "tools", "responses", "messages"])
    if kind == "schema":
        wish = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _schema(dice)}}}
    elif kind == "tag":
        parts = [{"begin": dice.choice(["<f>", ""]), "schema": _schema(dice), "end": dice.choice(["</f>", "", 5])}]
        wish = {
            "response_format": {"type": "structural_tag", "structures": parts, "triggers": dice.choice([["<f"], [], 5])}
        }
    elif kind == "tools":
        wish = _tools(dice)
    elif kind == "responses":
        form = {"format": {"type": "json_schema", "name": "a", "schema": _schema(dice)}}
        tools = [{"type": "function", "name": "f", "parameters": _schema(dice)}]
        return "/v1/responses", json.dumps({**ROUTES["/v1/responses"], "text": form, "tools": tools}).encode()
    elif kind == "messages":
        tools = [{"name": dice.choice(["f", "", "é"]), "input_schema": _schema(dice)}]
        choice = {"type": dice.choice(["any", "auto", "tool", "x"]), "name": "f"}
        return "/v1/messages", json.dumps({**ROUTES["/v1/messages"], "tools": tools, "tool_choice": choice}).encode()
    else:
        many = [f"{number}" for number in range(3000)]
        choices = dice.choice([[""], many, [1], [], ["a", "a"], "a"])
        value = {"json": _schema, "regex": _pattern, "grammar": _grammar, "choice": lambda _: choices}[kind](dice)
        wish = {"structured_outputs": {kind: value}}
    return "/v1/chat/completions", json.dumps({**ROUTES["/v1/chat/completions"], **wish}).encode()


# ── files ──


def upload(dice: random.Random) -> tuple[bytes, bytes]:
    """Return the content type and body of a form upload: a file of requests, valid or broken."""
    lines = [
        {"custom_id": dice.choice(["a", "a", "b", "", 5]), "method": dice.choice(["POST", "GET"]),
         "url": dice.choice(["/v1/completions", "/v1/completions", "/nowhere", 5]),
         "body": dice.choice([{"prompt": "", "max_tokens": 0}, {"prompt": 5}, [], None])}
        for _ in range(dice.randrange(4))
    ]  # fmt: skip
    file = b"\n".join(json.dumps(line).encode() for line in lines) + dice.choice([b"", b"\n", b"\n{", b"\xff\xfe"])
    purpose, name = (
        dice.choice([b"batch", b"batch", b"x", b"\xff", b"a" * 9000]),
        dice.choice([b"a.jsonl", b"../../x", b"\xff"]),
    )
    body = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n%b\r\n--x\r\n'
        b'Content-Disposition: form-data; name="file"; filename="%b"\r\n\r\n%b\r\n--x--\r\n'
    ) % (purpose, name, file)
    if dice.random() < 0.5:
        at = dice.randrange(len(body))
        body = (
            body[:at] + bytes(dice.choices(b'\r\n-x":;=\x00\xff', k=dice.randrange(5))) + body[at + dice.randrange(9) :]
        )
    boundary = dice.choice(
        [b"; boundary=x"] * 6 + [b"", b"; boundary=", b"; boundary=" + b"x" * 300, b"; boundary=\xff"]
    )
    return b"multipart/form-data" + boundary, body
