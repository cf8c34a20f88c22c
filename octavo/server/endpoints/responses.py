"""/v1/responses: create, stream, retrieve, delete; a response's input items; how many tokens an input has.
Knows nothing of the engine beyond Turn, of items beyond response_items.py, or of how responses are kept."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from fastapi import APIRouter, Request
from fastapi import Response as HttpResponse
from msgspec import UNSET

from octavo.errors import InvalidRequest, NotFound, Unsupported
from octavo.server.dialects.openai_responses import request as requests
from octavo.server.dialects.openai_responses import types
from octavo.server.dialects.openai_responses.items import chat_messages, read_input, references
from octavo.server.dialects.openai_responses.output import Output, item_id
from octavo.server.dialects.openai_responses.request import INCLUDABLE, NAMES, InputRequest, ResponsesRequest
from octavo.server.dialects.openai_responses.store import KeptResponses, ResponseStore, StoredResponse
from octavo.server.endpoints.stream import MAX_NUMBER_LEN, Wanted
from octavo.server.endpoints.stream import find as find_stream
from octavo.server.generate import chat_request
from octavo.server.generate.chat_task import ChatTask, parse_cut
from octavo.server.http.errors import describe
from octavo.server.http.sse import DONE, EventStream, owner_of, stream_answer, typed_event, until_gone
from octavo.server.schema.fields import Dialect, read_fields
from octavo.server.schema.shapes import EVENTS, Shape
from octavo.server.state.ignored_fields import json_answer
from octavo.server.state.loopback import is_inside
from octavo.server.state.service import Service

DIALECTS: list[Dialect[Any]] = [
    Dialect("responses", "/v1/responses", ResponsesRequest, requests.NOT_OFFERED),
    Dialect("responses input tokens", "/v1/responses/input_tokens", InputRequest, requests.NOT_OFFERED),
]
SHAPES = {
    "POST /v1/responses": Shape(
        types.Response,
        EVENTS,
        leads_to=(
            "GET /v1/responses/{response_id}",
            "DELETE /v1/responses/{response_id}",
            "GET /v1/responses/{response_id}/input_items",
        ),
    ),
    "POST /v1/responses/input_tokens": Shape(types.InputTokens),
    "GET /v1/responses/{response_id}": Shape(types.Response, EVENTS),
    "DELETE /v1/responses/{response_id}": Shape(types.Deleted),
    "POST /v1/responses/{response_id}/cancel": Shape(types.Response),
    "GET /v1/responses/{response_id}/input_items": Shape(types.ItemList),
}
MAX_ITEMS = 100  # in one page of a response's input
MAX_REFERENCES = 256  # to earlier items, in one request: another process may have to be asked for each


def router(service: Service) -> APIRouter:
    router = APIRouter()
    server = service.config.server
    own = ResponseStore(server.max_stored_responses, int(server.max_stored_response_bytes))
    being_made: WeakValueDictionary[str, _Answer] = WeakValueDictionary()

    def cancel_here(response_id: str, owner: bytes) -> bytes | None:
        """One whose stream goes on without its client: whoever wants another to end closes its connection."""
        log, answer = service.logs.find(response_id, owner), being_made.get(response_id)
        if log is None or log.is_ended or answer is None:
            return None
        service.logs.end(response_id, owner)
        return msgspec.json.encode(answer.cancelled())

    kept = KeptResponses(own, service.peers, cancel_here, service.logs.end)

    @router.post("/v1/responses")
    async def create(request: Request) -> HttpResponse:
        arrived = time.monotonic()
        service.accept()
        fields: ResponsesRequest = await read_fields(request, DIALECTS[0], server)
        service.check_model(fields.model)
        owner = owner_of(request)
        question = await _Question.read(service, kept, fields, owner)
        response_id = item_id("resp")
        with NAMES.in_errors():
            turn = await ChatTask.begin(
                service,
                question.fields,
                question.prompt,
                response_id=response_id,
                max_tokens=fields.max_output_tokens,
                arrived=arrived,
            )
        answer = _Answer(service, own, fields, question, turn, response_id, owner, is_inside(request.scope))
        being_made[response_id] = answer
        ignored = NAMES.ignored(fields, question.fields)
        if fields.stream:
            return stream_answer(
                service,
                request,
                response_id,
                answer.stream(),
                ignored=ignored,
                resumable=fields.wants_resumable,
                queued=[turn.request_id] if fields.wants_queue else (),
                tell=answer.tell,
            )
        return json_answer(await until_gone(service, request.receive, answer.collect()), ignored)

    @router.post("/v1/responses/input_tokens")
    async def count(request: Request) -> HttpResponse:
        fields: InputRequest = await read_fields(request, DIALECTS[1], server)
        service.check_model(fields.model)
        question = await _Question.read(service, kept, fields, owner_of(request))
        return json_answer(types.InputTokens(len(question.prompt.ids)), NAMES.ignored(fields, question.fields))

    @router.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str, request: Request) -> HttpResponse:
        _check_query(request, {"include", "include[]", "stream", "starting_after", "include_obfuscation"})
        if (first := _first_event(request)) is not None:
            wanted = Wanted(response_id, owner_of(request), first)
            try:
                return EventStream(service, await find_stream(service, wanted))
            except InvalidRequest as error:
                error.param = "starting_after"
                raise
        return HttpResponse((await _found(kept, response_id, request)).body, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, request: Request) -> HttpResponse:
        if not await kept.delete(response_id, owner_of(request)):
            raise _not_found(response_id)
        return json_answer(types.Deleted(response_id))

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str, request: Request) -> HttpResponse:
        if (cancelled := await kept.cancel(response_id, owner_of(request))) is not None:
            return HttpResponse(cancelled, media_type="application/json")
        await _found(kept, response_id, request)
        raise InvalidRequest(
            f"response {response_id[:100]!r} is finished: a response can be cancelled while it is made, and where its stream "
            "can be resumed; closing the connection ends any other"
        )

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str, request: Request) -> HttpResponse:
        _check_query(request, {"include", "include[]", "limit", "order", "after"})
        return json_answer(_page((await _found(kept, response_id, request)).read_input(), request))

    return router


# ── what is kept ────────────────────────────────────────────────────────────────────────────────────


async def _found(kept: KeptResponses, response_id: str, request: Request) -> StoredResponse:
    found = await kept.get(response_id, owner_of(request))
    if found is None:
        raise _not_found(response_id)
    return found


def _not_found(response_id: str) -> NotFound:
    return NotFound(
        f"no response {response_id[:100]!r} is kept here: it was not stored, was deleted or made room for others"
    )


def _check_query(request: Request, known: set[str]) -> None:
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise Unsupported(f"the query's {name[:60]} is not supported here", param=name[:60])
        if name in ("include", "include[]") and value not in INCLUDABLE:
            raise InvalidRequest(f"include: {value[:60]!r} is not one of {', '.join(INCLUDABLE)}", param="include")


def _first_event(request: Request) -> int | None:
    """Of a stream that is read on: events are numbered as it is kept, by sequence_number. None: the response is wanted whole."""
    after, is_stream = request.query_params.get("starting_after"), _switch(request, "stream")
    if _switch(request, "include_obfuscation"):
        raise Unsupported("include_obfuscation: streams are sent as they are", param="include_obfuscation")
    if after is not None and not is_stream:
        raise InvalidRequest("starting_after is only for streams: set stream to true", param="starting_after")
    if after is not None and not (after.isascii() and after.isdigit() and len(after) <= MAX_NUMBER_LEN):
        raise InvalidRequest(
            f"starting_after must be the number of an event, got {after[:60]!r}", param="starting_after"
        )
    if not is_stream:
        return None
    return 0 if after is None else int(after) + 1


def _switch(request: Request, name: str) -> bool:
    """OpenAI's clients write true and false; people write 1 and 0 too, or True."""
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "1", "false", "0"):
        raise InvalidRequest(f"{name} must be true or false, got {value[:60]!r}", param=name)
    return value in ("true", "1")


def _page(items: list[types.Item], request: Request) -> types.ItemList:
    query = request.query_params
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_ITEMS):
        raise InvalidRequest(f"limit must be between 1 and {MAX_ITEMS}, got {limit[:60]!r}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be 'asc' or 'desc', got {order[:60]!r}", param="order")
    ordered = items if order == "asc" else items[::-1]
    start = 0
    if after is not None:
        places = [at for at, item in enumerate(ordered) if item.id == after]
        if not places:
            raise InvalidRequest(f"after: the response has no input item {after[:100]!r}", param="after")
        start = places[0] + 1
    page = ordered[start : start + int(limit)]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return types.ItemList(page, first, last, start + len(page) < len(ordered))


# ── a request ───────────────────────────────────────────────────────────────────────────────────────


class _Question(msgspec.Struct, frozen=True):
    """What is asked, with all that was said before."""

    items: list[types.Item]
    fields: chat_request.ChatRequest
    prompt: chat_request.ChatPrompt

    @staticmethod
    async def read(service: Service, kept: KeptResponses, fields: InputRequest, owner: bytes) -> "_Question":
        server = service.config.server
        requests.check(fields, server)
        before: list[types.Item] = []
        if fields.previous_response_id is not None:
            previous = await kept.get(fields.previous_response_id, owner)
            if previous is None:
                error = _not_found(fields.previous_response_id)
                error.param = "previous_response_id"
                raise error
            before = previous.read_items()
        wanted_ids = references(fields.input)
        if len(wanted_ids) > MAX_REFERENCES:
            raise InvalidRequest(
                f"input refers to {len(wanted_ids)} items, at most {MAX_REFERENCES} are looked up", "input"
            )
        referred = {wanted: await kept.item(wanted, owner) for wanted in wanted_ids}
        items = [*before, *read_input(fields.input, referred.get)]
        if len(items) > server.max_messages:
            raise InvalidRequest(
                f"input has {len(items)} items, those before included; this server takes at most {server.max_messages} "
                "(--max-messages)",
                param="input",
            )
        messages = chat_messages(fields.instructions, items)
        with NAMES.in_errors():
            chat_fields = requests.chat_request(fields, messages)
            parse = parse_cut if fields.truncation == "auto" else chat_request.parse
            return _Question(items, chat_fields, await parse(service, chat_fields))


class _Answer:
    """One response, streamed or whole."""

    def __init__(
        self,
        service: Service,
        store: ResponseStore,
        fields: ResponsesRequest,
        question: _Question,
        turn: ChatTask,
        response_id: str,
        owner: bytes,
        is_of_batch: bool,
    ) -> None:
        if fields.store and not store.is_on:
            raise Unsupported("store: this server keeps no responses (--max-stored-responses)", param="store")
        # What a batch asked is in its output file: it is kept here only where its line says so.
        is_wanted = not is_of_batch if fields.store is None else fields.store
        self._store = store if is_wanted and store.is_on else None
        self._is_of_batch = is_of_batch
        self._question, self._turn, self._owner = question, turn, owner
        self._output = Output()
        self._begun = self._describe(service, fields, response_id)

    def _describe(self, service: Service, fields: ResponsesRequest, response_id: str) -> types.Response:
        params = self._turn.params
        format = (fields.text.format if fields.text else None) or {"type": "text"}
        if format.get("type") == "json_schema":
            format = {"strict": False, **{key: value for key, value in format.items() if value is not None}}
        return types.Response(
            id=response_id,
            created_at=int(time.time()),
            instructions=fields.instructions,
            max_output_tokens=fields.max_output_tokens,
            max_tool_calls=fields.max_tool_calls,
            model=service.model_name,
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
        async with aclosing(self._turn.parts()) as steps:
            async for parts in steps:
                for part in parts:
                    self._output.feed(part.event, part.logprobs)
        return self._finish()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        output = self._output
        before = typed_event(types.Created(output.next_number(), self._begun))
        before += typed_event(types.InProgress(output.next_number(), self._begun))
        async with aclosing(self._turn.parts()) as steps:
            async for parts in steps:
                for part in parts:
                    output.feed(part.event, part.logprobs)
                yield before + b"".join(map(typed_event, output.take_told()))
                before = b""
        response = self._finish()
        last = types.Completed if response.status == "completed" else types.Incomplete
        told = b"".join(map(typed_event, output.take_told()))
        yield before + told + typed_event(last(output.next_number(), response)) + DONE

    def tell(self, error: Exception, request_id: str) -> bytes:
        """What ended a stream that had begun."""
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
        """What there is of it. It is kept, where it would have been."""
        response = msgspec.structs.replace(
            self._begun, status="cancelled", output=self._output.items_so_far, usage=self._usage()
        )
        return self._kept(response)

    def _finish(self) -> types.Response:
        is_cut = self._turn.is_cut
        self._output.finish(is_cut)
        response = msgspec.structs.replace(
            self._begun,
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=self._incomplete_details() if is_cut else None,
            output=self._output.items,
            usage=self._usage(),
        )
        return self._kept(response)

    def _incomplete_details(self) -> types.IncompleteDetails:
        if self._turn.has_looped:
            return types.IncompleteDetails(stop_reason=str(self._turn.stop_reason))
        return types.IncompleteDetails("max_output_tokens")

    def _kept(self, response: types.Response) -> types.Response:
        if self._store is None:
            return response
        items = msgspec.json.encode([*self._question.items, *response.output])
        stored = StoredResponse(response.id, self._owner, msgspec.json.encode(response), items, len(response.output))
        if self._store.put(stored, [item.id for item in response.output], is_spare=self._is_of_batch):
            return response
        return msgspec.structs.replace(response, store=False)  # there is no room for it

    def _usage(self) -> types.ResponseUsage:
        used = self._turn.usage
        return types.ResponseUsage(
            used.prompt_tokens,
            types.InputTokensDetails(self._turn.num_cached_tokens),
            used.completion_tokens,
            types.OutputTokensDetails(self._turn.num_reasoning_tokens),
            used.total_tokens,
        )
