"""/completion, /completions, /infill, /apply-template, /props and /slots, as llama.cpp's server has them."""

import functools
import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.errors import EngineUnavailable, Field, InvalidRequest
from octavo.messages import ReadLive, SamplingParams
from octavo.observe.live_state import LiveLook
from octavo.server.dialects.llama_cpp.errors import ERROR_SCHEMA, error_body, error_event
from octavo.server.dialects.llama_cpp.output import (
    Defaults,
    LlamaCompletion,
    NextToken,
    Props,
    Rendered,
    Slot,
    settings,
)
from octavo.server.dialects.llama_cpp.request import (
    NAMES,
    NOT_OFFERED,
    Asked,
    InfillRequest,
    LlamaCompletionRequest,
    LlamaOptions,
    TemplateRequest,
    parse_completion,
    parse_infill,
)
from octavo.server.dialects.llama_cpp.writer import LlamaWriter
from octavo.server.generate.chat import Chat, check_variables, offload_render, read_ending, text_for
from octavo.server.generate.messages import MESSAGES, parse_messages
from octavo.server.generate.offload import offload_prompt
from octavo.server.generate.requests import check_text_len, new_id
from octavo.server.generate.structured import read_form
from octavo.server.http.errors import ERROR_SHAPES
from octavo.server.http.respond import submit_and_respond
from octavo.server.http.sse import viewer_of
from octavo.server.schema.fields import RouteSchema, read_fields
from octavo.server.schema.shapes import EVENTS, Shape
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.service import Service, version
from octavo.text.chat.tools import parse_tool_choice, parse_tools

COMPLETION = RouteSchema("llama.cpp completion", "/completion", LlamaCompletionRequest, NOT_OFFERED)
COMPLETIONS = RouteSchema("llama.cpp completions", "/completions", LlamaCompletionRequest, NOT_OFFERED)
INFILL = RouteSchema("llama.cpp infill", "/infill", InfillRequest, NOT_OFFERED)
TEMPLATE = RouteSchema("llama.cpp apply-template", "/apply-template", TemplateRequest, {})
ROUTE_SCHEMAS: list[RouteSchema[Any]] = [COMPLETION, COMPLETIONS, INFILL, TEMPLATE]

_ANSWER = Shape(LlamaCompletion | list[LlamaCompletion], EVENTS, error=ERROR_SCHEMA)
SHAPES = {
    "POST /completion": _ANSWER,
    "POST /completions": _ANSWER,
    "POST /infill": _ANSWER,
    "POST /apply-template": Shape(Rendered, error=ERROR_SCHEMA),
    "GET /props": Shape(Props, error=ERROR_SCHEMA),
    "GET /slots": Shape(list[Slot], error=ERROR_SCHEMA),
}
for _path in ("/completion", "/completions", "/infill", "/apply-template", "/props", "/slots"):
    ERROR_SHAPES[_path] = error_body

BYTES_PER_PROMPT = 100  # of a body: making a prompt's request takes as long
_decoder = msgspec.json.Decoder(LiveLook)


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/completion")
    @router.post("/completions")
    async def completion(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields = await read_fields(request, COMPLETION, service.config)
        await service.check_model(fields.model)
        return await _respond(service, request, fields, await parse_completion(service, fields), arrived)

    @router.post("/infill")
    async def infill(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields = await read_fields(request, INFILL, service.config)
        await service.check_model(fields.model)
        return await _respond(service, request, fields, await parse_infill(service, fields), arrived)

    @router.post("/apply-template")
    async def apply_template(request: Request) -> Response:
        service.accept()
        fields = await read_fields(request, TEMPLATE, service.config)
        await service.check_model(fields.model)
        text = await text_for(service, fields.chat_template)

        def make() -> Chat:
            check_text_len(
                service, fields.num_bytes, (fields.messages, fields.tools, fields.chat_template_kwargs), MESSAGES
            )
            tools, variables = parse_tools(fields.tools or []), fields.chat_template_kwargs or {}
            check_variables(service, fields, variables, Field("chat_template_kwargs"), text)
            messages = parse_messages(fields.messages, service.config.budget)
            ending = read_ending(messages, fields.add_generation_prompt, fields.continue_final_message)
            return Chat(messages, tools, parse_tool_choice(None, tools), variables, text, ending)

        chat = await offload_prompt(fields.num_bytes, make)
        return json_response(Rendered(await offload_render(service, chat, fields.num_bytes)), fields.ignored)

    @router.get("/props")
    async def props() -> Response:
        report, text = service.report, service.text
        roles = text.template_variables
        sampling: dict[str, Any] = {**text.default_sampling}
        return json_response(
            Props(
                Defaults(report.max_model_len, settings(SamplingParams(**sampling))),
                report.max_num_seqs,
                service.model_name,
                service.config.model.model or service.model_name,
                text.template_source or "",
                roles.get("bos_token") or "",
                roles.get("eos_token") or "",
                f"octavo-{version()}",
            )
        )

    @router.get("/slots")
    async def slots(request: Request) -> Response:
        fails = _fails_if_busy(request)
        look = _decoder.decode(await service.query(ReadLive(call=0, since=-1)))
        found = _slots(service, look, viewer_of(service, request).only)
        if fails and all(slot.is_processing for slot in found):
            raise EngineUnavailable("no slot is idle: all rows of the batch are in use (--max-num-seqs)", retry_after=1)
        return json_response(found)

    return router


async def _respond(service: Service, request: Request, fields: LlamaOptions, asked: Asked, arrived: float) -> Response:
    form = await read_form(service, asked.fields)
    response_id = new_id("cmpl")
    make = functools.partial(LlamaWriter, service, fields, asked, response_id, arrived, form)
    with NAMES.in_errors():
        writer = await offload_prompt(fields.num_bytes + BYTES_PER_PROMPT * len(asked.prompts), make)
    return await submit_and_respond(
        service,
        request,
        fields,
        response_id,
        writer.generation,
        writer,
        ignored=NAMES.ignored(fields, asked.fields),
        error_event=error_event,
    )


def _fails_if_busy(request: Request) -> bool:
    for name in request.query_params:
        if name not in ("fail_on_no_slot", "model"):
            raise InvalidRequest(f"unknown parameter {name[:60]!r}; supported is fail_on_no_slot", param=name[:60])
    return request.query_params.get("fail_on_no_slot", "") not in ("", "0")


def _slots(service: Service, look: LiveLook, owner: bytes | None) -> list[Slot]:
    """Every row of the batch. `owner`: whose requests are described; None: all."""
    own = {row.row: row for row in look.seen_by(owner).rows}
    used = {row.row for row in look.state.rows}
    longest = service.report.max_model_len
    found = []
    for number in range(look.state.max_rows):
        row = own.get(number)
        slot = Slot(number, longest, number in used)
        if row is not None:
            num_decoded = max(0, row.length - row.prompt_len)
            next_token = NextToken(num_decoded, max(0, row.max_len - row.length), True)
            slot = msgspec.structs.replace(
                slot, request_id=row.request, n_prompt_tokens=row.prompt_len, next_token=next_token
            )
        found.append(slot)
    return found
