"""Writes the answer to a chat task as OpenAI's response: streamed or whole, and kept where its request wants that."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET

from octavo import fresh
from octavo.errors import Unsupported
from octavo.server.dialects.openai_responses import request as requests
from octavo.server.dialects.openai_responses import types
from octavo.server.dialects.openai_responses.conversation import Conversation
from octavo.server.dialects.openai_responses.output import Output
from octavo.server.dialects.openai_responses.request import ResponsesRequest
from octavo.server.dialects.openai_responses.store import ResponseStore, StoredResponse
from octavo.server.generate.chat_task import ChatTask
from octavo.server.http.errors import describe
from octavo.server.http.sse import DONE, typed_event
from octavo.server.state.service import Service


class ResponseWriter:
    """One response."""

    def __init__(
        self,
        service: Service,
        store: ResponseStore,
        fields: ResponsesRequest,
        conversation: Conversation,
        task: ChatTask,
        response_id: str,
        owner: bytes,
        is_of_batch: bool,
    ) -> None:
        if fields.store and not store.is_on:
            raise Unsupported("store: this server does not store responses (--max-stored-responses)", param="store")
        # A batch has its answers in its output file: they are stored here only on request.
        is_wanted = not is_of_batch if fields.store is None else fields.store
        self._store = store if is_wanted and store.is_on else None
        self._is_of_batch = is_of_batch
        self._conversation, self._task, self._owner = conversation, task, owner
        self._output = Output()
        self._begun = self._describe(service, fields, response_id)

    def _describe(self, service: Service, fields: ResponsesRequest, response_id: str) -> types.Response:
        params = self._task.params
        format = (fields.text.format if fields.text else None) or {"type": "text"}
        if format.get("type") == "json_schema":
            format = {"strict": False, **{key: value for key, value in format.items() if value is not None}}
        return types.Response(
            id=response_id,
            created_at=int(fresh.now()),
            instructions=fields.instructions,
            max_output_tokens=fields.max_output_tokens,
            max_tool_calls=fields.max_tool_calls,
            model=service.answering_name,
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            previous_response_id=fields.previous_response_id,
            prompt_cache_key=fields.prompt_cache_key,
            reasoning=types.ResponseReasoning(fields.effort),
            safety_identifier=fields.safety_identifier,
            store=self._store is not None,
            temperature=params.temperature,
            top_p=params.top_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            text={"format": format},
            tool_choice=fields.tool_choice or "auto",
            tools=requests.shown_tools(fields),
            top_logprobs=fields.top_logprobs or 0,
            truncation=fields.truncation or "disabled",
            usage=self._usage(),
            metadata=fields.metadata or {},
            user=UNSET if fields.user is None else fields.user,
        )

    async def collect(self) -> types.Response:
        async with aclosing(self._task.parts()) as steps:
            async for parts in steps:
                for part in parts:
                    self._output.feed(part.event, part.logprobs)
        return self._finish()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        output = self._output
        before = typed_event(types.Created(output.next_number(), self._begun))
        before += typed_event(types.InProgress(output.next_number(), self._begun))
        async with aclosing(self._task.parts()) as steps:
            async for parts in steps:
                for part in parts:
                    output.feed(part.event, part.logprobs)
                yield before + b"".join(map(typed_event, output.take_events()))
                before = b""
        response = self._finish()
        last = types.Completed if response.status == "completed" else types.Incomplete
        events = b"".join(map(typed_event, output.take_events()))
        yield before + events + typed_event(last(output.next_number(), response)) + DONE

    def error_event(self, error: Exception, request_id: str) -> bytes:
        """The last events of a stream that failed after it had begun."""
        _, body = describe(error, request_id)
        response = msgspec.structs.replace(
            self._begun,
            status="failed",
            error=types.ResponseError(body.error.message),
            output=self._output.items_so_far,
            usage=self._usage(),
            store=False,
        )
        return typed_event(types.Failed(self._output.next_number(), response)) + DONE

    def cancelled(self) -> types.Response:
        """The response as far as it came, stored if the complete one would have been."""
        response = msgspec.structs.replace(
            self._begun, status="cancelled", output=self._output.items_so_far, usage=self._usage()
        )
        return self._kept(response)

    def _finish(self) -> types.Response:
        is_cut = self._task.is_cut
        self._output.finish(is_cut)
        response = msgspec.structs.replace(
            self._begun,
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=self._incomplete_details() if is_cut else None,
            output=self._output.items,
            usage=self._usage(),
            schema_valid=self._task.schema_valid,
        )
        return self._kept(response)

    def _incomplete_details(self) -> types.IncompleteDetails:
        if self._task.has_looped:
            return types.IncompleteDetails(stop_reason=str(self._task.stop_reason))
        return types.IncompleteDetails("max_output_tokens")

    def _kept(self, response: types.Response) -> types.Response:
        if self._store is None:
            return response
        items = msgspec.json.encode([*self._conversation.items, *response.output])
        stored = StoredResponse(response.id, self._owner, msgspec.json.encode(response), items, len(response.output))
        if self._store.put(stored, [item.id for item in response.output], is_spare=self._is_of_batch):
            return response
        return msgspec.structs.replace(response, store=False)  # no room

    def _usage(self) -> types.ResponseUsage:
        used = self._task.usage
        return types.ResponseUsage(
            used.prompt_tokens,
            types.InputTokensDetails(self._task.num_cached_tokens),
            used.completion_tokens,
            types.OutputTokensDetails(self._task.num_reasoning_tokens),
            used.total_tokens,
        )
