"""Structured output: a request's fields → the grammar that constrains its answer, which state/compiler.py has built and checked; and the
check of finished answers, where the grammar enforces only a part of their schema."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import Field, InvalidRequest, Sentence
from octavo.messages import StructuredOutputsParams
from octavo.server.schema.fields import CONSTRAINT_ALIASES, SamplingFields
from octavo.server.state.service import Service
from octavo.text.grammar.build import (
    RESPONSE_FORMAT,
    STRUCTURED_OUTPUTS,
    BuiltGrammar,
    check_unenforced,
    wish_of_response_format,
)

UNENFORCED = STRUCTURED_OUTPUTS / "unenforced"
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """Whether finished answers satisfy their whole schemas. `schema`: of the answer's text; `tools`: of the arguments of calls."""

    service: Service
    schema: Any = None
    tools: Mapping[str, Any] | None = None

    async def verdict(self, text: str, calls: Sequence[tuple[str, str]] = ()) -> bool | None:
        """`calls`: names and arguments. None: it could not be decided within the limits of a job."""
        if self.tools is None:
            return await self.service.compiler.is_valid([(self.schema, text)])
        if not calls or any(name not in self.tools for name, _ in calls):
            return False
        return await self.service.compiler.is_valid([(self.tools[name], arguments) for name, arguments in calls])


@dataclass(frozen=True, slots=True)
class AnswerForm:
    grammar: str = ""  # empty: none
    check: AnswerCheck | None = None


FREE = AnswerForm()


def wants_check(fields: SamplingFields) -> bool:
    """Whether answers are to be checked where a schema cannot be enforced."""
    mode = (fields.structured_outputs or {}).get("unenforced")
    check_unenforced(mode, STRUCTURED_OUTPUTS)
    return mode == "check"


async def read_form(service: Service, fields: SamplingFields, response_format: object = None) -> AnswerForm:
    """The form that the request asks for. `response_format`: as OpenAI's chat API has it."""
    found = _wishes(fields, response_format)
    if not found:
        return FREE
    if len(found) > 1:
        names = sum((" and " + field for field, _, _ in found[1:]), Sentence((found[0][0],)))
        raise InvalidRequest(names + " both constrain the output: give only one of them", param=found[1][0])
    field, where, wish = found[0]
    if not wants_check(fields):
        built = await service.compiler.wish(wish, field, where)
        note_annotations(fields, built)
        return AnswerForm(built.grammar)
    built = await service.compiler.wish({**wish, "unenforced": "check"}, field, where)
    note_annotations(fields, built)
    schema = wish.get("json")
    if schema is None or schema is False:  # {} and true are schemas
        if not wish.get("json_object"):
            raise InvalidRequest(
                UNENFORCED + " 'check' is for JSON schemas: " + field + " has none, or has it within a grammar"
            )
        schema = _ANY_OBJECT
    return AnswerForm(built.grammar, AnswerCheck(service, schema))


def note_annotations(fields: SamplingFields, built: BuiltGrammar) -> None:
    """List the annotations of the request's schema among the fields without effect."""
    fields.note([Field(*path) for path in built.ignored], built.num_ignored)


_Wish = tuple[Field, Field | None, Mapping[str, Any]]


def _wishes(fields: SamplingFields, response_format: object) -> list[_Wish]:
    """(field, the part of it that holds the constraint, the same as vLLM's structured_outputs) of each field that is set."""
    found: list[_Wish] = []
    wish: Mapping[str, Any] | None
    if response_format is not None and (wish := wish_of_response_format(response_format)) is not None:
        where = RESPONSE_FORMAT
        if isinstance(response_format, Mapping) and response_format.get("type") == "json_object":
            where /= "schema" if "json" in wish else "type"
        elif "json" in wish:
            where = where / "json_schema" / "schema"
        found.append((RESPONSE_FORMAT, where, wish))
    if fields.structured_outputs is not None:
        known = StructuredOutputsParams.__annotations__  # other members were refused, or listed as ignored
        wish = {name: value for name, value in fields.structured_outputs.items() if name in known}
        if {name for name, value in wish.items() if value is not None} != {
            "unenforced"
        }:  # which is about any of these fields
            found.append((STRUCTURED_OUTPUTS, None, wish))
    for name, kind in CONSTRAINT_ALIASES.items():
        value = getattr(fields, name)
        if value is not None and value is not False:
            found.append(_alias(Field(name), kind, value, fields))
    return found


def _alias(field: Field, kind: str, value: Any, fields: SamplingFields) -> _Wish:
    where = field
    if isinstance(value, Mapping) and kind == "grammar":  # text-generation-inference's
        kinds = {"json": "json", "json_object": "json", "json_schema": "json", "regex": "regex"}
        if value.get("type") not in kinds or "value" not in value:
            raise InvalidRequest(field + " must be a text, or an object with a type ('json' or 'regex') and a value")
        kind, value, where = kinds[value["type"]], value["value"], field / "value"
    wish: dict[str, Any] = {kind: value}
    if kind in ("json", "json_object") and fields.guided_whitespace_pattern is not None:
        wish["whitespace_pattern"] = fields.guided_whitespace_pattern
    return field, where, wish
