"""ChatFields: the one internal form of a chat request, to which every dialect maps its own JSON; parse() makes the prompt."""

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict

from octavo.errors import ContextTooLong, Field, InvalidRequest, quote_json
from octavo.messages.speculation import MAX_PREDICTION
from octavo.server.generate.chat import (
    Chat,
    check_choice,
    check_variables,
    effort_variables,
    encode,
    offload_encode,
    read_ending,
    text_for,
)
from octavo.server.generate.messages import MESSAGES, parse_messages
from octavo.server.generate.offload import offload_prompt
from octavo.server.generate.requests import Prompt, check_text_len, cut_prompt
from octavo.server.generate.retention import retention_in
from octavo.server.schema.fields import GenerationFields, Retention
from octavo.server.schema.shapes import Messages, Prediction, ToolChoice, Tools
from octavo.server.state.service import Service
from octavo.text import Text
from octavo.text.chat.tools import NO_CALLS, Tool, allowed_tools, parse_tool_choice, parse_tools

PREDICTION = Field("prediction")
MAX_PREDICTION_PARTS = 1024


def predicted_text(prediction: dict[str, Any]) -> str:
    """The text of OpenAI's `prediction`: what the answer is expected to be. It is drafted, so that what is right takes less time."""
    if prediction.get("type") != "content":
        raise InvalidRequest(PREDICTION / "type" + f" must be 'content', got {quote_json(prediction.get('type'))}")
    content, where = prediction.get("content"), PREDICTION / "content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(where + " must be a string or a list of text parts")
    if len(content) > MAX_PREDICTION_PARTS:
        raise InvalidRequest(where + f" has {len(content)} entries; at most {MAX_PREDICTION_PARTS} are allowed")
    for at, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(where / at + ' must be {"type": "text", "text": …}')
    return "".join(part["text"] for part in content)


class ChatFields(GenerationFields):
    model_config = ConfigDict(title="ChatRequest")  # the name in the OpenAPI document

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    chat_template: Any = None  # a string, where requests may bring templates
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: Prediction = None

    @property
    def retention(self) -> Retention | None:
        return self.prompt_cache_retention or retention_in(self.messages, self.tools)


@dataclass(frozen=True, slots=True)
class ChatPrompt(Prompt):
    chat: Chat = field(kw_only=True)  # what the prompt was made of
    prediction_ids: tuple[int, ...] = ()  # what the answer is expected to begin with


async def parse(service: Service, fields: ChatFields) -> ChatPrompt:
    text = await text_for(service, fields.chat_template)
    chat = await offload_prompt(fields.num_bytes, functools.partial(parse_chat, service, fields, text))
    longest = service.report.max_model_len if fields.truncate_prompt_tokens is None else None
    ids = await offload_encode(service, chat, fields.num_bytes, max_tokens=longest)
    if fields.truncate_prompt_tokens is not None:
        ids = cut_prompt(ids, fields, service.report)
    return ChatPrompt(ids, MESSAGES, chat=chat, prediction_ids=await _read_prediction(service, fields))


async def _read_prediction(service: Service, fields: ChatFields) -> tuple[int, ...]:
    """Tokens of the prediction, as many as a drafter looks at."""
    if fields.prediction is None:
        return ()
    predicted = predicted_text(fields.prediction)
    if service.report.speculation is None:
        return ()
    check_text_len(service, fields.num_bytes, predicted, PREDICTION)
    encode_it = functools.partial(service.text.encode, predicted, False, param="prediction")
    return tuple((await offload_prompt(fields.num_bytes, encode_it))[:MAX_PREDICTION])


async def parse_cut(service: Service, fields: ChatFields) -> ChatPrompt:
    """The prompt of as much of the conversation as fits: whole turns are dropped, oldest first, but never the system message."""
    return await offload_prompt(fields.num_bytes, functools.partial(_parse_cut, service, fields))


def _parse_cut(service: Service, fields: ChatFields) -> ChatPrompt:
    chat = parse_chat(service, fields, service.text)
    messages, longest = chat.messages, service.report.max_model_len
    num_kept = 1 if messages[0]["role"] == "system" else 0
    users = [at for at, message in enumerate(messages) if message["role"] == "user"]
    starts = [num_kept, *(at for at in users if at > num_kept)]

    def try_from(start: int) -> ChatPrompt | None:
        shorter = dataclasses.replace(chat, messages=[*messages[:num_kept], *messages[start:]])
        try:
            ids = encode(service, shorter, max_tokens=longest)
        except ContextTooLong:
            if start == starts[-1]:
                raise  # nothing left to drop
            return None
        fits = len(ids) < longest or start == starts[-1]
        return ChatPrompt(ids, MESSAGES, chat=shorter) if fits else None

    tried = {0: try_from(starts[0])}
    low, high = 0 if tried[0] is not None else 1, len(starts) - 1  # the first start that fits is in this range
    while low < high and tried.get(low) is None:
        middle = (low + high) // 2
        tried[middle] = try_from(starts[middle])
        low, high = (middle + 1, high) if tried[middle] is None else (low, middle)
    prompt = tried.get(low) or try_from(starts[low])
    assert prompt is not None
    return prompt


def parse_chat(service: Service, fields: ChatFields, text: Text) -> Chat:
    check_text_len(service, fields.num_bytes, (fields.messages, fields.tools, fields.chat_template_kwargs), MESSAGES)
    tools: list[Tool] = []
    choice = NO_CALLS
    if fields.tools or fields.tool_choice is not None:
        tools, wish = allowed_tools(parse_tools(fields.tools or []), fields.tool_choice)
        choice = parse_tool_choice(wish, tools, parallel=fields.parallel_tool_calls is not False)
        check_choice(choice, service)
        for at, tool in enumerate(tools if choice.mode == "auto" else ()):
            if tool.strict:
                fields.pass_over(Field("tools", at, "function", "strict"), service.config)
    variables = fields.chat_template_kwargs or {}
    if variables:
        check_variables(service, fields, variables, Field("chat_template_kwargs"), text)
    by_effort = effort_variables(service, fields, fields.reasoning_effort, text)
    messages = parse_messages(fields.messages, service.config.budget)
    ending = read_ending(messages, fields.add_generation_prompt, fields.continue_final_message)
    return Chat(messages, tools, choice, {**by_effort, **variables}, text, ending)


def num_logprobs(fields: ChatFields) -> int | None:
    """Logprobs per token. None: not wanted."""
    top = fields.top_logprobs
    if top and not fields.logprobs:
        raise InvalidRequest(Field("top_logprobs") + " needs logprobs to be true")
    return (top or 0) if fields.logprobs else None
