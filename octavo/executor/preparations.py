"""Preparations: asks every rank to compile grammars in the background, and reports when all are ready. It uses its own pipes
to the ranks, apart from those for steps."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import msgspec

from octavo.ipc.secure_channel import SecureConnection
from octavo.messages import PrepareGrammar


@dataclass(slots=True)
class _Preparing:
    num_left: int  # ranks that are not ready
    done: Callable[[], None]


class Preparations:
    def __init__(self, lines: "Sequence[Connection[Any, Any] | SecureConnection]") -> None:
        self._lines = lines
        self._encoder = msgspec.msgpack.Encoder()
        self._preparing: dict[int, _Preparing] = {}  # by the message's number
        self._number = 0
        self._is_over = False
        threading.Thread(target=self._listen, name="octavo-prepared", daemon=True).start()

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[], None]) -> None:
        """Ask all ranks. `done` is called by another thread, or at once if a rank has ended: the next step reports that."""
        self._number += 1
        self._preparing[self._number] = _Preparing(len(self._lines), done)
        message = self._encoder.encode(PrepareGrammar(self._number, grammar, forgets))
        try:
            for line in self._lines:
                line.send_bytes(message)
        except OSError:
            self._is_over = True
        if self._is_over:  # checked after the insertion: either this thread or _listen sees that the other came first
            done()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while not self._is_over:
                for line in wait(cast("Sequence[Connection[Any, Any]]", self._lines)):
                    number = int(cast("Connection[Any, Any]", line).recv_bytes())
                    preparing = self._preparing[number]
                    preparing.num_left -= 1
                    if not preparing.num_left:
                        del self._preparing[number]
                        preparing.done()
        self._is_over = True
        for preparing in list(self._preparing.values()):
            preparing.done()
