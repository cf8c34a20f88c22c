"""A client's own grammar in Lark's notation: the schemas in it are checked like all others, and unsupported directives are
rejected by name.

The lexical pieces are those of llguidance: strings, regexes and comments are skipped."""

import json
import re
from collections.abc import Callable

from octavo.errors import Field, InvalidRequest, Unsupported
from octavo.text.grammar.limits import MAX_RULES, longest_chain

# A string or regex that is not closed matches too, up to the end: else the search would go on from each of its characters.
_PIECE = re.compile(
    r"""
    (?P<comment>  (?://|\#)[^\n]* )
  | (?P<text>     "(?:\\.?|[^"\\])*(?:"i?|(?P<open_text>\Z)) )
  | (?P<regex>    /(?:\\.?|[^/\\])+(?:/[a-z]*|(?P<open_regex>\Z)) )
  | (?P<token>    <[^<>\s]+> )
  | (?P<directive> %[\w-]* )
    """,
    re.VERBOSE | re.DOTALL,
)
_RULE_OPTION = re.compile(r"\b(temperature|max_tokens|stop|stop_capture)\s*=")
_KEPT = ("%ignore", "%import")  # directives that the compiler enforces
_OPTIONS = re.compile(r"\s*\{\s*\}")  # empty options, which the GBNF converter writes
_SPACE = re.compile(r"\s*")
# As sampling/grammar/schema_places.py reads them: with one space between parts.
_FRAMED = re.compile(r'start: ("(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])*" )*%json ')
_TEXTS = re.compile(r'( "(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])*")*\s*')
# The start of a rule, with its options, or the name of one that it refers to.
_NAME = re.compile(r"(?m)^[ \t]*[?!]?(?P<rule>[A-Za-z_]\w*)[^:\n]*:|(?P<name>[A-Za-z_]\w*)")


def settle(lark: str, field: Field, schema_rule: Callable[[object, Field], str]) -> str:
    """Return the grammar with each schema replaced by the result of `schema_rule`, which rejects what is not enforced."""
    settled, outside, at = [], [], 0
    while piece := _PIECE.search(lark, at):
        outside.append(lark[at : piece.start()])
        settled.append(outside[-1])
        at = piece.end()
        if piece["open_text"] is not None or piece["open_regex"] is not None:
            raise InvalidRequest(field + f": a string or an expression is not closed: {piece[0][:30]!r}")
        if piece["directive"] is None:
            settled.append(piece[0])
            continue
        match piece[0]:
            case "%json":
                schema, at = _schema(lark, at, field)
                settled.append(schema_rule(schema, field))
            case "%llguidance" if options := _OPTIONS.match(lark, at):
                at = options.end()
            case "%llguidance":
                raise Unsupported(field + ": %llguidance options are not supported")
            case directive if directive in _KEPT:
                settled.append(directive)
            case directive:
                raise Unsupported(
                    field + f": {directive[:60]} is not supported; supported are %json, {' and '.join(_KEPT)}"
                )
    outside.append(lark[at:])
    settled.append(outside[-1])
    plain = " ".join(outside)
    if option := _RULE_OPTION.search(plain):
        raise Unsupported(field + f": the rule option {option[1]!r} is not supported: leave it out")
    if (chain := longest_chain(_references(plain))) > MAX_RULES:
        raise InvalidRequest(
            field + f" has a chain of {chain} rules that refer to each other; at most {MAX_RULES} are allowed"
        )
    return "".join(settled)


def is_framed(lark: str) -> bool:
    """Whether a grammar is one rule: a schema, between texts."""
    head = _FRAMED.match(lark)
    if head is None:
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(lark, head.end())
    except (ValueError, RecursionError):
        return False
    return _TEXTS.fullmatch(lark, end) is not None


def _references(plain: str) -> dict[str, list[str]]:
    """Each rule and the rules it refers to. `plain`: a grammar without its strings, regexes and comments."""
    named: dict[str, list[str]] = {}
    names: list[str] = []
    for found in _NAME.finditer(plain):
        if found["rule"] is not None:
            names = named.setdefault(found["rule"], [])
        else:
            names.append(found["name"])
    return {rule: [name for name in names if name in named] for rule, names in named.items()}


def _schema(lark: str, at: int, field: Field) -> tuple[object, int]:
    """Parse the JSON at position `at`: (value, its end)."""
    space = _SPACE.match(lark, at)
    assert space is not None  # it matches nothing, too
    try:
        return json.JSONDecoder().raw_decode(lark, space.end())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field + f": %json must be followed by a JSON schema: {error}") from error
