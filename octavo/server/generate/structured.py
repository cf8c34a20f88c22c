"""Structured output: a request's fields → the grammar that constrains its answer, built by text/grammar/build.py."""

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import Field, InvalidRequest, Sentence, Unsupported
from octavo.messages import StructuredOutputsParams
from octavo.observe.journeys.journey import current
from octavo.server.schema.fields import SamplingFields
from octavo.server.state.service import Service
from octavo.text.grammar.build import (
    RESPONSE_FORMAT,
    STRUCTURED_OUTPUTS,
    framed_grammar,
    grammar_of,
    schema_grammar,
    wish_of_response_format,
)
from octavo.text.tokenize.vocabulary import Vocabulary


async def read_grammar(service: Service, fields: SamplingFields, response_format: object = None) -> str:
    """The grammar that the request asks for; empty: none. `response_format`: as OpenAI's chat API has it."""
    found = _wishes(fields, response_format)
    if not found:
        return ""
    if len(found) > 1:
        names = sum((" and " + field for field, _, _ in found[1:]), Sentence((found[0][0],)))
        raise InvalidRequest(names + " both constrain the output: give only one of them", param=found[1][0])
    field, where, wish = found[0]
    vocabulary = _vocabulary(service, field)
    return await _beside(
        functools.partial(grammar_of, wish, vocabulary, field=field, where=where, max_bytes=_max_bytes(service)),
    )


async def grammar_of_schema(
    service: Service,
    schema: object,
    field: Field,
    frame: tuple[str, str] | None = None,
    can_repeat: bool = False,
) -> str:
    """The grammar of a required tool call. `frame`: the text around the JSON; with one, the answer can hold several calls."""
    vocabulary, max_bytes = _vocabulary(service, field), _max_bytes(service)
    if frame is None:
        make = functools.partial(schema_grammar, schema, vocabulary, field=field, max_bytes=max_bytes)
    else:
        make = functools.partial(
            framed_grammar, schema, frame, vocabulary, can_repeat=can_repeat, field=field, max_bytes=max_bytes
        )
    return await _beside(make)


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


async def _beside(compile: Callable[[], str]) -> str:
    """Compile in a thread, whatever the size: a short grammar can take a second."""
    started = time.monotonic()
    grammar = await asyncio.to_thread(compile)
    if (journey := current.get()) is not None:
        journey.grammar_seconds += time.monotonic() - started
    return grammar


def _vocabulary(service: Service, field: Field) -> Vocabulary:
    try:
        return service.text.vocabulary
    except Unsupported as error:
        raise Unsupported(error.message, param=field) from error


def _max_bytes(service: Service) -> int:
    return int(service.config.server.max_schema_bytes)
