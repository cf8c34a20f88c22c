"""Builds and checks the grammar of a structured output: JSON, a JSON schema, a regex, a choice, a grammar or structural tags.

`llguidance` compiles the grammar here, to reject what it cannot compile, and in the worker (sampling/grammar/row_processes.py), to
enforce it. A construct is either enforced or rejected: what the compiler would ignore is rejected first, in json_schema.py or
by name here."""

import functools
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.errors import Field, InvalidRequest, RequestError, Unsupported
from octavo.text.grammar.grammar_errors import in_words
from octavo.text.grammar.json_schema import prepare, without_patterns
from octavo.text.grammar.lark import is_framed, settle
from octavo.text.grammar.limits import parser_limits
from octavo.text.grammar.lower import MAX_NOTED
from octavo.text.grammar.multiples import Budget
from octavo.text.grammar.regex import ascii_classes, slashed, without_anchors
from octavo.text.grammar.schema_tree import rebuilt
from octavo.text.grammar.shared_parts import shared
from octavo.text.grammar.structural_tag import are_followed, tags_rules
from octavo.text.tokenize.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

STRUCTURED_OUTPUTS, RESPONSE_FORMAT = Field("structured_outputs"), Field("response_format")
MAX_BYTES = 256 * 2**10  # default limit on the size of a schema, grammar or regex
MAX_CHOICES = 4096
_MAX_NESTING = 100  # nested brackets
_BRACKETS = re.compile(r"[()\[\]{}]")
_MAX_TRIED = 8  # bytes of the output that is tried
_LONG_ROW, _NO_TOKEN = "Current row has", "NoExtension"  # as in the parser's errors
_TRIED = sorted(range(256), key=lambda byte: (bytes([byte]).isspace(), byte))
_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_STYLES = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
_OPTIONS = (*_STYLES, "unenforced")
UNENFORCED = ("strict", "check")
"""What becomes of constraints that cannot be enforced: the request is refused, or the finished answer is checked."""
# Tokens are sampled one by one under the grammar's mask, so it need not tokenize forced text itself.
_HEAD = '%llguidance {"no_forcing": true}\n'
# One space, or a line break and its indentation: otherwise a model could write whitespace forever.
_WHITESPACE = r"( |\r?\n[ \t]{0,32})"


def require_llguidance(field: Field) -> None:
    if importlib.util.find_spec("llguidance") is None:
        raise Unsupported(field + " needs the package llguidance on the server: pip install llguidance")


class BuiltGrammar(msgspec.Struct, frozen=True, array_like=True):
    """A grammar, and what the schemas in it say beyond it."""

    grammar: str
    ignored: list[list[str | int]] = []  # paths of annotations in the request
    num_ignored: int = 0  # all of them, also those that are not listed
    unenforced: list[str] = []  # constraints of schemas that it does not enforce


class _Notes:
    """What is found out about the schemas of one grammar."""

    def __init__(self, wish: Mapping[str, Any], may_leave_out: bool = False) -> None:
        self.may_leave_out = may_leave_out or wish.get("unenforced") == "check"
        self.ignored: list[list[str | int]] = []
        self.num_ignored = 0
        self.unenforced: list[str] = []

    def built(self, grammar: str) -> BuiltGrammar:
        return BuiltGrammar(grammar, self.ignored[:MAX_NOTED], self.num_ignored, self.unenforced)


def grammar_of(wish: Mapping[str, Any], vocabulary: Vocabulary, **options: Any) -> str:
    """The grammar alone. The options are those of build_wish()."""
    return build_wish(wish, vocabulary, **options).grammar


def build_wish(
    wish: Mapping[str, Any],
    vocabulary: Vocabulary,
    *,
    field: Field = STRUCTURED_OUTPUTS,
    where: Field | None = None,
    max_bytes: int = MAX_BYTES,
) -> BuiltGrammar:
    """Build the grammar. `wish`: vLLM's structured_outputs, with exactly one of its kinds. `field`: the request's field that it
    came in; `where`: the path of the value, if it is not field.kind."""
    kind, where = check_wish(wish, field=field, where=where, max_bytes=max_bytes)
    given, notes = _given(wish), _Notes(wish)
    value, budget = given[kind], Budget()
    match kind:
        case "json":
            schema = _parsed(value, where)
            rules = f"start: {_schema_rule(schema, where, given, vocabulary, notes)}\n"
        case "json_object":
            if value is not True:
                raise InvalidRequest(where + " must be true")
            rules = f"start: {_schema_rule({'type': 'object'}, where, given, vocabulary, notes)}\n"
        case "structural_tag":
            tags = _parsed(value, where)
            is_followed = are_followed(tags, lambda text: literal(text, vocabulary) == quoted(text))
            rules = tags_rules(
                tags,
                where,
                lambda schema, at: _schema_rule(schema, at, given, vocabulary, notes, budget, is_followed=is_followed),
                regex_terminal,
                lambda text: literal(text, vocabulary),
            )
        case "regex":
            rules = f"start: {regex_terminal(value, where)}\n"
        case "choice":
            rules = _choice(value, where)
        case _:
            is_followed = isinstance(value, str) and is_framed(value)
            rules = _lark(
                value,
                where,
                lambda schema, at: _schema_rule(schema, at, {}, vocabulary, notes, budget, is_followed=is_followed),
            )
    return notes.built(_checked(rules, vocabulary, where, is_own_text=rules == value))


def check_wish(
    wish: Mapping[str, Any],
    *,
    field: Field = STRUCTURED_OUTPUTS,
    where: Field | None = None,
    max_bytes: int = MAX_BYTES,
) -> tuple[str, Field]:
    """Check what takes no time: that there is one kind, and the size. Returns the kind, and the path of its value."""
    given = _given(wish)
    kinds = [key for key in given if key in _KINDS]
    if unknown := [key for key in given if key not in (*_KINDS, *_OPTIONS)]:
        raise Unsupported(field / unknown[0][:60] + " is not supported")
    check_unenforced(given.get("unenforced"), field)
    if len(kinds) != 1:
        named = " and ".join(kinds) if kinds else "none"
        raise InvalidRequest(field + f" must have exactly one of {', '.join(_KINDS)}; got {named}")
    require_llguidance(field)
    where = where or field / kinds[0]
    check_size(given[kinds[0]], where, max_bytes)
    return kinds[0], where


def _given(wish: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in wish.items() if value is not None and value is not False}


def check_unenforced(value: object, field: Field) -> None:
    if value is not None and value not in UNENFORCED:
        raise InvalidRequest(field / "unenforced" + f" must be 'strict' or 'check', got {str(value)[:60]!r}")


def schema_grammar(
    schema: object,
    vocabulary: Vocabulary,
    *,
    field: Field,
    style: Mapping[str, Any] | None = None,
    max_bytes: int = MAX_BYTES,
) -> str:
    """The grammar alone, of build_schema()."""
    return build_schema(schema, vocabulary, field=field, style=style, max_bytes=max_bytes).grammar


def build_schema(
    schema: object,
    vocabulary: Vocabulary,
    *,
    field: Field,
    style: Mapping[str, Any] | None = None,
    max_bytes: int = MAX_BYTES,
    may_leave_out: bool = False,
) -> BuiltGrammar:
    """Grammar of an output that is JSON, validates against the schema, and has nothing around it. `may_leave_out`: not all of the
    schema need be enforced."""
    require_llguidance(field)
    check_size(schema, field, max_bytes)
    notes = _Notes(style or {}, may_leave_out)
    rule = _schema_rule(schema, field, style or {}, vocabulary, notes)
    return notes.built(_checked(f"start: {rule}\n", vocabulary, field))


def build_framed(
    schema: object,
    frame: tuple[str, str],
    vocabulary: Vocabulary,
    *,
    can_repeat: bool,
    field: Field,
    max_bytes: int = MAX_BYTES,
    may_leave_out: bool = False,
) -> BuiltGrammar:
    """Grammar of an output that is JSON of this schema within a frame. If it can repeat, several follow each other directly: if
    anything were allowed between them, a model that writes it, even a line break, would have to continue with another."""
    require_llguidance(field)
    check_size(schema, field, max_bytes)
    notes = _Notes({}, may_leave_out)
    before, after = (literal(text, vocabulary) for text in frame)
    rule = _schema_rule(schema, field, {}, vocabulary, notes)
    rules = f"start: part{'+' if can_repeat else ''}\npart: {before} {rule} {after}\n"
    return notes.built(_checked(rules, vocabulary, field))


def _schema_rule(
    schema: object,
    field: Field,
    style: Mapping[str, Any],
    vocabulary: Vocabulary,
    notes: _Notes,
    budget: Budget | None = None,
    is_followed: bool = True,
) -> str:
    """Rule for a schema. `budget`: shared by all schemas of the grammar; None: there is no other. `is_followed`: where in an answer its
    value is can be told from the text alone."""
    if schema is True:
        schema = {}
    lowered = prepare(schema, field, budget, may_leave_out=notes.may_leave_out, is_followed=is_followed)
    prepared = lowered.schema
    if not isinstance(prepared, dict):
        raise InvalidRequest(field + " is false: no output satisfies it")
    if style.get("disable_additional_properties"):
        prepared = rebuilt(prepared, _closed)
    notes.ignored += [[*field.path, *path] for path in lowered.ignored]
    notes.num_ignored += lowered.num_ignored
    notes.unenforced += lowered.unenforced
    guidance: dict[str, Any] = {"whitespace_flexible": False} if style.get("disable_any_whitespace") else {}
    pattern = style.get("whitespace_pattern")
    if not guidance:
        guidance = {
            "whitespace_pattern": _WHITESPACE if pattern is None else _regex(pattern, Field("whitespace_pattern"))
        }
    rule = _json_rule(guidance, prepared)
    if notes.may_leave_out and _problem(f"{_HEAD}start: {rule}\n", vocabulary):
        kept, left_out = without_patterns(prepared, lambda pattern: bool(_pattern_problem(pattern, vocabulary)))
        notes.unenforced += [f"'pattern' {pattern[:60]!r}" for pattern in left_out]
        rule = _json_rule(guidance, kept)
        if _problem(f"{_HEAD}start: {rule}\n", vocabulary):  # patterns of names that overlap
            kept, left_out = without_patterns(kept, lambda pattern: True, only_names=True)
            notes.unenforced += [f"'patternProperties' {pattern[:60]!r}" for pattern in left_out]
            rule = _json_rule(guidance, kept)
    return rule


def _json_rule(guidance: Mapping[str, Any], schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({'x-guidance': guidance, **shared(schema)}, ensure_ascii=False)}"


def _pattern_problem(pattern: str, vocabulary: Vocabulary) -> str:
    """Why the compiler cannot enforce a pattern of strings. Empty: it can."""
    return _problem(f"{_HEAD}start: {_json_rule({}, {'type': 'string', 'pattern': pattern})}\n", vocabulary)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Forbid additional properties, unless the schema mentions them."""
    is_list = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    return {**schema, "additionalProperties": schema.get("additionalProperties", False)} if is_list else schema


def regex_terminal(value: object, field: Field) -> str:
    """The regex as a Lark terminal. The whole output must match, so anchors at the ends are dropped."""
    pattern = without_anchors(_regex(value, field))
    if not pattern:
        raise InvalidRequest(field + " matches only the empty string")
    return slashed(ascii_classes(pattern))


def _regex(value: object, field: Field) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(field + " must be a regular expression: a non-empty string")
    _check_nesting(value, field)
    return value


def _choice(value: object, field: Field) -> str:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(item, str) for item in value):
        raise InvalidRequest(field + " must be a non-empty list of strings")
    if len(value) > MAX_CHOICES:
        raise InvalidRequest(field + f" has {len(value)} entries; at most {MAX_CHOICES} are allowed")
    return "start: " + " | ".join(quoted(item) for item in dict.fromkeys(value)) + "\n"


def quoted(text: str) -> str:
    """Write a text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def literal(text: str, vocabulary: Vocabulary) -> str:
    """Write a text as Lark strings, with control tokens by id: no text can stand for them."""
    pattern = vocabulary.special_pattern
    parts = [text] if pattern is None else pattern.split(text)
    if len(parts) == 1:
        return quoted(text)
    return " ".join(
        f"<[{vocabulary.special_names[part]}]>" if at % 2 else quoted(part) for at, part in enumerate(parts) if part
    )


def _lark(value: object, field: Field, schema_rule: Callable[[object, Field], str]) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(field + " must be a string: a grammar in Lark or GBNF notation")
    _check_nesting(value, field)
    from llguidance import gbnf_to_lark

    text = value
    if not gbnf_to_lark.is_lark_syntax(value):
        try:
            text = gbnf_to_lark.gbnf_to_lark(value)
        except RecursionError:
            raise InvalidRequest(field + " is nested too deeply") from None
        except Exception as error:  # its own kind for what it cannot read, and bare ones for what makes no sense
            raise InvalidRequest(field + f" is neither Lark (no rule `start:`) nor GBNF: {_one_line(error)}") from error
    return settle(text, field, schema_rule)


def _checked(rules: str, vocabulary: Vocabulary, field: Field, is_own_text: bool = False) -> str:
    """Compile the rules and return the grammar. `is_own_text`: the rules are the client's own text, so errors name its lines."""
    grammar = _HEAD + rules
    if problem := _problem(grammar, vocabulary):
        words = in_words(problem, _HEAD.count("\n") if is_own_text else None)
        raise InvalidRequest(field + f" cannot be compiled: {words}")
    return grammar


@functools.lru_cache(maxsize=256)
def _problem(grammar: str, vocabulary: Vocabulary) -> str:
    """The compiler's error or warnings; empty: none. The grammar is also tried: some allow no first token, others have a choice
    that is too large for the parser after a few."""
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(vocabulary.stand_in, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            return str(matcher.get_error())
        if warnings := matcher.get_grammar_warnings():
            return "; ".join(map(str, warnings))
        num_tried = 0
        while num_tried < _MAX_TRIED and _advance(matcher, vocabulary):
            num_tried += 1
        error = str(matcher.get_error()) if matcher.is_error() else ""
        if num_tried:
            # Other limits may be exceeded by what was tried alone; rows are as long in every output.
            return error if _LONG_ROW in error else ""
        is_stuck = matcher.is_stopped() and not matcher.is_accepting() and (not error or _NO_TOKEN in error)
        return "no first token is possible" if is_stuck else error
    except RequestError:
        raise
    except Exception as error:  # whatever the compiler cannot handle is this request's fault
        return str(error) or "unknown error"


def _advance(matcher: "LLMatcher", vocabulary: Vocabulary) -> bool:
    """Append the first byte that is allowed and is no whitespace. False: there is none, or an error."""
    mask = matcher.compute_bitmask()
    if matcher.is_error() or matcher.is_stopped():
        return False
    ids = vocabulary.byte_ids
    token = next((ids[byte] for byte in _TRIED if mask[ids[byte] >> 3] >> (ids[byte] & 7) & 1), None)
    return token is not None and matcher.consume_token(token)


def _one_line(error: object) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:300] or "unknown error"


def _parsed(value: object, field: Field) -> object:
    """Parse a schema that is given as text. vLLM accepts both objects and text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field + f" is not valid JSON: {_one_line(error)}") from error


def check_size(value: object, field: Field, max_bytes: int) -> None:
    """Limit the bytes of a value as JSON. Takes time for no more than `max_bytes` of it."""
    size = f"more than {max_bytes}"
    try:
        if _least_size(value, max_bytes) <= max_bytes:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if (exact := len(text.encode())) <= max_bytes:
                return
            size = str(exact)
    except (ValueError, TypeError, RecursionError, UnicodeEncodeError) as error:
        raise InvalidRequest(field + f" cannot be written as JSON: {_one_line(error)}") from error
    raise InvalidRequest(field + f" has {size} bytes; at most {max_bytes} are allowed (--max-schema-bytes)")


def _least_size(value: object, enough: int) -> int:
    """A lower bound of a value's size as JSON. Stops counting above `enough`."""
    if isinstance(value, str):
        return len(value)
    size, containers = 0, [value]
    while containers and size <= enough:
        container = containers.pop()
        inside: Iterable[object] = ()
        if isinstance(container, Mapping):
            size += sum(map(len, container)) + len(container)
            inside = container.values()
        elif isinstance(container, list | tuple):
            size += len(container)
            inside = container
        else:
            size += 1
        if size > enough:
            break
        for part in inside:
            if isinstance(part, str):
                size += len(part)
            elif isinstance(part, dict | list | tuple | Mapping):
                containers.append(part)
            else:
                size += 1
    return size


def _check_nesting(text: str, field: Field) -> None:
    """Limit the nesting of brackets: compilers recurse on it, and the stack is finite."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(text):
        if bracket in "([{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth = max(0, depth - 1)
    if deepest > _MAX_NESTING:
        raise InvalidRequest(field + f" is nested too deeply: at most {_MAX_NESTING} levels of brackets are allowed")


def wish_of_response_format(value: object, field: Field = RESPONSE_FORMAT) -> dict[str, Any] | None:
    """Convert OpenAI's response_format to vLLM's structured_outputs. None: no structure is asked for."""
    match value:
        case {"type": "text", "schema": schema} if schema is not None:
            raise InvalidRequest(field / "schema" + " needs " + field / "type" + " 'json_object'")
        case None | {"type": "text"}:
            return None
        case {"type": "json_object", "schema": schema} if schema is not None:
            return {"json": schema}
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": schema}} if schema is not None:
            return {"json": schema}
        case {"type": "json_schema"}:
            raise InvalidRequest(field / "json_schema" / "schema" + " is missing", param=field / "json_schema")
        case {"type": "structural_tag"}:
            return {"structural_tag": value}
        case {"type": kind}:
            raise Unsupported(
                field / "type"
                + f" must be 'text', 'json_object', 'json_schema' or 'structural_tag', got {str(kind)[:60]!r}",
                param=field,
            )
    raise InvalidRequest(field + " must be an object with a type")
