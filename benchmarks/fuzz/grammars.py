"""Targets: schemas, regexes, grammars, structural tags and chat templates, by generation and by mutation."""

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

from benchmarks.fuzz.target import Target
from octavo.errors import OctavoError
from octavo.text.chat.template import request_template
from octavo.text.grammar.build import grammar_of
from octavo.text.tokenize.vocabulary import Vocabulary
from tests.doubles import byte_text

_NAMES = ("a", "b", "name", "items", "x y", "é", "$ref", "")


@cache
def _vocabulary() -> Vocabulary:
    return byte_text().vocabulary


# ── JSON schemas ──


def schema(dice: random.Random, depth: int = 0) -> Any:
    """A random schema, mostly valid."""
    if depth > 5 or dice.random() < 0.1:
        return dice.choice(({}, True, {"type": "null"}, {"const": 1}, {"$ref": "#/$defs/a"}, {"$ref": "#"}))
    match dice.randrange(9):
        case 0:
            names = dice.sample(_NAMES, dice.randrange(1, 5))
            made: dict[str, Any] = {"type": "object", "properties": {name: schema(dice, depth + 1) for name in names}}
            if dice.random() < 0.7:
                made["required"] = names[: dice.randrange(len(names) + 1)]
            if dice.random() < 0.5:
                made["additionalProperties"] = dice.choice((False, True, schema(dice, depth + 1)))
            if dice.random() < 0.2:
                made["patternProperties"] = {regex(dice, 2): schema(dice, depth + 1)}
            if dice.random() < 0.2:
                made |= {"minProperties": dice.randrange(4), "maxProperties": dice.randrange(8)}
        case 1:
            made = {"type": "array", "items": schema(dice, depth + 1), "minItems": dice.choice((0, 1, 3, 500))}
            if dice.random() < 0.5:
                made["maxItems"] = dice.choice((0, 2, 10, 100_000))
            if dice.random() < 0.3:
                made["prefixItems"] = [schema(dice, depth + 1) for _ in range(dice.randrange(3))]
        case 2:
            made = {"type": "string"}
            made |= dice.choice(
                (
                    {"pattern": regex(dice)},
                    {"minLength": dice.choice((0, 5, 10_000)), "maxLength": dice.choice((3, 100, 10**6, 10**400))},
                    {"format": dice.choice(("date-time", "email", "uuid", "ipv6", "uri", "nonsense"))},
                    {"enum": ["a", "b\n", "é"]},
                )
            )
        case 3:
            made = {"type": dice.choice(("integer", "number"))}
            for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
                if dice.random() < 0.4:
                    made[key] = dice.choice((0, 1, -5, 0.1, 1e-9, 3, 10**18, 1e300, 10**400, 7.5))
        case 4:
            made = {
                dice.choice(("anyOf", "oneOf", "allOf")): [schema(dice, depth + 1) for _ in range(dice.randrange(1, 4))]
            }
        case 5:
            made = {
                "enum": [dice.choice((1, "a", None, True, [], {"a": 1}, 1.5)) for _ in range(dice.randrange(1, 30))]
            }
        case 6:
            made = {"type": dice.sample(("string", "null", "object", "array", "number"), dice.randrange(1, 4))}
        case 7:
            key = dice.choice(
                ("not", "if", "contains", "propertyNames", "unevaluatedProperties", "x-own", "title", "$id")
            )
            made = {"type": "object", key: schema(dice, depth + 1)}
        case _:
            made = schema(dice, depth + 1)
            made = (
                {"allOf": [made]} if dice.random() < 0.5 or not isinstance(made, dict) else made | {"description": "x"}
            )
    if depth == 0 and isinstance(made, dict):
        made["$defs"] = {name: schema(dice, 2) for name in ("a", "b")}
        if dice.random() < 0.1:
            made["$defs"] |= _chain(dice)
            made["properties"] = {"x": {"$ref": "#/$defs/c0"}}
    return made


def _chain(dice: random.Random) -> dict[str, Any]:
    length = dice.choice((10, 100, 400))
    wrap = dice.choice(
        (
            lambda inner: {"anyOf": [inner, {"type": "null"}]},
            lambda inner: {"type": "object", "properties": {"x": inner}},
            lambda inner: {"type": "array", "items": inner},
            lambda inner: {"allOf": [inner]},
            lambda inner: inner,
        )
    )
    links = {f"c{at}": wrap({"$ref": f"#/$defs/c{at + 1}"}) for at in range(length)}
    return links | {f"c{length}": {"type": "string"}}


# ── regexes ──


def regex(dice: random.Random, depth: int = 0) -> str:
    parts = []
    for _ in range(dice.randrange(1, 4)):
        match dice.randrange(9 if depth < 4 else 4):
            case 0:
                part = dice.choice(("a", "b", "é", r"\.", r"\n", " ", "x" * 50))
            case 1:
                part = dice.choice(
                    ("[a-z]", r"\d", r"\w", r"\s", "[^a]", ".", r"\p{L}", r"[\x00-\x{10FFFF}]", "[[:alpha:]]")
                )
            case 2:
                part = dice.choice(
                    ("^", "$", r"\b", "(?i)", r"\1", "(?=a)", "(?<!b)", "[", "(", "*", r"\u00e9", r"\xZZ")
                )
            case 3:
                part = ""
            case 4 | 5:
                part = f"({regex(dice, depth + 1)})"
            case 6:
                part = f"(?:{regex(dice, depth + 1)}|{regex(dice, depth + 1)})"
            case _:
                part = regex(dice, depth + 1)
        if part and dice.random() < 0.3:
            part += dice.choice(("*", "+", "?", "{2}", "{0,5}", "{3,}", "{1,200}", "{1000}", "*?", "{2,1}", "{,3}"))
        parts.append(part)
    return "".join(parts)


# ── Lark and GBNF ──


def lark(dice: random.Random) -> str:
    rules = ["start", *(f"r{at}" for at in range(dice.randrange(1, 6)))]
    terminals = [f"T{at}" for at in range(dice.randrange(1, 5))]
    text = "".join(f"{rule}: {_body(dice, rules, terminals)}\n" for rule in rules)
    for name in terminals:
        text += f"{name}: " + dice.choice((f"/{regex(dice, 2)}/", '"a"', '"x".."z"', *terminals)) + "\n"
    if dice.random() < 0.2:
        text += dice.choice(
            ("%ignore /[ ]+/\n", "%import common.INT\n", "%json {}\n", "%llguidance {}\n", "%nothing x\n")
        )
    if dice.random() < 0.1:
        length = dice.choice((20, 200, 1000))
        text += "".join(f"c{at}: c{at + 1}\n" for at in range(length)) + f'c{length}: "end"\n'
    return text


def _body(dice: random.Random, rules: list[str], terminals: list[str], depth: int = 0) -> str:
    choices = []
    for _ in range(dice.randrange(1, 4)):
        parts = []
        for _ in range(dice.randrange(1, 4)):
            part = dice.choice(
                (*rules, *terminals, '"lit"', "/[0-9]+/", "<[257]>", f"%json {json.dumps(schema(dice, 4))}")
            )
            if depth < 3 and dice.random() < 0.2:
                part = f"({_body(dice, rules, terminals, depth + 1)})"
            parts.append(part + dice.choice(("", "", "", "?", "*", "+", "~2..5", "{3}")))
        choices.append(" ".join(parts))
    return " | ".join(choices)


def gbnf(dice: random.Random) -> str:
    rules = ["root", *(f"r{at}" for at in range(dice.randrange(1, 5)))]
    lines = []
    for rule in rules:
        parts = [
            dice.choice((*rules, '"lit"', "[a-z0-9]", "[^\\n]", "( r0 | r1 )", "(root)", '"\\x41"', "."))
            + dice.choice(("", "", "*", "+", "?", "{2,3}", "{4}"))
            for _ in range(dice.randrange(1, 5))
        ]
        lines.append(f"{rule} ::= {' '.join(parts)}" + dice.choice(("", ' | "z"', " |", " # note")))
    return "\n".join(lines) + "\n"


# ── structural tags and templates ──


def structural_tag(dice: random.Random) -> Any:
    tags = [
        {
            "begin": dice.choice(("<f>", "<|turn|>", "", "<g=")),
            "end": dice.choice(("</f>", "", "<|end|>")),
            "schema": schema(dice, 3),
        }
        for _ in range(dice.randrange(1, 4))
    ]
    if dice.random() < 0.5:
        return {
            "type": "structural_tag",
            "structures": tags,
            "triggers": dice.choice((["<f"], ["<"], [], [""], ["<f", "<g"])),
        }
    kinds: list[Any] = [
        {"type": "json_schema", "json_schema": schema(dice, 3)},
        {"type": "regex", "pattern": regex(dice, 2)},
        {"type": "const_string", "value": "x"},
        {"type": "any_text"},
        {"type": "grammar", "grammar": lark(dice)},
    ]
    inner = {"type": dice.choice(("sequence", "or")), "elements": dice.sample(kinds, dice.randrange(1, 4))}
    form = dice.choice((inner, {"type": "tag", "begin": "<f>", "content": inner, "end": "</f>"}, *kinds))
    return {"type": "structural_tag", "format": form}


_PIECES = (
    "{{ messages[0].content }}", "{{ 'a' * 9 }}", "{{ '%s' % 'a' }}", "{{ '{:>9}'.format(1) }}", "{{ messages | tojson(indent=2) }}",
    "{% set x = namespace(y=1) %}", "{{ range(5) | list }}", "{{ x.__class__ }}", "{{ raise_exception('no') }}", "{{ f(1) }}", "text",
    "{# note #}", "{{ 'abc' | wordwrap(2) }}", "{{ strftime_now('%Y') }}", "{{ messages | map(attribute='role') | join(',') }}",
    "{{ 10 ** 5 }}", "{{ 'a'.join([]) }}",
)  # fmt: skip
_BLOCKS = (
    ("{% for m in messages %}", "{% endfor %}"), ("{% if tools %}", "{% endif %}"), ("{% macro f(a) %}", "{% endmacro %}"),
    ("{%- generation -%}", "{% endgeneration %}"), ("{% if messages %}", "{% else %}no{% endif %}"), ("{{", "}}"),
)  # fmt: skip


def template(dice: random.Random) -> str:
    """Half of them have blocks that are closed."""
    if dice.random() < 0.5:
        pieces = (*_PIECES, *(mark for block in _BLOCKS for mark in block))
        return "".join(dice.choice(pieces) for _ in range(dice.randrange(1, 12)))
    return _nested(dice, 3)


def _nested(dice: random.Random, depth: int) -> str:
    parts = []
    for _ in range(dice.randrange(1, 4)):
        if depth and dice.random() < 0.4:
            begin, end = dice.choice(_BLOCKS[:-1])
            parts.append(begin + _nested(dice, depth - 1) + end)
        else:
            parts.append(dice.choice(_PIECES))
    return "".join(parts)


def _run_template(data: bytes) -> None:
    source = data.decode("utf-8", "replace")
    text = byte_text()
    template = request_template(source, text.template_variables)
    text.with_template(template).render_chat([{"role": "user", "content": "Hi"}])


def _wish(kind: str, data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    value: Any = text
    if kind in ("json", "structural_tag"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return
    grammar_of({kind: value}, _vocabulary())


def _dumped(make: Callable[[random.Random], Any]) -> Callable[[random.Random], bytes]:
    return lambda dice: json.dumps(make(dice)).encode()


def _text(make: Callable[[random.Random], str]) -> Callable[[random.Random], bytes]:
    return lambda dice: make(dice).encode()


def _seeds(generate: Callable[[random.Random], bytes]) -> list[bytes]:
    return [generate(random.Random(seed)) for seed in range(20)]


def _target(
    name: str, kind: str, generate: Callable[[random.Random], bytes], words: tuple[str, ...], is_json: bool
) -> Target:
    return Target(
        name,
        _seeds(generate),
        lambda data: _wish(kind, data),
        (OctavoError,),
        words,
        is_json,
        generate=generate,
        seconds=10.0,
    )


_KEYWORDS = (
    "type", "properties", "required", "items", "anyOf", "oneOf", "allOf", "$ref", "$defs", "enum", "const", "pattern", "format",
    "additionalProperties", "patternProperties", "minLength", "maxLength", "minItems", "maxItems", "prefixItems", "not", "object",
    "array", "string", "integer", "number", "boolean", "null", "multipleOf", "minimum", "uniqueItems", "x-guidance", "nullable",
)  # fmt: skip

TARGETS: dict[str, Callable[[], Target]] = {
    "schema": lambda: _target("schema", "json", _dumped(schema), _KEYWORDS, True),
    "regex": lambda: _target("regex", "regex", _text(regex), ("(", ")", "[", "]", "{1,9}", "*", "|", "\\d", "(?:"), False),
    "lark": lambda: _target("lark", "grammar", _text(lark), ("start:", "|", "%json", "/a/", "~", "\n", "T0", "r0"), False),
    "gbnf": lambda: _target("gbnf", "grammar", _text(gbnf), ("root ::=", "|", "[a-z]", "\\x", "{1,}", "\n"), False),
    "structural_tag": lambda: _target(
        "structural_tag", "structural_tag", _dumped(structural_tag),
        ("structures", "triggers", "begin", "end", "schema", "format", "tag", "sequence", "or", "triggered_tags"), True,
    ),
    "template": lambda: Target(
        "template", _seeds(_text(template)), _run_template, (OctavoError,), ("{{", "}}", "{%", "%}", "for", "in", "|", "~"),
        generate=_text(template), seconds=10.0,
    ),
}  # fmt: skip
