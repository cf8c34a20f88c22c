"""LiveFeed: polls the engine's state a few times a second while there are watchers, and sends it to all of them; of the page
map only the changes."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

import msgspec

from octavo.client.client import EngineClient
from octavo.errors import OctavoError
from octavo.messages import ReadLive
from octavo.observe.live_state import LiveEnd, LiveLook, LiveState, changes
from octavo.server.state.encoded_json import add_member

INTERVAL_SECONDS = 0.25
MAX_WATCHERS = 32
"""Per API process: more would slow the streams."""
MAX_ENDED = 100
MAX_BEHIND = 40
"""Events that a slow watcher may lag behind; then it is disconnected, and may reconnect."""

_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(LiveLook)


class LiveFeed:
    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._watchers: dict[asyncio.Queue[bytes | None], bytes | None] = {}  # → the owner whose requests it sees
        self._task: asyncio.Task[None] | None = None
        self._last: LiveLook | None = None
        self._ended: deque[tuple[LiveEnd, bytes]] = deque(maxlen=MAX_ENDED)  # sent so far, for new watchers

    @property
    def is_full(self) -> bool:
        return len(self._watchers) >= MAX_WATCHERS

    async def watch(self, owner: bytes | None = None) -> AsyncGenerator[bytes, None]:
        """Events: first the whole state, then the changes. Ends when the server drains or the engine is gone. `owner`: the API
        key whose requests are shown; None: all."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_BEHIND)
        if self._last is not None:
            ended = [end for end, _ in self._ended]
            state = msgspec.structs.replace(self._last.state, ended=ended)
            full = msgspec.structs.replace(self._last, state=state, ended=[whose for _, whose in self._ended])
            queue.put_nowait(_event(full.seen_by(owner), None))
        self._watchers[queue] = owner
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._watchers.pop(queue, None)

    def close(self) -> None:
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    async def _run(self) -> None:
        since = -1
        try:
            while self._watchers:
                look = _decoder.decode(await self._engine.control(ReadLive(call=0, since=since)))
                since = max([0, since, *(end.number for end in look.state.ended)])
                self._publish(look)
                await asyncio.sleep(INTERVAL_SECONDS)
        except OctavoError:
            self.close()  # the engine is gone: watchers reconnect
        finally:
            self._task = self._last = None
            self._ended.clear()

    def _publish(self, look: LiveLook) -> None:
        before, self._last = self._last, look
        self._ended += zip(look.state.ended, look.ended, strict=True)
        events: dict[bytes | None, bytes] = {}  # by owner: most watchers see the same
        for queue, owner in [*self._watchers.items()]:
            if queue.full():
                del self._watchers[queue]
                queue.get_nowait()
                queue.put_nowait(None)
                continue
            if owner not in events:
                events[owner] = _event(look.seen_by(owner), None if before is None else before.state)
            queue.put_nowait(events[owner])


def _event(state: LiveState, before: LiveState | None) -> bytes:
    """The state with the whole page map, or with the map's changes since `before`."""
    if before is None or len(before.pages) != len(state.pages):
        return b"data: " + _encode(state) + b"\n\n"
    body = _encode(msgspec.structs.replace(state, pages=b""))
    return b"data: " + add_member(body, "changes", _encode(changes(before.pages, state.pages))) + b"\n\n"
