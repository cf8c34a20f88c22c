"""POST /v1/prefix: compute a prefix before the first request needs it (warm), and keep its pages (pin) until it is
unpinned. GET /v1/prefix: what the key has pinned."""

import time
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.admission.validate import admit
from octavo.errors import Field, InvalidRequest, NotFound, Unsupported, quote
from octavo.messages import HoldPrefix, PinnedPrefix, PrefixReply, ReadPrefixes, ReleasePrefix, SamplingParams
from octavo.observe.journeys.journey import current
from octavo.server.generate.chat import Chat, check_variables, offload_encode, text_for
from octavo.server.generate.generation import Generation
from octavo.server.generate.messages import MESSAGES, parse_messages
from octavo.server.generate.offload import offload_prompt
from octavo.server.generate.requests import check_text_len, new_id
from octavo.server.http.sse import owner_of, viewer_of
from octavo.server.schema.fields import RequestFields, RouteSchema, read_fields
from octavo.server.schema.shapes import Messages, Shape, Tools
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.service import Service
from octavo.text.chat.tools import parse_tool_choice, parse_tools

MAX_NAME_LEN = 128
MAX_SECONDS = 30 * 24 * 3600.0
PROMPT = Field("prompt")


class PrefixFields(RequestFields):
    action: Literal["pin", "warm", "unpin"]
    name: str | None = None  # of the pin: pin and unpin need it
    prompt: str | None = None  # text as /v1/completions takes it, …
    messages: Messages | None = None  # … or the beginning of a chat: a system message, examples
    tools: Tools = None  # messages only, as the next one
    chat_template_kwargs: dict[str, Any] | None = None
    seconds: float | None = None  # for how long it is pinned; None: until it is unpinned


ROUTE = RouteSchema("prefix", "/v1/prefix", PrefixFields, {})
ROUTE_SCHEMAS: list[RouteSchema[Any]] = [ROUTE]


class PrefixDone(msgspec.Struct, frozen=True):
    action: str
    name: str | None
    prompt_tokens: int  # 0: unpin
    found_tokens: int  # of these: that the prefix cache had before
    pinned: list[PinnedPrefix]  # all that this key has pinned now
    object: Literal["prefix"] = "prefix"


class PrefixList(msgspec.Struct, frozen=True):
    data: list[PinnedPrefix]
    object: Literal["list"] = "list"


SHAPES = {"POST /v1/prefix": Shape(PrefixDone), "GET /v1/prefix": Shape(PrefixList)}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(ROUTE.path)
    async def change(request: Request) -> Response:
        service.accept()
        fields = await read_fields(request, ROUTE, service.config)
        await service.check_model(fields.model)
        _check(fields)
        owner = owner_of(request)
        if fields.action == "unpin":
            reply = await _ask(service, ReleasePrefix(0, fields.name or "", owner))
            if reply.error:
                raise NotFound(reply.error)
            return json_response(PrefixDone("unpin", fields.name, 0, 0, reply.pinned), fields.ignored)
        journey = current.get()
        if journey is not None and journey.adapter is not None:
            raise Unsupported(
                "prefixes of adapters cannot be pinned or warmed: use the model's own name", param="model"
            )
        ids = await _encode(service, fields)
        field = PROMPT if fields.messages is None else MESSAGES
        if fields.action == "pin":  # first: for a pin that does not fit, nothing is computed
            await _pin(service, fields, owner, ids)
        found = await _compute(service, ids, field)
        reply = await _ask(service, ReadPrefixes(0, owner))
        return json_response(PrefixDone(fields.action, fields.name, len(ids), found, reply.pinned), fields.ignored)

    @router.get(ROUTE.path)
    async def pinned(request: Request) -> Response:
        reply = await _ask(service, ReadPrefixes(0, viewer_of(service, request).only))
        return json_response(PrefixList(reply.pinned), [])

    return router


def _check(fields: PrefixFields) -> None:
    if fields.action != "warm" and not fields.name:
        raise InvalidRequest(Field("name") + f" is needed to {fields.action} a prefix")
    if len(fields.name or "") > MAX_NAME_LEN:
        raise InvalidRequest(Field("name") + f" must have at most {MAX_NAME_LEN} characters")
    if fields.seconds is not None and (fields.action != "pin" or not 0 < fields.seconds <= MAX_SECONDS):
        raise InvalidRequest(
            Field("seconds")
            + f" is for action pin and must be above 0 and at most {MAX_SECONDS:.0f}, got {quote(fields.seconds)}"
        )
    given = [name for name in ("prompt", "messages") if getattr(fields, name) is not None]
    if fields.action == "unpin":
        if given:
            raise InvalidRequest(Field(given[0]) + " has no meaning with action unpin: the name is enough")
    elif len(given) != 1:
        raise InvalidRequest("give either prompt or messages", param="prompt")


async def _pin(service: Service, fields: PrefixFields, owner: bytes, ids: list[int]) -> None:
    limit = service.config.budget.max_pinned_bytes
    most = limit if isinstance(limit, int) else -1
    salt = service.prefix_salt(owner)
    space = SamplingParams(prefix_salt=salt).prefix_space
    reply = await _ask(service, HoldPrefix(0, fields.name or "", ids, owner, fields.seconds or 0.0, most, space))
    if reply.error:
        raise InvalidRequest(reply.error, param="prompt" if fields.messages is None else "messages")


async def _ask(service: Service, control: HoldPrefix | ReleasePrefix | ReadPrefixes) -> PrefixReply:
    return msgspec.json.decode(await service.query(control), type=PrefixReply)


async def _compute(service: Service, ids: list[int], field: Field) -> int:
    """Have the engine compute the prompt. → tokens that it found in the prefix cache."""
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, use_speculation=False)
    request = admit(
        new_id("prefix"), ids, params, service.report, service.text.eos_ids, field=field, arrived=time.monotonic()
    )
    generation = Generation(service, [request])
    generation.submit()
    await generation.whole()
    return generation.num_cached(0) or 0


async def _encode(service: Service, fields: PrefixFields) -> list[int]:
    longest = service.report.max_model_len
    if fields.messages is None:
        for name in ("tools", "chat_template_kwargs"):
            if getattr(fields, name) is not None:
                raise InvalidRequest(f"{name} is only supported with messages, not with prompt", param=name)
        prompt = fields.prompt or ""
        check_text_len(service, fields.num_bytes, prompt, PROMPT)
        return await offload_prompt(fields.num_bytes, lambda: service.text.encode(prompt, True))
    text = await text_for(service, None)

    def make() -> Chat:
        check_text_len(
            service, fields.num_bytes, (fields.messages, fields.tools, fields.chat_template_kwargs), MESSAGES
        )
        tools = parse_tools(fields.tools or [])
        variables = fields.chat_template_kwargs or {}
        check_variables(service, fields, variables, Field("chat_template_kwargs"), text)
        messages = parse_messages(fields.messages or [], service.config.budget)
        return Chat(messages, tools, parse_tool_choice(None, tools), variables, text, "turn")

    chat = await offload_prompt(fields.num_bytes, make)
    return await offload_encode(service, chat, fields.num_bytes, max_tokens=longest)
