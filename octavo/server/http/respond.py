"""give: an answer that is ready to begin becomes the response, streamed or whole, as its request asked for.
Knows nothing of what the answer says, nor of its dialect."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.http.sse import stream_answer, until_gone
from octavo.server.schema.fields import GenerationFields
from octavo.server.state.ignored_fields import json_answer
from octavo.server.state.service import Service


class Answer(Protocol):
    @property
    def request_ids(self) -> Sequence[str]: ...  # of what the engine is asked for

    def stream(self) -> AsyncGenerator[bytes, None]: ...

    async def collect(self) -> msgspec.Struct: ...


async def respond(
    service: Service, request: Request, fields: GenerationFields, response_id: str, answer: Answer
) -> Response:
    if fields.stream:
        return stream_answer(
            service,
            request,
            response_id,
            answer.stream(),
            ignored=fields.ignored,
            resumable=fields.wants_resumable,
            queued=answer.request_ids if fields.wants_queue else (),
        )
    return json_answer(await until_gone(service, request.receive, answer.collect()), fields.ignored)
