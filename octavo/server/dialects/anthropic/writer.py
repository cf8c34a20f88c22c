"""Writes the answer to a chat task as Anthropic's message: streamed or whole."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from octavo.server.dialects.anthropic import output
from octavo.server.generate.chat_task import ChatTask
from octavo.server.http.sse import typed_event


class MessageWriter:
    """One message."""

    def __init__(self, message_id: str, model: str, task: ChatTask) -> None:
        self._id, self._model, self._task = message_id, model, task
        self._blocks = output.Blocks()

    async def collect(self) -> output.Message:
        async with aclosing(self._task.parts()) as steps:
            async for parts in steps:
                for part in parts:
                    self._blocks.feed(part.event)
        self._blocks.finish()
        message = self._message(self._blocks.blocks, *self._stop())
        return msgspec.structs.replace(message, schema_valid=self._task.schema_valid)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        before = typed_event(output.MessageStart(self._message([], None, None))) + typed_event(output.Ping())
        async with aclosing(self._task.parts()) as steps:
            async for parts in steps:
                for part in parts:
                    self._blocks.feed(part.event)
                yield before + self._new_events()
                before = b""
        self._blocks.finish()
        last = typed_event(output.MessageDelta(self._end(), self._usage()))
        yield before + self._new_events() + last + typed_event(output.MessageStop())

    def _new_events(self) -> bytes:
        return b"".join(map(typed_event, self._blocks.take_events()))

    def _message(
        self, blocks: list[output.Block], stop_reason: output.StopReason | None, stop_sequence: str | None
    ) -> output.Message:
        return output.Message(self._id, self._model, blocks, stop_reason, stop_sequence, self._usage())

    def _end(self) -> output.End:
        return output.End(*self._stop(), self._task.schema_valid)

    def _stop(self) -> tuple[output.StopReason, str | None]:
        """The reason, and the stop sequence."""
        task = self._task
        if task.is_cut and not task.has_looped:
            return "model_context_window_exceeded" if task.filled_context else "max_tokens", None
        if task.finish_reason == "tool_calls":
            return "tool_use", None
        if isinstance(task.stop_reason, str):
            return "stop_sequence", task.stop_reason
        return "end_turn", None

    def _usage(self) -> output.MessageUsage:
        used, cached = self._task.usage, self._task.num_cached_tokens
        thought = output.OutputTokensDetails(self._task.num_reasoning_tokens)
        added = self._task.num_added_tokens
        by_time = None
        if self._task.retention is not None:
            is_hour = self._task.retention == "1h"
            by_time = output.CacheCreation(0 if is_hour else added, added if is_hour else 0)
        rest = used.prompt_tokens - cached - added
        return output.MessageUsage(rest, used.completion_tokens, thought, cached, added, by_time)
