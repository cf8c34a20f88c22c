"""The Responses API's objects: items of input and output, the response, the events of its stream. OpenAI's names and shapes.

Every field that OpenAI's schema or the Open Responses specification requires is here; a field that either forbids to be null is
omitted where it has no value.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from octavo.server.generate.logprobs import TokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


# ── parts of a message ──────────────────────────────────────────────────────────────────────────────


class InputText(msgspec.Struct, frozen=True, tag="input_text"):
    text: str


class OutputText(msgspec.Struct, frozen=True, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    refusal: str


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, frozen=True, tag="summary_text"):
    text: str


# ── items ───────────────────────────────────────────────────────────────────────────────────────────


class MessageItem(msgspec.Struct, frozen=True, tag="message"):
    id: str
    role: Literal["user", "system", "developer", "assistant"]
    content: list[InputText | OutputText | Refusal]
    status: Status = "completed"


class ReasoningItem(msgspec.Struct, frozen=True, tag="reasoning"):
    id: str
    content: list[ReasoningText]
    summary: list[SummaryText] = []
    encrypted_content: None = None
    status: Status = "completed"


class CallItem(msgspec.Struct, frozen=True, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str  # the text of a JSON object
    status: Status = "completed"


class CallOutputItem(msgspec.Struct, frozen=True, tag="function_call_output"):
    id: str
    call_id: str
    output: str | list[InputText]
    status: Status = "completed"


class CompactionItem(msgspec.Struct, frozen=True, tag="compaction"):
    """Stands for a conversation (compact.py)."""

    id: str
    encrypted_content: str


Item = MessageItem | ReasoningItem | CallItem | CallOutputItem | CompactionItem


class ItemList(msgspec.Struct, frozen=True):
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


# ── the response ────────────────────────────────────────────────────────────────────────────────────


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0  # cache writes are neither charged nor counted


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"] | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET  # ours: the reason, where OpenAI has no name for it


class ResponseError(msgspec.Struct, frozen=True):
    message: str
    code: Literal["server_error"] = "server_error"


class ResponseTool(msgspec.Struct, frozen=True):
    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool
    type: Literal["function"] = "function"


class ResponseReasoning(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[ResponseTool]
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage
    metadata: dict[str, str]
    user: str | UnsetType = UNSET
    schema_valid: bool | UnsetType | None = (
        UNSET  # ours: structured_outputs.unenforced is "check"; null: not decided in time
    )


class Deleted(msgspec.Struct, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct, frozen=True):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


# ── events of a stream ──────────────────────────────────────────────────────────────────────────────


class StreamEvent(msgspec.Struct, frozen=True, gc=False):
    sequence_number: int


class Created(StreamEvent, frozen=True, tag="response.created"):
    response: Response


class InProgress(StreamEvent, frozen=True, tag="response.in_progress"):
    response: Response


class Completed(StreamEvent, frozen=True, tag="response.completed"):
    response: Response


class Incomplete(StreamEvent, frozen=True, tag="response.incomplete"):
    response: Response


class Failed(StreamEvent, frozen=True, tag="response.failed"):
    response: Response


class ItemAdded(StreamEvent, frozen=True, tag="response.output_item.added"):
    output_index: int
    item: Item


class ItemDone(StreamEvent, frozen=True, tag="response.output_item.done"):
    output_index: int
    item: Item


class _InItem(StreamEvent, frozen=True):
    item_id: str
    output_index: int


class _InPart(_InItem, frozen=True):
    content_index: int


class PartAdded(_InPart, frozen=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_InPart, frozen=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(_InPart, frozen=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(_InPart, frozen=True, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_InPart, frozen=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_InPart, frozen=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_InItem, frozen=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_InItem, frozen=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str
