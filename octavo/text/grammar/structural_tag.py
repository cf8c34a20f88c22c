"""Structural tags, as in vLLM and xgrammar: free text with tagged parts of a given form. Turns them into rules of a grammar."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.errors import Field, InvalidRequest, Unsupported

SchemaRule = Callable[[object, Field], str]
"""(schema, the field it came in) → its expression in a rule."""

_TAG = {"type", "begin", "content", "end"}
_OPTIONS = {"at_least_one", "stop_after_first"}
_WORDS = {
    "const_string": {"type", "value"},
    "json_schema": {"type", "json_schema"},
    "regex": {"type", "pattern"},
    "any_text": {"type"},
    "sequence": {"type", "elements"},
    "or": {"type", "elements"},
    "tag": _TAG,
    "triggered_tags": {"type", "triggers", "tags", *_OPTIONS},
    "tags_with_separator": {"type", "tags", "separator", *_OPTIONS},
}
"""The fields of each type of form. Any other field is rejected, because it would not be enforced."""

MAX_TAGS = 256
_MAX_DEPTH = 16
_TEXT = "TAG_TEXT"


def tags_rules(
    value: object,
    field: Field,
    schema_rule: SchemaRule,
    regex: Callable[[object, Field], str],
    literal: Callable[[str], str],
) -> str:
    """Build the rules. `literal`: writes a text as an expression of a rule, with control tokens by id."""
    maker = _Rules(schema_rule, regex, literal)
    match value:
        case {"structures": structures, "triggers": triggers}:
            maker.only(value, {"type", "structures", "triggers"}, field)
            tags = maker.entries(structures, field / "structures")
            body = maker.triggered(tags, triggers, "schema", field, {})
        case {"format": form}:
            maker.only(value, {"type", "format"}, field)
            body = maker.form(form, field / "format", 0)
        case _:
            raise InvalidRequest(field + " must have structures and triggers, or a format")
    return f"start: {body}\n" + "".join(maker.rules)


def are_followed(value: object, is_text: Callable[[str], bool]) -> bool:
    """Whether it can be told from an answer's text alone where each value in it begins and of which schema it is: all tags have schemas,
    and no tag begins like another. `is_text`: there is no control token in a text."""
    match value:
        case {"structures": list(tags), "triggers": list(triggers)}:
            pass
        case {"format": {"type": "triggered_tags", "tags": list(tags), "triggers": list(triggers)}}:
            pass
        case _:
            return False
    begins: list[str] = []
    for tag in tags:
        match tag:
            case {"begin": str(begin), "schema": _} | {"begin": str(begin), "content": {"type": "json_schema"}}:
                begins.append(begin)
            case _:
                return False
    begins.sort()
    is_clear = not any(later.startswith(begin) for begin, later in itertools.pairwise(begins))
    return is_clear and all(isinstance(text, str) and is_text(text) for text in (*begins, *triggers))


class _Rules:
    def __init__(
        self, schema_rule: SchemaRule, regex: Callable[[object, Field], str], literal: Callable[[str], str]
    ) -> None:
        self._schema_rule, self._regex, self._literal = schema_rule, regex, literal
        self.rules: list[str] = [f"{_TEXT}: /(.|\\n)*/\n", f"tag_end: {_TEXT}\n"]
        self._num_tags = 0

    def form(self, value: object, where: Field, depth: int) -> str:
        """The expression of a form in a rule."""
        if depth > _MAX_DEPTH:
            raise InvalidRequest(where + " is nested too deeply")
        if not isinstance(value, Mapping):
            raise InvalidRequest(where + " must be an object with a type")
        if isinstance(kind := value.get("type"), str) and kind in _WORDS:
            self.only(value, _WORDS[kind], where)
        match value:
            case {"type": "const_string", "value": str(text)} if text:
                return self._literal(text)
            case {"type": "json_schema", "json_schema": schema}:
                return self._schema_rule(schema, where / "json_schema")
            case {"type": "regex", "pattern": pattern}:
                return self._regex(pattern, where / "pattern")
            case {"type": "any_text"}:
                return "tag_end"
            case {"type": "sequence", "elements": elements}:
                every = self.entries(elements, where / "elements")
                return "(" + " ".join(self._inner(e, where / "elements" / i, depth) for i, e in enumerate(every)) + ")"
            case {"type": "or", "elements": elements}:
                every = self.entries(elements, where / "elements")
                return (
                    "(" + " | ".join(self._inner(e, where / "elements" / i, depth) for i, e in enumerate(every)) + ")"
                )
            case {"type": "tag"}:
                return self._tag(value, where, depth)
            case {"type": "triggered_tags", "triggers": triggers, "tags": tags}:
                return self.triggered(self.entries(tags, where / "tags"), triggers, "content", where, value, depth)
            case {"type": "tags_with_separator", "tags": tags, "separator": str(separator)}:
                return self._separated(self.entries(tags, where / "tags"), separator, value, where, depth)
            case {"type": kind}:
                raise Unsupported(
                    where + f": the type {str(kind)[:60]!r} is not supported, or a required field is missing"
                )
        raise InvalidRequest(where + " must be an object with a type")

    def only(self, value: object, words: set[str], where: Field) -> None:
        """Reject an object that has other fields."""
        assert isinstance(value, Mapping)
        for name in value:
            if name not in words and value[name] is not None:
                raise Unsupported(where / name[:60] + f" is not supported; allowed fields: {', '.join(sorted(words))}")

    def _inner(self, value: object, where: Field, depth: int) -> str:
        return self.form(value, where, depth + 1)

    def entries(self, value: object, where: Field) -> list[Mapping[str, Any]]:
        if not isinstance(value, list) or not value or not all(isinstance(entry, Mapping) for entry in value):
            raise InvalidRequest(where + " must be a non-empty list of objects")
        if len(value) > MAX_TAGS:
            raise InvalidRequest(where + f" has {len(value)} entries; at most {MAX_TAGS} are allowed")
        return value

    def triggered(
        self,
        tags: Sequence[Mapping[str, Any]],
        triggers: object,
        content: str,
        where: Field,
        options: Mapping[str, Any],
        depth: int = 0,
    ) -> str:
        """Free text until one of the triggers; then one of the tags that begin with it; then free text again."""
        if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
            raise InvalidRequest(where / "triggers" + " must be a non-empty list of strings")
        if len(triggers) > MAX_TAGS:
            raise InvalidRequest(where / "triggers" + f" has {len(triggers)} entries; at most {MAX_TAGS} are allowed")
        names = []
        for number, tag in enumerate(tags):
            at = where / ("structures" if content == "schema" else "tags") / number
            self.only(tag, {"begin", "schema", "end"} if content == "schema" else _TAG, at)
            begin = self._text(tag, "begin", at)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise InvalidRequest(at / "begin" + " must start with one of the triggers")
            names.append(self._new_tag(tag, begin, trigger, content, at, depth))
        for trigger in triggers:
            if not any(self._text(tag, "begin", where).startswith(trigger) for tag in tags):
                raise InvalidRequest(where / "triggers" + f": no tag begins with {trigger[:60]!r}")
        one = "(" + " | ".join(names) + ")"
        first, last = ("+" if options.get("at_least_one") else "*"), " tag_end"
        if options.get("stop_after_first"):
            return one if options.get("at_least_one") else f"({one} | tag_end)"
        return f"({one}{first}{last})"

    def _new_tag(self, tag: Mapping[str, Any], begin: str, trigger: str, content: str, where: Field, depth: int) -> str:
        self._num_tags += 1
        name = f"tag_{self._num_tags}"
        head, body = f"{name}_head", self._content(tag, content, where, depth)
        rest, literal = begin[len(trigger) :], self._literal(trigger)
        if literal.startswith("<"):  # a control token, which free text cannot contain
            self.rules.append(f"{head}: {_TEXT} {literal}\n")
        else:
            self.rules.append(f"{head}[lazy]: {_TEXT} {literal}\n")
        self.rules.append(f"{name}: {head} {self._literal(rest) if rest else ''} {body}\n")
        return name

    def _tag(self, tag: Mapping[str, Any], where: Field, depth: int) -> str:
        self.only(tag, _TAG, where)
        return f"({self._literal(self._text(tag, 'begin', where))} {self._content(tag, 'content', where, depth)})"

    def _content(self, tag: Mapping[str, Any], key: str, where: Field, depth: int) -> str:
        """The content of a tag and its end."""
        if key not in tag:
            raise InvalidRequest(where / key + " is missing")
        end = self._text(tag, "end", where, may_be_empty=True)
        inner, last = tag[key], self._literal(end) if end else ""
        if key == "schema":
            return f"{self._schema_rule(inner, where / 'schema')} {last}"
        if isinstance(inner, Mapping) and inner.get("type") == "any_text" and end:
            self._num_tags += 1
            name = f"tag_text_{self._num_tags}"
            is_control = last.startswith("<")
            self.rules.append(f"{name}: {_TEXT} {last}\n" if is_control else f"{name}[lazy]: {_TEXT} {last}\n")
            return name
        return f"{self.form(inner, where / key, depth + 1)} {last}"

    def _separated(
        self, tags: Sequence[Mapping[str, Any]], separator: str, options: Mapping[str, Any], where: Field, depth: int
    ) -> str:
        one = "(" + " | ".join(self._tag(tag, where / "tags" / i, depth) for i, tag in enumerate(tags)) + ")"
        between = self._literal(separator) if separator else ""
        many = one if options.get("stop_after_first") else f"{one} ({between} {one})*"
        return f"({many})" if options.get("at_least_one") else f"({many})?"

    def _text(self, tag: Mapping[str, Any], key: str, where: Field, may_be_empty: bool = False) -> str:
        text = tag.get(key)
        if not isinstance(text, str) or not (text or may_be_empty):
            raise InvalidRequest(where / key + f" must be a {'' if may_be_empty else 'non-empty '}string")
        return text
