"""Attacks on the compilers of schemas, regexes and grammars, through every field that takes one."""

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.torture.attacks.base import HI, Answer, Attack, Door, Send, Strike, dumped, must_be, post

_CHAT, _COMPLETIONS, _RESPONSES, _MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"

_COMPILE_S = 25.0  # clients wait for long: what takes long to compile may also take long in every step


# ── schemas ──


def chain_of_any_of(length: int) -> Any:
    return _chain(length, _any_of)


def _chain(length: int, link: Callable[[Any], Any]) -> Any:
    """A schema whose definitions refer to the next one each."""
    links: dict[str, Any] = {f"c{at}": link({"$ref": f"#/$defs/c{at + 1}"}) for at in range(length)}
    return {"$defs": {**links, f"c{length}": {"type": "string"}}, "$ref": "#/$defs/c0"}


def _any_of(inner: Any) -> Any:
    return {"anyOf": [inner, {"type": "null"}]}


def _object(inner: Any) -> Any:
    return {"type": "object", "properties": {"x": inner}}


def _items(inner: Any) -> Any:
    return {"type": "array", "items": inner}


def _all_of(inner: Any) -> Any:
    return {"allOf": [inner]}


def _doubling(key: str, depth: int) -> Any:
    """2 ** depth paths through depth definitions."""
    links: dict[str, Any] = {
        f"c{at}": {key: [{"$ref": f"#/$defs/c{at + 1}"}, {"$ref": f"#/$defs/c{at + 1}"}]} for at in range(depth)
    }
    return {"$defs": {**links, f"c{depth}": {"type": "string"}}, "$ref": "#/$defs/c0"}


def _nested(depth: int, wrap: Callable[[Any], Any] = _object) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = wrap(schema)
    return schema


def _one_of(count: int) -> Any:
    return {
        "oneOf": [
            {"type": "object", "properties": {f"k{at}": {"type": "string"}}, "required": [f"k{at}"]}
            for at in range(count)
        ]
    }


def _optional(count: int) -> Any:
    return {
        "type": "object",
        "properties": {f"k{at}": {"type": "string"} for at in range(count)},
        "additionalProperties": False,
    }


def _intersecting(count: int) -> Any:
    """Objects whose merged properties must be intersected, pattern with pattern."""
    return {"allOf": [{"type": "string", "pattern": f"^.*[a-{chr(98 + at % 24)}].{{{at % 9 + 9}}}$"} for at in range(count)]}  # fmt: skip


# ── the fields that take a schema ──


def _format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def _tools(schema: Any, count: int = 1) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": f"f{at}", "parameters": schema}} for at in range(count)]
    return {"tools": tools, "tool_choice": "required"}


def _in_responses(schema: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}


def _in_responses_tool(schema: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f", "parameters": schema}], "tool_choice": "required"}


def _in_messages(schema: Any) -> dict[str, Any]:
    return {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "tool", "name": "f"}}


def _tag(schema: Any) -> dict[str, Any]:
    tag = {"begin": "<f>", "schema": schema, "end": "</f>"}
    return {"response_format": {"type": "structural_tag", "structures": [tag], "triggers": ["<f"]}}


def _new_tag(schema: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema}
    form = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    return {"response_format": {"type": "structural_tag", "format": form}}


def _wish(kind: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"structured_outputs": {kind: value}, **more}


# ── grammars ──


def _lark_rules(length: int) -> str:
    return "start: r0\n" + "".join(f"r{at}: r{at + 1}\n" for at in range(length)) + f'r{length}: "a"\n'


def _lark_terminals(length: int) -> str:
    return "start: T0\n" + "".join(f"T{at}: T{at + 1}\n" for at in range(length)) + f'T{length}: "a"\n'


def _gbnf_rules(length: int) -> str:
    return "root ::= r0\n" + "".join(f"r{at} ::= r{at + 1}\n" for at in range(length)) + f'r{length} ::= "a"\n'


def _doubling_terminals(depth: int) -> str:
    return "start: T0\n" + "".join(f"T{at}: T{at + 1} T{at + 1}\n" for at in range(depth)) + f'T{depth}: "a"\n'


def _doubling_rules(depth: int) -> str:
    return "start: r0\n" + "".join(f"r{at}: r{at + 1} r{at + 1}\n" for at in range(depth)) + f'r{depth}: "a"?\n'


def _ambiguous(count: int) -> str:
    ways = " | ".join(f"b{at} a" for at in range(count))
    return f'start: a\na: {ways} | "x"\n' + "".join(f'b{at}: "x"*\n' for at in range(count))


def _schemas() -> list[Attack]:
    chains: dict[str, Callable[[], Any]] = {
        "anyof-1050": lambda: _chain(1050, _any_of),
        "objects-1000": lambda: _chain(1000, _object),
        "items-2500": lambda: _chain(2500, _items),
        "allof-2500": lambda: _chain(2500, _all_of),
        "bare-2500": lambda: _chain(2500, lambda inner: inner),
    }
    attacks = [
        post(f"chain-{name}", _CHAT, functools.partial(lambda make: _format(make()), make))
        for name, make in chains.items()
    ]
    anyof, items = chains["anyof-1050"], chains["items-2500"]
    ways: list[tuple[str, str, Callable[[], dict[str, Any]]]] = [
        ("structured-outputs", _COMPLETIONS, lambda: _wish("json", anyof())),
        ("guided-json", _COMPLETIONS, lambda: {"guided_json": items()}),
        ("as-text", _CHAT, lambda: _wish("json", dumped(anyof()).decode())),
        ("tools", _CHAT, lambda: _tools(anyof())),
        ("tools-of-items", _CHAT, lambda: _tools(items())),
        ("structural-tag", _CHAT, lambda: _tag(anyof())),
        ("structural-tag-format", _CHAT, lambda: _new_tag(items())),
        ("lark-json", _CHAT, lambda: _wish("grammar", f"start: %json {dumped(anyof()).decode()}\n")),
        ("responses", _RESPONSES, lambda: _in_responses(anyof())),
        ("responses-tool", _RESPONSES, lambda: _in_responses_tool(items())),
        ("messages-tool", _MESSAGES, lambda: _in_messages(anyof())),
    ]
    attacks += [post(f"chain-by-{way}", path, make) for way, path, make in ways]
    sizes: dict[str, Callable[[], Any]] = {
        "oneof-1600": lambda: _one_of(1600),
        "anyof-2-to-the-30": lambda: _doubling("anyOf", 30),
        "allof-2-to-the-30": lambda: _doubling("allOf", 30),
        "oneof-2-to-the-12": lambda: _doubling("oneOf", 12),
        "nested-60": lambda: _nested(60),
        "nested-1000": lambda: _nested(1000),
        "nested-anyof-3000": lambda: _nested(3000, _any_of),
        "nested-allof-90": lambda: _nested(90, _all_of),
        "properties-5000-optional": lambda: _optional(5000),
        "properties-9000-required": lambda: {**_optional(9000), "required": [f"k{at}" for at in range(9000)]},
        "pattern-properties-500": lambda: {
            "type": "object",
            "patternProperties": {f"^[a-z]{{{at}}}x.*{at}$": {} for at in range(1, 500)},
        },
        "patterns-intersected-40": lambda: _intersecting(40),
        "enum-20000": lambda: {"enum": [f"{at:x}" for at in range(20_000)]},
        "enum-of-objects-2000": lambda: {"enum": [{"a": [at, {"b": at}]} for at in range(2000)]},
        "const-200kb": lambda: {"const": "a" * 200_000},
        "min-items-a-million": lambda: {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
        "min-length-a-million": lambda: {"type": "string", "minLength": 10**6, "maxLength": 10**9},
        "max-items-nested": lambda: _nested(6, lambda inner: {"type": "array", "items": inner, "maxItems": 500}),
        "multiple-of-tiny": lambda: {"type": "number", "multipleOf": 1e-300},
        "multiple-of-primes": lambda: {
            "allOf": [{"type": "integer", "multipleOf": prime} for prime in (997, 991, 983, 977, 971)]
        },
        "numbers-of-4000-digits": lambda: {"type": "integer", "minimum": 10**4000, "maximum": 10**4100},
        "unicode-pattern": lambda: {"type": "string", "pattern": r"^[\p{L}\p{N}\p{S}]{1,4000}$"},
        "ref-to-itself": lambda: {"$ref": "#", "anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]},
        "required-100000": lambda: {"type": "object", "required": [f"{at}" for at in range(30_000)]},
    }
    attacks += [
        post(f"schema-{name}", _CHAT, functools.partial(lambda make: _format(make()), make), is_cheap=name in _CHEAP)
        for name, make in sizes.items()
    ]
    attacks.append(
        post(
            "schema-510-optional-is-answered",
            _CHAT,
            lambda: {**_format(_optional(510)), "max_tokens": 32},
            seconds=20.0,
            check=must_be(200),
        )
    )
    attacks.append(post("schema-100-tools-of-2kb", _CHAT, lambda: _tools(_optional(60), 100)))
    return attacks


_CHEAP = ("nested-60", "enum-of-objects-2000", "ref-to-itself", "nested-1000", "multiple-of-tiny", "const-200kb")


def _texts() -> list[Attack]:
    regexes: dict[str, Callable[[], str]] = {
        "optional-32000": lambda: "a?" * 32_000,
        "optional-counted-32000": lambda: "(a?){32000}",
        "counted-a-million": lambda: "(a{1000}){1000}",
        "counted-99-cubed": lambda: "((a{99}){99}){99}",
        "counted-any": lambda: "(.{1,1000}){1,1000}",
        "nested-quantifiers": lambda: "((((a+)+)+)+)+b",
        "exponential-automaton": lambda: ".*a.{24}",
        "exponential-automata-many": lambda: "|".join(f".*{letter}.{{18}}" for letter in "abcdefghijklmnop"),
        "unicode-counted": lambda: r"[\p{L}\p{N}]{1,4000}",
        "unicode-alternatives": lambda: "|".join([r"\p{Greek}+\p{Cyrillic}+"] * 2000),
        "words-20000": lambda: "|".join(f"{at:x}z" for at in range(20_000)),
        "nested-groups-100": lambda: "(" * 99 + "a" + ")*" * 99,
        "any-case-250kb": lambda: "(?i)" + "k" * 250_000,
        "class-of-everything": lambda: "[" + "".join(chr(at) for at in range(0x4E00, 0x9FFF, 2)) + "]{1,2000}",
    }
    attacks = [
        post(
            f"regex-{name}",
            _COMPLETIONS,
            functools.partial(lambda make: _wish("regex", make(), max_tokens=20), make),
            seconds=_COMPILE_S,
        )
        for name, make in regexes.items()
    ]
    grammars: dict[str, Callable[[], str]] = {
        "lark-rules-2673": lambda: _lark_rules(2673),
        "lark-rules-10000": lambda: _lark_rules(10_000),
        "lark-terminals-5000": lambda: _lark_terminals(5000),
        "lark-terminals-10000": lambda: _lark_terminals(10_000),
        "gbnf-rules-3000": lambda: _gbnf_rules(3000),
        "gbnf-nested-1000": lambda: "root ::= " + "(" * 99 + '"a"' + ")?" * 99,
        "gbnf-40000-alternatives": lambda: "root ::= " + "|".join(['"a"'] * 40_000),
        "gbnf-20000-alternatives": lambda: "root ::= " + " | ".join(['"a"'] * 20_000),
        "lark-40000-alternatives": lambda: "start: " + "|".join(['"a"'] * 40_000) + "\n",
        "lark-alternatives-of-rules": lambda: "start: " + "|".join(["a"] * 60_000) + '\na: "x" start?\n',
        "lark-ambiguous": lambda: 'start: a\na: a a | "x"\n',
        "lark-ambiguous-empty": lambda: 'start: a\na: a a a | "x" | ""\n',
        "lark-ambiguous-many": lambda: _ambiguous(300),
        "lark-doubling-terminals-30": lambda: _doubling_terminals(30),
        "lark-doubling-rules-30": lambda: _doubling_rules(30),
        "lark-repeated-100000": lambda: 'start: "a"~1..100000\n',
        "lark-repeated-nested": lambda: "start: r0\n" + "".join(f"r{at}: r{at + 1}~1..50\n" for at in range(8)) + 'r8: "a"\n',
        "lark-complement": lambda: "start: T\nT: /.*a.{20}/ & ~/.*b.{20}/ & /.*c.{20}/\n",
        "lark-ignored": lambda: 'start: "a"*\n' + "%ignore /(( |\\t)+)+/\n" * 2000,
        "lark-200kb-string": lambda: 'start: "' + "a" * 200_000 + '"\n',
        "lark-left-recursion-2000": lambda: "start: r0\n" + "".join(f'r{at}: r{at + 1} | r{at} "x"\n' for at in range(2000)) + 'r2000: "a"\n',
    }  # fmt: skip
    attacks += [
        post(
            f"grammar-{name}",
            _CHAT,
            functools.partial(lambda make: _wish("grammar", make(), max_tokens=64), make),
            seconds=_COMPILE_S,
        )
        for name, make in grammars.items()
    ]
    attacks += [
        post("choice-4096-long", _CHAT, lambda: _wish("choice", [f"{at:050}" for at in range(4096)], max_tokens=8)),
        post("choice-4096-nested-prefixes", _CHAT, lambda: _wish("choice", ["a" * at for at in range(1, 700)], max_tokens=8)),
        post("whitespace-pattern", _CHAT, lambda: _wish("json", _optional(50), max_tokens=32)
             | {"structured_outputs": {"json": _optional(50), "whitespace_pattern": "(( |\\t)*|.*a.{22})"}}),
        post("structural-tags-256", _CHAT, lambda: {"response_format": {
            "type": "structural_tag", "triggers": ["<f"],
            "structures": [{"begin": f"<f{at}>", "schema": _optional(8), "end": "</f>"} for at in range(256)]}}),
    ]  # fmt: skip
    return attacks


# ── several requests ──


def _leaving_compilers(door: Door, dice: random.Random) -> Strike:
    """Eight clients ask for a large schema and leave; their work must not hold up a listing of files."""
    body = dumped({"messages": HI, "max_tokens": 1, **_format(_one_of(1600))})
    yield [Send([door.request("POST", _CHAT, body.replace(b"k0", b"x%d" % at))], "leave", delay=0.02 * at) for at in range(8)]  # fmt: skip
    yield [Send([door.request("GET", "/v1/files")])]


def _listed_soon(answers: Sequence[Answer], door: Door) -> str:
    slow = max(answer.seconds for answer in answers)
    if answers[-1].status != 200:
        return f"the listing of files gave {answers[-1].status}"
    return f"the listing of files took {slow:.1f} s" if slow > 1.0 else ""


def _eight_schemas(door: Door, dice: random.Random) -> Strike:
    """Eight different schemas at the same time, then one of each kind again."""
    bodies = [
        dumped({"messages": HI, "max_tokens": 4, **_format(_optional(300 + 20 * at + dice.randrange(9)))})
        for at in range(8)
    ]
    yield [Send([door.request("POST", _CHAT, body)]) for body in bodies]


ATTACKS = [
    *_schemas(),
    *_texts(),
    Attack("compilers-8-that-leave", _leaving_compilers, seconds=15.0, is_flood=True, check=_listed_soon),
    Attack("compilers-8-at-once", _eight_schemas, seconds=15.0, is_flood=True),
]
