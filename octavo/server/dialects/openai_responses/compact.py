"""POST /v1/responses/compact: a long conversation as its user messages and one compaction item, which holds a summary by the model.

summary.py has what the item holds."""

import time
from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec

from octavo.errors import InvalidRequest, RequestFailed
from octavo.server.dialects.openai_responses import types
from octavo.server.dialects.openai_responses.output import item_id
from octavo.server.dialects.openai_responses.request import InputRequest
from octavo.server.dialects.openai_responses.summary import write_summary
from octavo.server.generate.chat_task import ChatTask
from octavo.server.schema.fields import RequestFields, Retention, SamplingFields, make_fields
from octavo.server.schema.shapes import Input

DEFAULT_MAX_TOKENS = 1024
INSTRUCTION = (
    "Summarize our conversation so far, so that it can be continued from your summary alone. Keep goals, decisions, facts, names, numbers, "
    "code, results of tools and open questions. Write only the summary."
)


NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "image": (),
    "prompt_cache_options": ({},),
    "service_tier": ("auto", "default"),
}


class CompactRequest(SamplingFields):
    input: Input = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None  # of the summary
    truncation: Literal["auto", "disabled"] | None = None
    priority: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # How long the pages of the conversation stay: a hint.
    prompt_cache_key: str | None = None
    prompt_cache_retention: Retention | None = None
    # Labels for the caller's own use: accepted, without effect.
    safety_identifier: str | None = None
    user: str | None = None

    def as_input(self) -> InputRequest:
        """The request whose answer is the summary."""
        if self.input is None and self.previous_response_id is None:
            raise InvalidRequest("input is missing: give input, previous_response_id or both", param="input")
        names = (
            "instructions",
            "previous_response_id",
            "truncation",
            "priority",
            "chat_template_kwargs",
            "prompt_cache_key",
            "prompt_cache_retention",
        )
        values = {name: getattr(self, name) for name in names} | {"input": self.input or []}
        values["max_output_tokens"] = self.max_output_tokens or DEFAULT_MAX_TOKENS
        sampling = {
            name: getattr(self, name) for name in SamplingFields.model_fields.keys() - RequestFields.model_fields
        }
        return make_fields(InputRequest, values, self.num_bytes, sampling)


class Compacted(msgspec.Struct, frozen=True):
    id: str
    created_at: int
    output: list[types.Item]
    usage: types.ResponseUsage
    object: Literal["response.compaction"] = "response.compaction"


class CompactWriter:
    """Writes the answer of a summary's task."""

    def __init__(self, task: ChatTask, items: list[types.Item], response_id: str) -> None:
        self._task, self._items, self._id = task, items, response_id

    def stream(self) -> AsyncGenerator[bytes, None]:
        raise AssertionError("a compaction has no stream")

    async def collect(self) -> Compacted:
        (answer,) = await self._task.whole()
        summary = answer.content.strip()
        if not summary:
            raise RequestFailed("the model wrote no summary: try again, or with more max_output_tokens")
        users: list[types.Item] = [
            item for item in self._items if isinstance(item, types.MessageItem) and item.role == "user"
        ]
        made = types.CompactionItem(item_id("cmp"), write_summary(summary))
        return Compacted(self._id, int(time.time()), [*users, made], self._usage())

    def _usage(self) -> types.ResponseUsage:
        used = self._task.usage
        return types.ResponseUsage(
            used.prompt_tokens,
            types.InputTokensDetails(self._task.num_cached_tokens),
            used.completion_tokens,
            types.OutputTokensDetails(self._task.num_reasoning_tokens),
            used.total_tokens,
        )
