"""Preparations: has every rank make grammars ready beside its steps, and says when all have.
Knows nothing of grammars, nor of steps: it has lines of its own to the ranks."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import msgspec

from octavo.messages import PrepareGrammar


@dataclass(slots=True)
class _Preparing:
    num_left: int  # ranks that are not ready
    done: Callable[[], None]


class Preparations:
    def __init__(self, lines: "Sequence[Connection[Any, Any]]") -> None:
        self._lines = lines
        self._encoder = msgspec.msgpack.Encoder()
        self._preparing: dict[int, _Preparing] = {}  # by number
        self._number = 0
        self._is_over = False
        threading.Thread(target=self._listen, name="octavo-prepared", daemon=True).start()

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[], None]) -> None:
        """`done` is called by another thread, or at once where a rank has ended: the next step will say so."""
        self._number += 1
        self._preparing[self._number] = _Preparing(len(self._lines), done)
        message = self._encoder.encode(PrepareGrammar(self._number, grammar, forgets))
        try:
            for line in self._lines:
                line.send_bytes(message)
        except OSError:
            self._is_over = True
        if self._is_over:  # looked at last: who ends first is seen by the other
            done()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while not self._is_over:
                for line in wait(self._lines):
                    number = int(cast("Connection[Any, Any]", line).recv_bytes())
                    preparing = self._preparing[number]
                    preparing.num_left -= 1
                    if not preparing.num_left:
                        del self._preparing[number]
                        preparing.done()
        self._is_over = True
        for preparing in list(self._preparing.values()):
            preparing.done()
