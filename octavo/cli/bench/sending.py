"""Sends prompts to a server and times the responses: one RequestResult per request."""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.cli.bench.flags import SAMPLING
from octavo.cli.bench.http_stream import Client, HTTPFailure, Target
from octavo.cli.bench.workload import Workload


class _Text(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Text | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None  # with `return_token_ids`


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Chunk(msgspec.Struct, gc=False):
    """The parts of a streamed chunk that are measured; decoding nothing else keeps the client fast."""

    id: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(slots=True)
class RequestResult:
    """Times of one request, in seconds of time.perf_counter()."""

    started: float
    first: float = 0.0  # first text, or first token id
    ended: float = 0.0  # last choice, or the failure
    # Between consecutive texts; with `return_token_ids`, between consecutive tokens: 0 between those of one event.
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    has_usage: bool = False
    error: str = ""
    response_id: str = ""  # the server's

    @property
    def ttft(self) -> float | None:
        """Time to first token; None if none came."""
        return self.first - self.started if self.first else None

    @property
    def latency(self) -> float | None:
        """Time to the end of the response; None for a failed request, whose time is not a latency."""
        return None if self.error else self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for an output of one token."""
        return (self.ended - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Sender:
    """Sends one prompt and times its response."""

    def __init__(self, client: Client, arguments: argparse.Namespace, model: str) -> None:
        self._client = client
        self._chat = arguments.endpoint == "chat"
        self._path = "/v1/chat/completions" if self._chat else "/v1/completions"
        self._timeout: float = arguments.timeout
        self._decode = msgspec.json.Decoder(_Chunk).decode
        self._fields: dict[str, Any] = {
            "model": model,
            "max_tokens": arguments.output_len,
            "temperature": arguments.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"ignore_eos": True} if arguments.ignore_eos else {})
        # Benchmarks that are not commands have no flags for further fields.
        sampling = {name: getattr(arguments, name, None) for name in SAMPLING}
        self._fields |= {name: value for name, value in sampling.items() if value is not None}
        self._fields |= getattr(arguments, "extra_body", {})

    async def send(self, prompt: str | list[int], max_tokens: int | None = None) -> RequestResult:
        """`max_tokens`: None: as many as for all."""
        prompt_field = {"messages": [{"role": "user", "content": prompt}]} if self._chat else {"prompt": prompt}
        length_field = {} if max_tokens is None else {"max_tokens": max_tokens}
        body = json.dumps(self._fields | prompt_field | length_field).encode()
        result = RequestResult(started=time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout):
                await self._receive(body, result)
        except HTTPFailure as failure:
            result.error = describe(failure)
        except TimeoutError:
            result.error = f"no end within {self._timeout:g} s"
        except (OSError, msgspec.MsgspecError) as error:
            result.error = f"{type(error).__name__}: {error}"
        if result.error:
            result.ended = time.perf_counter()
        return result

    async def _receive(self, body: bytes, result: RequestResult) -> None:
        latest, num_tokens, done = 0.0, 0, False
        async for data in self._client.post_events(self._path, body):
            now = time.perf_counter()
            if data == b"[DONE]":
                done = True
                continue
            chunk = self._decode(data)
            if chunk.error is not None:
                result.error = _message(json.dumps({"error": chunk.error}))
                return
            result.response_id = chunk.id or result.response_id
            if chunk.usage is not None:
                result.has_usage = True
                result.prompt_tokens = chunk.usage.prompt_tokens
                result.output_tokens = chunk.usage.completion_tokens or 0
            for choice in chunk.choices:
                if count := _num_tokens(choice):
                    num_tokens += count
                    if latest:
                        result.gaps.append(now - latest)
                    result.gaps += [0.0] * (count - 1)
                    latest = now
                    result.first = result.first or now
                if choice.finish_reason or latest == now:
                    result.ended = now
        if not result.ended:
            result.error = "the stream ended without an answer"
            return
        if not done:
            result.error = "the stream ended without [DONE]"
        result.first = result.first or result.ended  # a response without text: use its end
        if not result.has_usage:
            result.output_tokens = num_tokens


def _num_tokens(choice: _Choice) -> int:
    """Tokens that came with an event. Without their ids, a text counts as one."""
    if choice.token_ids is not None:
        return len(choice.token_ids)
    delta = choice.delta
    return bool(choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))


def describe(failure: HTTPFailure) -> str:
    return f"HTTP {failure.status}: {_message(str(failure))}" if failure.status else str(failure)


def _message(text: str) -> str:
    """The message of an OpenAI error body, or the body itself."""
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(text.split())[:300]


def client_for(arguments: argparse.Namespace) -> Client:
    key = arguments.api_key or os.environ.get("OCTAVO_API_KEY", "").split(",")[0]
    return Client(Target.parse(arguments.base_url), key)


async def drive(
    sender: Sender, load: Workload, max_concurrency: int | None, done: Callable[[], object]
) -> list[RequestResult]:
    """Send every request at its arrival time, with at most `max_concurrency` open at once. Returns the results in order of
    arrival. `done` is called at the end of each."""
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    ends = [asyncio.Event() for _ in load.prompts] if load.after is not None else []

    async def one(number: int) -> RequestResult:
        if load.after is not None and load.after[number] >= 0:
            await ends[load.after[number]].wait()
            await asyncio.sleep(load.arrivals[number])
        async with gate or nullcontext():
            result = await sender.send(
                load.prompts[number], None if load.output_lens is None else load.output_lens[number]
            )
        if ends:
            ends[number].set()
        done()
        return result

    start, tasks = time.perf_counter(), []
    for number, arrival in enumerate(load.arrivals):
        if load.after is None or load.after[number] < 0:
            wait = start + arrival - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(number)))
    return list(await asyncio.gather(*tasks))


def loop_factory() -> Any:
    """uvloop if it is installed: the client then takes less CPU time from a server on the same machine."""
    try:
        import uvloop

        return uvloop.new_event_loop
    except ImportError:
        return None
