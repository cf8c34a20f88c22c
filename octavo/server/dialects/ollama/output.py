"""What Ollama's clients read: chunks of an answer, and the counts and times of the last one."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from octavo.server.generate.logprobs import TokenLogprob


class Function(msgspec.Struct, frozen=True):
    index: int
    name: str
    arguments: msgspec.Raw  # an object as the model wrote it, so that no number is rounded


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: Function


class Message(msgspec.Struct, frozen=True):
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer, or all of it. The last one has the reason of its end, counts of tokens, and times in nanoseconds."""

    model: str
    created_at: str
    done: bool = False
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    logprobs: Sequence[TokenLogprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET  # from the request's arrival
    load_duration: int | UnsetType = UNSET  # always 0: the model is loaded
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET  # from the request's arrival to the first piece of the answer
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET  # from the first piece to the end
    schema_valid: bool | UnsetType | None = (
        UNSET  # ours: structured_outputs.unenforced is "check"; null: not decided in time
    )


class ChatChunk(Chunk, frozen=True, kw_only=True):
    message: Message


class GenerateChunk(Chunk, frozen=True, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class Embeddings(msgspec.Struct, frozen=True, gc=False):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OneEmbedding(msgspec.Struct, frozen=True, gc=False):
    embedding: list[float]


def timestamp(seconds: float | None = None) -> str:
    """A moment as Ollama writes it; None: now."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")
