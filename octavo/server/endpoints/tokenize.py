"""POST /tokenize and /detokenize, with vLLM's shapes: a prompt or messages to token ids, and back. GET /tokenizer_info: the tokenizer's
settings."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.admission.validate import check_ids
from octavo.errors import Field, InvalidRequest, Unsupported
from octavo.server.generate.chat import Chat, check_variables, offload_encode, read_ending, text_for
from octavo.server.generate.messages import MESSAGES, parse_messages
from octavo.server.generate.offload import offload, offload_prompt
from octavo.server.generate.requests import check_text_len
from octavo.server.schema.fields import RequestFields, RouteSchema, read_fields
from octavo.server.schema.lists import FirstError
from octavo.server.schema.shapes import Messages, Shape, Tools
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.service import Service
from octavo.text.chat.tools import parse_tool_choice, parse_tools

MAX_DETOKENIZED = 2**18  # ids in one request, or as many as the context holds
NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}


class TokenizeRequest(RequestFields):
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # None: yes for a prompt, no for messages, whose template writes them
    add_generation_prompt: bool | None = None  # messages only; None: yes
    continue_final_message: bool | None = None  # messages only
    return_token_strs: bool | None = None
    tools: Tools = None  # messages only, as the next one
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None  # messages only: a string, where requests may bring templates


class DetokenizeRequest(RequestFields):
    tokens: Annotated[list[int], FirstError()]


ROUTE_SCHEMAS = (
    RouteSchema("tokenize", "/tokenize", TokenizeRequest, NOT_OFFERED),
    RouteSchema("detokenize", "/detokenize", DetokenizeRequest, {}),
)


class Tokens(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None  # as the vocabulary writes them


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True):
    """Under the names of a tokenizer_config.json."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    eos_token_ids: list[int]  # all that end an answer
    all_special_ids: list[int]
    chat_template: str | None  # null: the model has none


SHAPES = {
    "POST /tokenize": Shape(Tokens),
    "POST /detokenize": Shape(Detokenized),
    "GET /tokenizer_info": Shape(TokenizerInfo),
}


def router(service: Service) -> APIRouter:
    router = APIRouter()
    tokenize_schema, detokenize_schema = ROUTE_SCHEMAS

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        service.accept()
        fields = await read_fields(request, tokenize_schema, service.config)
        await service.check_model(fields.model)
        ids = await _encode(service, fields)
        longest = service.report.max_model_len

        def respond() -> Response:
            names = service.text.token_names(ids) if fields.return_token_strs else None
            return json_response(Tokens(len(ids), longest, ids, names), fields.ignored)

        return await offload(len(ids), respond)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        service.accept()
        fields = await read_fields(request, detokenize_schema, service.config)
        await service.check_model(fields.model)
        report = service.report
        if len(fields.tokens) > (most := max(MAX_DETOKENIZED, report.max_model_len)):
            raise InvalidRequest(f"tokens has {len(fields.tokens)} entries; at most {most} are allowed", param="tokens")

        def respond() -> Response:
            check_ids(fields.tokens, report, Field("tokens"))
            return json_response(Detokenized(service.text.decode(fields.tokens, False)), fields.ignored)

        return await offload(len(fields.tokens), respond)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        text = service.text
        roles = text.template_variables
        return json_response(
            TokenizerInfo(
                text.tokenizer_kind,
                text.vocab_size,
                service.report.max_model_len,
                roles.get("bos_token"),
                roles.get("eos_token"),
                roles.get("unk_token"),
                roles.get("pad_token"),
                list(text.eos_ids),
                sorted(text.special_ids),
                text.template_source,
            )
        )

    return router


async def _encode(service: Service, fields: TokenizeRequest) -> list[int]:
    """The tokens, however many: this is how clients learn whether they fit."""
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if fields.prompt is not None:
        return await _encode_prompt(service, fields, fields.prompt)
    if fields.add_special_tokens:
        raise Unsupported(
            "add_special_tokens = true is not supported with messages: the chat template adds the special tokens",
            param="add_special_tokens",
        )
    text = await text_for(service, fields.chat_template)

    def make() -> Chat:
        given = (fields.messages, fields.tools, fields.chat_template_kwargs)
        check_text_len(service, fields.num_bytes, given, MESSAGES)
        tools = parse_tools(fields.tools or [])
        variables = fields.chat_template_kwargs or {}
        check_variables(service, fields, variables, Field("chat_template_kwargs"), text)
        messages = parse_messages(fields.messages or [], service.config.budget)
        ending = read_ending(messages, fields.add_generation_prompt, fields.continue_final_message)
        return Chat(messages, tools, parse_tool_choice(None, tools), variables, text, ending)

    chat = await offload_prompt(fields.num_bytes, make)
    return await offload_encode(service, chat, fields.num_bytes, max_tokens=None)


async def _encode_prompt(service: Service, fields: TokenizeRequest, prompt: str) -> list[int]:
    for name in ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs", "chat_template"):
        if getattr(fields, name) is not None:
            raise InvalidRequest(f"{name} is only supported with messages, not with prompt", param=name)
    check_text_len(service, fields.num_bytes, prompt, Field("prompt"))
    is_marked = fields.add_special_tokens is not False
    return await offload_prompt(fields.num_bytes, lambda: service.text.encode(prompt, is_marked))
