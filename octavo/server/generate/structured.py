"""Structured output: a request's fields → the grammar that constrains its answer, which state/compiler.py has built and checked."""

from collections.abc import Mapping
from typing import Any

from octavo.errors import Field, InvalidRequest, Sentence
from octavo.messages import StructuredOutputsParams
from octavo.server.schema.fields import SamplingFields
from octavo.server.state.service import Service
from octavo.text.grammar.build import RESPONSE_FORMAT, STRUCTURED_OUTPUTS, wish_of_response_format


async def read_grammar(service: Service, fields: SamplingFields, response_format: object = None) -> str:
    """The grammar that the request asks for; empty: none. `response_format`: as OpenAI's chat API has it."""
    found = _wishes(fields, response_format)
    if not found:
        return ""
    if len(found) > 1:
        names = sum((" and " + field for field, _, _ in found[1:]), Sentence((found[0][0],)))
        raise InvalidRequest(names + " both constrain the output: give only one of them", param=found[1][0])
    field, where, wish = found[0]
    return await service.compiler.wish(wish, field, where)


def _wishes(fields: SamplingFields, response_format: object) -> list[tuple[Field, Field | None, Mapping[str, Any]]]:
    """(field, the part of it that holds the constraint, the same as vLLM's structured_outputs) of each field that is set."""
    found: list[tuple[Field, Field | None, Mapping[str, Any]]] = []
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
        found.append((STRUCTURED_OUTPUTS, None, wish))
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(fields, f"guided_{kind}")
        if value is not None:
            field = Field(f"guided_{kind}")
            found.append((field, field, {kind: value}))
    return found
