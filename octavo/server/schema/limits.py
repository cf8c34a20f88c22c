"""Limits that a request sets itself, and what its stream tells while it waits: the fields of every dialect that computes.
Knows nothing of who keeps to the limits: the engine's client has the timers, the engine its queue."""

from pydantic import BaseModel, ConfigDict

from octavo.errors import InvalidRequest

MAX_MILLISECONDS = 10**12  # far beyond any use: what is larger would not fit a clock


class LimitFields(BaseModel):
    deadline_ms: int | None = None  # ours: from its arrival, after which the request is ended
    max_queue_ms: int | None = None  # ours: the same, if it has no row by then

    @property
    def limits(self) -> dict[str, int | None]:
        """By their names, for another dialect's fields."""
        return {name: getattr(self, name) for name in LimitFields.model_fields}

    def times(self, arrived: float) -> dict[str, float]:
        """By the names of a GenerateRequest; empty for most."""
        given = (("deadline", self.deadline_ms), ("queue_until", self.max_queue_ms))
        return {name: arrived + limit / 1000 for name, limit in given if limit is not None}

    def check_limits(self) -> None:
        for name, limit in self.limits.items():
            if limit is not None and not 1 <= limit <= MAX_MILLISECONDS:
                raise InvalidRequest(f"{name} must be between 1 and {MAX_MILLISECONDS}, got {limit}", param=name)


class QueueOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    include_queue: bool | None = None  # ours: comments that tell the place in the queue, until there is a row


class StreamFields(LimitFields):
    """Of a dialect whose answers can be streamed. It may have more stream_options than these."""

    stream: bool | None = None
    stream_options: QueueOptions | None = None

    @property
    def wants_queue(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_queue)

    @property
    def wants_resumable(self) -> bool:
        """Whether the stream can be read on at another connection. Not every dialect has this."""
        return False

    def check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only for streams: set stream to true", param="stream_options")
