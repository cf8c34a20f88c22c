"""A client's own grammar in Lark's notation: the schemas in it are checked like all others, and unsupported directives are
rejected by name.

The lexical pieces are those of llguidance: strings, regexes and comments are skipped."""

import json
import re
from collections.abc import Callable

from octavo.errors import Field, InvalidRequest, Unsupported

_PIECE = re.compile(
    r"""
    (?P<comment>  (?://|\#)[^\n]* )
  | (?P<text>     "(?:\\.|[^"\\])*"i? )
  | (?P<regex>    /(?:\\.|[^/\\])+/[a-z]* )
  | (?P<token>    <[^<>\s]+> )
  | (?P<order>    %[\w-]* )
    """,
    re.VERBOSE | re.DOTALL,
)
_RULE_OPTION = re.compile(r"\b(temperature|max_tokens|stop|stop_capture)\s*=")
_KEPT = ("%ignore", "%import")  # directives that the compiler enforces
_OPTIONS = re.compile(r"\s*\{\s*\}")  # empty options, which the GBNF converter writes


def settle(lark: str, field: Field, schema_rule: Callable[[object, Field], str]) -> str:
    """Return the grammar with each schema replaced by the result of `schema_rule`, which rejects what is not enforced."""
    settled, plain, at = [], [], 0
    while piece := _PIECE.search(lark, at):
        plain.append(lark[at : piece.start()])
        settled.append(plain[-1])
        at = piece.end()
        if piece.lastgroup != "order":
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
            case order if order in _KEPT:
                settled.append(order)
            case order:
                raise Unsupported(
                    field + f": {order[:60]} is not supported; supported are %json, {' and '.join(_KEPT)}"
                )
    plain.append(lark[at:])
    settled.append(plain[-1])
    if option := _RULE_OPTION.search(" ".join(plain)):
        raise Unsupported(field + f": the rule option {option[1]!r} is not supported: leave it out")
    return "".join(settled)


def _schema(lark: str, at: int, field: Field) -> tuple[object, int]:
    """Parse the JSON at position `at`: (value, its end)."""
    start = at + len(lark[at:]) - len(lark[at:].lstrip())
    try:
        return json.JSONDecoder().raw_decode(lark, start)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field + f": %json must be followed by a JSON schema: {error}") from error
