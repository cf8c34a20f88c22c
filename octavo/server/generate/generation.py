"""Generation: the text of one response, several prompts × n choices as one stream, and the tokens it used."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from octavo.admission.finish_errors import failure_of
from octavo.admission.searches import likeliest
from octavo.client.streams import joined
from octavo.messages import FinishReason, GenerateRequest, Logprobs, TokenDelta
from octavo.observe.journeys.journey import current
from octavo.server.state.service import Service
from octavo.text.stream import TextDelta, TextStream


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int
    # Of requests with `prediction`: drafted tokens, whether of the prediction or of the text so far.
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    # None: unknown. A stop string ended every choice before the engine could say what it found in its cache.
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # of reasoning models


class PromptProgress(msgspec.Struct, frozen=True):
    """How far a prompt is computed. `processed_tokens` may fall: when memory runs out, the youngest request begins again."""

    prompt_tokens: int
    processed_tokens: int  # those of the prefix cache among them
    cached_tokens: int


class Piece(msgspec.Struct, frozen=True, gc=False):
    """New text of one choice, or its end. `index` counts over all prompts: prompt × n + choice."""

    index: int
    delta: TextDelta
    token_ids: Sequence[int] = ()  # behind this text, or text to come
    logprobs: Sequence[Logprobs] = ()  # one per token, where requested
    progress: PromptProgress | None = None  # of the choice's prompt; the rest is empty then
    schema_valid: bool | UnsetType | None = (
        UNSET  # with the finish reason, where answers are checked; None: not decided
    )


@dataclass(slots=True)
class WholeChoice:
    """All of one choice."""

    index: int
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)

    def as_piece(self) -> Piece:
        delta = TextDelta(self.text, self.finish_reason, self.stop_reason, self.num_tokens)
        return Piece(self.index, delta, self.token_ids, self.logprobs)


@dataclass(slots=True)
class _Choice:
    stream: TextStream
    num_tokens: int = 0
    finished: bool = False


class Generation:
    def __init__(
        self,
        service: Service,
        requests: Sequence[GenerateRequest],
        tokens_per_event: int = 1,
        every_token: bool = False,
        marks: Sequence[str] = (),
        num_kept: int | None = None,
    ) -> None:
        """`tokens_per_event`: tokens of a choice that are collected into one piece, after the first token.
        `every_token`: a piece for each delta, even where its tokens give no text yet. `marks`: special tokens whose text is not
        skipped. `num_kept`: how many of each prompt's choices are returned, the likeliest first; None: all."""
        self._service = service
        self._every_token = every_token or num_kept is not None  # comparing choices needs the logprobs of all tokens
        self.prompt_logprobs: list[list[Logprobs]] = [[] for _ in requests]
        self._requests = requests
        self._tokens_per_event = tokens_per_event
        self._num_kept = num_kept
        self._choices = [
            [_Choice(service.text.stream(request.params, request.prompt_ids, marks)) for _ in range(request.params.n)]
            for request in requests
        ]
        self._num_cached: list[int | None] = [None] * len(requests)
        self.num_accepted = self.num_rejected = 0  # drafted tokens of choices that the engine has ended

    @property
    def request_ids(self) -> list[str]:
        """Ids of the engine's requests."""
        return [request.id for request in self._requests]

    @property
    def num_choices(self) -> int:
        return sum(len(choices) for choices in self._choices)

    def usage(self) -> Usage:
        """What has been used so far. A prompt counts once, whatever n is."""
        num_prompt = sum(len(request.prompt_ids) for request in self._requests)
        num_output = sum(choice.num_tokens for choices in self._choices for choice in choices)
        known = [num for num in self._num_cached if num is not None]
        details = PromptTokensDetails(sum(known)) if len(known) == len(self._num_cached) else None
        return Usage(num_prompt, num_output, num_prompt + num_output, details)

    def num_cached(self, number: int) -> int | None:
        """Tokens of a prompt that the prefix cache had. None: not known, or not yet."""
        return self._num_cached[number]

    async def whole(self, on_piece: Callable[[Piece], None] | None = None) -> list[WholeChoice]:
        """Every choice, once all have finished. `on_piece` is called with each piece as it arrives."""
        choices = [WholeChoice(index) for index in range(self.num_choices)]
        async with aclosing(self.pieces()) as steps:
            async for pieces in steps:
                for piece in pieces:
                    if on_piece is not None:
                        on_piece(piece)
                    choice, delta = choices[piece.index], piece.delta
                    choice.text += delta.text
                    choice.num_tokens = delta.num_tokens
                    choice.token_ids += piece.token_ids
                    choice.logprobs += piece.logprobs
                    if delta.finish_reason is not None:
                        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        return choices if self._num_kept is None else self._best(choices, self._num_kept)

    def _best(self, choices: list[WholeChoice], num_kept: int) -> list[WholeChoice]:
        kept: list[WholeChoice] = []
        num_each = self.num_choices // len(self._requests)  # the same for every prompt
        for start in range(0, len(choices), num_each):
            kept += likeliest(choices[start : start + num_each], num_kept, len(kept))
        return kept

    def submit(self) -> None:
        """Give the requests to the engine. Raises where it refuses one."""
        self._service.submit(self._requests)

    def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """Lists of new pieces until every choice has finished. To be read once, after submit; leaving early aborts what
        still runs."""
        return self._follow(0) if len(self._requests) == 1 else self._together()

    async def _together(self) -> AsyncGenerator[list[Piece], None]:
        arrivals: asyncio.Queue[list[Piece] | Exception | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._pump(number, arrivals)) for number in range(len(self._requests))]
        try:
            num_left = len(tasks)
            while num_left:
                arrived = [await arrivals.get()]
                while not arrivals.empty():
                    arrived.append(arrivals.get_nowait())
                together: list[Piece] = []
                for item in arrived:
                    if item is None:
                        num_left -= 1
                    elif isinstance(item, Exception):
                        raise item
                    else:
                        together += item
                if together:
                    yield together
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._service.release(self.request_ids)  # some tasks may not have begun to read

    async def _pump(self, number: int, arrivals: asyncio.Queue[list[Piece] | Exception | None]) -> None:
        try:
            async with aclosing(self._follow(number)) as steps:
                async for pieces in steps:
                    arrivals.put_nowait(pieces)
            arrivals.put_nowait(None)
        except Exception as error:  # raised in the task that serves the client
            arrivals.put_nowait(error)

    async def _follow(self, number: int) -> AsyncGenerator[list[Piece], None]:
        request, journey = self._requests[number], current.get()
        waiting: list[TokenDelta] = []
        is_first = True
        async with aclosing(self._service.deltas(request.id)) as steps:
            async for deltas in steps:
                self._service.heard()
                if self._tokens_per_event > 1:
                    # Collected before detokenizing, so that they become one piece, as for a slow reader.
                    waiting += deltas
                    if not is_first and not _is_due(waiting, self._tokens_per_event):
                        continue
                    deltas, waiting = waiting, []
                    is_first = is_first and not any(delta.token_ids for delta in deltas)
                started = time.monotonic()
                pieces = self._advance(number, deltas)
                if journey is not None:
                    journey.took(started, time.monotonic())
                if pieces:
                    yield pieces

    def _advance(self, number: int, deltas: list[TokenDelta]) -> list[Piece]:
        pieces: list[Piece] = []
        base = number * len(self._choices[number])  # n is the same for every prompt
        progress: PromptProgress | None = None
        for delta in deltas:
            if delta.finish is not None and delta.finish.reason == "error":
                raise failure_of(delta.finish)
            if delta.prompt_logprobs:
                delta.add_scores_to(self.prompt_logprobs[number])
            if delta.progress is not None:  # the newest is enough
                newest = delta.progress
                num_prompt = len(self._requests[number].prompt_ids)
                progress = PromptProgress(num_prompt, newest.num_computed, newest.num_cached)
        if progress is not None:
            pieces.append(Piece(base, TextDelta("", None, None, 0), progress=progress))
        # Deltas of one choice become one piece: a slow reader gets fewer, larger events.
        for delta in deltas if len(deltas) == 1 else joined(deltas):
            index, finish = delta.index, delta.finish
            choice = self._choices[number][index]
            if finish is not None:
                self._num_cached[number] = max(self._num_cached[number] or 0, finish.num_cached_tokens)
                self.num_accepted += finish.num_accepted_tokens
                self.num_rejected += finish.num_drafted_tokens - finish.num_accepted_tokens
            if choice.finished:
                continue
            text = choice.stream.push(delta.token_ids, finish)
            num_new = text.num_tokens - choice.num_tokens  # tokens after a stop string do not count
            choice.num_tokens = text.num_tokens
            choice.finished = text.finish_reason is not None
            if choice.stream.stopped:  # by a stop string, which only this process looks for
                self._service.engine.abort(self._requests[number].id, index, "stop")
            if text.finish_reason is not None and (journey := current.get()) is not None:
                journey.finish(self._requests[number].id, index, text.finish_reason, choice.num_tokens)
            if text.text or choice.finished or (self._every_token and num_new):
                pieces.append(Piece(base + index, text, delta.token_ids[:num_new], delta.logprobs[:num_new]))
        return pieces


def _is_due(deltas: list[TokenDelta], num_tokens: int) -> bool:
    """Whether a choice has ended, or has this many tokens."""
    counts: dict[int, int] = {}
    for delta in deltas:
        counts[delta.index] = counts.get(delta.index, 0) + len(delta.token_ids)
        if delta.finish is not None or counts[delta.index] >= num_tokens:
            return True
    return False
