"""What /v1/chat/completions returns: OpenAI's completion and its chunks."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from octavo.server.generate.generation import PromptProgress, Usage
from octavo.server.generate.logprobs import ChatLogprobs, PromptLogprob


class Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: Function
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True):
    role: Literal["assistant"]
    content: str | None  # None: only tool calls, or only reasoning
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    # Two names for the same text: vLLM's and DeepSeek's older one, and vLLM's current one.
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True):
    index: int
    message: Message
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: ChatLogprobs | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    schema_valid: bool | UnsetType | None = (
        UNSET  # ours: structured_outputs.unenforced is "check"; null: not decided in time
    )


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None  # vLLM's; null where not requested
    prompt_token_ids: list[int] | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"


class FunctionDelta(msgspec.Struct, frozen=True, gc=False):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CallDelta(msgspec.Struct, frozen=True, gc=False):
    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, gc=False):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, gc=False):
    index: int
    delta: Delta
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: ChatLogprobs | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    schema_valid: bool | UnsetType | None = UNSET  # with the finish reason


class ChatChunk(msgspec.Struct, frozen=True, gc=False):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET  # null in every chunk but the last, where usage was requested
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
