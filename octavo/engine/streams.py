"""Open requests of one asyncio process: deltas come in for all of them at once, each reader takes its own.
Knows nothing of how the deltas got here."""

import asyncio

from octavo.errors import OctavoError
from octavo.messages import TokenDelta


class _Stream:
    __slots__ = ("deltas", "open_choices", "reader")

    def __init__(self, num_choices: int) -> None:
        self.open_choices = set(range(num_choices))
        self.deltas: list[TokenDelta] = []
        self.reader: asyncio.Future[None] | None = None  # what the reader waits for, while it does

    def wake(self) -> None:
        reader, self.reader = self.reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)


class Streams:
    """Not thread-safe: everything happens on the event loop."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._failure: OctavoError | None = None

    def open(self, request_id: str, num_choices: int) -> None:
        if self._failure is not None:
            raise self._failure
        assert request_id not in self._streams, "request ids are unique"
        self._streams[request_id] = _Stream(num_choices)

    def deliver(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None and delta.index in stream.open_choices:
                stream.deltas.append(delta)
                if delta.finish is not None:
                    stream.open_choices.discard(delta.index)
                if stream.reader is not None:
                    stream.wake()

    def end_choice(self, request_id: str, index: int) -> None:
        """No more deltas of this choice (−1: of any choice) are wanted."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.open_choices = {choice for choice in stream.open_choices if index not in (-1, choice)}
            stream.deltas = [delta for delta in stream.deltas if index not in (-1, delta.index)]
            stream.wake()

    def fail(self, error: OctavoError) -> None:
        """Every open stream, and every one to come, raises `error`."""
        self._failure = error
        for stream in self._streams.values():
            stream.wake()

    async def next(self, request_id: str) -> list[TokenDelta]:
        """What arrived since the last look, in however many steps; waits for it. Empty: every choice has ended."""
        stream = self._streams[request_id]
        while not stream.deltas:
            if not stream.open_choices:
                return []
            if self._failure is not None:
                raise self._failure
            stream.reader = asyncio.get_running_loop().create_future()
            await stream.reader
        deltas, stream.deltas = stream.deltas, []
        return deltas

    def close(self, request_id: str) -> bool:
        """Forget the request. True: some of its choices had not ended."""
        stream = self._streams.pop(request_id, None)
        return stream is not None and bool(stream.open_choices)
