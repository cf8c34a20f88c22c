"""One turn of a conversation in a dialect whose answers have one choice: a chat's fields in, the answer's events out.
Knows nothing of any dialect: each puts its request into a chat's fields and names its own fields in what is refused."""

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from octavo.errors import ContextTooLong
from octavo.messages import Logprobs, SamplingParams
from octavo.server.generate.answer_events import Answers
from octavo.server.generate.chat import answer_grammar, encode
from octavo.server.generate.chat_request import ChatPrompt, ChatRequest, num_logprobs, parse_chat
from octavo.server.generate.generation import Usage
from octavo.server.generate.logprobs import TokenLogprob, chat_logprobs
from octavo.server.generate.messages import MESSAGES
from octavo.server.generate.requests import build_requests
from octavo.server.state.service import Service
from octavo.text.parsers import Content, Event


class Part(msgspec.Struct, frozen=True, gc=False):
    event: Event
    logprobs: Sequence[TokenLogprob] = ()  # of the tokens behind it, where asked for


class ChatTask:
    @staticmethod
    async def begin(
        service: Service,
        fields: ChatRequest,
        prompt: ChatPrompt,
        *,
        response_id: str,
        max_tokens: int | None,
        arrived: float,
    ) -> "ChatTask":
        """`max_tokens`: an upper bound, which shrinks to the room that the prompt leaves; None: all of it."""
        grammar = await answer_grammar(service, prompt.chat, fields, fields.response_format)
        return ChatTask(service, fields, prompt, response_id, max_tokens, arrived, grammar)

    def __init__(
        self,
        service: Service,
        fields: ChatRequest,
        prompt: ChatPrompt,
        response_id: str,
        max_tokens: int | None,
        arrived: float,
        grammar: str,
    ) -> None:
        (request,) = build_requests(
            response_id,
            [prompt],
            fields,
            report=service.report,
            text=service.text,
            logprobs=num_logprobs(fields),
            default_max_tokens=max_tokens,
            arrived=arrived,
            grammar=grammar,
        )
        self.request_id = request.id  # of what the engine is asked for
        self.params: SamplingParams = request.params
        self.finish_reason: str | None = None  # set when `parts` has ended
        self.stop_reason: str | int | None = None
        self._service = service
        self._max_tokens = max_tokens
        self._wants_logprobs = bool(fields.logprobs)
        self._answers = Answers(
            service,
            request,
            prompt.chat.shape(
                service.text, is_constrained=bool(grammar), include_reasoning=fields.include_reasoning is not False
            ),
            every_token=self._wants_logprobs,
            tokens_per_event=fields.tokens_per_event(service.config.server),
        )

    @property
    def usage(self) -> Usage:
        """So far."""
        return self._answers.usage()

    @property
    def num_cached_tokens(self) -> int:
        details = self.usage.prompt_tokens_details
        return details.cached_tokens if details else 0

    @property
    def num_reasoning_tokens(self) -> int:
        details = self.usage.completion_tokens_details
        return details.reasoning_tokens if details else 0

    @property
    def is_cut(self) -> bool:
        """Not the model ended it: a limit did, or that it went round in circles."""
        return self.finish_reason not in ("stop", "tool_calls")

    @property
    def has_looped(self) -> bool:
        return self.finish_reason == "repetition"

    @property
    def filled_context(self) -> bool:
        """It is cut because the context was full, before the limit that was asked for."""
        used = self.usage
        is_full = used.total_tokens >= self._service.report.max_model_len
        return self.is_cut and is_full and used.completion_tokens != self._max_tokens

    async def parts(self) -> AsyncGenerator[list[Part], None]:
        """Until the answer ends. Leaving early aborts it."""
        unclaimed: list[Logprobs] = []
        async with aclosing(self._answers.pieces()) as steps:
            async for pieces in steps:
                events: list[Event] = []
                for piece in pieces:
                    events += piece.events
                    unclaimed += piece.logprobs
                    if piece.finish_reason is not None:
                        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
                if events:
                    yield self._claim(events, unclaimed)
                    unclaimed = []

    def _claim(self, events: list[Event], entries: list[Logprobs]) -> list[Part]:
        """Tokens belong to the content that comes with them or next; those of reasoning and of calls are told nowhere."""
        parts = [Part(event) for event in events]
        if self._wants_logprobs and entries:
            last = max((at for at, event in enumerate(events) if isinstance(event, Content)), default=None)
            if last is not None:
                parts[last] = Part(events[last], chat_logprobs(self._service.text, entries).content)
        return parts


async def parse_cut(service: Service, fields: ChatRequest) -> ChatPrompt:
    """The prompt of as much of the conversation as fits: whole turns are left out, the oldest first, never what opens it."""
    chat = parse_chat(service, fields, service.text)
    messages, longest = chat.messages, service.report.max_model_len
    num_kept = 1 if messages[0]["role"] == "system" else 0
    users = [at for at, message in enumerate(messages) if message["role"] == "user"]
    starts = [num_kept, *(at for at in users if at > num_kept)]

    async def try_from(start: int) -> ChatPrompt | None:
        shorter = dataclasses.replace(chat, messages=[*messages[:num_kept], *messages[start:]])
        try:
            ids = await encode(service, shorter, max_tokens=longest)
        except ContextTooLong:
            if start == starts[-1]:
                raise  # nothing is left to leave out
            return None
        fits = len(ids) < longest or start == starts[-1]
        return ChatPrompt(ids, MESSAGES, chat=shorter) if fits else None

    tried = {0: await try_from(starts[0])}
    low, high = 0 if tried[0] is not None else 1, len(starts) - 1  # the first place that fits is one of these
    while low < high and tried.get(low) is None:
        middle = (low + high) // 2
        tried[middle] = await try_from(starts[middle])
        low, high = (middle + 1, high) if tried[middle] is None else (low, middle)
    prompt = tried.get(low) or await try_from(starts[low])
    assert prompt is not None
    return prompt
