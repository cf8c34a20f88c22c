"""TextTask: a prompt that is continued as it is, for dialects whose answers have one choice. ChatTask is the same for chats."""

import functools
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET, UnsetType

from octavo.messages import Logprobs
from octavo.server.generate.chat_task import Part
from octavo.server.generate.generation import Generation, Usage
from octavo.server.generate.logprobs import chat_logprobs
from octavo.server.generate.offload import offload_prompt
from octavo.server.generate.requests import Prompt, build_requests
from octavo.server.generate.structured import AnswerForm, read_form
from octavo.server.schema.fields import GenerationFields
from octavo.server.state.service import Service
from octavo.text.parsers import Content


class TextTask:
    @staticmethod
    async def prepare(
        service: Service,
        fields: GenerationFields,
        prompt: Prompt,
        *,
        response_id: str,
        arrived: float,
        max_tokens: int | None = None,
        logprobs: int | None = None,
    ) -> "TextTask":
        """`max_tokens`: an upper bound, which shrinks to the room that the prompt leaves; None: all of it. `logprobs`: top
        logprobs of each token; None: none at all."""
        form = await read_form(service, fields, fields.response_format)
        make = functools.partial(TextTask, service, fields, prompt, response_id, arrived, max_tokens, logprobs, form)
        return await offload_prompt(fields.num_bytes, make)

    def __init__(
        self,
        service: Service,
        fields: GenerationFields,
        prompt: Prompt,
        response_id: str,
        arrived: float,
        max_tokens: int | None,
        logprobs: int | None,
        form: AnswerForm,
    ) -> None:
        requests = build_requests(
            response_id,
            [prompt],
            fields,
            report=service.report,
            budget=service.config.budget,
            text=service.text,
            logprobs=logprobs,
            default_max_tokens=max_tokens,
            arrived=arrived,
            grammar=form.grammar,
        )
        self.response_id, self.prompt = response_id, prompt
        self.finish_reason: str | None = None  # ┐ set when `parts` has ended
        self.stop_reason: str | int | None = None  # │
        self.schema_valid: bool | UnsetType | None = UNSET  # ┘ None: not decided; unset: it was not to be checked
        self._check = form.check
        self._text, self._wants_logprobs = service.text, logprobs is not None
        self._generation = Generation(
            service, requests, fields.tokens_per_event(service.config), every_token=logprobs is not None
        )

    @property
    def request_ids(self) -> list[str]:
        """Ids of the engine's requests."""
        return self._generation.request_ids

    @property
    def usage(self) -> Usage:
        """What has been used so far."""
        return self._generation.usage()

    def submit(self) -> None:
        """Give the request to the engine. Raises where it refuses it."""
        self._generation.submit()

    async def parts(self) -> AsyncGenerator[list[Part], None]:
        """The answer's text until it ends. Leaving early aborts it."""
        unclaimed: list[Logprobs] = []
        said: list[str] = []
        async with aclosing(self._generation.pieces()) as steps:
            async for pieces in steps:
                text = "".join(piece.delta.text for piece in pieces)
                for piece in pieces:
                    unclaimed += piece.logprobs
                    if piece.delta.finish_reason is not None:
                        self.finish_reason, self.stop_reason = piece.delta.finish_reason, piece.delta.stop_reason
                if text:
                    scores = chat_logprobs(self._text, unclaimed).content if self._wants_logprobs else ()
                    yield [Part(Content(text), scores)]
                    unclaimed = []
                if self._check is not None:
                    said.append(text)
        if self._check is not None:
            self.schema_valid = await self._check.verdict("".join(said))
