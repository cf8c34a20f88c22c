"""ChatTask: a chat request as the engine computes it, whatever dialect it came in."""

import functools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from msgspec import UNSET, UnsetType

from octavo.admission.searches import likeliest
from octavo.messages import Logprobs, SamplingParams
from octavo.server.generate.answer_events import AnswerPiece, AnswerReader, WholeAnswer
from octavo.server.generate.chat import answer_form
from octavo.server.generate.chat_request import ChatFields, ChatPrompt, num_logprobs
from octavo.server.generate.generation import CompletionTokensDetails, Generation, Usage
from octavo.server.generate.logprobs import TokenLogprob, chat_logprobs
from octavo.server.generate.offload import offload_prompt
from octavo.server.generate.requests import build_requests
from octavo.server.generate.structured import AnswerForm
from octavo.server.state.service import Service
from octavo.text.parsers import Content, Event


class Part(msgspec.Struct, frozen=True, gc=False):
    event: Event
    logprobs: Sequence[TokenLogprob] = ()  # of the tokens behind it, where requested


class ChatTask:
    """A chat request's generation, its text read as events. `pieces` and `whole` are for n choices, `parts` and what follows
    are for dialects whose answers have one."""

    @staticmethod
    async def prepare(
        service: Service,
        fields: ChatFields,
        prompt: ChatPrompt,
        *,
        response_id: str,
        arrived: float,
        max_tokens: int | None = None,
    ) -> "ChatTask":
        """`max_tokens`: an upper bound where the fields have none, which shrinks to the room that the prompt leaves; None: all
        of it."""
        form = await answer_form(service, prompt.chat, fields, fields.response_format)
        make = functools.partial(ChatTask, service, fields, prompt, response_id, arrived, max_tokens, form)
        return await offload_prompt(fields.num_bytes, make)

    def __init__(
        self,
        service: Service,
        fields: ChatFields,
        prompt: ChatPrompt,
        response_id: str,
        arrived: float,
        max_tokens: int | None,
        form: AnswerForm,
    ) -> None:
        (request,) = build_requests(
            response_id,
            [prompt],
            fields,
            report=service.report,
            budget=service.config.budget,
            text=service.text,
            logprobs=num_logprobs(fields),
            default_max_tokens=max_tokens,
            arrived=arrived,
            grammar=form.grammar,
            prediction_ids=prompt.prediction_ids,
        )
        shape = prompt.chat.shape(
            service.text, is_constrained=bool(form.grammar), include_reasoning=fields.include_reasoning is not False
        )
        self.response_id, self.prompt = response_id, prompt
        self.retention = fields.retention
        self.params: SamplingParams = request.params
        self.finish_reason: str | None = None  # ┐ of the one choice, set when `parts` has ended
        self.stop_reason: str | int | None = None  # │
        self.schema_valid: bool | UnsetType | None = UNSET  # ┘ None: not decided; unset: it was not to be checked
        self._service, self._max_tokens = service, max_tokens
        self._wants_logprobs = bool(fields.logprobs)
        self._num_kept = fields.num_kept
        self._every_token = bool(fields.logprobs or fields.return_token_ids) or self._num_kept is not None
        self._counts_reasoning = shape.think_format is not None
        self.generation = Generation(
            service,
            [request],
            marks=shape.marks,
            every_token=self._every_token or self._counts_reasoning,
            tokens_per_event=fields.tokens_per_event(service.config),
        )
        self._check = form.check
        self._readers = [AnswerReader(service.text, request.prompt_ids, shape) for _ in range(request.params.n)]

    @property
    def request_ids(self) -> list[str]:
        """Ids of the engine's requests."""
        return self.generation.request_ids

    @property
    def num_choices(self) -> int:
        return len(self._readers)

    @property
    def usage(self) -> Usage:
        """What has been used so far."""
        usage = self.generation.usage()
        if not self._counts_reasoning and not self.params.prediction_ids:
            return usage
        num_reasoning = sum(reader.num_reasoning_tokens for reader in self._readers) if self._counts_reasoning else 0
        details = CompletionTokensDetails(num_reasoning)
        if self.params.prediction_ids:
            num_accepted, num_rejected = self.generation.num_accepted, self.generation.num_rejected
            details = CompletionTokensDetails(num_reasoning, num_accepted, num_rejected)
        return msgspec.structs.replace(usage, completion_tokens_details=details)

    def submit(self) -> None:
        """Give the request to the engine. Raises where it refuses it."""
        self.generation.submit()

    async def pieces(self) -> AsyncGenerator[list[AnswerPiece], None]:
        """Lists of new pieces until every choice has finished. To be read once, after submit; leaving early aborts what
        still runs."""
        answers = [WholeAnswer(index=index) for index in range(self.num_choices if self._check else 0)]
        async with aclosing(self.generation.pieces()) as steps:
            async for pieces in steps:
                read: list[AnswerPiece] = []
                for piece in pieces:
                    answer = self._readers[piece.index].read(piece)
                    if self._check is not None:
                        answers[piece.index].add(answer)
                        if answer.finish_reason is not None:
                            whole = answers[piece.index]
                            calls = [(call.name, call.arguments) for call in whole.calls]
                            verdict = await self._check.verdict(whole.content, calls)
                            answer = msgspec.structs.replace(answer, schema_valid=verdict)
                    if self._every_token or answer.events or answer.finish_reason or answer.progress:
                        read.append(answer)
                if read:
                    yield read

    async def whole(self) -> list[WholeAnswer]:
        """Every choice, once all have finished; of `best_of` choices the best."""
        answers = [WholeAnswer(index=index) for index in range(self.num_choices)]
        async with aclosing(self.pieces()) as steps:
            async for pieces in steps:
                for piece in pieces:
                    answers[piece.index].add(piece)
        return answers if self._num_kept is None else likeliest(answers, self._num_kept)

    # ── one choice ──

    @property
    def num_cached_tokens(self) -> int:
        details = self.usage.prompt_tokens_details
        return details.cached_tokens if details else 0

    @property
    def num_added_tokens(self) -> int:
        """Prompt tokens that this request has added to the prefix cache, where it asked for that: those of full pages that were not found.
        0 as long as it is not known what was found."""
        details = self.usage.prompt_tokens_details
        if self.retention is None or details is None or not self._service.config.cache.enable_prefix_caching:
            return 0
        size = self._service.report.page_size
        return max(0, self.usage.prompt_tokens // size * size - details.cached_tokens)

    @property
    def num_reasoning_tokens(self) -> int:
        details = self.usage.completion_tokens_details
        return details.reasoning_tokens if details else 0

    @property
    def is_cut(self) -> bool:
        """Whether a limit or repetition detection ended the answer, not the model."""
        return self.finish_reason not in ("stop", "tool_calls")

    @property
    def has_looped(self) -> bool:
        return self.finish_reason == "repetition"

    @property
    def filled_context(self) -> bool:
        """Whether the full context ended the answer, before the requested limit."""
        used = self.usage
        is_full = used.total_tokens >= self._service.report.max_model_len
        return self.is_cut and is_full and used.completion_tokens != self._max_tokens

    async def parts(self) -> AsyncGenerator[list[Part], None]:
        """The answer's events until it ends. Leaving early aborts it."""
        unclaimed: list[Logprobs] = []
        async with aclosing(self.pieces()) as steps:
            async for pieces in steps:
                events: list[Event] = []
                for piece in pieces:
                    events += piece.events
                    unclaimed += piece.logprobs
                    if piece.finish_reason is not None:
                        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
                        self.schema_valid = piece.schema_valid
                if events:
                    yield self._claim(events, unclaimed)
                    unclaimed = []

    def _claim(self, events: list[Event], entries: list[Logprobs]) -> list[Part]:
        """Give logprobs to the content that comes with them or next; those of reasoning and calls are not returned."""
        parts = [Part(event) for event in events]
        if self._wants_logprobs and entries:
            last = max((at for at, event in enumerate(events) if isinstance(event, Content)), default=None)
            if last is not None:
                parts[last] = Part(events[last], chat_logprobs(self._service.text, entries).content)
        return parts
