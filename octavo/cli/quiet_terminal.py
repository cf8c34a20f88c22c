"""no_echo: keys that are typed while an answer is written do not appear in it. They are there at the next prompt."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, Any

ENDINGS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def no_echo(out: IO[str]) -> Iterator[None]:
    """Turn the terminal's echo off, if answers and keys share one. It is on again afterwards, also if this process is ended by a signal that
    can be caught. The terminal keeps what is typed, and Ctrl-C discards it."""
    if sys.stdin is None or not sys.stdin.isatty() or not out.isatty():
        yield
        return
    import termios  # not on every system

    terminal = sys.stdin.fileno()
    try:
        before = termios.tcgetattr(terminal)
    except termios.error:
        yield
        return
    silent = [*before]
    silent[3] &= ~termios.ECHO

    def change(settings: list[Any]) -> None:
        # A process in the background that changes the terminal would be stopped.
        with suppress(OSError, termios.error):
            if os.tcgetpgrp(terminal) == os.getpgrp():
                termios.tcsetattr(terminal, termios.TCSANOW, settings)

    def end(number: int, frame: FrameType | None) -> None:
        change(before)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    caught = [number for number in ENDINGS if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in caught:
            signal.signal(number, end)
        change(silent)
        yield
    finally:
        change(before)
        for number in caught:
            signal.signal(number, signal.SIG_DFL)
