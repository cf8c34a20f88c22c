"""SideRequests: asks ranks for what must not wait for a step (grammars to compile, adapters to read), and reports when all have answered.
It uses its own pipes to the ranks, apart from those for steps."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import msgspec

from octavo.ipc.secure_channel import SecureConnection
from octavo.messages.side import SideMessage, SideReply

Line = Connection | SecureConnection


@dataclass(slots=True)
class _Asked:
    ranks: Sequence[int]
    replies: dict[int, SideReply]
    done: Callable[[list[SideReply] | None], None]
    on_part: Callable[[], None]


class SideRequests:
    def __init__(self, lines: "Sequence[Connection[Any, Any] | SecureConnection]") -> None:
        """`lines`: to the ranks, in their order."""
        self._lines = lines
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SideReply)
        self._asked: dict[int, _Asked] = {}  # by the message's number
        self._number = 0
        self._is_over = False
        self._lock = threading.Lock()  # of senders, and of what is asked
        threading.Thread(target=self._listen, name="octavo-side", daemon=True).start()

    def ask(
        self,
        ranks: Sequence[int],
        message: Callable[[int], SideMessage],
        done: Callable[[list[SideReply] | None], None] = lambda replies: None,
        on_part: Callable[[], None] = lambda: None,
    ) -> None:
        """Ask these ranks. Any thread. `message` is given the number of the message. `done` is called once with the ranks' replies, in their
        order, by another thread; or with None, perhaps at once, if a rank has ended. `on_part`: called, by that thread too, for each part that a rank
        has done of it."""
        with self._lock:
            self._number += 1
            number = self._number
            if not self._is_over:
                self._asked[number] = _Asked(ranks, {}, done, on_part)
                encoded = self._encoder.encode(message(number))
                try:
                    for rank in ranks:
                        self._lines[rank].send_bytes(encoded)
                    return
                except OSError:
                    self._is_over = True
                    del self._asked[number]
        done(None)

    def _listen(self) -> None:
        rank_of = {id(line): rank for rank, line in enumerate(self._lines)}
        with contextlib.suppress(EOFError, OSError):
            while not self._is_over:
                for line in wait(cast("Sequence[Connection[Any, Any]]", self._lines)):
                    reply = self._decoder.decode(cast("Connection[Any, Any]", line).recv_bytes())
                    self._take(rank_of[id(line)], reply)
        with self._lock:
            self._is_over = True
            left, self._asked = list(self._asked.values()), {}
        for asked in left:
            asked.done(None)

    def _take(self, rank: int, reply: SideReply) -> None:
        with self._lock:
            asked = self._asked[reply.number]
            if reply.is_over:
                asked.replies[rank] = reply
                if len(asked.replies) < len(asked.ranks):
                    return
                del self._asked[reply.number]
        if not reply.is_over:
            asked.on_part()
            return
        asked.done([asked.replies[rank] for rank in asked.ranks])
