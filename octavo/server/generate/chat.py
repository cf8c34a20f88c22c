"""Chat: a conversation to be answered, its prompt, and how its answers are parsed. Shared by all dialects."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from octavo.errors import Field, InvalidRequest, Unsupported
from octavo.server.generate.answer_events import AnswerShape
from octavo.server.generate.offload import offload_prompt
from octavo.server.generate.structured import FREE, AnswerCheck, AnswerForm, read_form, wants_check
from octavo.server.schema.fields import MAX_TEMPLATE_VARIABLES, RequestFields, SamplingFields
from octavo.server.state.service import Service
from octavo.text import Text
from octavo.text.chat.template import RESERVED
from octavo.text.chat.tools import (
    NO_CALLS,
    Tool,
    ToolChoice,
    call_schema,
    calls_schema,
    schemas_by_name,
    template_form,
)
from octavo.text.parsers import ToolFormat, tool_format
from octavo.text.text import RenderCall

T = TypeVar("T")
Ending = Literal["answer", "turn", "open"]
"""Where a prompt ends: where the answer begins, after the last message, or within it, to be continued."""

EFFORT = Field("reasoning_effort")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class Chat:
    messages: list[dict[str, Any]]  # as generate/messages.py makes them
    tools: list[Tool] = field(default_factory=list)
    choice: ToolChoice = NO_CALLS  # one that enforces a call has tools to choose from
    variables: Mapping[str, Any] = field(default_factory=dict)  # for the template: enable_thinking, …
    text: Text | None = None  # None: the server's; else possibly with the request's own template
    ending: Ending = "answer"

    @property
    def offered(self) -> list[Tool]:
        """The tools that the prompt describes: none where the model may not call any."""
        return [] if self.choice.mode == "none" else self.tools

    def required_format(self, text: Text) -> ToolFormat:
        """The format of enforced calls: the model's own where a grammar can express it."""
        own = (self.text or text).formats.tools
        return own if own is not None and own.frame is not None else tool_format("plain_json")

    def shape(self, text: Text, *, is_constrained: bool = False, include_reasoning: bool = True) -> AnswerShape:
        """`is_constrained`: a grammar governs the answer from its first token on, so it holds no reasoning."""
        formats = (self.text or text).formats
        calls, schemas, is_enforced = None, {}, False
        if offered := self.offered:
            calls, schemas, is_enforced = formats.tools, schemas_by_name(offered), self.choice.is_enforced
        if is_enforced:
            calls, is_constrained = self.required_format(text), True
        thinking = formats.thinking
        if thinking is not None and self.ending == "open":  # a continued answer is past its reasoning
            thinking = replace(thinking, opens_unsaid=False)
        return AnswerShape(
            tool_format=calls,
            tools=schemas,
            think_format=None if is_constrained else thinking,
            is_parallel=self.choice.parallel,
            is_calls_alone=is_enforced,
            include_reasoning=include_reasoning,
        )


def check_choice(choice: ToolChoice, service: Service) -> None:
    if choice.mode == "auto" and not service.config.server.enable_auto_tool_choice:
        raise Unsupported(
            Field("tool_choice")
            + " 'auto' is disabled on this server (--no-enable-auto-tool-choice): use 'required' or name a tool"
        )


def check_variables(
    service: Service, fields: RequestFields, variables: Mapping[str, Any], field: Field, text: Text
) -> None:
    """Check variables for the template. Those that it does not read are named back."""
    if len(variables) > MAX_TEMPLATE_VARIABLES:
        raise InvalidRequest(field + f" has {len(variables)} entries; at most {MAX_TEMPLATE_VARIABLES} are allowed")
    for name in variables:
        if name in RESERVED or not name.isidentifier():
            raise InvalidRequest(field + f" must not set {name[:60]!r}")
    for name in variables:
        if not text.template_reads(name):
            fields.pass_over(field / name[:60], service.config, "the chat template does not read it")


def read_ending(messages: list[dict[str, Any]], opens: bool | None, continues: bool | None) -> Ending:
    """`opens` and `continues`: vLLM's add_generation_prompt and continue_final_message."""
    if not continues:
        return "turn" if opens is False else "answer"
    if opens:
        raise InvalidRequest(
            Field("continue_final_message") + " and add_generation_prompt exclude each other: set one of them"
        )
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str) or last.get("tool_calls"):
        raise InvalidRequest(
            Field("continue_final_message") + " needs a last message of the assistant, with text and without tool calls"
        )
    return "open"


async def text_for(service: Service, chat_template: object) -> Text:
    """The server's Text, with the request's own template where it has one."""
    if chat_template is None:
        return service.text
    if not isinstance(chat_template, str):
        raise InvalidRequest(Field("chat_template") + " must be a string")
    return service.text.with_template(await service.compiler.template(chat_template))


def effort_variables(
    service: Service, fields: RequestFields, effort: str | None, text: Text | None = None
) -> dict[str, Any]:
    """`reasoning_effort` as variables that the template reads: itself, or a switch for reasoning."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise InvalidRequest(EFFORT + f" must be one of {', '.join(EFFORTS)}")
    values = {"reasoning_effort": effort, **dict.fromkeys(("enable_thinking", "thinking"), effort != "none")}
    text = text or service.text
    known = {name: value for name, value in values.items() if text.template_reads(name)}
    if not known and (effort != "none" or text.formats.thinking is not None):
        fields.pass_over(EFFORT, service.config)
    return known


async def answer_form(
    service: Service, chat: Chat, fields: SamplingFields, response_format: object = None
) -> AnswerForm:
    """The form of an answer. `response_format` is about text answers, and ignored where calls are required. (Annotations in the
    schemas of tools are not ignored: the prompt describes the tools.)"""
    wished = FREE
    if response_format is not None or fields.has_constraint:
        wished = await read_form(service, fields, response_format)
    if not chat.tools or not chat.choice.is_enforced:
        return wished
    if wished.grammar and response_format is None:
        raise InvalidRequest(
            Field("tool_choice") + " and structured_outputs both constrain the output: give only one of them"
        )
    frame = chat.required_format(service.text).frame
    make = functools.partial(calls_schema if frame is None else call_schema, chat.tools, chat.choice)
    schema = await offload_prompt(fields.num_bytes, make)
    is_checked = wants_check(fields)
    built = await service.compiler.schema(schema, Field("tools"), frame, chat.choice.parallel, is_checked)
    check = AnswerCheck(service, tools=schemas_by_name(chat.tools)) if is_checked else None
    return AnswerForm(built.grammar, check)


def encode(service: Service, chat: Chat, *, max_tokens: int | None) -> list[int]:
    """The prompt's tokens, by the model's own template. Takes long for a long chat."""
    text = chat.text or service.text
    return text.encode_called(_call(text, chat), max_tokens)


async def offload_encode(service: Service, chat: Chat, num_bytes: int, *, max_tokens: int | None) -> list[int]:
    """The prompt's tokens. A chat of a long request is encoded in a thread; a request's own template is rendered in another
    process. `num_bytes`: the request's size."""
    text = chat.text or service.text
    if (template := text.described_template) is None:
        return await offload_prompt(num_bytes, lambda: encode(service, chat, max_tokens=max_tokens))
    call = await offload_prompt(num_bytes, lambda: _call(text, chat))
    try:
        rendered = await service.compiler.render(template, call)
    except InvalidRequest as error:
        raise text.revealed(error) from error
    return await offload_prompt(len(rendered), lambda: text.encode_rendered(call, rendered, max_tokens))


async def offload_render(service: Service, chat: Chat, num_bytes: int) -> str:
    """The prompt as text. `num_bytes`: the request's size."""
    text = chat.text or service.text
    if (template := text.described_template) is None:
        return await offload_prompt(num_bytes, lambda: text.rendered(_call(text, chat)))
    call = await offload_prompt(num_bytes, lambda: _call(text, chat))
    try:
        return text.shown(call, await service.compiler.render(template, call))
    except InvalidRequest as error:
        raise text.revealed(error) from error


def _call(text: Text, chat: Chat) -> RenderCall:
    tools = template_form(chat.offered) if chat.offered else None
    return text.render_call(chat.messages, chat.ending == "answer", chat.ending == "open", tools, chat.variables)
