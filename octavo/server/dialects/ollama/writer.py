"""Writes the answer to a task as Ollama's chunks: streamed in lines, or joined into one."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from octavo.server.dialects.ollama.output import (
    ChatChunk,
    Chunk,
    Function,
    GenerateChunk,
    Message,
    ToolCall,
    timestamp,
)
from octavo.server.generate.chat_task import Part
from octavo.server.generate.generation import Usage
from octavo.server.generate.logprobs import TokenLogprob
from octavo.server.http.ndjson import line
from octavo.text.parsers import CallArguments, CallBegin, CallEnd, Content, Reasoning

Make = Callable[..., Chunk]
"""Makes a chunk of a text, a thought, calls, and further members of Chunk."""


class Task(Protocol):
    """A ChatTask or a TextTask."""

    finish_reason: str | None
    schema_valid: bool | UnsetType | None

    @property
    def usage(self) -> Usage: ...

    def parts(self) -> AsyncGenerator[list[Part], None]: ...


def chat_chunk(model: str, text: str = "", thought: str = "", calls: Sequence[ToolCall] = (), **more: Any) -> Chunk:
    message = Message(text, thought or UNSET, list(calls) or UNSET)
    return ChatChunk(model=model, created_at=timestamp(), message=message, **more)


def generate_chunk(model: str, text: str = "", thought: str = "", calls: Sequence[ToolCall] = (), **more: Any) -> Chunk:
    assert not calls, "only a chat has tools"
    return GenerateChunk(model=model, created_at=timestamp(), response=text, thinking=thought or UNSET, **more)


class OllamaWriter:
    """One answer."""

    def __init__(self, task: Task, model: str, make: Make, arrived: float) -> None:
        """`make`: chat_chunk or generate_chunk. `arrived`: time.monotonic() of the request."""
        self._task, self._model, self._make, self._arrived = task, model, make, arrived
        self._first = 0.0  # time.monotonic() of the first piece
        self._open: CallBegin | None = None
        self._arguments = ""  # of the open call

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._task.parts()) as steps:
            async for parts in steps:
                lines = [line(self._make(self._model, **members)) for members in self._members(parts)]
                if lines:
                    yield b"".join(lines)
        yield line(self._make(self._model, **self._end()))

    async def collect(self) -> Chunk:
        text, thought = "", ""
        calls: list[ToolCall] = []
        scores: list[TokenLogprob] = []
        async with aclosing(self._task.parts()) as steps:
            async for parts in steps:
                for members in self._members(parts):
                    text += members.get("text", "")
                    thought += members.get("thought", "")
                    calls += members.get("calls", ())
                    scores += members.get("logprobs", ())
        return self._make(self._model, text, thought, calls, logprobs=scores or UNSET, **self._end())

    def _members(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """The chunks of these parts, each as arguments of `make`."""
        self._first = self._first or time.monotonic()
        found: list[dict[str, Any]] = []
        for part in parts:
            match part.event:
                case Content(text):
                    found.append({"text": text} | ({"logprobs": part.logprobs} if part.logprobs else {}))
                case Reasoning(text):
                    found.append({"thought": text})
                case CallBegin() as begun:
                    self._open, self._arguments = begun, ""
                case CallArguments(_, text):
                    self._arguments += text
                case CallEnd(index):
                    assert self._open is not None
                    arguments = msgspec.Raw(self._arguments.encode() or b"{}")
                    call = ToolCall(self._open.id, Function(index, self._open.name, arguments))
                    found.append({"calls": [call]})
        return found

    def _end(self) -> dict[str, Any]:
        now, usage = time.monotonic(), self._task.usage
        first = self._first or now
        return {
            "done": True,
            "done_reason": "stop" if self._task.finish_reason in ("stop", "tool_calls") else "length",
            "total_duration": _nanoseconds(now - self._arrived),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - self._arrived),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(now - first),
            "schema_valid": self._task.schema_valid,
        }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
