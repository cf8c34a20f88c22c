"""`octavo top`: shows a running server in the terminal: rows, queue, pages, and what requests wait for. It follows the server's
live feed and reconnects when that breaks off."""

import os
import select
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from octavo.cli.chat import Remote
from octavo.cli.top_screen import Screen
from octavo.errors import EngineUnavailable, OctavoError, RequestFailed

ROUTE = "/live"  # below the server's /v1
RETRY_SECONDS = 1.0
SILENCE_SECONDS = 10.0
"""A feed that sends nothing for this long is lost: it sends four times a second."""
FIRM = (400, 401, 403, 404)
"""Statuses for which a retry is pointless."""
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # alternate screen without a cursor; and back


def run(url: str, api_key: str, once: bool = False) -> int:
    server = Remote(url, api_key, timeout=SILENCE_SECONDS)
    screen = Screen()
    if once or not sys.stdout.isatty():
        return _lines(server, screen, once)
    with _terminal(), suppress(KeyboardInterrupt):
        _follow(server, screen)
    return 0


def _lines(server: Remote, screen: Screen, once: bool) -> int:
    """Print one line for each state, for a file or a pipe."""
    with suppress(KeyboardInterrupt):
        for state in server.events(ROUTE):
            screen.take(state)
            if once:
                print("\n".join(screen.draw(*_size())))
                return 0
            print(screen.summary(), flush=True)
    return 0


def _follow(server: Remote, screen: Screen) -> None:
    """Show the feed until the user quits. Raises the error if there never was a feed, or if a retry is pointless."""
    while True:
        try:
            for state in server.events(ROUTE):
                screen.take(state)
                _show(screen)
                if _wants_to_leave(0.0):
                    return
        except (RequestFailed, EngineUnavailable) as error:
            if screen.is_empty or server.status in FIRM:
                raise
            screen.lose(_short(error), time.strftime("%H:%M:%S"))
        _show(screen)
        if _wants_to_leave(RETRY_SECONDS):
            return


def _show(screen: Screen) -> None:
    is_coloured = "NO_COLOR" not in os.environ and os.environ.get("TERM", "") not in ("", "dumb")
    lines = [line + CLEAR_LINE for line in screen.draw(*_size(), is_coloured)]
    print(HOME + "\r\n".join(lines) + CLEAR_BELOW, end="", flush=True)


def _short(error: OctavoError) -> str:
    return " ".join(error.message.split())


def _size() -> tuple[int, int]:
    size = shutil.get_terminal_size((100, 40))
    return size.columns, size.lines


def _wants_to_leave(seconds: float) -> bool:
    """Wait up to `seconds` and return whether q was pressed."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and b"q" in os.read(sys.stdin.fileno(), 64).lower()


@contextmanager
def _terminal() -> Iterator[None]:
    """Switch to the alternate screen and to unbuffered keys, and restore both at the end."""
    before: list[Any] | None = None
    if sys.stdin.isatty():
        import termios
        import tty

        before = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)
    print(ENTER, end="", flush=True)
    try:
        yield
    finally:
        print(LEAVE, end="", flush=True)
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
